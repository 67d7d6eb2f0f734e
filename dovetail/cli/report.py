"""What every verb shares: exit codes, one-sentence errors, JSON output and consoles.

Exit codes: 0 done, 1 a check failed, 2 bad input, bad environment or interrupted.
"""

from __future__ import annotations

import errno
import functools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from traceback import walk_stack
from types import FrameType
from typing import NoReturn, ParamSpec, TypeVar

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from dovetail.errors import DovetailError, SpecError

CHECK_FAILED, NOT_DONE = 1, 2

P = ParamSpec("P")
Report = TypeVar("Report")


class Terminated(BaseException):
    """SIGTERM arrived; unwinds like Ctrl-C so that half-made files are removed."""


SIGNALS: dict[type[BaseException], int] = {
    Terminated: signal.SIGTERM,
    KeyboardInterrupt: signal.SIGINT,
}


def report_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Decorate a verb: what a user can cause ends in one sentence on stderr and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        signal.signal(signal.SIGTERM, _terminate)
        sys.unraisablehook = _send_again
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except DovetailError as error:
            fail(str(error))
        except Terminated:
            fail("terminated; nothing half-made was left behind")
        except (KeyboardInterrupt, typer.Abort):  # typer's: at a question
            fail("interrupted; nothing half-made was left behind")
        except BrokenPipeError:  # the reader of our output went away: leave quietly
            sys.stdout = Path("/dev/null").open("w")  # so that Python does not flush again
            raise typer.Exit(0) from None
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            fail(f"{where}{error.strerror or error}")
        except MemoryError:
            fail("out of memory; free some, or choose a smaller model or context")

    return run


def tell(line: str) -> None:
    """Print a line of ours to stderr."""
    print(f"dovetail: {line}", file=sys.stderr, flush=True)


def fail(message: str) -> NoReturn:
    """Print `message` to stderr and leave with exit code 2."""
    tell(message)
    raise typer.Exit(NOT_DONE)


def print_json(value: object) -> None:
    """Print a report as JSON; structs and dataclasses become objects, paths texts."""
    data = msgspec.json.encode(value, enc_hook=os.fspath)
    sys.stdout.write(msgspec.json.format(data, indent=2).decode() + "\n")


def show_report(
    report: Report, describe: Callable[[Report], str | Iterable[RenderableType]], *, json: bool
) -> None:
    """Print a report: as JSON, or the text or the tables and lines that `describe` makes of it."""
    if json:
        print_json(report)
    elif isinstance(found := describe(report), str):
        print(found)
    else:  # texts as they are, e.g. [/INST]; wide enough for tables where it is no terminal
        width = None if sys.stdout.isatty() else 140
        console = Console(highlight=False, markup=False, emoji=False, width=width)
        for part in found:
            console.print(part)


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table; the cells of columns that begin with `>` are numbers, on the right."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def facts_table(title: str, facts: dict[str, str]) -> Table:
    """Return facts by name."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def show_bytes(count: int) -> str:
    """Return a byte count in the unit a person would pick."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


@contextmanager
def writing(output: Path) -> Iterator[None]:
    """Turn what keeps `output` from being written into one sentence that names it."""
    try:
        yield
    except OSError as error:
        raise SpecError(
            f"cannot write {output}: {error.strerror or error}; choose another output"
        ) from error


def check_file(output: Path) -> None:
    """Raise SpecError as `writing` does: before the work that a file would be in vain after."""
    target = Path(os.path.realpath(output))
    with writing(output):
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if target.is_file() or not output.exists():  # a pipe or a device is just written to
            TemporaryFile(dir=target.parent).close()


def read_duration(text: str) -> float:
    """Return the seconds that `90`, `60s`, `15m` or `1h` say; SpecError for anything else."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "s")
    try:
        seconds = float(number) * units[unit]
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < 1e9:
        raise SpecError(f"{text!r} is not a duration; write 90, 60s, 15m or 1h")
    return seconds


def show_seconds(seconds: float) -> str:
    """Return a duration as minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def show_count(number: int, noun: str) -> str:
    """Return `1 process` or `2 processes`."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{ending}"


@contextmanager
def progress_bars(*, quiet: bool = False) -> Iterator[Callable[[str, float, float], None]]:
    """Yield a callback (stage, done, total) that draws one bar with an ETA per stage on stderr."""
    console = Console(stderr=True, quiet=quiet)
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console) as progress:

        def update(stage: str, done: float, total: float) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done, total=total)

        yield update


def _terminate(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise Terminated


def _send_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Deliver a signal once more that arrived inside a finalizer, where Python drops exceptions."""
    number = SIGNALS.get(unraisable.exc_type)
    if number is None:
        sys.__unraisablehook__(unraisable)
    else:
        here = threading.get_ident(), sys._getframe()
        threading.Thread(target=_send_after, args=(*here, number)).start()


def _send_after(thread: int, hook: FrameType, number: int) -> None:
    """Send a signal to this process once `thread` has left `hook`, which would drop it, too."""
    while (top := sys._current_frames().get(thread)) and hook in dict(walk_stack(top)):
        time.sleep(0.001)
    os.kill(os.getpid(), number)
