"""Runs the command line in this process, with its output and exit code caught."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
from dataclasses import dataclass

from dovetail.cli import main


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def dovetail(*arguments: object) -> Result:
    """Run `dovetail arguments`; anything but an exit with a code is a failure of the test."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    handler, hook = signal.getsignal(signal.SIGTERM), sys.unraisablehook
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        finally:
            signal.signal(signal.SIGTERM, handler)
            sys.unraisablehook = hook
    return Result(code, out.getvalue(), err.getvalue())


def assert_one_sentence(result: Result, code: int = 2) -> None:
    """The exit code is `code`, stderr holds one line of ours."""
    assert result.code == code, result
    assert result.err.startswith("dovetail: ") and result.err.endswith("\n"), result.err
    assert len(result.err.splitlines()) == 1, result.err
