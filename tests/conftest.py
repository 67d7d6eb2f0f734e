"""What holds for every test, however the suite was started."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Take SIGINT as a terminal's process does: a shell's background jobs ignore it, and so would
    the commands that tests interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
