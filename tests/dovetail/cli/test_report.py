from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.dovetail.commands import assert_one_sentence, dovetail

WORKING = """
import signal, sys, threading, time
from dovetail.cli.report import report_errors

class Late:
    def __del__(self):
        signal.raise_signal(int(sys.argv[1]))

start = threading.Thread.start

def start_slowly(thread):  # as on a busy machine
    start(thread)
    time.sleep(0.1)

threading.Thread.start = start_slowly

@report_errors
def work():
    Late()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(1)

work()
"""


class Interrupt:
    """Ctrl-C while the command line is imported."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "dovetail.cli.app":
            raise KeyboardInterrupt


def test_ctrl_c_while_modules_are_loaded_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dovetail.cli.app", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupt(), *sys.meta_path])
    assert_one_sentence(dovetail("--version"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_inside_a_finalizer_still_ends_the_command(number: signal.Signals) -> None:
    command = [sys.executable, "-P", "-c", WORKING, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.stderr.startswith("dovetail: ") and "nothing half-made" in done.stderr
    assert done.returncode != 0


def test_what_a_library_warns_of_reads_as_our_lines() -> None:
    code = (
        "import logging; from dovetail.cli import main\n"
        "try: main(['--version'])\n"
        "except SystemExit: logging.getLogger('uvicorn.error').error('one task was cancelled')"
    )
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "dovetail: one task was cancelled\n"
