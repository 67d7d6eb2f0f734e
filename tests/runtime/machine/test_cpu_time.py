"""How busy CPUs are: found for real, and nothing where the kernel does not tell."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from dovetail.runtime.machine.cpu_time import (
    busy_cores,
    busy_seconds,
    family_seconds,
    process_seconds,
    read_busy,
)
from dovetail.runtime.native.adapt import BUSY
from tests.runtime.native.test_adapt import HERE, busy_loop


@pytest.mark.skipif(os.nice(0) > 0, reason="work of low priority, as this is, counts as none")
def test_a_busy_cpu_is_found() -> None:
    with busy_loop(HERE[-1]):
        tries = range(100)  # other processes may have the CPU first
        assert any(read_busy(seconds=0.2)[HERE[-1]] >= BUSY for _ in tries)
        assert any(BUSY <= busy_cores(HERE[-1:]) <= busy_cores(HERE) + 0.5 for _ in tries)
        assert busy_cores(()) == 0.0


def test_what_processes_spend_is_part_of_what_cpus_work() -> None:
    pid, busy, own = os.getpid(), busy_seconds(), process_seconds(os.getpid())
    total = sum(i * i for i in range(4_000_000))
    spent = process_seconds(pid) - own
    assert total and 0 < spent <= busy_seconds() - busy + 0.1
    assert process_seconds(2**22 + 1) == 0.0


def test_files_that_are_not_there_tell_nothing(tmp_path: Path) -> None:
    assert read_busy(tmp_path) == {}
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/loadavg").write_text("0.1 0.1 0.1 1/9 7\n")
    assert read_busy(tmp_path) == {}
    (tmp_path / "proc/loadavg").write_text("0.1 0.1 0.1 5/9 7\n")
    assert read_busy(tmp_path, seconds=0.0) == {}


def test_a_process_that_may_open_no_file_counts_nothing() -> None:
    """As a server whose clients have taken all: who looks again and again must live on."""
    assert family_seconds(os.getpid()) > 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        assert family_seconds(os.getpid()) == 0.0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
