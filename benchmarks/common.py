"""What the benchmarks share: machine facts, quiet timing, medians with spread, tables and JSON.

In: functions to time. Out: `Sample`s, and reports of the form
`{"benchmark", "machine", "config", "rows", "summary"}`.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from dovetail.compiler.measure.paired import pair_times
from dovetail.ir.files import write_whole
from dovetail.runtime.machine.cpu_time import QUIET_CORES, busy_seconds, process_seconds
from dovetail.topology.hardware import read_hardware
from dovetail.topology.values import HardwareSpec

BUSY_LIMIT = QUIET_CORES
"""Cores that other processes may use during a timed region before it is run again."""
QUIET_TRIES = 4
WIDTH = 132
"""Columns of a table that goes to a file or pipe."""

_PACKAGES = ("dovetail", "numpy", "torch", "transformers", "openvino", "openvino-genai")
_PACKAGES += ("gguf", "vllm", "apache-tvm")


@dataclass(slots=True)
class Region:
    """One timed region. `others` is the mean number of cores other processes used meanwhile.

    own: CPU seconds of this process and those below it.
    """

    seconds: float = 0.0
    others: float = 0.0
    own: float = 0.0

    @property
    def quiet(self) -> bool:
        """Return whether the rest of the machine was idle enough for the figure to count."""
        return self.others <= BUSY_LIMIT


@dataclass(frozen=True, slots=True)
class Sample:
    """Times of one thing in seconds: the median, and the quartiles around it.

    `noisy` counts the runs that stayed disturbed by other processes after all retries.
    """

    median: float
    low: float
    high: float
    runs: int
    noisy: int = 0

    @property
    def spread(self) -> float:
        """Return the distance of the quartiles, relative to the median."""
        return (self.high - self.low) / self.median if self.median else 0.0


def sample(seconds: Sequence[float], noisy: int = 0) -> Sample:
    """Return the median and quartiles of `seconds` (one value at least)."""
    ordered = sorted(seconds)
    if len(ordered) < 3:
        low, high = ordered[0], ordered[-1]
    else:
        low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
    return Sample(statistics.median(ordered), low, high, len(ordered), noisy)


@contextmanager
def timed_region() -> Iterator[Region]:
    """Time the body, and measure how busy processes of others kept the machine."""
    region = Region()
    busy, own, start = busy_seconds(), _own_seconds(), time.perf_counter()
    yield region
    region.seconds = time.perf_counter() - start
    region.own = own = _own_seconds() - own
    # /proc/stat counts in hundredths of a second, so very short regions cannot be judged
    if region.seconds >= 0.05:
        region.others = max(0.0, (busy_seconds() - busy - own) / region.seconds)


@dataclass(slots=True)
class Patience:
    """Seconds that a benchmark may still spend waiting for other processes to finish."""

    seconds: float

    def wait(self, step: float = 0.5) -> None:
        """Sleep in steps until one was quiet, or patience is at its end."""
        while self.seconds > 0:
            self.seconds -= step
            with timed_region() as region:
                time.sleep(step)
            if region.quiet:
                return


def run_quiet(
    function: Callable[[], Any], tries: int = QUIET_TRIES, patience: Patience | None = None
) -> Region:
    """Run `function` until a run was undisturbed, at most `tries` times; return its region.

    With `patience` the next try waits for the other processes to finish first.
    """
    best = None
    for turn in range(tries):
        if turn and patience:
            patience.wait()
        with timed_region() as region:
            function()
        if best is None or region.others < best.others:
            best = region
        if region.quiet:
            break
    assert best is not None, "tries must be positive"
    return best


def interleave(
    functions: Mapping[str, Callable[[], Any]],
    rounds: int,
    warmups: int = 1,
    patience: Patience | None = None,
    before: Callable[[], object] | None = None,
) -> dict[str, Sample]:
    """Time several functions in turns, `rounds` times each, so that drift hits all alike.

    `before` runs ahead of every function, outside its time.
    """
    regions: dict[str, list[Region]] = {name: [] for name in functions}
    for turn in range(-warmups, rounds):
        for name, function in functions.items():
            if before is not None:
                before()
            if turn < 0:
                function()
            else:
                regions[name].append(run_quiet(function, patience=patience))
    return {
        name: sample([r.seconds for r in found], sum(not r.quiet for r in found))
        for name, found in regions.items()
    }


def speedup(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float | None]:
    """Return how many times as fast we are: `ratio`, the median over rounds, and `bound`.

    The true ratio is at least `bound` with a probability of 0.99; None where rounds are too few.
    Both are one over a `PairedRatio` of our times over theirs, whose bound is an upper one.
    """
    found = pair_times(ours, theirs)
    return {"ratio": 1 / found.median, "bound": 1 / found.bound if found.bound else None}


def geometric_mean(values: Iterable[float]) -> float | None:
    """Return the geometric mean of positive `values`, None of none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def machine_facts() -> dict[str, Any]:
    """Return what a reader needs to know of this machine; no host names."""
    spec = read_hardware()
    return {
        "cpu": machine_name(spec),
        "arch": spec.arch,
        "cores": spec.cores,
        "pus": len(spec.pus),
        "allowed_pus": list(spec.allowed_pus),
        "usable_threads": spec.usable_threads,
        "cpu_quota": spec.cpu_quota,
        "caches": {f"L{level}": spec.cache_bytes(level) for level in (1, 2, 3)},
        "memory_bytes": spec.memory_bytes,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: v for name in _PACKAGES if (v := _version(name))},
    }


def machine_name(spec: HardwareSpec) -> str:
    """Return the CPU's name and its own caches: virtual machines name different CPUs alike."""
    first, second = (spec.cache_bytes(level) // 1024 for level in (1, 2))
    return f"{spec.cpu_model}, L1 {first} KiB, L2 {second} KiB"


def origin() -> dict[str, str]:
    """Return what each row says: the machine it was measured on, and the version measured."""
    return {"machine": machine_name(read_hardware()), "commit": commit()}


@cache
def commit() -> str:
    """Return the version measured, marked `-dirty` where files differ from it."""
    command = ["git", "describe", "--always", "--dirty"]
    folder = Path(__file__).parent
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return found.stdout.strip()


def earlier_rows(
    path: Path | None, config: Mapping[str, Any], same: Sequence[str], *, any_machine: bool = False
) -> list[dict[str, Any]]:
    """Return the rows of the report at `path`, none without one: a run that resumes keeps them.

    any_machine: rows say which machine they are of. Raises SystemExit where it is another machine's
    and they do not, or differs in one of the settings `same`.
    """
    if path is None or not path.exists():
        return []
    report = msgspec.json.decode(path.read_bytes())
    now = msgspec.json.decode(msgspec.json.encode(config))  # tuples are lists in the file
    elsewhere = report["machine"]["cpu"] != machine_facts()["cpu"] and not any_machine
    if elsewhere or any(report["config"].get(name) != now[name] for name in same):
        raise SystemExit(f"{path}: of another machine or setting; leave --resume away")
    rows: list[dict[str, Any]] = report["rows"]
    return [{"machine": report["machine"]["cpu"], **row} for row in rows] if any_machine else rows


@dataclass(slots=True)
class Report:
    """A benchmark's result; `rows` are flat objects, one per cell."""

    benchmark: str
    config: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path | None) -> None:
        """Write the report as JSON to `path`, if one is given, at once or not at all."""
        if path is None:
            return
        body = {
            "benchmark": self.benchmark,
            "machine": machine_facts(),
            "config": self.config,
            "rows": self.rows,
            "summary": self.summary,
        }
        write_whole(path, msgspec.json.format(msgspec.json.encode(body), indent=1) + b"\n")

    def print(self, columns: Sequence[str] = ()) -> None:
        """Print the rows as a table, all columns or those named, and the summary below."""
        shown = [{c: row.get(c, "") for c in columns} if columns else row for row in self.rows]
        print_rows(self.benchmark, shown)
        for name, value in self.summary.items():
            print(f"{name:32} {show(value)}")


def print_rows(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print flat objects as a table, as wide as the terminal; a file or pipe has WIDTH columns."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(rows_table(title, rows))


def rows_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return flat objects as a table; columns in the order in which they first occur."""
    table = Table(title=title, title_justify="left")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*(show(row.get(name, "")) for name in columns))
    return table


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Add `--json` and `--resume`, which `open_report` reads."""
    parser.add_argument("--json", type=Path, metavar="F", help="write the report to F")
    parser.add_argument("--resume", action="store_true", help="keep what F has already")


def open_report(
    benchmark: str,
    options: argparse.Namespace,
    config: dict[str, Any],
    same: Sequence[str],
    *,
    any_machine: bool = False,
) -> Report:
    """Return a report, with the earlier rows where the run resumes one of the `same` settings."""
    if options.resume and options.json is None:
        raise SystemExit("--resume needs --json F")
    kept = {"any_machine": any_machine}
    rows = earlier_rows(options.json, config, same, **kept) if options.resume else []
    return Report(benchmark, config, rows)


def add_work_option(parser: argparse.ArgumentParser) -> None:
    """Add `--work`, which `work_folder` reads."""
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep what is built in DIR")


@contextmanager
def work_folder(kept: Path | None) -> Iterator[Path]:
    """Give the folder where things are built: `kept`, else one that is removed at the end."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
    else:
        with tempfile.TemporaryDirectory(prefix="dovetail-benchmark-") as folder:
            yield Path(folder)


def keep_current(artifact: Path, make: Callable[[], object], settings: object = None) -> None:
    """Have `make` write an artifact, unless the one there is of the same sources and settings.

    A file beside it says of which, else older kernels would be timed in the newest ones' name.
    """
    from dovetail.codegen.text_cache import digest_sources
    from dovetail.compiler.measure.answers import PACKAGES

    origin = artifact.with_name(f"{artifact.name}.origin")
    now = f"{digest_sources(*PACKAGES)} {settings}"
    if artifact.exists() and origin.exists() and origin.read_text() == now:
        return
    origin.unlink(missing_ok=True)
    make()
    origin.write_text(now)


def parse_numbers(text: str) -> tuple[int, ...]:
    """Parse an option such as `1,2,4`; raises what argparse reports as a usage error."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of integers") from None


def parse_shapes(text: str) -> tuple[tuple[int, int], ...]:
    """Parse `--shapes`, such as `2048x2048,11008x2048`."""
    try:
        sizes = [tuple(map(int, part.split("x"))) for part in text.split(",")]
        return tuple((n, k) for n, k in sizes)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write NxK,NxK") from None


def _own_seconds() -> float:
    """Return the CPU seconds of this process and those below it (servers and their engines)."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = time.process_time() + ended.ru_utime + ended.ru_stime
    return seconds + sum(process_seconds(pid) for pid in family(os.getpid()) if pid != os.getpid())


def family(pid: int) -> Iterator[int]:
    """Yield a process and all below it."""
    yield pid
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread may end meanwhile
            for child in file.read_text().split():
                yield from family(int(child))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def show(value: object) -> str:
    """Return a figure as a table has it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {show(each)}" for name, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
