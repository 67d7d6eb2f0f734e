"""Workflows below stage level against whole stages, on three scales (HedraRAG §6).

`simulated`: 38M x 1024, IVF4096 and an H100 beside 64 cores, in virtual time on documented figures.
`cpu`: 1M x 384, IVF1024, searched here by faiss on one thread, beside an *emulated* H100 that takes
its time and replies by script. All planes of a scale meet the same engine, scans and questions.
`tiny`: the bundled world on the real engine, `App.run` beside LangGraph with our nodes.
`real`: real passages, models and servers by the wall clock, see `rag_real.py`; `--quick` tries it
out, the whole goes on with `--resume` after `--limit` seconds, and vLLM wants `DOVETAIL_VLLM`, the
Python that has it.

    python benchmarks/rag.py --scale simulated --json benchmarks/results/rag_simulated.json --resume
    python benchmarks/rag.py --scale cpu --json benchmarks/results/rag_cpu.json
    python benchmarks/rag.py --scale tiny --requests 16 --json benchmarks/results/rag_tiny.json
    python benchmarks/rag.py --scale real --limit 7000 --work DIR --json FILE --resume
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from common import (
    Report,
    add_report_options,
    add_work_option,
    geometric_mean,
    machine_facts,
    open_report,
)

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rag_cells import FREE, SLO, WORKFLOWS, Cell, Stage, rates_of, run_cell
from rag_costs import ENCODE, LINK, cpu_scan, device_scan, engine_cost
from rag_planes import MAKERS
from rag_script import Script, make_corpus
from rag_wall import FaissIndex, WallSimulation, measure_scan
from rag_world import StandIn
from simulated_workflows import WorkflowMachine

NPROBES = {"simulated": (256, 128, 512), "cpu": (256, 128, 64)}
WIDTH = 384
"""Values of a vector on scale cpu."""
MIDDLE = 256
"""Clusters probed where only one number of them is looked at; 128 in mixes, as in the paper."""
RIVALS = ("sequential", "async")
COMPARED = (*RIVALS, "dovetail")
SINGLE = {
    "simulated": (*RIVALS, "async_divided", "fixed", "dovetail", FREE),
    "cpu": (*COMPARED, FREE),
}
POINTS = {
    "simulated": ((0.2, "bound"), (0.5, "bound"), (0.8, "bound")),
    "cpu": ((0.8, "async"), (0.6, "sequential")),
}
"""Rates at which latencies are compared: parts of what a rival sustains, or of the bound."""
LOADS = {"simulated": (0.4, 0.8), "cpu": (0.8,)}
"""Parts of the bound at which techniques are compared."""
LOADED = 0.5
"""Part of what the sequential baseline sustains from which it is loaded."""
ABLATION = ("dovetail", "no_split", "no_reorder", "no_speculation")
GUESSING = ("ralmspec", "piperag", "paper_triggers", "dovetail")
ENDING = ("dovetail", "early", "early_no_reorder")
ROOM = {"simulated": 0.12, "cpu": 0.0}
"""Part of the index in the device's cache: 19 of 155 GB fit beside the model and its KV cache."""
RATIOS = (1, 2, 4)
SECONDS = {"simulated": 10.0, "cpu": 8.0, "tiny": 0.0, "real": 0.0}
"""Of arrivals, and of a burst's work; a shorter burst would be the way of its last request."""


def make_cells(scale: str, groups: Sequence[str] = ()) -> Iterator[Cell]:
    """Yield the cells of a scale; a rate that others are parts of comes before them."""
    for group, make in GROUPS.items():
        if group in groups or not groups:
            for fields in make(scale):
                room = ROOM[scale] if group not in UNCACHED else 0.0
                yield Cell(**{"group": group, "nprobe": 128, "room": room, **fields})


Fields: TypeAlias = Iterator[dict[str, Any]]


def _each(scale: str) -> Fields:
    for nprobe, name in itertools.product(NPROBES[scale], WORKFLOWS):
        yield {"workflows": (name,), "nprobe": nprobe}


def _saturation(scale: str) -> Fields:
    for one in _each(scale):
        yield {**one, "planes": ("async",), "point": 1.5}


def _rates(scale: str) -> Fields:
    for one in _each(scale):
        yield {
            **one,
            "planes": COMPARED,
            "point": "sustained" if scale == "simulated" else "burst",
        }


def _online(scale: str) -> Fields:
    for one, (point, of) in itertools.product(_each(scale), POINTS[scale]):
        yield {**one, "planes": SINGLE[scale], "point": point, "of": of}


def _at_loads(planes: Sequence[str]) -> Callable[[str], Fields]:
    def make(scale: str) -> Fields:
        for name, point in itertools.product(WORKFLOWS, LOADS[scale]):
            yield {"workflows": (name,), "nprobe": MIDDLE, "planes": planes, "point": point}

    return make


def _cache(scale: str) -> Fields:
    for name, point in itertools.product(WORKFLOWS, (0.6, 0.9) if ROOM[scale] else ()):
        planes = ("dovetail", "no_cache")
        yield {"workflows": (name,), "nprobe": 512, "planes": planes, "point": point}


def _offline(scale: str) -> Fields:
    for name in WORKFLOWS:
        planes = (*COMPARED, "fixed")
        yield {"workflows": (name,), "nprobe": MIDDLE, "planes": planes, "point": "burst"}


def _mixes(scale: str) -> Fields:
    for pair in itertools.combinations(WORKFLOWS, 2):
        yield {"workflows": pair, "planes": SINGLE[scale], "point": 0.5}


def _ratios(scale: str) -> Fields:
    pairs = (("multistep", "one-shot"), ("one-shot", "multistep"))
    for ratio, (most, few) in itertools.product(RATIOS, pairs):
        if ratio > 1 or most == "multistep":
            workflows = (most,) * ratio + (few,)
            yield {"workflows": workflows, "planes": SINGLE[scale], "point": 0.5}


def _models(scale: str) -> Fields:
    for model, name in itertools.product(("llama-2-13b", "opt-30b"), ("multistep", "irg")):
        yield {"workflows": (name,), "planes": SINGLE[scale], "point": 0.5, "model": model}


GROUPS: dict[str, Callable[[str], Fields]] = {
    "rates": _rates,
    "online": _online,
    "ablation": _at_loads(ABLATION),
    "guesses": _at_loads(GUESSING),
    "early": _at_loads(ENDING),
    "cache": _cache,
    "offline": _offline,
    "mixes": _mixes,
    "ratios": _ratios,
    "models": _models,
    "saturation": _saturation,
}
"""Groups of cells, in the order in which they are run."""
UNCACHED = ("guesses", "early", "saturation")
"""Groups without a cache on the device: those that are compared with have none."""


def simulated_stage(options: argparse.Namespace) -> Stage:
    """Return the scale in virtual time."""
    script = Script(make_corpus(4096, 40_000, 32, seed=options.seed), seed=options.seed)
    machine = WorkflowMachine(
        scan=cpu_scan(1024), device=device_scan(1024), encode=ENCODE, copy=4096 / LINK
    )
    index = StandIn(script.corpus, 38_000_000)
    return Stage(
        script,
        index,
        machine,
        functools.cache(engine_cost),
        seconds=options.seconds,
        seed=options.seed,
    )


def cpu_stage(options: argparse.Namespace) -> Stage:
    """Return the scale of real searches beside an emulated accelerator."""
    script = Script(make_corpus(1024, options.vectors, WIDTH, seed=options.seed), seed=options.seed)
    index = FaissIndex(script.corpus)
    queries = [script.meaning(script.question(i)) for i in range(16)]
    cost = measure_scan(index, queries)
    print(f"a scan: {cost.fixed * 1e6:.0f} us, {cost.per_vector * 1e9:.1f} ns a vector", flush=True)
    return Stage(
        script,
        index,
        WorkflowMachine(scan=cost, encode=ENCODE),
        functools.cache(engine_cost),
        simulation=WallSimulation,
        seconds=options.seconds,
        seed=options.seed,
    )


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the keys of the issue, as far as their cells were run."""
    found = _rate_keys(rows) | _latency_keys(rows) | _gains(rows)
    cells = [row["async_mean"] / row["dovetail_mean"] for row in rows if _has(row, "mean")]
    cells += [row["dovetail_rate"] / row["async_rate"] for row in rows if row["group"] == "rates"]
    if cells:
        found["min_cell"] = min(cells)
    full = [
        row["async_middle_rate"] / min(row["retrieval_bound"], row["generation_bound"])
        for row in rows
        if row["group"] == "saturation"
    ]
    if full:
        found["async_saturation_min"] = min(full)
    bursts = [row for row in rows if row["group"] == "offline"]
    for rival in RIVALS if bursts else ():
        gains = [row[f"{rival}_seconds"] / row["dovetail_seconds"] for row in bursts]
        found[f"offline_vs_{rival}"] = geometric_mean(gains)
    if control := [row["dovetail_control"] for row in rows if "dovetail_control" in row]:
        found["control_max"] = max(control)
    tried = sum(row.get("dovetail_attempted", 0) for row in rows)
    if tried:
        held = sum(row.get("dovetail_accepted", 0) for row in rows)
        found["speculation_accuracy"] = held / tried
    return found


def _has(row: dict[str, Any], what: str) -> bool:
    return {f"async_{what}", f"dovetail_{what}"} <= set(row) and row["group"] != "rates"


def _rate_keys(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return sustained rates over rivals', beside what anybody could have on index and engine."""
    found: dict[str, Any] = {}
    rates = [row for row in rows if row["group"] == "rates"]
    for row in rates:
        name = f"{row['workflows'].replace('-', '_')}_{row['nprobe']}"
        found[f"rate_vs_sequential_{name}"] = row["dovetail_rate"] / row["sequential_rate"]
        if not row["room"]:  # all searches are the CPU's
            bound = min(row["retrieval_bound"], row["generation_bound"])
            found[f"bound_vs_sequential_{name}"] = bound / row["sequential_rate"]
    if rates:
        found["rate_vs_async_min"] = min(r["dovetail_rate"] / r["async_rate"] for r in rates)
    return found


def _latency_keys(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return latencies of rivals over ours, and over those with searches that take no time."""
    online = [row for row in rows if row["group"] == "online"]
    if not online:
        return {}
    found: dict[str, Any] = {}
    for rival in ("async", "async_divided"):
        own = [row for row in online if f"{rival}_mean" in row]
        for name, plane in (("latency", "dovetail"), ("possible", FREE)):
            gains = [row[f"{rival}_mean"] / row[f"{plane}_mean"] for row in own]
            if gains:
                found[f"{name}_vs_{rival}_min"] = min(gains)
                found[f"{name}_vs_{rival}_max"] = max(gains)
    shares = [
        (row["async_mean"] - row["dovetail_mean"]) / (row["async_mean"] - row[f"{FREE}_mean"])
        for row in online
        if row["async_mean"] > 1.01 * row[f"{FREE}_mean"]
    ]
    if shares:
        found["part_of_possible_mean"] = sum(shares) / len(shares)
    ratios = [(row, row["sequential_mean"] / row["dovetail_mean"]) for row in online]
    loaded = [ratio for row, ratio in ratios if _loads_sequential(row, rows)]
    light = [ratio for row, ratio in ratios if not _loads_sequential(row, rows)]
    found["latency_vs_sequential_loaded_min"] = min(loaded, default=None)
    found["latency_vs_sequential_light_min"] = min(light, default=None)
    return found


def _loads_sequential(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> bool:
    """Tell whether a cell's rate is at least LOADED of what the sequential baseline sustains."""
    sustained = rates_of(row, rows)
    return sustained is None or bool(row["rate"] >= LOADED * sustained["sequential_rate"])


def _gains(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what each technique is worth: the latency without it over that with all."""
    found = {}
    for name, group, without, plane in (
        ("split_gain", "ablation", "no_split", "dovetail"),
        ("reorder_gain", "ablation", "no_reorder", "dovetail"),
        ("spec_gain", "ablation", "no_speculation", "dovetail"),
        ("cache_gain", "cache", "no_cache", "dovetail"),
        ("spec_vs_ralmspec", "guesses", "ralmspec", "dovetail"),
        ("spec_vs_piperag", "guesses", "piperag", "dovetail"),
        ("triggers_gain", "guesses", "paper_triggers", "dovetail"),
        ("early_gain", "early", "dovetail", "early"),
        ("early_reorder_gain", "early", "early_no_reorder", "early"),
    ):
        ratios = [r[f"{without}_mean"] / r[f"{plane}_mean"] for r in rows if r["group"] == group]
        if ratios:
            found[name] = geometric_mean(ratios)
            found[f"{name}_range"] = f"{min(ratios):.2f}-{max(ratios):.2f}"
    for name, group, figure in (
        ("cache_hits", "cache", "dovetail_on_device"),
        ("early_same_answers", "early", "early_same"),
        ("early_no_reorder_same_answers", "early", "early_no_reorder_same"),
    ):
        if values := [row[figure] for row in rows if row["group"] == group]:
            found[name] = sum(values) / len(values)
    return found


def main(arguments: Sequence[str] | None = None) -> Report:
    """Run the benchmark with command line `arguments`, print and write its report."""
    options = _parse(arguments)
    config = {
        "scale": options.scale,
        "seed": options.seed,
        "seconds": options.seconds,
        "vectors": options.vectors,
        "slo": SLO,
    }
    if options.scale == "real":
        config |= {name: getattr(options, name) for name in ("count", "passages", "quick")}
    if options.scale == "cpu":
        config["index_over_cache"] = _index_over_cache(options.vectors)
    report = open_report("rag", options, config, tuple(config))
    if options.scale == "tiny":
        return _run_tiny(options, report)
    if options.scale == "real":
        return _run_real(options, report)
    stage = STAGES[options.scale](options)
    started = time.perf_counter()
    for cell in make_cells(options.scale, options.only):
        if not _wanted(cell, options) or any(
            cell.key.items() <= row.items() for row in report.rows
        ):
            continue
        if time.perf_counter() - started > options.limit:
            print("the time is up; --resume goes on", flush=True)
            break
        report.rows.append(run_cell(stage, cell, report.rows))
        print(describe(report.rows[-1]), flush=True)
        report.summary = summarize(report.rows)
        report.write(options.json)
    report.summary = summarize(report.rows)
    report.write(options.json)
    report.print(COLUMNS)
    return report


def _index_over_cache(vectors: int) -> float | None:
    """Return the bytes of the index over those of the last cache: below 1 no scan reads memory."""
    cache = machine_facts()["caches"]["L3"]
    return round(4 * WIDTH * vectors / cache, 2) if cache else None


def _wanted(cell: Cell, options: argparse.Namespace) -> bool:
    """Tell whether a cell is among those that the command line asks for."""
    probes = not options.nprobe or cell.nprobe in options.nprobe
    return probes and (not options.workflow or cell.key["workflows"] in options.workflow)


def _run_tiny(options: argparse.Namespace, report: Report) -> Report:
    from rag_tiny import measure_tiny

    report.rows = measure_tiny(options)
    report.summary = {
        f"tiny_vs_langgraph_{way}_min": min(row[f"vs_{way}"] for row in report.rows)
        for way in ("one", "batch")
    }
    report.summary["control_max"] = max(row["dovetail_control"] for row in report.rows)
    report.write(options.json)
    report.print()
    return report


def _run_real(options: argparse.Namespace, report: Report) -> Report:
    from rag_real import measure_real, print_real

    measure_real(options, report)
    report.write(options.json)
    print_real(report)
    return report


COLUMNS = ("group", "workflows", "nprobe", "point", "of", "model")
COLUMNS += tuple(f"{plane}_{what}" for plane in COMPARED for what in ("rate", "mean"))


def describe(row: dict[str, Any]) -> str:
    """Return one line for a cell."""
    head = f"{row['group']:9} {row['workflows']:24} {row['nprobe']:4} {row['point']!s:9}"
    what = "rate" if row["group"] == "rates" else "mean"
    planes = (*MAKERS, FREE)
    shown = (f"{plane} {row[key]:.3f}" for plane in planes if (key := f"{plane}_{what}") in row)
    bound = min(row["retrieval_bound"], row["generation_bound"])
    return f"{head} bound {bound:.2f}/s  " + "  ".join(shown)


STAGES = {"simulated": simulated_stage, "cpu": cpu_stage}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--scale", choices=(*STAGES, "tiny", "real"), default="simulated")
    parser.add_argument("--only", nargs="+", default=(), help="groups of cells of the scale")
    parser.add_argument("--workflow", nargs="+", help="only cells of these, mixes as a+b")
    parser.add_argument("--nprobe", nargs="+", type=int, help="only cells of so many clusters")
    parser.add_argument("--requests", type=int, default=16, help="of scale tiny")
    parser.add_argument("--vectors", type=int, default=1_000_000, help="of scale cpu")
    parser.add_argument("--seconds", type=float, help=f"of arrivals ({SECONDS})")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which to stop")
    parser.add_argument("--seed", type=int, default=0)
    real = parser.add_argument_group("of scale real")
    corpus = Path(os.environ.get("DOVETAIL_CORPUS", "../shared"))
    real.add_argument("--traces", type=Path, default=corpus / "traces")
    real.add_argument("--peers", nargs="+", default=["llamacpp", "vllm", "openvino"])
    real.add_argument("--count", type=int, default=48, help="questions of a cell")
    real.add_argument("--seeds", type=int, default=3, help="of main")
    real.add_argument("--passages", type=int, default=0, help="beyond the real ones: variations")
    real.add_argument("--quick", action="store_true", help="8 questions, one workflow, one try")
    add_work_option(real)
    add_report_options(parser)
    options = parser.parse_args(arguments)
    groups = tuple(GROUPS)
    if options.scale == "real":
        from rag_real import GROUPS as groups
    if not set(options.only) <= set(groups):
        parser.error(f"--only takes {', '.join(groups)}")
    options.seconds = options.seconds or SECONDS[options.scale]
    return options


if __name__ == "__main__":
    main()
