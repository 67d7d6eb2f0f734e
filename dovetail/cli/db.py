"""`dovetail db`: what a tuning database holds, by machine class, and several of them made one.

In: paths of databases. Out: a table of machine classes, or one database of the best records.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from dovetail.cli.options import AsJson
from dovetail.cli.report import make_table, show_bytes, show_count, show_report

if TYPE_CHECKING:
    from dovetail.compiler.tune.machine_classes import DatabaseReport, MergeReport


def db_show_command(
    database: Annotated[
        Path | None, typer.Argument(help="A tuning database; default the one in the build cache.")
    ] = None,
    *,
    json: AsJson = False,
) -> None:
    """List machine classes of a tuning database: records, shapes, gains over default schedules."""
    from dovetail.compiler.measure.database import default_path
    from dovetail.compiler.tune.machine_classes import describe_database

    show_report(describe_database(database or default_path()), _describe_classes, json=json)


def db_merge_command(
    databases: Annotated[list[Path], typer.Argument(help="Tuning databases, of any machines.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Database to write, or to add records to.")
    ],
    json: AsJson = False,
) -> None:
    """Make one database of several, with the best record of each trial and machine class."""
    from dovetail.compiler.tune.machine_classes import merge_databases

    show_report(merge_databases(databases, output), _describe_merge, json=json)


def _describe_classes(report: DatabaseReport) -> list[RenderableType]:
    rows = []
    for found in report.classes:
        best = ""
        if found.best is not None and found.best.gain_low > 1:
            sizes = ", ".join(f"{name} {size}" for name, size in found.best.shape.items())
            best = f"{found.best.gain:.2f}x {found.best.kind} {sizes} {found.best.dtype}"
        caches = "/".join(show_bytes(size) for size in found.caches)
        name = found.label + " (this machine)" * (found.label == report.here)
        machine = f"{found.cpu or found.arch}, {caches}"
        targets, counts = ", ".join(found.targets), (str(found.records), str(found.shapes))
        rows.append((name, machine, targets, *counts, f"{found.gain:.2f}x", best))
    columns = ("class", "CPU, caches", "targets", ">records", ">shapes", ">gain", "best gain")
    lines: list[RenderableType] = [make_table(report.database, columns, rows)]
    if report.here not in {found.label for found in report.classes}:
        lines.append(f"this machine is of class {report.here}, of which there are no records")
    return lines + ([report.warning] if report.warning else [])


def _describe_merge(report: MergeReport) -> str:
    added = "\n".join(f"{count} records taken from {path}" for path, count in report.added.items())
    return f"{report.database}: {show_count(report.records, 'record')}\n{added}"
