"""Serving under load on CPU: TTFT, TPOT and goodput against transformers and llama.cpp.

Run `python benchmarks/serve.py --json F`; about 40 minutes on two cores, most of them for the 1.1B
shape. Requests arrive by a Poisson process, and as in the Azure code trace (`--trace`), with the
trace's lengths, prompts scaled by a stated factor. Every side first serves all requests at once:
that is its capacity; then rates are stated parts of it. Goodput is the largest rate that keeps P90
TTFT and TPOT within the SLOs of Sandwich §8.3 times a scale; the headline scale is fixed here.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common import Report, geometric_mean
from dovetail.topology.hardware import read_hardware
from generate import compile_artifact, installed_peers, make_files
from generate_models import SHAPES
from generate_peers import PEERS
from generate_workers import Worker
from serve_load import Level, Slo, find_goodput, make_arrivals, measure_level, read_trace
from serve_workers import DovetailServer, LlamaCppServer, TransformersServer

SEED = 11
TRACE = "AzureLLMInferenceTrace_code.csv"
ARRIVALS = ("poisson", "azure")
SCALES = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0)
HEADLINE_SCALE = 4.0
"""Scale of the headline: the paper's machines have ten times the cores of those this is run on."""
AT_ONCE = 1e6
"""A rate at which all requests are there from the start."""
CONTEXT = 512
RUNNING = 64
SHOWN = ("model", "arrivals", "side", "rate", "p90_ttft_ms", "p90_tpot_ms", "scale", "goodput")


@dataclass(frozen=True, slots=True)
class Setup:
    """What is run of a model. Parts are of a side's own capacity."""

    slo: Slo
    length_scale: float
    requests: int
    parts: tuple[float, ...]


SETUPS = {
    "tiny": Setup(Slo(0.2, 0.1), 1 / 64, 8, (0.5, 1.0)),  # for trying the script out
    "160m": Setup(Slo(0.2, 0.1), 1 / 32, 48, (0.2, 0.4, 0.6, 0.8, 1.0)),
    "1b": Setup(Slo(2.0, 0.28), 1 / 32, 16, (0.3, 0.6, 0.9)),
}

SERVERS = {"transformers": TransformersServer, "llamacpp": LlamaCppServer}
"""Peers, by their names in `generate_peers.PEERS`."""

Make = Callable[[], Worker]


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the report there")
    parser.add_argument("--models", default="160m,1b", help=",".join(SETUPS))
    parser.add_argument("--trace", type=Path, help=f"{TRACE}; default $DOVETAIL_CORPUS/traces")
    parser.add_argument("--peers", default=",".join(SERVERS), help=",".join(SERVERS))
    parser.add_argument("--effort", default="fast", help="of the compile: none, fast, full")
    parser.add_argument("--threads", type=int, default=read_hardware().usable_threads)
    parser.add_argument("--work", type=Path, help="keep models and artifacts in this directory")
    options = parser.parse_args()
    for name, known in (("models", SETUPS), ("peers", SERVERS)):
        chosen = getattr(options, name).split(",")
        if not set(chosen) <= set(known):
            parser.error(f"--{name} takes {','.join(known)}")
        setattr(options, name, chosen)
    if options.trace is None:
        options.trace = Path(os.environ.get("DOVETAIL_CORPUS", ".")) / "traces" / TRACE
    if not options.trace.is_file():
        parser.error(f"{options.trace} is not there; give --trace FILE")
    options.peers = installed_peers(options.peers)
    return options


def run_benchmark(options: argparse.Namespace, work: Path) -> Report:
    """Measure all models and sides; models and artifacts are made in `work`."""
    config = {
        "models": {name: asdict(SETUPS[name]) for name in options.models},
        "trace": options.trace.name,
        "threads": options.threads,
        "scales": SCALES,
        "headline_scale": HEADLINE_SCALE,
        "seed": SEED,
    }
    report = Report("serve", config)
    trace = read_trace(options.trace)
    for model in options.models:
        checkpoint = work / f"{model}-f32"
        make_files(checkpoint, model, "f32", [p for p in options.peers if PEERS[p].prepare])
        artifact = compile_artifact(checkpoint, options.effort, work / "tuning.jsonl")
        sides = make_sides(options, checkpoint, artifact)
        for name, make in sides.items():
            with make() as worker:
                report.rows += measure_side(worker, name, model, trace)
                if name == "dovetail":
                    report.rows.append(measure_batching(worker, model))
                worker.call("close")
            report.write(options.json)  # what is done survives an interruption
    report.summary = summarise(report.rows)
    return report


def make_sides(options: argparse.Namespace, checkpoint: Path, artifact: Path) -> dict[str, Make]:
    """Return how to start each side; one lives at a time, so that none disturbs another."""
    threads = options.threads
    sides: dict[str, Make] = {"dovetail": partial(Worker, DovetailServer, str(artifact), threads)}
    for name in options.peers:
        path = str(PEERS[name].path(checkpoint))
        sides[name] = partial(Worker, SERVERS[name], path, CONTEXT, threads)
    return sides


def measure_side(
    worker: Worker, side: str, model: str, trace: Sequence[tuple[float, int, int]]
) -> list[dict[str, Any]]:
    """Return a row per rate, and one per SLO scale with the goodput that follows from these."""
    setup, settings = SETUPS[model], worker.call("settings")
    rows = []
    for kind in ARRIVALS:

        def serve(rate: float, kind: str = kind) -> dict[str, Any]:
            arrivals = make_arrivals(
                trace,
                kind,
                rate,
                setup.requests,
                length_scale=setup.length_scale,
                longest=CONTEXT,
                vocabulary=SHAPES[model]["vocab_size"],
                seed=SEED,
            )
            found: dict[str, Any] = worker.call("serve", arrivals)
            return found

        serve(AT_ONCE)  # warm-up: pages, thread pools, allocators
        capacity = setup.requests / serve(AT_ONCE)["seconds"]
        place = {"model": model, "arrivals": kind, "side": side, "settings": settings}
        levels = []
        for part in setup.parts:
            found = serve(part * capacity)
            level = measure_level(part * capacity, found["served"])
            levels.append(level)
            rows.append(
                {
                    **place,
                    "rate": level.rate,
                    "capacity": capacity,
                    "p90_ttft_ms": level.ttft * 1e3,
                    "p90_tpot_ms": level.tpot * 1e3,
                    "others": found["others"],
                }
            )
            print(describe(rows[-1]), flush=True)
        rows += [{**place, **goodput_row(levels, setup.slo, scale)} for scale in SCALES]
    return rows


def goodput_row(levels: Sequence[Level], slo: Slo, scale: float) -> dict[str, Any]:
    """Return the goodput at one scale. `bound`: none held, so it is below the lowest rate."""
    goodput = find_goodput(levels, slo, scale)
    return {"scale": scale, "goodput": goodput, "bound": min(level.rate for level in levels)}


def measure_batching(worker: Worker, model: str) -> dict[str, Any]:
    """Return decoding at batch 8 and 1, in turns, and the share of planning at 64 requests."""
    rates: dict[int, list[float]] = {1: [], 8: []}
    for _ in range(3):
        for batch, found in rates.items():
            found.append(worker.call("decode_rate", batch, 24))
    planning = worker.call("scheduler_fraction", RUNNING, 16)
    return {
        "model": model,
        "side": "dovetail",
        "batch1_tokens_s": max(rates[1]),
        "batch8_tokens_s": max(rates[8]),
        "batch8_vs_batch1": max(rates[8]) / max(rates[1]),
        "scheduler_fraction": planning["fraction"],
        "running": planning["running"],
    }


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures that the targets are stated in, at the headline scale.

    Where no rate of a peer holds the SLO, its lowest rate stands for its goodput: a lower bound.
    """
    cells: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row.get("scale") == HEADLINE_SCALE:
            cells.setdefault((row["model"], row["arrivals"]), {})[row["side"]] = row
    summary: dict[str, Any] = {}
    ratios: dict[str, list[float]] = {}
    for cell in cells.values():
        ours = cell["dovetail"]["goodput"]
        found = {n: ours / (r["goodput"] or r["bound"]) for n, r in cell.items() if n != "dovetail"}
        found["best"] = min(found.values())
        for name, ratio in found.items():
            ratios.setdefault(name, []).append(ratio)
    for name, values in ratios.items():
        held = all(value > 0 for value in values)
        summary[f"goodput_vs_{name}"] = geometric_mean(values) if held else 0.0
    batching = [row for row in rows if "batch8_vs_batch1" in row]
    if batching:
        summary["batch8_vs_batch1"] = min(row["batch8_vs_batch1"] for row in batching)
        summary["scheduler_fraction"] = max(row["scheduler_fraction"] for row in batching)
    return summary


def describe(row: dict[str, Any]) -> str:
    """Return one line about a rate."""
    return (
        f"{row['model']} {row['arrivals']} {row['side']}: {row['rate']:.2f} of "
        f"{row['capacity']:.2f} requests/s, P90 TTFT {row['p90_ttft_ms']:.0f} ms, "
        f"P90 TPOT {row['p90_tpot_ms']:.0f} ms"
    )


def main() -> None:
    """Run the benchmark from the command line."""
    options = parse_arguments()
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
        report = run_benchmark(options, options.work)
    else:
        with tempfile.TemporaryDirectory(prefix="dovetail-serve-") as work:
            report = run_benchmark(options, Path(work))
    report.print(SHOWN)
    report.write(options.json)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
