"""A compile as a child of a command: it ends with what started it, and leaves nothing half-made.

In: the command of a compile. Out: its exit code. The child and the compilers that it runs are a
process group, so that Ctrl-C is for the parent alone, which has all of them end and waits until
they have removed what is half-made.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from dovetail.cli.options import flag_of

END_SECONDS = 10.0
"""A child that was told to end may take so long to remove what is half made."""
ORPHAN_SECONDS = 3.0
"""And so long where nobody is left to wait for it."""
PROGRAM = (
    "from dovetail.cli.compile_child import begin; begin({parent}, {nice}); "
    "from dovetail.cli import main; main()"
)


def child_command(
    model: Path, output: Path, options: Mapping[str, object], flags: Sequence[str], nice: int = 0
) -> tuple[str, ...]:
    """Return the command of a compile as a child of this process; options: by parameters' names.

    A tuple is an option that is given several times.
    """
    program = PROGRAM.format(parent=os.getpid(), nice=nice)
    chosen = [
        part
        for name, value in options.items()
        for each in (value if isinstance(value, tuple) else (value,))
        for part in (flag_of(name), str(each))
    ]
    words = ("compile", str(model), "-o", str(output), *chosen, *flags)
    return (sys.executable, "-P", "-c", program, *words)


def begin(parent: int, nice: int) -> None:
    """Have this process end with `parent`; what it runs follows."""
    with suppress(OSError):  # the system knows no such descriptors
        watched = os.pidfd_open(parent)
        threading.Thread(target=_follow, args=(watched,), daemon=True).start()
    if os.getppid() != parent:  # it ended before
        sys.exit(1)
    os.nice(nice)


def _follow(parent: int) -> None:
    select.select([parent], [], [])  # readable once it has ended
    os.killpg(0, signal.SIGTERM)
    time.sleep(ORPHAN_SECONDS)
    os.killpg(0, signal.SIGKILL)


class CompileChild:
    """A compile that runs."""

    def __init__(self, command: Sequence[str], output: Path, said: IO[bytes] | None = None) -> None:
        """`output`: what it makes. `said`: where its stdout and stderr go, by default to stderr."""
        self._output = output
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said or sys.__stderr__,  # a notebook puts what has no descriptor in its place
            stderr=said,
            process_group=0,
        )
        self._stopped: float | None = None

    def wait(self) -> int:
        """Return its exit code; nothing that it started is left. Ends it where this is interrupted.

        One that was stopped is killed where it does not end in END_SECONDS.
        """
        from dovetail.compiler.write.writer import sweep

        try:
            self._join()
        except BaseException:
            self.stop()
            self._join(KeyboardInterrupt)
            raise
        finally:
            self._signal(signal.SIGKILL)  # what it started
            sweep(self._output.parent, f".{self._output.name}.")  # where it was killed
        return self._process.returncode

    def stop(self) -> None:
        """Have it end."""
        self._stopped = self._stopped or time.monotonic()
        self._signal(signal.SIGTERM)

    def _join(self, *unheard: type[BaseException]) -> None:
        """Return once it has ended; `unheard`: what does not interrupt this."""
        while self._process.poll() is None:
            with suppress(subprocess.TimeoutExpired, *unheard):
                self._process.wait(END_SECONDS if self._stopped is None else self._left())
            if self._stopped is not None and not self._left():
                self._signal(signal.SIGKILL)

    def _left(self) -> float:
        assert self._stopped is not None, "nobody has stopped it"
        return max(0.0, self._stopped + END_SECONDS - time.monotonic())

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)
