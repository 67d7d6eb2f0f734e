"""Processes that tests look at: signals to them, and what they print."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def running(pids: Sequence[int]) -> list[int]:
    """Return those that are there, if only to be waited for."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def stop(pid: int) -> None:
    """Stop a child of this process, and wait until all its threads are."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def printed_with_seeds(code: str) -> set[bytes]:
    """Return what code prints in two processes, in which sets have another order."""
    return {
        subprocess.run(
            [sys.executable, "-P", "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in "12"
    }
