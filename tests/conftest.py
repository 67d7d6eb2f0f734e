"""What holds for every test, however the suite was started."""

from __future__ import annotations

import signal

import hypothesis
import pytest

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.register_profile("seeded", deadline=None, derandomize=True)


def pytest_configure(config: pytest.Config) -> None:
    """Seed the default suite, which gates changes; long tests draw anew each time.

    No example has a deadline: other work on the machine is no fault of ours.
    Take SIGINT as a terminal's process does: a shell's background jobs ignore it, and so would the
    commands that tests interrupt.
    """
    long = "long" in config.getoption("markexpr").replace("not long", "")
    hypothesis.settings.load_profile("untimed" if long else "seeded")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
