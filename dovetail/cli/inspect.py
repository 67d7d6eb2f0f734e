"""`dovetail inspect`: every decision in an artifact, with the figure behind it.

In: an artifact directory, of any machine. Out: an `Inspection`: its summary, all of its tables, one
JSON object, or a page of HTML.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import RenderableType

from dovetail.cli.options import ArtifactDirectory, AsJson
from dovetail.cli.report import facts_table, progress_bars, show_report, tell
from dovetail.errors import SpecError

if TYPE_CHECKING:
    from dovetail.cli.inspection import Inspection


def inspect_command(
    artifact: ArtifactDirectory,
    everything: Annotated[
        bool, typer.Option("--all", help="Show every decision, and the figure behind it.")
    ] = False,
    html: Annotated[Path | None, "Write a report with pictures: one HTML file."] = None,
    timeline: Annotated[
        Path | None, "With --html: timeline that `serve --timeline` recorded, to show in it."
    ] = None,
    gpu: Annotated[
        str | None, "Show how the memory of this device, such as cuda:0, would be divided."
    ] = None,
    rate: Annotated[float, "With --gpu: workflows that start per second."] = 1,
    index: Annotated[Path | None, "With --gpu: index; default the artifact's own."] = None,
    nprobe: Annotated[int, "With --gpu: clusters that a search scans."] = 16,
    json: AsJson = False,
) -> None:
    """Show what an artifact decides: a summary, or with --all every decision and its figure."""
    from dovetail.cli.inspect_memory import divide_gpu
    from dovetail.cli.inspection import describe_inspection, inspect_artifact
    from dovetail.runtime.flows.gpu_memory import GpuShare

    if timeline is not None and html is None:
        raise SpecError("--timeline is shown in the report; add --html report.html")
    share = GpuShare(rate=rate, index=index, nprobe=nprobe)
    if gpu is None and share != GpuShare(rate=1):
        raise SpecError("--rate, --index and --nprobe say how to divide a device; add --gpu DEVICE")
    found = inspect_artifact(artifact)
    if gpu is not None:
        found = msgspec.structs.replace(found, gpu_memory=divide_gpu(artifact, gpu, share))
    if html is not None:
        from dovetail.html_report.page import read_timeline, write_report

        trace = None if timeline is None else read_timeline(timeline)
        with progress_bars(quiet=json) as progress:
            write_report(found, html, trace, progress)
        tell(f"wrote {html}; open it in a browser")
    if html is None or json:
        show_report(found, describe_inspection if everything else _describe_summary, json=json)


def _describe_summary(found: Inspection) -> Iterator[RenderableType]:
    from dovetail.cli.inspect_memory import division_tables
    from dovetail.cli.inspect_summary import summarise

    more = {"more": "--all prints every decision, --html FILE writes a report with pictures"}
    yield facts_table("", summarise(found) | more)
    if found.gpu_memory is not None:
        yield from division_tables(found.gpu_memory)
