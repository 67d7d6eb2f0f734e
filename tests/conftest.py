"""What holds for every test, however the suite was started."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from dovetail.codegen.targets import host_target
from dovetail.ir.cpu import FORCED_TARGET
from tests.codegen.float_targets import FLOATS_OF
from tests.gpus import count_devices
from tests.hosts import host_targets

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.register_profile("seeded", deadline=None, derandomize=True)


def pytest_configure(config: pytest.Config) -> None:
    """Seed the default suite, which gates changes; long tests draw anew each time.

    No example has a deadline: other work on the machine is no fault of ours.
    Take SIGINT as a terminal's process does: a shell's background jobs ignore it, and so would the
    commands that tests interrupt.
    Libraries compute on one thread: models here are so small that more only wait for each other,
    which costs a third of the time of tests with torch. Where threads matter they are asked for.
    Nothing is garbage until tests run: looking for it takes a fifth of the collection.
    """
    gc.disable()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    long = "long" in config.getoption("markexpr").replace("not long", "")
    hypothesis.settings.load_profile("untimed" if long else "seeded")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Look for garbage again, seldom, and not in what stays: modules and tests.

    Trees of kernels are many objects without circles: looking takes a third of a lowering.
    """
    gc.freeze()
    gc.set_threshold(100_000)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none, before anything is made for it."""
    if item.get_closest_marker("gpu") and not count_devices():
        pytest.skip("torch sees no GPU here")


@pytest.fixture(autouse=True)
def own_cpus() -> Iterator[None]:
    """Give back the CPUs that a test's steps pinned this thread away from."""
    cpus = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, cpus)


def each_name() -> list[Any]:
    """Return the x86 targets of this host, or the one that is forced.

    Those whose floats are another's run where tests are long.
    """
    if os.environ.get(FORCED_TARGET):
        return [host_target().name]
    x86 = [target.name for target in host_targets() if target.machine == "x86_64"]
    alike = [pytest.param(name, marks=pytest.mark.long) for name in x86 if name in FLOATS_OF]
    return [name for name in x86 if name not in FLOATS_OF] + alike or [host_target().name]


@pytest.fixture(params=each_name())
def each_target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force each x86 target that this host has in turn, on every road."""
    name: str = request.param
    monkeypatch.setenv(FORCED_TARGET, name)
    return name
