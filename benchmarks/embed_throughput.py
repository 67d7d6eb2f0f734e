"""Part (a) of `embed.py`: texts per second of whole calls, ours against peers, in turns.

In: models, lengths, batches. Out: a row per cell: each side's texts per second, the best peer, and
how many times as many ours embeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common import BUSY_LIMIT, geometric_mean, sample
from embed_models import EncoderFiles, make_texts, prepare, ragged_lengths
from embed_peers import OURS, side_makers
from generate_workers import Worker

RAGGED = "16..500"
MOST_ROUNDS = 7
CHECKED = 4
"""Texts whose vectors are compared over the sides before anything is timed."""
SMALL_BATCH = 4
LEAST_SECONDS = 0.2
"""Of calls that are timed together: in less the threads of the side before still spin, and whether
others disturbed them cannot be told."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A model, `75` or `16..500` tokens, and the texts of a call."""

    model: str
    length: str
    batch: int

    def texts(self, folder: Path) -> list[str]:
        """Return the texts of the call."""
        ragged = self.length == RAGGED
        lengths = ragged_lengths(self.batch) if ragged else [int(self.length)] * self.batch
        return make_texts(folder, lengths)

    @property
    def key(self) -> dict[str, Any]:
        """Return what names the cell in a row."""
        names = {"model": self.model, "length": self.length, "batch": self.batch}
        return {"part": "throughput", **names}


CELLS = tuple(
    Cell(model, length, batch)
    for model, length, batches in (
        ("minilm", "75", (1, 2, 4, 8, 16, 32, 64)),
        ("minilm", RAGGED, (1, 4, 16, 64)),
        ("bge-large", "75", (1, 4, 16, 64)),
        ("bge-large", RAGGED, (1, 4)),
        ("tiny", "75", (1, 4)),
        ("tiny", RAGGED, (4,)),
    )
    for batch in batches
)


def throughput_rows(
    models: Sequence[str],
    where: Path,
    threads: int,
    seconds: float,
    done: Sequence[Mapping[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Yield a row per cell of `models` that is not among the rows in `done`.

    Args:
        models: names of `embed_models.MODELS`.
        where: the folder of their files, which are made where they are missing.
        threads: of every side.
        seconds: about what a cell may take; calls of a cell are at least one of each side.
        done: rows of an earlier run.
    """
    for model in models:
        found = [tuple(row.get(n) for n in ("model", "length", "batch")) for row in done]
        cells = [c for c in CELLS if c.model == model]
        cells = [c for c in cells if (c.model, c.length, c.batch) not in found]
        if not cells:
            continue
        files = prepare(model, where)
        with ExitStack() as stack:
            sides = {
                name: stack.enter_context(Worker(make, *arguments))
                for name, (make, arguments) in side_makers(files, threads).items()
            }
            if not any(row["part"] == "sides" and row["model"] == model for row in done):
                yield from _sides(sides, files)
            for cell in cells:
                yield cell.key | time_cell(sides, cell.texts(files.folder), seconds)


def _sides(sides: Mapping[str, Worker], files: EncoderFiles) -> Iterator[dict[str, Any]]:
    """Yield what each side is, and the least cosine of its vectors with ours."""
    texts = make_texts(files.folder, ragged_lengths(CHECKED))
    rows = {name: side.call("vectors", texts) for name, side in sides.items()}
    for name, side in sides.items():
        yield {
            "part": "sides",
            "model": files.name,
            "side": name,
            "settings": side.call("settings"),
            "cosine": float(np.sum(rows[OURS] * rows[name], axis=1).min()),
        }


def time_cell(sides: Mapping[str, Worker], texts: Sequence[str], seconds: float) -> dict[str, Any]:
    """Return texts per second of each side, timed in turns; medians, and the relative spread."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    calls = dict.fromkeys(sides, 1)
    noisy = 0

    def run_round() -> float:
        nonlocal noisy
        for name, side in sides.items():
            spent, others = side.call("run", texts, calls[name])
            taken[name].append(spent)
            noisy += others > BUSY_LIMIT
        return sum(calls[name] * each[-1] for name, each in taken.items())

    first = run_round()
    if first < seconds / 4:  # else it is too dear to be a warm-up only
        calls = {name: math.ceil(LEAST_SECONDS / each[-1]) for name, each in taken.items()}
        taken, noisy = {name: [] for name in sides}, 0
        first = run_round()
    for _ in range(min(MOST_ROUNDS, round(seconds / first)) - 1):
        run_round()
    return _row(taken, len(texts)) | {"noisy": noisy}


def _row(taken: Mapping[str, Sequence[float]], texts: int) -> dict[str, Any]:
    samples = {name: sample(each) for name, each in taken.items()}
    peers = {name: found.median for name, found in samples.items() if name != OURS}
    best = min(peers, key=lambda name: peers[name]) if peers else None
    return {
        **{name: texts / found.median for name, found in samples.items()},
        "best_peer": best,
        "ratio": peers[best] / samples[OURS].median if best else None,
        "spread": max(found.spread for found in samples.values()),
        "rounds": samples[OURS].runs,
    }


def summarize_throughput(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return ratios to the best peer of each cell: geometric means, and the least ones."""
    timed = [row for row in rows if row["part"] == "throughput" and row["ratio"]]
    if not timed:
        return {}
    small = [row["ratio"] for row in timed if row["batch"] <= SMALL_BATCH]
    ragged = [row["ratio"] for row in timed if row["length"] == RAGGED]
    even = [row["ratio"] for row in timed if row["length"] != RAGGED]
    return {
        "throughput_vs_best_peer_len75": geometric_mean(even),
        "throughput_vs_best_peer": geometric_mean(row["ratio"] for row in timed),
        "throughput_vs_best_peer_small": geometric_mean(small),
        "throughput_vs_best_peer_small_least": min(small, default=None),
        "throughput_vs_best_peer_ragged": geometric_mean(ragged),
        "throughput_vs_best_peer_ragged_least": min(ragged, default=None),
        "throughput_spread": statistics.median(row["spread"] for row in timed),
    }
