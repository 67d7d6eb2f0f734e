"""TVM MetaSchedule as a baseline: tuned once per cell in its own environment, then timed live.

In: a cell (M, N, K, threads, trials). Out: its tuning seconds, from the cache directory where it
was tuned before on this CPU, and a `TvmProduct` that runs the tuned kernel in its own process. A
cell of fewer trials than its shape is tuned for is the first part of that tuning.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from common import machine_facts
from dovetail.ir.cache import cache_directory

PACKAGES = (
    "apache-tvm==0.27.0.post1",
    "apache-tvm-ffi==0.1.14.post1",  # later ones crash MetaSchedule of this TVM
    "psutil",
    "cloudpickle",
    "xgboost-cpu",
    "numpy",
)
"""What the environment holds; torch must stay out, it slows every builder process down."""
SPIN = 2000
"""Turns that threads wait for work before they sleep: ours, and TVM's as well."""
WORKER = Path(__file__).with_name("tuning_tvm.py")


class TvmError(RuntimeError):
    """TVM could not tune or run a cell; the others may go on."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A static shape, threads, how many candidates MetaSchedule may try, and how many it tries."""

    m: int
    n: int
    k: int
    threads: int
    trials: int
    tuned: int

    @property
    def name(self) -> str:
        """Return e.g. `m64_n2048_k2048_t2_800`: cells of one tuning share it."""
        return f"m{self.m}_n{self.n}_k{self.k}_t{self.threads}_{self.tuned}"


@dataclass(frozen=True, slots=True)
class Tuned:
    """What MetaSchedule's tuning of a cell took, and the CPU it ran on."""

    seconds: float
    records: int
    cpu: str


def home() -> Path:
    """Return the folder of the environment and of what was tuned."""
    return cache_directory() / "metaschedule"


def environment(python: Path | None = None) -> Path:
    """Return the interpreter that has TVM; make its environment if none is given and none is there.

    Raises CalledProcessError when pip cannot install it.
    """
    if python is not None:
        return python
    folder = home() / "environment"
    found = folder / "bin" / "python"
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([found, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        (folder / "complete").touch()
    return found


def cell_folder(cell: Cell) -> Path:
    """Return where the cell's tuning database lies; another CPU has another folder."""
    cpu = re.sub(r"\W+", "-", str(machine_facts()["cpu"])).strip("-")
    return home() / cpu / cell.name


def command(python: Path, verb: str, cell: Cell, *more: object) -> list[str]:
    """Return the worker's command line."""
    trials = cell.tuned if verb == "tune" else cell.trials
    numbers = (cell.m, cell.n, cell.k, trials, cell_folder(cell), *more)
    return [str(python), "-P", str(WORKER), verb, *map(str, numbers)]


def settings(cell: Cell) -> dict[str, str]:
    """Return the worker's environment: TVM's threads, which wait between calls as ours do."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "TVM_NUM_THREADS": str(cell.threads), "TVM_THREAD_POOL_SPIN_COUNT": str(SPIN)}


def tune(python: Path, cell: Cell) -> Tuned:
    """Return what the cell's tuning took; it is run now unless it is on record.

    Raises TvmError where TVM's process fails.
    """
    done = cell_folder(cell) / "done.json"
    if not done.exists():
        print(f"MetaSchedule tunes {cell.name}", file=sys.stderr, flush=True)
        run = subprocess.run(
            command(python, "tune", cell),
            env=settings(cell),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        if run.returncode:
            raise TvmError(f"its process ended with {run.returncode}; run {run.args} to see why")
        rounds = json.loads(run.stdout.splitlines()[-1])
        done.write_bytes(msgspec.json.encode({"rounds": rounds, "machine": machine_facts()}))
    found = msgspec.json.decode(done.read_bytes())
    records, seconds = next(
        (each for each in found["rounds"] if each[0] >= cell.trials), found["rounds"][-1]
    )
    return Tuned(seconds, records, found["machine"]["cpu"])


class TvmProduct:
    """The tuned kernel in its own process; a context manager. `run(calls)` returns seconds."""

    def __init__(self, python: Path, cell: Cell, copies: int) -> None:
        self._process = subprocess.Popen(
            command(python, "serve", cell, copies),
            env=settings(cell),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        first = self._read()
        self.error, self.packed = float(first["error"]), bool(first["packed"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, calls: int) -> float:
        """Run `calls` products on the copies of the weight in turn; return seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{calls}\n")
        self._process.stdin.flush()
        return float(self._read()["seconds"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise TvmError(f"its process ended; run {self._process.args} to see why")
