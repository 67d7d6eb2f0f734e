"""llama.cpp's own programs: found, run, and what they print parsed. Nothing is downloaded.

They lie in the folder that `DOVETAIL_PEERS` names, at any depth, else on `PATH`; the newest build
counts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

BENCH, QUANTIZE, SERVER = "llama-batched-bench", "llama-quantize", "llama-server"


@dataclass(frozen=True, slots=True)
class Programs:
    """A folder with one build of the programs."""

    folder: Path
    build: int

    def path(self, name: str) -> str:
        """Return what to run."""
        return str(self.folder / name)


@dataclass(frozen=True, slots=True)
class Batched:
    """What one run of `llama-batched-bench` found: seconds of prompts, and of further tokens."""

    prefill: float
    decode: float


@lru_cache
def find_programs() -> Programs | None:
    """Return the newest build that this machine has, None where it has none."""
    return newest(Programs(folder, parse_build(_version(folder / BENCH))) for folder in _folders())


def newest(found: Iterable[Programs]) -> Programs | None:
    """Return the newest of several builds."""
    return max(found, key=lambda programs: programs.build, default=None)


def _folders() -> list[Path]:
    peers = os.environ.get("DOVETAIL_PEERS")
    files = sorted(Path(peers).rglob(BENCH)) if peers else []
    if on_path := shutil.which(BENCH):
        files.append(Path(on_path).resolve())
    return [file.parent for file in files]


def _version(program: Path) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def parse_build(text: str) -> int:
    """Return the number in what `--version` prints, 0 where it names none."""
    found = re.search(r"build (\d+)|version: (\d+) ", text)
    return int(found[1] or found[2]) if found else 0


def parse_batched(text: str) -> Batched | None:
    """Return the figures of `llama-batched-bench --output-format jsonl` with one `-npl`, if any."""
    for line in text.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            return Batched(row["t_pp"], row["t_tg"])
    return None


def run_measured(command: Sequence[str]) -> tuple[str, float, int]:
    """Run a program; return what it printed, its seconds and its peak resident bytes.

    Raises RuntimeError with the end of its messages where it failed.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        errors.seek(0)
        if process.returncode:
            said = errors.read()[-600:]
            raise RuntimeError(f"{command[0]} ended with {process.returncode}: {said}")
        return out.read(), seconds, usage.ru_maxrss << 10


def quantize(source: Path, target: Path, width: str) -> None:
    """Write `source` anew with weights of another width, such as Q4_K_M, whole or not at all."""
    programs = find_programs()
    if programs is None:
        raise RuntimeError(f"{QUANTIZE} is not there: name its folder in DOVETAIL_PEERS")
    part = target.with_name(f"{target.name}.part")
    command = [programs.path(QUANTIZE), "--allow-requantize", str(source), str(part), width]
    run_measured(command)
    part.replace(target)
