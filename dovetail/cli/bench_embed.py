"""`dovetail bench embed`: how many queries meet an SLO, and what the CPU adds to an accelerator.

In: an encoder's artifact. Out: depths measured on this machine, beside a torch device if there is
one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dovetail.cli.options import AsJson
from dovetail.cli.report import make_table, progress_bars, read_duration, show_report

if TYPE_CHECKING:
    from dovetail.runtime.sim.capacity import Capacity


@dataclass(frozen=True, slots=True)
class EmbedReport:
    """What `bench embed APP.dove --json` prints: one capacity per SLO."""

    artifact: str
    accelerator: str
    results: list[Capacity]


def embed_command(
    artifact: Annotated[Path, typer.Argument(help="An artifact with an encoder.")],
    slo: Annotated[list[str] | None, "Time a query may take: 1s, 0.5s; may be repeated."] = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a query.")] = 75,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each stress trial.")] = 3,
    device: Annotated[str, "Beside the CPU: auto, cpu (none), cuda:1, torch:cpu."] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; default all cores.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Measure the concurrency within an SLO with and without the CPU's help."""
    times = [read_duration(each) for each in slo or ("1s", "2s")]
    report = _measure(artifact, times, length, device=device, repeats=repeats, threads=threads)
    show_report(report, describe_capacity, json=json)


def _measure(artifact: Path, slos: Sequence[float], length: int, **options: Any) -> EmbedReport:
    from dovetail.runtime.sim.capacity import measure_artifact

    results: list[Capacity] = []
    with progress_bars(quiet=not sys.stderr.isatty()) as progress:  # a minute for each SLO
        for slo in slos:
            progress("measure", len(results), len(slos))
            results.append(measure_artifact(artifact, length, slo, **options))
        progress("measure", len(slos), len(slos))
    return EmbedReport(artifact.name, results[0].accelerator, results)


def describe_capacity(report: EmbedReport) -> Iterator[Table]:
    """Yield a table of what was measured; `npu` is the accelerator."""
    from dovetail.runtime.sim.capacity import NO_ACCELERATOR

    alone = report.accelerator == NO_ACCELERATOR
    devices = "the CPU alone" if alone else f"npu {report.accelerator}"
    rows = _flat(report.results)
    columns = [f">{name}" for name in rows[0]] if rows else []
    cells = [[_show(value) for value in row.values()] for row in rows]
    yield make_table(f"{report.artifact}, {devices}", columns, cells)


def _flat(results: Sequence[Capacity]) -> list[dict[str, object]]:
    return [
        {
            "slo": each.slo,
            "length": each.length,
            **{f"{name} {kind}": depths[name] for name in each.predicted for kind, depths in (
                ("predicted", each.predicted), ("tested", each.together), ("alone", each.alone)
            )},
            "gain": each.gain,
            "depth error": each.depth_error,
            "saving": each.saving,
        }
        for each in results
    ]  # fmt: skip


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return "" if value is None else str(value)
