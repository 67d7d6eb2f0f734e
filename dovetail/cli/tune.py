"""`dovetail tune`: search the schedules of a model's kernels, and keep every trial on record.

In: a model directory, a tuning database and how much time to spend. Out: records in the database,
a line of live progress, and a report of the best schedules. A stopped job goes on by itself.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dovetail.cli.options import AsJson, CompileFlags, KernelFlags, SearchFlags, flag_of
from dovetail.cli.report import Terminated, fail, show_count, show_report, show_seconds
from dovetail.errors import SpecError

if TYPE_CHECKING:
    from dovetail.compiler.measure.jobs import TuneProgress
    from dovetail.compiler.tune.kernel import KernelReport
    from dovetail.compiler.tune.model import TuneReport


def tune_command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A Hugging Face model directory, a GGUF file, or a hub id; without it a --kernel "
            "is tuned alone."
        ),
    ] = None,
    resume: Annotated[bool, "Continue this job where it was interrupted, or begin it anew."] = True,
    missing: Annotated[bool, "Measure only what the database does not contain yet."] = False,
    effort: Annotated[
        str, "Time for the search: fast (a minute) or full (a quarter of an hour)."
    ] = "fast",
    workers: Annotated[
        int | None, "Processes that measure at the same time, on separate cores; default 1."
    ] = None,
    ray: Annotated[
        str | None,
        "Address of a Ray cluster whose nodes measure instead; with --hardware all for each kind "
        "of machine in it.",
    ] = None,
    target: Annotated[str | None, "Instruction set; default the machine's best."] = None,
    shape: Annotated[
        list[str] | None,
        "Shape to tune a --kernel for without a model: rows=R,width=W; for other kernels "
        "NAME=NUMBER for each integer parameter; repeatable.",
    ] = None,
    *,
    own: KernelFlags,
    search: SearchFlags,
    compiling: CompileFlags,
    json: AsJson = False,
) -> None:
    """Search fast schedules for a model's kernels, for later `compile`s to use."""
    if (model is None) != bool(shape) or (shape and len(own.kernel or ()) != 1):
        raise SpecError("give a model to tune, or one --kernel and the --shape it is tuned for")
    if model is None:
        more = {"no_resume": not resume, "missing": missing, "effort": effort != "fast"}
        more |= {"hardware": search.hardware != "auto", "workload": search.workload is not None}
        more |= {"workers": workers is not None, "ray": ray is not None}
        more |= dict.fromkeys(compiling.chosen(), True)
        if unused := ", ".join(flag_of(name) for name, given in more.items() if given):
            raise SpecError(f"a kernel for a --shape is tuned without {unused}: omit that")
        tune_one_kernel(own, shape or [], target, search, json=json)
        return
    from dovetail.compiler.models.hub import find_model

    path = find_model(model)  # with bars of its own
    options: dict[str, Any] = {
        **{"resume": resume, "missing": missing, "effort": effort, "workers": workers},
        **{"ray": ray, "target": target},
        **search.fields(),
        **vars(compiling),
        **own.fields(),
    }
    tune_one_model(path, options, kinds=ray is not None and search.hardware == "all", json=json)


def tune_one_model(path: Path, options: dict[str, Any], *, kinds: bool, json: bool) -> None:
    """Tune a model; kinds: for each kind of machine in a cluster."""
    live = LiveProgress()
    options |= {"progress": live.show, "say": live.say}
    try:
        with closing(live):
            live.say("starting")
            from dovetail.compiler.tune.model import ClusterReport, tune_kinds, tune_model

            if kinds:
                del options["hardware"]
            reports = tune_kinds(path, **options) if kinds else (tune_model(path, **options),)
    except (KeyboardInterrupt, Terminated):
        fail(describe_stop(live.latest))
    if kinds:
        words = "\n".join(f"{kind.machine}: {describe_report(kind)}" for kind in reports)
        show_report(ClusterReport(reports), lambda _: words, json=json)
    else:
        show_report(reports[0], describe_report, json=json)


def tune_one_kernel(
    own: KernelFlags, shapes: list[str], target: str | None, search: SearchFlags, *, json: bool
) -> None:
    """Tune a user's kernel for shapes."""
    from dovetail.compiler.tune.kernel import tune_kernel

    live, given = LiveProgress(), {**own.fields(), **search.fields()}
    options = {n: given[n] for n in ("database", "budget", "threads", "prelude", "include")}
    (kernel,) = given["kernels"]
    try:
        with closing(live):
            report = tune_kernel(kernel, shapes, target=target, say=live.say, **options)
    except (KeyboardInterrupt, Terminated):
        fail("stopped; what was measured is kept, and the same command continues")
    show_report(report, describe_kernel, json=json)


def describe_kernel(report: KernelReport) -> str:
    """Return a line for each shape, with times in microseconds."""
    lines = [f"{report.op} of {report.file} for {report.target}; {report.database}"]
    for row in report.rows:
        shape = " ".join(f"{name}={size}" for name, size in row.shape.items())
        ours = "" if row.ours is None else f", ours {1e6 * row.ours:.1f}"
        rate = "" if row.gbytes is None else f" ({row.gbytes:.1f} GB/s)"
        lines.append(
            f"{shape}: as it stands {1e6 * row.plain:.1f} us, {row.variant} {1e6 * row.best:.1f}"
            f"{rate}{ours}; {row.serves} serves"
        )
    return "\n".join((*lines, *(f"note: {note}" for note in report.notes)))


def describe_progress(at: TuneProgress) -> str:
    """Return one line: trials, best rate, gain over the default schedules with its band, ETA."""
    failed = "".join(f", {n} {status}" for status, n in at.failed.items())
    best = f"best {at.best_gflops:.1f} GFLOP/s; " if at.best_gflops else ""  # rows have none
    return (
        f"{at.trials} trials{failed}; {best}"
        f"{at.gain:.2f}x the default ({at.gain_low:.2f} to {at.gain_high:.2f}); "
        f"ETA {show_seconds(at.eta)}"
    )


def describe_report(report: TuneReport) -> str:
    """Return the lines a person reads after a job."""
    at = report.progress
    failed = "".join(f", {n} {status}" for status, n in at.failed.items())
    lines = [
        f"{report.database}: {report.trials} trials for {report.target}, "
        f"{report.trials - report.measured} of them from the database{failed}; "
        f"{show_count(report.workers, 'worker')}, {report.seconds:.1f} s",
        f"{len(report.points)} shapes, {at.gain:.2f}x as fast as by the default schedules "
        f"(bounds {at.gain_low:.2f} to {at.gain_high:.2f}), "
        f"best {at.best_gflops:.1f} GFLOP/s",
        *(f"note: {note}" for note in report.notes),
    ]
    return "\n".join(lines)


def describe_stop(at: TuneProgress | None) -> str:
    """Return a sentence on a job that was stopped."""
    if at is None:
        return "stopped before the first trial; nothing was recorded"
    return f"stopped after {at.trials} trials, which are all kept; the same command continues"


class LiveProgress:
    """A job's progress on stderr, from its first second on."""

    def __init__(self) -> None:
        self.latest: TuneProgress | None = None
        columns = (TextColumn("tune"), BarColumn(20), TimeElapsedColumn())
        now = TextColumn("{task.fields[now]}", markup=False)
        self._bars = Progress(*columns, now, console=Console(stderr=True, markup=False))
        self._task = self._bars.add_task("tune", total=None, now="")

    def say(self, stage: str) -> None:
        """Draw what is done before there are trials; a log gets a line."""
        self._bars.start()
        self._bars.update(self._task, now=stage)
        if not self._bars.console.is_terminal:
            self._bars.console.print(f"tune: {stage}")

    def show(self, at: TuneProgress) -> None:
        """Draw how far the job is."""
        self.latest = at
        self._bars.start()
        self._bars.update(self._task, completed=at.done, total=at.items, now=describe_progress(at))

    def close(self) -> None:
        """Draw no more, if anything was drawn."""
        if self._bars.live.is_started:
            self._bars.stop()
