"""`dovetail.load`: as `dovetail.runtime.app.load`, and builds shared kernels that are not there.

The runtime never runs a compiler. Where a machine lacks kernels that an artifact shares with others
(it came from elsewhere, or the cache was emptied), they are built before it is loaded again.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from dovetail.errors import MissingKernelsError
from dovetail.runtime import app
from dovetail.runtime.artifact import Artifact, open_artifact
from dovetail.runtime.machine.trust import meet
from dovetail.topology.hardware import HardwareSpec

Given = ParamSpec("Given")
Loaded = TypeVar("Loaded")


def build_missing(load: Callable[Given, Loaded]) -> Callable[Given, Loaded]:
    """Return `load`, which then builds the shared kernels that it finds missing and tries again.

    ToolchainError where there is no compiler, MissingKernelsError where this version's kernels are
    others than the artifact's.
    """

    @functools.wraps(load)
    def build_and_load(*args: Given.args, **options: Given.kwargs) -> Loaded:
        try:
            return load(*args, **options)
        except MissingKernelsError as missing:
            from dovetail.compiler.shared_kernels import restore_kernels  # noqa: PLC0415

            count = f"{len(missing.kernels)} kernels for {missing.target}"
            print(f"dovetail: building {count}, once on this machine", file=sys.stderr, flush=True)
            restore_kernels(missing)
        return load(*args, **options)

    return build_and_load


load = build_missing(app.load)


@build_missing
def open_ready(
    path: str | os.PathLike[str], hardware: HardwareSpec, *, trust: bool = False
) -> Artifact:
    """Open an artifact as `open_artifact` does, its kernels at hand; trust: see `load`."""
    artifact = open_artifact(Path(path), hardware)
    meet(artifact.path, trust=trust)
    return artifact
