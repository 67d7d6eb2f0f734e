"""`dovetail inspect`: every decision in an artifact, with the figure behind it.

In: an artifact directory, of any machine. Out: an `Inspection`, as tables or one JSON object.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from dovetail.cli.report import print_json, report_errors, stdout_console


@report_errors
def inspect_command(
    artifact: Annotated[Path, typer.Argument(help="An artifact directory.")],
    gpu: Annotated[
        str | None,
        typer.Option(help="A device here, or a class such as h100: how its memory is divided."),
    ] = None,
    rate: Annotated[float, typer.Option(help="With --gpu: workflows that begin each second.")] = 1,
    index: Annotated[
        Path | None, typer.Option(help="With --gpu: the index, default the artifact's own.")
    ] = None,
    nprobe: Annotated[int, typer.Option(help="With --gpu: clusters that a search scans.")] = 16,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show every decision in an artifact, with the figure behind it."""
    from dovetail.cli.inspect_memory import divide_gpu
    from dovetail.cli.inspection import inspect_artifact, print_inspection
    from dovetail.runtime.gpu_memory import GpuShare

    found = inspect_artifact(artifact)
    if gpu is not None:
        share = GpuShare(rate=rate, index=index, nprobe=nprobe)
        division = divide_gpu(artifact, gpu, share)
        found = msgspec.structs.replace(found, gpu_memory=division)
    if json:
        print_json(found)
    else:
        print_inspection(found, stdout_console())
