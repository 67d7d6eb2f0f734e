"""Decoding several requests together beside one alone: what continuous batching gains.

Run `python benchmarks/batching.py APP.dove --json F` (a minute or two). Batches take turns on one
loaded artifact; a batch's rate counts the tokens after its last first one, when all of it decodes.
`batch8_vs_batch1` is for other benchmarks to call.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import Report, Sample, parse_numbers, sample, timed_region
from dovetail.runtime.app import App, load

PROMPT_TOKENS, MAX_TOKENS = 32, 33
"""Short prompts: a decode step then reads weights rather than keys, and these once for all."""
ROUNDS = 5


def decode_rate(app: App, batch: int, seed: int) -> tuple[float, bool]:
    """Return the tokens per second of `batch` requests that decode together, and if it was quiet.

    Prompts differ, and all of them fit into one step.
    """
    draw = random.Random(seed)
    vocabulary = app.engine.spec.vocab_size
    prompts = [[draw.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
    with timed_region() as region:
        done = app.generate(prompts, max_tokens=MAX_TOKENS, ignore_eos=True)
    first = max(each.metrics.first_token or 0.0 for each in done)
    last = max(each.metrics.last_token or 0.0 for each in done)
    return batch * (MAX_TOKENS - 1) / (last - first), region.quiet


def compare_batches(app: App, batches: Sequence[int], rounds: int = ROUNDS) -> dict[int, Sample]:
    """Return the tokens per second of each batch size, measured in turns after a warm-up."""
    found: dict[int, list[tuple[float, bool]]] = {batch: [] for batch in batches}
    for turn in range(rounds + 1):
        for batch, rates in found.items():
            rates.append(decode_rate(app, batch, seed=1000 * turn + batch))
    return {
        batch: sample([rate for rate, _ in rates[1:]], sum(not quiet for _, quiet in rates[1:]))
        for batch, rates in found.items()
    }


def batch8_vs_batch1(app: App, rounds: int = ROUNDS) -> float:
    """Return how many times the tokens per second of batch 1 decoding has at batch 8."""
    found = compare_batches(app, (1, 8), rounds)
    return found[8].median / found[1].median


def make_rows(found: dict[int, Sample]) -> list[dict[str, Any]]:
    """Return one row per batch size, each with its gain over batch 1."""
    return [
        {
            "batch": batch,
            "tokens_per_second": rate.median,
            "low": rate.low,
            "high": rate.high,
            "noisy": rate.noisy,
            "vs_batch1": rate.median / found[1].median,
        }
        for batch, rate in found.items()
    ]


def main() -> None:
    """Measure all batch sizes, print the table, write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("artifact", type=Path, help="what `dovetail compile` wrote")
    parser.add_argument("--json", type=Path, metavar="F", help="write the report to F")
    parser.add_argument("--batches", type=parse_numbers, default=(2, 4, 8), help="beside 1")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, help="default as planned")
    parser.add_argument("--deterministic", action="store_true", help="one order of sums")
    options = parser.parse_args()
    config = {
        "artifact": options.artifact.name,
        "prompt_tokens": PROMPT_TOKENS,
        "max_tokens": MAX_TOKENS,
        "rounds": options.rounds,
        "threads": options.threads,
        "deterministic": options.deterministic,
    }
    report = Report("batching", config)
    asked = {"threads": options.threads, "deterministic": options.deterministic}
    with load(options.artifact, **asked) as app:
        config["weight_dtype"] = app.engine.spec.weight_dtype
        rows = make_rows(compare_batches(app, (1, *options.batches), options.rounds))
    report.rows += rows
    gains = {row["batch"]: row["vs_batch1"] for row in rows}
    report.summary = {"batch8_vs_batch1": gains.get(8)}
    report.print()
    report.write(options.json)


if __name__ == "__main__":
    main()
