"""`dovetail bench embed`: how many queries meet an SLO, and what the CPU adds to an accelerator.

In: an encoder's artifact, or nothing. Out: depths measured on this machine, beside a torch device
if there is one; those of the published pairs by the product's estimator and simulator.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dovetail.cli.options import AsJson, Threads
from dovetail.cli.report import make_table, progress_bars, read_duration, show_report

if TYPE_CHECKING:
    from dovetail.runtime.sim.capacity import Capacity
    from dovetail.runtime.sim.pairs import PairRow

CURVE = ("pair", "slo", "length", "cores", "npu", "cpu", "gain", "saving")
"""What is shown of a `PairRow`."""


@dataclass(frozen=True, slots=True)
class PairReport:
    """What `bench embed --json` prints without an artifact: published figures and assumptions."""

    assumptions: tuple[str, ...]
    table: list[dict[str, object]]
    lengths: list[PairRow]
    cores: list[PairRow]


@dataclass(frozen=True, slots=True)
class EmbedReport:
    """What `bench embed APP.dove --json` prints: one capacity per SLO."""

    artifact: str
    accelerator: str
    results: list[Capacity]


def embed_command(
    artifact: Annotated[
        Path | None, typer.Argument(help="An artifact with an encoder; none: published pairs.")
    ] = None,
    pair: Annotated[str, "A published pair, simulated: v100, atlas or all."] = "all",
    slo: Annotated[list[str] | None, "Time a query may take: 1s, 0.5s; may be repeated."] = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a query.")] = 75,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each stress trial.")] = 3,
    device: Annotated[str, "Beside the CPU: auto, cpu (none), cuda:1, torch:cpu."] = "auto",
    threads: Threads = None,
    json: AsJson = False,
) -> None:
    """Measure, or simulate, the concurrency within an SLO with and without the CPU's help."""
    report: EmbedReport | PairReport
    if artifact is None:
        report = _simulate(pair)
    else:
        times = [read_duration(each) for each in slo or ("1s", "2s")]
        report = _measure(artifact, times, length, device=device, repeats=repeats, threads=threads)
    show_report(report, describe_capacity, json=json)


def _simulate(pair: str) -> PairReport:
    from dovetail.runtime.sim import pairs

    chosen = list(pairs.PAIRS.values()) if pair == "all" else [pairs.find_pair(pair)]
    return PairReport(
        assumptions=pairs.SOURCES,
        table=[row for each in chosen for row in pairs.table_rows(each)],
        lengths=[row for each in chosen for row in pairs.length_rows(each)],
        cores=[row for each in chosen for row in pairs.core_rows(each)],
    )


def _measure(artifact: Path, slos: Sequence[float], length: int, **options: Any) -> EmbedReport:
    from dovetail.runtime.sim.capacity import measure_artifact

    results: list[Capacity] = []
    with progress_bars(quiet=not sys.stderr.isatty()) as progress:  # a minute for each SLO
        for slo in slos:
            progress("measure", len(results), len(slos))
            results.append(measure_artifact(artifact, length, slo, **options))
        progress("measure", len(slos), len(slos))
    return EmbedReport(artifact.name, results[0].accelerator, results)


def describe_capacity(report: EmbedReport | PairReport) -> Iterator[Table]:
    """Yield tables of what was measured or simulated; `npu` is the accelerator."""
    from dovetail.runtime.sim.capacity import NO_ACCELERATOR

    if isinstance(report, EmbedReport):
        alone = report.accelerator == NO_ACCELERATOR
        devices = "the CPU alone" if alone else f"npu {report.accelerator}"
        yield _table(f"{report.artifact}, {devices}", _flat(report.results))
        return
    yield _table("Queue depths by linear regression, reproduced and published", report.table)
    for over, rows in (("query length", report.lengths), ("CPU cores", report.cores)):
        cells = [{name: getattr(row, name) for name in CURVE} for row in rows]
        yield _table(f"Depths over {over} (simulated)", cells)


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


def _table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    columns = [f">{name}" for name in rows[0]] if rows else []
    return make_table(title, columns, [[_show(value) for value in row.values()] for row in rows])


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return "" if value is None else str(value)
