"""`dovetail tune`: search the schedules of a model's kernels, and keep every trial on record.

In: a model directory, a tuning database and how much time to spend. Out: records in the database,
a line of live progress, and a report of the best schedules. A stopped job is resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dovetail.cli.options import (
    AsJson,
    Calibrate,
    Database,
    KvDtype,
    MaxContext,
    ModelDirectory,
    Threads,
    WeightDtype,
    Workload,
)
from dovetail.cli.report import (
    Terminated,
    fail,
    print_json,
    read_duration,
    report_errors,
    show_count,
    show_seconds,
)

if TYPE_CHECKING:
    from dovetail.compiler.jobs import TuneProgress
    from dovetail.compiler.tune import TuneReport


@report_errors
def tune_command(
    model: ModelDirectory,
    db: Database = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a job that was interrupted.")
    ] = False,
    missing: Annotated[
        bool, typer.Option("--missing", help="Run only trials that are not on record at all.")
    ] = False,
    effort: Annotated[str, typer.Option(help="fast: a minute; full: a quarter of an hour.")] = (
        "fast"
    ),
    budget: Annotated[
        str | None, typer.Option(help="Time to spend: 60s, 15m, 1h. Default as the effort.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Processes that measure at once, each on cores of its own; default 1."),
    ] = None,
    ray: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster whose nodes measure instead.")
    ] = None,
    hardware: Annotated[
        str, typer.Option(help="auto, or the hardware.json of the machines in the Ray cluster.")
    ] = "auto",
    workload: Workload = None,
    target: Annotated[
        str | None, typer.Option(help="Instruction set, default the machine's best.")
    ] = None,
    threads: Threads = None,
    max_context: MaxContext = None,
    weight_dtype: WeightDtype = "auto",
    calibrate: Calibrate = None,
    kv_dtype: KvDtype = None,
    json: AsJson = False,
) -> None:
    """Search the schedules of a model's kernels; `compile` then finds them on record."""
    from dovetail.compiler.tune import tune_model

    stopped: str | None = None
    with _live_progress() as (show, latest):
        try:
            report = tune_model(
                model,
                progress=show,
                database=db,
                resume=resume,
                missing=missing,
                effort=effort,
                budget=None if budget is None else read_duration(budget),
                workers=workers,
                ray=ray,
                hardware=hardware,
                workload=workload,
                target=target,
                threads=threads,
                max_context=max_context,
                weight_dtype=weight_dtype,
                calibrate=calibrate,
                kv_dtype=kv_dtype,
            )
        except (KeyboardInterrupt, Terminated):
            stopped = describe_stop(latest(), again=resume or missing)
    if stopped:
        fail(stopped)
    if json:
        print_json(report)
    else:
        print(describe_report(report))


def describe_progress(at: TuneProgress) -> str:
    """Return one line: trials, best rate, gain over the default schedules with its band, ETA."""
    failed = "".join(f", {n} {status}" for status, n in at.failed.items())
    return (
        f"{at.trials} trials{failed}; best {at.best_gflops:.1f} GFLOP/s; "
        f"{at.gain:.2f}x the default ({at.gain_low:.2f} to {at.gain_high:.2f}); "
        f"ETA {show_seconds(at.eta)}"
    )


def describe_report(report: TuneReport) -> str:
    """Return the lines a person reads after a job."""
    at = report.progress
    failed = "".join(f", {n} {status}" for status, n in at.failed.items())
    lines = [
        f"{report.database}: {report.trials} trials for {report.target}, "
        f"{report.trials - report.measured} of them on record{failed}; "
        f"{show_count(report.workers, 'worker')}, {report.seconds:.1f} s",
        f"{len(report.points)} shapes, {at.gain:.2f}x as fast as by the default schedules "
        f"(bounds {at.gain_low:.2f} to {at.gain_high:.2f}), "
        f"best {at.best_gflops:.1f} GFLOP/s",
        *(f"note: {note}" for note in report.notes),
    ]
    return "\n".join(lines)


def describe_stop(at: TuneProgress | None, *, again: bool) -> str:
    """Return a sentence on a job that was stopped; again: its own command already goes on."""
    if at is None:
        return "stopped before the first trial; nothing was recorded"
    command = "the same command" if again else "the same command with --resume"
    return f"stopped after {at.trials} trials, which are all on record; {command} goes on"


@contextmanager
def _live_progress() -> Iterator[
    tuple[Callable[[TuneProgress], None], Callable[[], TuneProgress | None]]
]:
    """Yield a callback that draws a job's progress on stderr, and one that returns the last."""
    console = Console(stderr=True)
    columns = (
        TextColumn("tune"),
        BarColumn(20),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )
    bars = Progress(*columns, console=console)
    task = bars.add_task("tune", total=None, now="")
    seen: list[TuneProgress] = []

    def show(at: TuneProgress) -> None:
        seen[:] = [at]
        bars.start()
        bars.update(task, completed=at.done, total=at.items, now=describe_progress(at))

    try:
        yield show, lambda: seen[-1] if seen else None
    finally:
        if seen:
            bars.stop()
