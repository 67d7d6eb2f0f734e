"""`dovetail.load`: as `dovetail.runtime.app.load`, and makes first what is not there.

The runtime never runs a compiler. Where it is given a model that is no artifact, that is compiled
into the cache, as by `dovetail run`. Where a machine lacks kernels that an artifact shares with
others (it came from elsewhere, or the cache was emptied), they are built before it is loaded again.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from dovetail.errors import MissingKernelsError
from dovetail.runtime import app
from dovetail.runtime.artifact import Artifact, open_artifact
from dovetail.runtime.machine.trust import check_trust
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
        for _ in range(2):  # of the artifact, and of its draft model
            try:
                return load(*args, **options)
            except MissingKernelsError as missing:
                from dovetail.compiler.rules.shared_kernels import restore_kernels  # noqa: PLC0415

                count = f"{len(missing.kernels)} kernels for {missing.target}"
                print(f"dovetail: building {count}, once on this machine", file=sys.stderr)
                restore_kernels(missing)
        return load(*args, **options)

    return build_and_load


def compile_first(
    load: Callable[Concatenate[str | os.PathLike[str], Given], Loaded],
) -> Callable[Concatenate[str | os.PathLike[str], Given], Loaded]:
    """Return `load`, which takes a model directory, a GGUF file and an id of the hub, too.

    As does its `draft`.
    """

    @functools.wraps(load)
    def find_and_load(
        path: str | os.PathLike[str], *args: Given.args, **options: Given.kwargs
    ) -> Loaded:
        if options.get("draft") is not None:
            options["draft"] = str(_find(options["draft"]))  # type: ignore[arg-type]
        return load(_find(path), *args, **options)

    return find_and_load  # type: ignore[return-value] # whose `path` has a name, too


def _find(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return an artifact as it is; of a model, that of the cache, which is compiled first."""
    if not isinstance(path, str | os.PathLike) or (Path(path) / "manifest.json").exists():
        return path  # what is no path, `load` refuses
    from dovetail.cli.model_cache import find_artifact, is_model  # noqa: PLC0415 - compiles

    return find_artifact(path, {}) if is_model(path) else path


load = compile_first(build_missing(app.load))


@build_missing
def open_ready(
    path: str | os.PathLike[str], hardware: HardwareSpec, *, trust: bool = False
) -> Artifact:
    """Open an artifact as `open_artifact` does, its kernels at hand; trust: see `load`."""
    artifact = open_artifact(Path(path), hardware)
    check_trust(artifact.path, trust=trust)
    return artifact
