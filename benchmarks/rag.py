"""Workflows below stage level against whole stages, on three scales (HedraRAG §6).

`simulated`: 38M x 1024, IVF4096 and an H100 beside 64 cores, in virtual time on documented figures.
`cpu`: 1M x 384, IVF1024, searched here by faiss on one thread, beside an *emulated* H100 that takes
its time and replies by script. All planes of a scale meet the same engine, scans and questions.
`tiny`: the bundled world on the real engine, `App.run` beside LangGraph with our nodes.

    python benchmarks/rag.py --scale simulated --json benchmarks/results/rag_simulated.json --resume
    python benchmarks/rag.py --scale cpu --json benchmarks/results/rag_cpu.json
    python benchmarks/rag.py --scale tiny --requests 16 --json benchmarks/results/rag_tiny.json
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from common import Report, add_report_options, geometric_mean, open_report

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rag_cells import SLO, WORKFLOWS, Cell, Stage, run_cell
from rag_costs import cpu_scan, device_scan, engine_cost
from rag_engine import ScriptedEngine
from rag_planes import MAKERS
from rag_script import Script, make_corpus
from rag_wall import FaissIndex, WallWorld, measure_scan
from rag_world import Scene, StandIn

NPROBES = {"simulated": (128, 256, 512), "cpu": (64, 128, 256)}
RIVALS = ("sequential", "async")
SINGLE = (*RIVALS, "fixed", "dovetail")
POINTS = {
    "simulated": ((0.2, "bound"), (0.5, "bound"), (0.8, "bound")),
    "cpu": ((0.6, "sequential"), (0.8, "async")),
}
"""Rates at which latencies are compared: parts of what a rival sustains, or of the bound."""
LOADED = 0.3
"""Part of the bound from which the sequential baseline is loaded: it sustains less than 0.6."""
ABLATION = ("dovetail", "no_split", "no_reorder", "no_speculation")
GUESSING = ("ralmspec", "piperag", "paper_triggers", "dovetail")
ROOM = 0.12
"""Part of the index that fits beside the model: 19 of 155 GB."""
RATIOS = (1, 2, 4)
GROUPS = (
    "saturation",
    "rates",
    "online",
    "ablation",
    "guesses",
    "cache",
    "offline",
    "mixes",
    "ratios",
    "models",
)


def make_cells(scale: str, groups: Sequence[str], requests: int) -> Iterator[Cell]:
    """Yield the cells of a scale; a rate that others are parts of comes before them."""
    nprobes = NPROBES[scale]
    middle = nprobes[1] if scale == "simulated" else nprobes[2]
    for nprobe, name in itertools.product(nprobes, WORKFLOWS):
        one = {"workflows": (name,), "nprobe": nprobe, "planes": (*RIVALS, "dovetail")}
        one |= {"requests": requests}
        if "saturation" in groups:
            alone = {**one, "planes": ("async",), "requests": 0}
            yield Cell(group="saturation", point=1.5, **alone)
        if "rates" in groups:
            point = "sustained" if scale == "simulated" else "burst"
            yield Cell(group="rates", point=point, **one)
        if "online" in groups:
            for point, of in POINTS[scale]:
                yield Cell(
                    group="online",
                    workflows=(name,),
                    nprobe=nprobe,
                    planes=SINGLE,
                    point=point,
                    of=of,
                    requests=requests,
                )
    for name in WORKFLOWS:
        one = {"workflows": (name,), "requests": requests}
        if "offline" in groups:
            yield Cell(group="offline", nprobe=middle, planes=SINGLE, point="burst", **one)
        if "ablation" in groups:
            for point in (0.4, 0.8):
                yield Cell(group="ablation", nprobe=middle, planes=ABLATION, point=point, **one)
        if "guesses" in groups:
            for point in (0.4, 0.8):
                yield Cell(group="guesses", nprobe=middle, planes=GUESSING, point=point, **one)
        if "cache" in groups and scale == "simulated":
            for point in (0.6, 0.9):
                yield Cell(
                    group="cache",
                    nprobe=nprobes[-1],
                    planes=("dovetail", "no_cache"),
                    point=point,
                    room=ROOM,
                    **one,
                )
    if "mixes" in groups:
        for pair in itertools.combinations(WORKFLOWS, 2):
            yield Cell(
                group="mixes",
                workflows=pair,
                nprobe=nprobes[0],
                planes=SINGLE,
                point=0.5,
                requests=requests,
            )
    for ratio in RATIOS if "ratios" in groups else ():
        for most, few in (("multistep", "one-shot"), ("one-shot", "multistep")):
            mixed = (most,) * ratio + (few,)
            yield Cell(
                group="ratios",
                workflows=mixed,
                nprobe=nprobes[0],
                planes=SINGLE,
                point=0.5,
                requests=requests,
            )
    if "models" in groups and scale == "simulated":
        for model, name in itertools.product(("llama-2-13b", "opt-30b"), ("multistep", "irg")):
            yield Cell(
                group="models",
                workflows=(name,),
                nprobe=nprobes[0],
                planes=SINGLE,
                point=0.5,
                model=model,
                requests=requests,
            )


def simulated_stage(options: argparse.Namespace) -> Stage:
    """Return the scale in virtual time."""
    script = Script(make_corpus(4096, 40_000, 32, seed=options.seed), seed=options.seed)
    index = StandIn(script.corpus, 38_000_000)
    engine = functools.cache(engine_cost)

    def scene(nprobe: int, model: str) -> Scene:
        return Scene(
            index=index,
            script=script,
            nprobe=nprobe,
            engine=lambda: ScriptedEngine(engine(model), script.reply),
            scan=cpu_scan(1024),
            device=device_scan(1024),
            divide=options.divide,
        )

    return Stage(scene, engine, script, seconds=options.seconds, seed=options.seed)


def cpu_stage(options: argparse.Namespace) -> Stage:
    """Return the scale of real searches beside an emulated accelerator."""
    script = Script(make_corpus(1024, options.vectors, 384, seed=options.seed), seed=options.seed)
    index = FaissIndex(script.corpus)
    engine = functools.cache(engine_cost)
    queries = [script.meaning(script.question(i)) for i in range(16)]
    cost = measure_scan(index, queries)
    print(f"a scan: {cost.fixed * 1e6:.0f} us, {cost.per_vector * 1e9:.1f} ns a vector", flush=True)

    def scene(nprobe: int, model: str) -> Scene:
        return Scene(
            index=index,
            script=script,
            nprobe=nprobe,
            engine=lambda: ScriptedEngine(engine(model), script.reply),
            scan=cost,
        )

    return Stage(scene, engine, script, world=WallWorld, seed=options.seed)


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the keys of the issue, as far as their cells were run."""
    found: dict[str, Any] = {}
    sustained = [row for row in rows if row["group"] == "rates"]
    for row in sustained:
        name = f"rate_vs_sequential_{row['workflows'].replace('-', '_')}_{row['nprobe']}"
        found[name] = row["dovetail_rate"] / row["sequential_rate"]
    if sustained:
        found["rate_vs_async_min"] = min(r["dovetail_rate"] / r["async_rate"] for r in sustained)
    timed = [row for row in rows if "dovetail_mean" in row]
    online = [row for row in timed if row["group"] == "online"]
    if online:
        gains = [row["async_mean"] / row["dovetail_mean"] for row in online]
        found["latency_vs_async_min"], found["latency_vs_async_max"] = min(gains), max(gains)
        ratios = [(row, row["sequential_mean"] / row["dovetail_mean"]) for row in online]
        loaded = [ratio for row, ratio in ratios if row["point"] >= LOADED]
        light = [ratio for row, ratio in ratios if row["point"] < LOADED]
        found["latency_vs_sequential_loaded_min"] = min(loaded, default=None)
        found["latency_vs_sequential_light_min"] = min(light, default=None)
    found |= _gains(timed)
    cells = [row["async_mean"] / row["dovetail_mean"] for row in timed if "async_mean" in row]
    cells += [row["dovetail_rate"] / row["async_rate"] for row in sustained]
    if cells:
        found["min_cell"] = min(cells)
    full = [
        row["async_middle_rate"] / min(row["retrieval_bound"], row["generation_bound"])
        for row in rows
        if row["group"] == "saturation"
    ]
    if full:
        found["async_saturation_min"] = min(full)
    bursts = [row for row in timed if row["group"] == "offline"]
    if bursts:
        for rival in RIVALS:
            gains = [row[f"{rival}_seconds"] / row["dovetail_seconds"] for row in bursts]
            found[f"offline_vs_{rival}"] = geometric_mean(gains)
    tried = sum(row["dovetail_attempted"] for row in timed)
    if tried:
        held = sum(row["dovetail_accepted"] for row in timed)
        found["speculation_accuracy"] = held / tried
    return found


def _gains(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what each technique is worth: the latency without it over that with all."""
    found = {}
    for name, group, without in (
        ("split_gain", "ablation", "no_split"),
        ("reorder_gain", "ablation", "no_reorder"),
        ("spec_gain", "ablation", "no_speculation"),
        ("cache_gain", "cache", "no_cache"),
        ("spec_vs_ralmspec", "guesses", "ralmspec"),
        ("spec_vs_piperag", "guesses", "piperag"),
    ):
        ratios = [r[f"{without}_mean"] / r["dovetail_mean"] for r in rows if r["group"] == group]
        if ratios:
            found[name] = geometric_mean(ratios)
            found[f"{name}_range"] = f"{min(ratios):.2f}-{max(ratios):.2f}"
    hits = [row["dovetail_on_device"] for row in rows if row["group"] == "cache"]
    if hits:
        found["cache_hits"] = sum(hits) / len(hits)
    return found


def main(arguments: Sequence[str] | None = None) -> Report:
    """Run the benchmark with command line `arguments`, print and write its report."""
    options = _parse(arguments)
    groups = options.only or GROUPS
    config = {
        "scale": options.scale,
        "seed": options.seed,
        "seconds": options.seconds,
        "requests": options.requests,
        "divide": options.divide,
        "vectors": options.vectors,
        "slo": SLO,
    }
    report = open_report("rag", options, config, tuple(config))
    if options.scale == "tiny":
        return _run_tiny(options, report)
    stage = STAGES[options.scale](options)
    started = time.perf_counter()
    for cell in make_cells(options.scale, groups, options.requests):
        if any(cell.key.items() <= row.items() for row in report.rows):
            continue
        if time.perf_counter() - started > options.limit:
            print("the time is up; --resume goes on", flush=True)
            break
        report.rows.append(run_cell(stage, cell, report.rows))
        print(describe(report.rows[-1]), flush=True)
        report.summary = summarize(report.rows)
        report.write(options.json)
    report.print(COLUMNS)
    return report


def _run_tiny(options: argparse.Namespace, report: Report) -> Report:
    from rag_tiny import measure_tiny

    report.rows = measure_tiny(options)
    report.summary = {
        f"tiny_vs_langgraph_{way}_min": min(row[f"vs_{way}"] for row in report.rows)
        for way in ("one", "batch")
    }
    report.write(options.json)
    report.print()
    return report


COLUMNS = ("group", "workflows", "nprobe", "point", "of", "model")
COLUMNS += tuple(f"{plane}_{what}" for plane in SINGLE for what in ("rate", "mean"))


def describe(row: dict[str, Any]) -> str:
    """Return one line for a cell."""
    head = f"{row['group']:9} {row['workflows']:24} {row['nprobe']:4} {row['point']!s:9}"
    what = "rate" if row["point"] == "sustained" else "mean"
    shown = (f"{plane} {row[key]:.3f}" for plane in MAKERS if (key := f"{plane}_{what}") in row)
    bound = min(row["retrieval_bound"], row["generation_bound"])
    return f"{head} bound {bound:.2f}/s  " + "  ".join(shown)


STAGES = {"simulated": simulated_stage, "cpu": cpu_stage}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--scale", choices=(*STAGES, "tiny"), default="simulated")
    parser.add_argument("--only", nargs="*", choices=GROUPS, help="groups of cells")
    parser.add_argument("--requests", type=int, default=160, help="of a cell")
    parser.add_argument("--vectors", type=int, default=1_000_000, help="of scale cpu")
    parser.add_argument("--seconds", type=float, default=30, help="of arrivals, to find a rate")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which to stop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--divide",
        action="store_true",
        help="divide a query's clusters between threads (simulated)",
    )
    add_report_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
