"""Prefill and decode against transformers and llama.cpp: same weights, same prompts, interleaved.

Run `python benchmarks/generate.py --json F`. Decode is timed per token after the first, prefill as
the time to the first token; every figure is a median over rounds. Summary ratios are geometric
means over cells, above 1 = Dovetail is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import (
    BUSY_LIMIT,
    QUIET_TRIES,
    Report,
    Sample,
    geometric_mean,
    parse_numbers,
    sample,
)
from generate_models import SHAPES, TORCH_NAMES, compile_model, write_checkpoint
from generate_peers import PEER_PACKAGES, LlamaCpp, missing_packages, write_gguf
from generate_workers import Dovetail, Transformers, Worker

SEED = 7
SHOWN = (
    "model",
    "dtype",
    "prompt",
    "threads",
    "decode_ms",
    "decode_ratio",
    "prefill_ms",
    "prefill_ratio",
    "decode_vs_llamacpp",
    "prefill_vs_llamacpp",
    "bandwidth_fraction",
    "noisy",
)
"""Columns of the printed table; the JSON file has all."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure: a model in a dtype, prompt tokens, threads."""

    model: str
    dtype: str
    prompt: int
    threads: int


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of weights.bin; bytes a decode step reads: of weights, and of KV per visible token."""

    file: int
    total: int
    kv_per_token: int


@dataclass(slots=True)
class Side:
    """The runs of one side in one cell."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    noisy: int = 0

    def add(self, worker: Worker, *request: Any) -> None:
        """Run once; again while other processes disturb it."""
        best: dict[str, Any] | None = None
        for _ in range(QUIET_TRIES):
            found = worker.call("run", *request)
            if best is None or found["others"] < best["others"]:
                best = found
            if found["others"] <= BUSY_LIMIT:
                break
        assert best is not None, "QUIET_TRIES must be positive"
        self.prefill.append(best["prefill"])
        self.decode.append(best["decode"])
        self.ids.append(best["ids"])
        self.noisy += best["others"] > BUSY_LIMIT

    def samples(self) -> tuple[Sample, Sample]:
        """Return the medians of prefill and decode."""
        return sample(self.prefill, self.noisy), sample(self.decode, self.noisy)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the report there")
    parser.add_argument("--models", default="160m,1b", help=",".join(SHAPES))
    parser.add_argument("--dtypes", default=",".join(TORCH_NAMES), help="f32,bf16")
    parser.add_argument("--prompts", type=parse_numbers, default=(32, 512), help="prompt lengths")
    parser.add_argument("--threads", type=parse_numbers, default=(1, 2), help="thread counts")
    parser.add_argument("--new-tokens", type=int, default=48, help="tokens to generate, at least 2")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side per cell")
    parser.add_argument(
        "--peers", default=",".join(PEER_PACKAGES), help="besides transformers; none where empty"
    )
    parser.add_argument("--quick", action="store_true", help="160m only, 3 rounds, 16 tokens")
    parser.add_argument("--work", type=Path, help="keep models and artifacts in this directory")
    options = parser.parse_args()
    if options.quick:
        options.models, options.rounds, options.new_tokens = "160m", 3, 16
    for name, known in (("models", SHAPES), ("dtypes", TORCH_NAMES)):
        chosen = getattr(options, name).split(",")
        if not set(chosen) <= set(known):
            parser.error(f"--{name} takes {','.join(known)}")
        setattr(options, name, chosen)
    options.peers = installed_peers(options.peers)
    if options.new_tokens < 2 or options.rounds < 1:
        parser.error("--new-tokens must be at least 2, --rounds at least 1")
    return options


def installed_peers(names: str) -> list[str]:
    """Return those of the peers asked for that are installed; say which are not."""
    found = []
    for name in filter(None, names.split(",")):
        missing = missing_packages(name)
        if missing:
            print(f"{name} is left out: {', '.join(missing)} is not installed", flush=True)
        else:
            found.append(name)
    return found


def run_benchmark(options: argparse.Namespace, work: Path) -> Report:
    """Measure every cell; models and artifacts are made in `work`."""
    config = {k: v for k, v in vars(options).items() if k not in ("json", "work", "quick")}
    report = Report("generate", config)
    for model in options.models:
        for dtype in options.dtypes:
            checkpoint, artifact = prepare(work, model, dtype, options.peers)
            report.rows += measure_model(options, model, dtype, checkpoint, artifact)
            report.write(options.json)  # what is done survives an interruption
    report.summary = summarise(report.rows)
    return report


def prepare(work: Path, model: str, dtype: str, peers: list[str]) -> tuple[Path, Path]:
    """Make the checkpoint and the artifact in child processes, so that their memory goes back."""
    checkpoint, artifact = work / f"{model}-{dtype}", work / f"{model}-{dtype}.dove"
    with Worker(Preparation) as worker:
        print(f"preparing {model} {dtype}", flush=True)
        worker.call("checkpoint", checkpoint, model, dtype)
        if "llamacpp" in peers:
            worker.call("gguf", checkpoint, checkpoint.with_suffix(".gguf"))
    if not artifact.exists():
        with Worker(Preparation) as worker:
            print(f"compiling {model} {dtype}", flush=True)
            seconds = worker.call("artifact", str(checkpoint), str(artifact))["compile_seconds"]
            print(f"compiled in {seconds:.1f} s", flush=True)
    return checkpoint, artifact


class Preparation:
    """What `prepare` does in its child processes."""

    def checkpoint(self, directory: Path, model: str, dtype: str) -> None:
        """Write a random checkpoint."""
        write_checkpoint(directory, model, dtype, SEED)

    def gguf(self, checkpoint: Path, target: Path) -> None:
        """Write the same weights for llama.cpp."""
        write_gguf(checkpoint, target)

    def artifact(self, model: str, artifact: str) -> dict[str, Any]:
        """Compile it."""
        return compile_model(model, artifact)


def measure_model(
    options: argparse.Namespace, model: str, dtype: str, checkpoint: Path, artifact: Path
) -> Iterator[dict[str, Any]]:
    """Yield the row of each cell of one model in one dtype."""
    weights = read_weights(artifact)
    with ExitStack() as stack:
        ours = stack.enter_context(Worker(Dovetail, str(artifact)))
        peer = stack.enter_context(Worker(Transformers, str(checkpoint)))
        others: dict[str, Worker] = {}
        if "llamacpp" in options.peers:
            context = max(options.prompts) + options.new_tokens + 8
            gguf = str(checkpoint.with_suffix(".gguf"))
            others["llamacpp"] = stack.enter_context(Worker(LlamaCpp, gguf, context))
        versions = {name: worker.call("settings") for name, worker in others.items()}
        loading = ours.call("load", max(options.threads))
        settings = peer.call("settings")
        for threads in options.threads:
            for prompt in options.prompts:
                cell = Cell(model, dtype, prompt, threads)
                row = measure_cell(cell, options, {"ours": ours, "peer": peer, **others}, weights)
                row |= {
                    "load_s": loading["seconds"],
                    "load_memory": loading["bytes"] / weights.file,
                    "peer": f"transformers {settings['transformers']}, torch {settings['torch']}, "
                    f"{settings['attention']}, {settings['dtype']}",
                    **{f"{name}_settings": text for name, text in versions.items()},
                }
                print(describe(row), flush=True)
                yield row


def measure_cell(
    cell: Cell, options: argparse.Namespace, workers: Mapping[str, Worker], weights: Weights
) -> dict[str, Any]:
    """Measure all sides and the read bandwidth in turns; return one row."""
    sides = {name: Side() for name in workers}
    ours = workers["ours"]
    bandwidth: list[float] = []
    new = options.new_tokens
    for worker in workers.values():  # warm-up: pages, thread pools, allocators
        worker.call("run", make_prompt(cell, -1), 4, cell.threads)
    for turn in range(options.rounds):
        prompt = make_prompt(cell, turn)
        for name, side in sides.items():
            side.add(workers[name], prompt, new, cell.threads)
        bandwidth.append(ours.call("bandwidth", cell.threads))
    our_prefill, our_decode = sides["ours"].samples()
    peer_prefill, peer_decode = sides["peer"].samples()
    more: dict[str, float | str] = {}
    for name in workers.keys() - {"ours", "peer"}:
        prefill, decode = sides[name].samples()
        more |= {
            f"{name}_decode_ms": decode.median * 1e3,
            f"{name}_prefill_ms": prefill.median * 1e3,
            f"decode_vs_{name}": decode.median / our_decode.median,
            f"prefill_vs_{name}": prefill.median / our_prefill.median,
            f"{name}_same_ids": common_prefix(sides["ours"].ids[0], sides[name].ids[0]),
        }
    visible = cell.prompt + (new + 1) / 2  # mean tokens a decode step sees
    moved = weights.total + weights.kv_per_token * visible
    read = sample(bandwidth).median
    return {
        "model": cell.model,
        "dtype": cell.dtype,
        "prompt": cell.prompt,
        "threads": cell.threads,
        "decode_ms": our_decode.median * 1e3,
        "peer_decode_ms": peer_decode.median * 1e3,
        "decode_ratio": peer_decode.median / our_decode.median,
        "prefill_ms": our_prefill.median * 1e3,
        "peer_prefill_ms": peer_prefill.median * 1e3,
        "prefill_ratio": peer_prefill.median / our_prefill.median,
        "read_gb_s": read / 1e9,
        "bandwidth_fraction": moved / our_decode.median / read,
        "decode_spread": our_decode.spread,
        "peer_decode_spread": peer_decode.spread,
        "noisy": our_decode.noisy + peer_decode.noisy,
        "same_ids": common_prefix(sides["ours"].ids[0], sides["peer"].ids[0]),
        **more,
    }


def make_prompt(cell: Cell, turn: int) -> list[int]:
    """Return random token ids, others in each turn, so that no cache of prompts helps."""
    draw = random.Random(f"{SEED} {cell.prompt} {turn}")
    vocabulary = SHAPES[cell.model]["vocab_size"]
    return [draw.randrange(3, vocabulary) for _ in range(cell.prompt)]


def read_weights(artifact: Path) -> Weights:
    """Return what one decode step of the artifact's model reads."""
    (file,) = artifact.glob("models/*/model.json")
    model = json.loads(file.read_text())
    spec = model["spec"]
    total = sum(w["bytes"] for w in model["weights"] if w["name"] not in ("embed", *ROPE_TABLES))
    size = {"f32": 4, "bf16": 2, "f16": 2}[spec["kv_dtype"]]
    kv = 2 * spec["n_layers"] * spec["n_kv_heads"] * spec["head_dim"] * size
    packed = (file.parent / "weights/weights.bin").stat().st_size
    return Weights(packed, total, kv)


ROPE_TABLES = ("rope_cos", "rope_sin")  # one row of each is read, like one row of the embedding


def common_prefix(left: list[int], right: list[int]) -> str:
    """Return how many leading token ids are equal, `n/total`; random weights make near ties."""
    same = 0
    for a, b in zip(left, right, strict=True):
        if a != b:
            break
        same += 1
    return f"{same}/{len(left)}"


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the geometric means that the targets are stated in."""

    def mean(column: str, **wanted: str) -> float | None:
        chosen = (row for row in rows if all(row[k] == v for k, v in wanted.items()))
        return geometric_mean(row[column] for row in chosen if column in row)

    def largest(column: str) -> float | None:
        return max((row[column] for row in rows if row["model"] == "160m"), default=None)

    return {
        "decode_vs_transformers_f32": mean("decode_ratio", dtype="f32"),
        "decode_vs_transformers_f32_160m": mean("decode_ratio", dtype="f32", model="160m"),
        "decode_vs_transformers_f32_1b": mean("decode_ratio", dtype="f32", model="1b"),
        "decode_vs_transformers_bf16": mean("decode_ratio", dtype="bf16"),
        "prefill_vs_transformers_f32": mean("prefill_ratio", dtype="f32"),
        **peer_means(rows, mean),
        "decode_bandwidth_fraction": mean("bandwidth_fraction"),
        "load_seconds_160m_max": largest("load_s"),
        "load_memory_160m_max": largest("load_memory"),
    }


def peer_means(
    rows: list[dict[str, Any]], mean: Callable[..., float | None]
) -> dict[str, float | None]:
    """Return `decode_vs_llamacpp_f32` and its kin: keys of peers and dtypes that were measured."""
    columns = [f"{phase}_vs_{peer}" for peer in PEER_PACKAGES for phase in ("decode", "prefill")]
    return {
        f"{column}_{dtype}": mean(column, dtype=dtype)
        for column in columns
        for dtype in TORCH_NAMES
        if any(column in row and row["dtype"] == dtype for row in rows)
    }


def describe(row: dict[str, Any]) -> str:
    """Return one line about a finished cell."""
    return (
        f"{row['model']} {row['dtype']} prompt {row['prompt']} threads {row['threads']}: "
        f"decode {row['decode_ms']:.1f} ms ({row['decode_ratio']:.2f}x), "
        f"prefill {row['prefill_ms']:.0f} ms ({row['prefill_ratio']:.2f}x), "
        + "".join(
            f"{peer}: {row[f'decode_vs_{peer}']:.2f}x, {row[f'prefill_vs_{peer}']:.2f}x, "
            for peer in PEER_PACKAGES
            if f"decode_vs_{peer}" in row
        )
        + f"{row['bandwidth_fraction']:.0%} of {row['read_gb_s']:.1f} GB/s"
    )


def main() -> None:
    """Run the benchmark from the command line."""
    options = parse_arguments()
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
        report = run_benchmark(options, options.work)
    else:
        with tempfile.TemporaryDirectory(prefix="dovetail-generate-") as work:
            report = run_benchmark(options, Path(work))
    report.print(SHOWN)
    report.write(options.json)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
