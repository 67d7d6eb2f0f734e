"""Prefill and decode against transformers, llama.cpp and OpenVINO GenAI, in turns.

Run `python benchmarks/generate.py --json F`; `--resume` keeps the cells that F has already, and
with `--work W --files-only` everybody's files are made beforehand. All have the same weights and
prompts. Decode is timed per token after the first, prefill as the time to the first token; every
figure is a median over rounds. Summary ratios are geometric means over cells, above 1 = Dovetail is
faster.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common import (
    BUSY_LIMIT,
    QUIET_TRIES,
    Report,
    Sample,
    add_report_options,
    add_work_option,
    geometric_mean,
    keep_current,
    open_report,
    parse_numbers,
    sample,
    work_folder,
)
from generate_models import SHAPES, TORCH_NAMES, compile_model, write_checkpoint
from generate_peers import PEERS
from generate_workers import Dovetail, Worker

SEED = 7
PHASES = ("decode", "prefill")
SHOWN = (
    *("model", "dtype", "prompt", "threads", "decode_ms", "prefill_ms"),
    *(f"{phase}_vs_{peer}" for phase in PHASES for peer in PEERS),
    *("bandwidth_fraction", "noisy"),
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
    add_report_options(parser)
    parser.add_argument("--models", default="160m,1b", help=",".join(SHAPES))
    parser.add_argument("--dtypes", default=",".join(TORCH_NAMES), help="f32,bf16")
    parser.add_argument("--prompts", type=parse_numbers, default=(32, 512), help="prompt lengths")
    parser.add_argument("--threads", type=parse_numbers, default=(1, 2), help="thread counts")
    parser.add_argument("--new-tokens", type=int, default=48, help="tokens to generate, at least 2")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side per cell")
    parser.add_argument("--peers", default=",".join(PEERS), help=",".join(PEERS))
    parser.add_argument("--quick", action="store_true", help="160m only, 3 rounds, 16 tokens")
    add_work_option(parser)
    parser.add_argument("--files-only", action="store_true", help="make the models' files, no more")
    parser.add_argument("--effort", default="fast", help="of the compile: none, fast, full")
    parser.add_argument("--db", type=Path, help="tuning database, default one in the directory")
    options = parser.parse_args()
    if options.quick:
        options.models, options.rounds, options.new_tokens = "160m", 3, 16
    for name, known in (("models", SHAPES), ("dtypes", TORCH_NAMES), ("peers", PEERS)):
        chosen = getattr(options, name).split(",")
        if not set(chosen) <= set(known):
            parser.error(f"--{name} takes {','.join(known)}")
        setattr(options, name, chosen)
    options.peers = installed_peers(options.peers)
    if options.files_only and not options.work:
        parser.error("--files-only needs --work W")
    if options.new_tokens < 2 or options.rounds < 1:
        parser.error("--new-tokens must be at least 2, --rounds at least 1")
    return options


def installed_peers(names: Sequence[str]) -> list[str]:
    """Return those of the peers asked for that are installed; say which are not."""
    found = []
    for name in names:
        if missing := PEERS[name].missing:
            print(f"{name} is left out: {', '.join(missing)} is not installed", flush=True)
        else:
            found.append(name)
    return found


def run_benchmark(options: argparse.Namespace, work: Path) -> Report:
    """Measure every cell that is not in the report; models and artifacts are made in `work`."""
    config = {"peers": options.peers, "effort": options.effort}
    report = open_report("generate", options, config, tuple(config))
    for model in options.models:
        for dtype in options.dtypes:
            missing = missing_cells(options, model, dtype, report.rows)
            if not missing:
                continue
            checkpoint = work / f"{model}-{dtype}"
            peers = [name for name in options.peers if dtype in PEERS[name].dtypes]
            make_files(checkpoint, model, dtype, peers)
            if options.files_only:
                continue
            database = options.db or work / "tuning.jsonl"
            artifact = compile_artifact(checkpoint, options.effort, database)
            for row in measure_model(options, missing, checkpoint, artifact, peers):
                report.rows.append(row)
                report.summary = summarise(report.rows)
                report.write(options.json)  # what is done survives an interruption
    report.summary = summarise(report.rows)
    return report


def missing_cells(
    options: argparse.Namespace, model: str, dtype: str, rows: list[dict[str, Any]]
) -> list[Cell]:
    """Return the cells of one model in one dtype that have no row, by threads."""
    done = {Cell(row["model"], row["dtype"], row["prompt"], row["threads"]) for row in rows}
    cells = (Cell(model, dtype, p, t) for t in options.threads for p in options.prompts)
    return [cell for cell in cells if cell not in done]


def make_files(checkpoint: Path, model: str, dtype: str, peers: Sequence[str]) -> None:
    """Make the checkpoint and the peers' files, each in a process whose memory goes back."""
    with Worker(Preparation) as worker:
        print(f"preparing {model} {dtype}", flush=True)
        worker.call("checkpoint", checkpoint, model, dtype)
    for name in peers:
        target = PEERS[name].path(checkpoint)
        if not target.exists():
            with Worker(Preparation) as worker:
                print(f"preparing {target.name}", flush=True)
                worker.call("peer", name, checkpoint, target)


def compile_artifact(checkpoint: Path, effort: str, database: Path) -> Path:
    """Return the checkpoint's artifact, compiled now if there is none of these sources."""
    artifact = checkpoint.with_name(f"{checkpoint.name}.dove")

    def make() -> None:
        with Worker(Preparation) as worker:
            print(f"compiling {checkpoint.name}", flush=True)
            paths = str(checkpoint), str(artifact), str(database)
            seconds = worker.call("artifact", *paths, effort)
            print(f"compiled in {seconds:.1f} s", flush=True)

    keep_current(artifact, make, effort)
    return artifact


class Preparation:
    """What is done in child processes before anything is measured."""

    def checkpoint(self, directory: Path, model: str, dtype: str) -> None:
        """Write a random checkpoint."""
        write_checkpoint(directory, model, dtype, SEED)

    def peer(self, name: str, checkpoint: Path, target: Path) -> None:
        """Write the same weights for a peer."""
        prepare = PEERS[name].prepare
        assert prepare is not None, "a peer without files of its own reads the checkpoint"
        prepare(checkpoint, target)

    def artifact(self, model: str, artifact: str, database: str, effort: str) -> float:
        """Compile it; return seconds."""
        found = compile_model(model, artifact, database=database, effort=effort)
        return float(found["compile_seconds"])


def measure_model(
    options: argparse.Namespace,
    cells: Sequence[Cell],
    checkpoint: Path,
    artifact: Path,
    peers: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """Yield the row of each cell of one model in one dtype."""
    weights = read_weights(artifact)
    with ExitStack() as stack:
        workers = {"ours": stack.enter_context(Worker(Dovetail, str(artifact)))}
        for name in peers:
            peer = PEERS[name]
            worker = Worker(peer.side, str(peer.path(checkpoint)))
            workers[name] = stack.enter_context(worker)
        settings = {f"{name}_settings": workers[name].call("settings") for name in peers}
        loading = workers["ours"].call("load", max(cell.threads for cell in cells))
        for cell in cells:
            row = measure_cell(cell, options, workers, weights)
            row |= {
                "load_s": loading["seconds"],
                "load_memory": loading["bytes"] / weights.file,
                **settings,
            }
            print(describe(row), flush=True)
            yield row


def measure_cell(
    cell: Cell, options: argparse.Namespace, workers: Mapping[str, Worker], weights: Weights
) -> dict[str, Any]:
    """Measure all sides and the read bandwidth in turns; return one row."""
    sides = {name: Side() for name in workers}
    bandwidth: list[float] = []
    pages: list[float] = []
    new = options.new_tokens
    for worker in workers.values():  # warm-up: pages, thread pools, allocators
        worker.call("run", make_prompt(cell, -1), 4, cell.threads)
    for turn in range(options.rounds):
        prompt = make_prompt(cell, turn)
        for name, side in sides.items():
            side.add(workers[name], prompt, new, cell.threads)
        bandwidth.append(workers["ours"].call("bandwidth", cell.threads))
        pages.append(workers["ours"].call("weights_bandwidth", cell.threads))
    ours = sides.pop("ours")
    prefill, decode = ours.samples()
    visible = cell.prompt + (new + 1) / 2  # mean tokens a decode step sees
    moved = weights.total + weights.kv_per_token * visible
    read = sample(bandwidth).median
    row = {
        **asdict(cell),
        "rounds": options.rounds,
        "new_tokens": new,
        "decode_ms": decode.median * 1e3,
        "decode_spread": decode.spread,
        "prefill_ms": prefill.median * 1e3,
        "read_gb_s": read / 1e9,
        "weights_gb_s": sample(pages).median / 1e9,
        "bandwidth_fraction": moved / decode.median / read,
        "noisy": ours.noisy + sum(side.noisy for side in sides.values()),
    }
    for name, side in sides.items():
        their_prefill, their_decode = side.samples()
        row |= {
            f"{name}_decode_ms": their_decode.median * 1e3,
            f"{name}_decode_spread": their_decode.spread,
            f"{name}_prefill_ms": their_prefill.median * 1e3,
            f"decode_vs_{name}": their_decode.median / decode.median,
            f"prefill_vs_{name}": their_prefill.median / prefill.median,
            f"{name}_same_ids": common_prefix(ours.ids[0], side.ids[0]),
        }
    return row


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


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the targets are stated in: geometric means and, of loading the 160M, the most.

    Ratios are named `decode_vs_PEER_DTYPE` over all models, and `..._MODEL` of one.
    """
    summary = {}
    for column in (f"{phase}_vs_{peer}" for phase in PHASES for peer in PEERS):
        summary |= means(rows, column, ("dtype",)) | means(rows, column, ("dtype", "model"))
    small = [row for row in rows if row["model"] == "160m"]
    return {
        **summary,
        **means(rows, "bandwidth_fraction", ("model", "dtype")),
        "decode_bandwidth_fraction": geometric_mean(row["bandwidth_fraction"] for row in rows),
        "load_seconds_160m_max": max((row["load_s"] for row in small), default=None),
        "load_memory_160m_max": max((row["load_memory"] for row in small), default=None),
    }


def means(
    rows: Sequence[dict[str, Any]], column: str, by: Sequence[str]
) -> dict[str, float | None]:
    """Return the geometric mean of a column in each group of rows that have it."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        if column in row:
            groups.setdefault("_".join([column, *(row[name] for name in by)]), []).append(
                row[column]
            )
    return {name: geometric_mean(values) for name, values in groups.items()}


def describe(row: dict[str, Any]) -> str:
    """Return one line about a finished cell."""
    ratios = "".join(
        f"{row[f'decode_vs_{peer}']:.2f}x and {row[f'prefill_vs_{peer}']:.2f}x {peer}, "
        for peer in PEERS
        if f"decode_vs_{peer}" in row
    )
    return (
        f"{row['model']} {row['dtype']} prompt {row['prompt']} threads {row['threads']}: "
        f"decode {row['decode_ms']:.1f} ms, prefill {row['prefill_ms']:.0f} ms, {ratios}"
        f"{row['bandwidth_fraction']:.0%} of {row['read_gb_s']:.1f} GB/s, "
        f"weights are read at {row['weights_gb_s']:.1f}"
    )


def main() -> None:
    """Run the benchmark from the command line."""
    options = parse_arguments()
    with work_folder(options.work) as work:
        report = run_benchmark(options, work)
    if not options.files_only:
        report.print([name for name in SHOWN if any(name in row for row in report.rows)])
        report.write(options.json)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
