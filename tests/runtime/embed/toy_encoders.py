"""Encoders for tests, also for child processes: vectors that can be told apart, chosen faults."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dovetail.ir.errors import DeviceError, SpecError
from dovetail.runtime.child.child import ChildLost
from dovetail.runtime.embed.line import Line

DIM = 8
DEADLY, HEAVY, WRONG, FATAL = 666, 667, 668, 669
"""Token ids on which an encoder is killed, is out of memory, gives no number, has a fault."""


def vector(ids: Sequence[int]) -> np.ndarray:
    """The vector of some ids."""
    powers = np.arange(1, DIM + 1)
    values = [np.sin(np.asarray(ids, np.float64) * p + np.arange(len(ids))).sum() for p in powers]
    return np.asarray(values, np.float32)


class Toy:
    """Vectors by `vector`, segments added to ids; `calls` are the sizes of its batches."""

    dim = DIM

    def __init__(self) -> None:
        self.calls: list[int] = []

    def embed_tokens(
        self, ids: Sequence[np.ndarray], types: Sequence[np.ndarray] | None = None
    ) -> np.ndarray:
        self.calls.append(len(ids))
        seen = {int(token) for each in ids for token in each if token >= DEADLY}
        if DEADLY in seen:
            os.kill(os.getpid(), signal.SIGKILL)
        if HEAVY in seen:
            raise MemoryError
        if FATAL in seen:
            raise ZeroDivisionError
        if types is not None:
            ids = [each + kinds for each, kinds in zip(ids, types, strict=True)]
        rows = np.stack([vector(each) for each in ids])
        for row, each in zip(rows, ids, strict=True):
            row[0] = np.nan if WRONG in each else row[0]
        return rows

    def close(self) -> None:
        """Nothing is held."""


class Timed(Toy):
    """Takes line(C) seconds, C in queries of 75 tokens; its vectors say nothing."""

    def __init__(self, line: Line, sleep: Callable[[float], object] = time.sleep) -> None:
        super().__init__()
        self.line, self.sleep = line, sleep

    def embed_tokens(
        self, ids: Sequence[np.ndarray], types: Sequence[np.ndarray] | None = None
    ) -> np.ndarray:
        self.sleep(self.line.seconds(sum(map(len, ids)) / 75))
        return np.zeros((len(ids), DIM), np.float32)


class Small(Toy):
    """Has memory for batches of so many tokens."""

    def __init__(self, most_tokens: int) -> None:
        super().__init__()
        self.most_tokens = most_tokens

    def embed_tokens(
        self, ids: Sequence[np.ndarray], types: Sequence[np.ndarray] | None = None
    ) -> np.ndarray:
        if (tokens := sum(map(len, ids))) > self.most_tokens:
            raise DeviceError(f"out of memory: {tokens} tokens, {self.most_tokens} fit")
        return super().embed_tokens(ids, types)


def toy() -> Toy:
    return Toy()


def refuse() -> Toy:
    raise SpecError("no such model")


def once(path: str) -> Toy:
    """An encoder that starts once: the second process finds the file, and has no model."""
    file = Path(path)
    if file.exists():
        raise SpecError("started before")
    file.touch()
    return Toy()


def gated(path: str, gate: str) -> Toy:
    """An encoder whose later starts wait until the gate, a pipe, was opened and closed."""
    file = Path(path)
    if file.exists():
        Path(gate).read_text()
    file.touch()
    return Toy()


class Pinned(Toy):
    """Says on which CPUs it runs, and in which process."""

    def embed_tokens(
        self, ids: Sequence[np.ndarray], types: Sequence[np.ndarray] | None = None
    ) -> np.ndarray:
        row = [os.getpid() % 10_000, len(os.sched_getaffinity(0)), min(os.sched_getaffinity(0))]
        return np.tile(np.asarray([*row, *[0] * (DIM - 3)], np.float32), (len(ids), 1))


def pinned() -> Pinned:
    return Pinned()


class Failing(Toy):
    """As one on a GPU: DEADLY breaks the GPU, on HEAVY it has no memory."""

    def embed_tokens(
        self, ids: Sequence[np.ndarray], types: Sequence[np.ndarray] | None = None
    ) -> np.ndarray:
        seen = {int(token) for each in ids for token in each}
        if DEADLY in seen:
            raise ChildLost("gpu: an illegal memory access")
        if HEAVY in seen:
            tokens = sum(map(len, ids))
            raise DeviceError(f"gpu: out of memory in a pass of {tokens} tokens")
        return super().embed_tokens(ids, types)


def gpu() -> Failing:
    return Failing()


class Stuck(Toy):
    """Begins a batch, says so, and never ends it."""

    def __init__(self, pipe: str) -> None:
        super().__init__()
        self.pipe = pipe

    def embed_tokens(
        self, ids: Sequence[np.ndarray], types: Sequence[np.ndarray] | None = None
    ) -> np.ndarray:
        hang(self.pipe)
        return super().embed_tokens(ids, types)


def hang(pipe: str) -> None:
    Path(pipe).write_text("begun")
    threading.Event().wait()


def stuck(pipe: str, started: str) -> Stuck:
    """An encoder whose batches never end, nor does its second start."""
    if Path(started).exists():
        hang(pipe)
    Path(started).touch()
    return Stuck(pipe)
