"""`dovetail inspect`: every decision in an artifact, with the figure behind it.

In: an artifact directory, of any machine. Out: an `Inspection`, as tables or one JSON object.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from dovetail.cli.options import ArtifactDirectory, AsJson
from dovetail.cli.report import show_report


def inspect_command(
    artifact: ArtifactDirectory,
    gpu: Annotated[
        str | None, "Show how the memory of this device, such as cuda:0, would be divided."
    ] = None,
    rate: Annotated[float, "With --gpu: workflows that start per second."] = 1,
    index: Annotated[Path | None, "With --gpu: index; default the artifact's own."] = None,
    nprobe: Annotated[int, "With --gpu: clusters that a search scans."] = 16,
    json: AsJson = False,
) -> None:
    """Show every decision in an artifact, with the figure behind it."""
    from dovetail.cli.inspect_memory import divide_gpu
    from dovetail.cli.inspection import describe_inspection, inspect_artifact
    from dovetail.runtime.flows.gpu_memory import GpuShare

    found = inspect_artifact(artifact)
    if gpu is not None:
        share = GpuShare(rate=rate, index=index, nprobe=nprobe)
        found = msgspec.structs.replace(found, gpu_memory=divide_gpu(artifact, gpu, share))
    show_report(found, describe_inspection, json=json)
