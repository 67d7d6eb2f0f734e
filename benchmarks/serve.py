"""Serving under load on CPU: TTFT, TPOT and goodput against transformers and llama.cpp.

Run `python benchmarks/serve.py --json F`; `--resume` keeps what F has. Requests arrive by a Poisson
process, and as in the Azure code trace (`--trace`), with the trace's lengths, scaled by stated
factors. Every side first serves all requests at once: that is its capacity; then rates are
stated parts of it, ascending until the loosest SLO is missed. Goodput is the largest rate that
keeps P90 TTFT and TPOT within the SLOs of Sandwich §8.3 times a scale; a fixed one is the headline.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    BUSY_LIMIT,
    Report,
    add_report_options,
    add_work_option,
    geometric_mean,
    open_report,
    work_folder,
)
from dovetail.topology.hardware import read_hardware
from generate import Preparation, compile_artifact
from generate_models import SHAPES
from generate_peers import programs_missing
from generate_workers import Worker
from serve_load import Arrival, Level, Slo, find_goodput, make_arrivals, measure_level, read_trace
from serve_workers import DovetailServer, LlamaCppServer, TransformersServer

SEED = 11
TRACE = "AzureLLMInferenceTrace_code.csv"
ARRIVALS = ("poisson", "azure")
SCALES = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0)
HEADLINE_SCALE = 2.0
"""Scale of the headline: the paper's machines have ten times the cores of those this is run on."""
AT_ONCE = 1e6
"""A rate at which all requests are there from the start."""
CONTEXT = 512
RUNNING = 64
TRIES = 2
"""Runs of a rate, where other processes disturbed the first."""
SHOWN = ("model", "arrivals", "side", "part", "rate", "p90_ttft_ms", "p90_tpot_ms", "scale")
SHOWN += ("goodput",)


@dataclass(frozen=True, slots=True)
class Setup:
    """What is run of a model. Parts are of a side's own capacity, ascending.

    Prompts and answers of the trace are scaled so that a prompt costs about what the SLO allows.
    """

    slo: Slo
    prompt_scale: float
    answer_scale: float
    requests: int
    parts: tuple[float, ...]


SETUPS = {
    "tiny": Setup(Slo(0.2, 0.1), 1 / 64, 1.0, 8, (0.5, 1.0)),  # for trying the script out
    "160m": Setup(Slo(0.2, 0.1), 1 / 64, 1.0, 32, (0.4, 0.8, 1.6, 3.2)),
    "1b": Setup(Slo(2.0, 0.28), 1 / 64, 0.5, 16, (0.4, 0.8, 1.6)),
}

SERVERS = {"llamacpp": LlamaCppServer, "transformers": TransformersServer}

Make = Callable[[], Worker]


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_report_options(parser)
    parser.add_argument("--models", default="160m,1b", help=",".join(SETUPS))
    parser.add_argument("--trace", type=Path, help=f"{TRACE}; default $DOVETAIL_CORPUS/traces")
    parser.add_argument("--peers", default=",".join(SERVERS), help=",".join(SERVERS))
    parser.add_argument("--effort", default="fast", help="of the compile: none, fast, full")
    parser.add_argument("--threads", type=int, default=read_hardware().usable_threads)
    add_work_option(parser)
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
    if "llamacpp" in options.peers and (missing := programs_missing()):
        print(f"llamacpp is absent: {missing} is not installed", flush=True)
        options.peers.remove("llamacpp")
    return options


def run_benchmark(options: argparse.Namespace, work: Path) -> Report:
    """Measure what the report lacks of all models and sides; their files are made in `work`."""
    config = {
        "setups": {name: asdict(setup) for name, setup in SETUPS.items()},
        "trace": options.trace.name,
        "threads": options.threads,
        "context": CONTEXT,
        "scales": SCALES,
        "headline_scale": HEADLINE_SCALE,
        "seed": SEED,
    }
    report = open_report("serve", options, config, tuple(config))
    rows = [row for row in report.rows if "scale" not in row]
    trace = read_trace(options.trace)
    for model in options.models:
        sides = [name for name in ("dovetail", *options.peers) if not is_done(rows, model, name)]
        if not sides:
            continue
        checkpoint = work / f"{model}-f32"
        file = checkpoint.with_name(f"{model}-F32.gguf")
        with Worker(Preparation) as worker:
            worker.call("checkpoint", checkpoint, model, "f32")
            if "llamacpp" in options.peers and not file.exists():
                worker.call("width", checkpoint, file, "F32")
        artifact = compile_artifact(checkpoint, options.effort, work / "tuning.jsonl")
        makers = make_sides(options, {"llamacpp": file, "transformers": checkpoint}, artifact)
        for name in sides:
            with makers[name]() as worker:
                for row in measure_side(worker, name, model, trace, rows):
                    rows.append(row)
                    write_report(report, rows, options.json)  # it survives an interruption
                worker.call("close")
    write_report(report, rows, options.json)
    return report


def write_report(report: Report, rows: Sequence[dict[str, Any]], path: Path | None) -> None:
    """Write what was measured, and what follows from it."""
    curves = make_curves(rows)
    report.rows, report.summary = [*rows, *curves], summarise([*rows, *curves])
    report.write(path)


def make_sides(
    options: argparse.Namespace, models: Mapping[str, Path], artifact: Path
) -> dict[str, Make]:
    """Return how to start each side; one lives at a time, so that none disturbs another."""
    threads = options.threads
    sides: dict[str, Make] = {"dovetail": partial(Worker, DovetailServer, str(artifact), threads)}
    for name in options.peers:
        sides[name] = partial(Worker, SERVERS[name], str(models[name]), CONTEXT, threads)
    return sides


def measure_side(
    worker: Worker,
    side: str,
    model: str,
    trace: Sequence[tuple[float, int, int]],
    known: Sequence[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Yield the rows that `known` lacks of a side: its capacity, then one for each rate."""
    setup, settings = SETUPS[model], worker.call("settings")
    for kind in ARRIVALS:
        place = {"model": model, "arrivals": kind, "side": side}

        def load(rate: float, kind: str = kind) -> list[Arrival]:
            return make_arrivals(
                trace,
                kind,
                rate,
                setup.requests,
                prompt_scale=setup.prompt_scale,
                answer_scale=setup.answer_scale,
                longest=CONTEXT,
                vocabulary=SHAPES[model]["vocab_size"],
                seed=SEED,
            )

        rows = [row for row in known if row.items() >= place.items()]
        if next_part(rows, model) is not None:
            worker.call("serve", load(AT_ONCE)[::3])  # warm-up: pages, thread pools, allocators
        if not rows:
            seconds = serve_quiet(worker, load(AT_ONCE))["seconds"]
            rows.append({**place, "capacity": setup.requests / seconds})
            yield {**rows[-1], "settings": settings}
        while (part := next_part(rows, model)) is not None:
            rate = part * rows[0]["capacity"]
            found = serve_quiet(worker, load(rate))
            level = measure_level(rate, found["served"])
            figures = {"p90_ttft_ms": level.ttft * 1e3, "p90_tpot_ms": level.tpot * 1e3}
            rows.append({**place, "part": part, "rate": rate, **figures, "others": found["others"]})
            print(describe(rows[-1]), flush=True)
            yield rows[-1]
    if side == "dovetail" and not has_batching(known, model):
        yield measure_batching(worker, model)


def serve_quiet(worker: Worker, arrivals: Sequence[Arrival]) -> dict[str, Any]:
    """Serve; again where other processes disturbed it, and return the quieter run."""
    runs: list[dict[str, Any]] = []
    while len(runs) < TRIES and not any(run["others"] <= BUSY_LIMIT for run in runs):
        runs.append(worker.call("serve", arrivals))
    return min(runs, key=lambda run: float(run["others"]))


def of_model(rows: Sequence[dict[str, Any]], model: str) -> list[dict[str, Any]]:
    """Return the rows of a model."""
    return [row for row in rows if row["model"] == model]


def read_levels(rows: Sequence[dict[str, Any]]) -> list[Level]:
    """Return the rates that were measured, of rows of one model, kind of arrivals and side."""
    return [
        Level(row["rate"], row["p90_ttft_ms"] / 1e3, row["p90_tpot_ms"] / 1e3)
        for row in rows
        if "part" in row
    ]


def next_part(rows: Sequence[dict[str, Any]], model: str) -> float | None:
    """Return the part of the capacity to run next; None at the end, and beyond the loosest SLO."""
    setup, levels = SETUPS[model], read_levels(rows)
    if any(level.strain(setup.slo, max(SCALES)) > 1.0 for level in levels):
        return None
    done = {row.get("part") for row in rows}
    return next((part for part in setup.parts if part not in done), None)


def has_batching(rows: Sequence[dict[str, Any]], model: str) -> bool:
    """Tell whether batch 8 and 1 were compared."""
    return any("batch8_vs_batch1" in row for row in of_model(rows, model))


def is_done(rows: Sequence[dict[str, Any]], model: str, side: str) -> bool:
    """Tell whether nothing is left to be measured of a side."""
    own = [row for row in of_model(rows, model) if row["side"] == side]
    if side == "dovetail" and not has_batching(own, model):
        return False
    kinds = [[row for row in own if row.get("arrivals") == kind] for kind in ARRIVALS]
    return all(found and next_part(found, model) is None for found in kinds)


def make_curves(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per SLO scale with the goodput that follows from the rates of a side.

    `bound`: none held, so it is below the lowest rate. `open`: the highest held, so it is above it.
    """
    cells: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if "part" in row:
            cells.setdefault((row["model"], row["arrivals"], row["side"]), []).append(row)
    curves = []
    for (model, kind, side), found in cells.items():
        levels, slo = read_levels(found), SETUPS[model].slo
        for scale in SCALES:
            goodput = find_goodput(levels, slo, scale)
            rates = sorted(level.rate for level in levels)
            figures = {"goodput": goodput, "bound": rates[0], "open": goodput == rates[-1]}
            place = {"model": model, "arrivals": kind, "side": side}
            curves.append({**place, "scale": scale, **figures})
    return curves


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
        if "dovetail" not in cell:
            continue
        ours = cell["dovetail"]["goodput"]
        found = {n: ours / (r["goodput"] or r["bound"]) for n, r in cell.items() if n != "dovetail"}
        if found:
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
        f"{row['model']} {row['arrivals']} {row['side']}: {row['rate']:.2f} requests/s "
        f"({row['part']:.0%} of its capacity), P90 TTFT {row['p90_ttft_ms']:.0f} ms, "
        f"P90 TPOT {row['p90_tpot_ms']:.0f} ms"
    )


def main() -> None:
    """Run the benchmark from the command line."""
    options = parse_arguments()
    with work_folder(options.work) as work:
        report = run_benchmark(options, work)
    report.print(SHOWN)
    report.write(options.json)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
