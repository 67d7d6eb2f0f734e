"""Signals to the processes that tests look at."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path


def running(pids: Sequence[int]) -> list[int]:
    """Return those that are there, if only to be waited for."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def stop(pid: int) -> None:
    """Stop a child of this process, and wait until all its threads are."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
