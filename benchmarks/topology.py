"""Plans and the all-reduce on this machine, and simulated plans of others.

All-reduce: two processes, 4 KB to 16 MB, against gloo and a naive one with a lock. Plans: prefill
and decode of a random model under the plan of its artifact, under every number of processes and
threads that this machine can run, and under pairs of them. Simulated: the choice against exhaustive
search, on every machine of a corpus cut to a few cores (skipped where there is none).

    python benchmarks/topology.py --json topology.json
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

import allreduce
import exhaustive
from common import (
    Report,
    add_work_option,
    geometric_mean,
    keep_current,
    parse_numbers,
    sample,
    work_folder,
)
from dovetail.compiler.models.spec import read_dimensions
from dovetail.ir.artifact import ServicePlan
from dovetail.topology.hardware import load_hardware, read_hardware
from dovetail.topology.presets import preset_model
from generate_models import SHAPES, compile_model, write_checkpoint
from plans import PHASES, Load, Times, every_plan, measure_plans, planned_for, uneven_pairs

CORPUS = Path(__file__).parents[1] / os.environ.get("DOVETAIL_CORPUS", "../shared") / "topologies"
SIZES = tuple(4096 << i for i in range(0, 13, 2))
SMALL = 64 << 10
CHOSEN = "chosen"
COLUMNS = ("part", "case", "contestant", "seconds", "low", "high", "noisy", "ratio")


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--parts", default="allreduce,plans,simulated", help="some of these")
    parser.add_argument("--sizes", type=parse_numbers, default=SIZES, help="bytes, e.g. 4096,65536")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", choices=SHAPES, default="160m")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prefill")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens of the decode")
    parser.add_argument("--seconds", type=float, default=90.0, help="limit of the plans' rounds")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="a folder of topology files")
    parser.add_argument("--cores", type=int, default=16, help="what its machines are cut to")
    add_work_option(parser)
    return parser.parse_args()


def run_allreduce(options: argparse.Namespace, report: Report) -> None:
    """Add a row per size and contestant, and how many times faster ours is, at worst.

    Ratios are of lower quartiles, which a busy machine disturbs least.
    """
    ratios: dict[tuple[bool, str], list[float]] = {}
    ours = None
    for nbytes, name, seconds in allreduce.measure(options.sizes, options.rounds):
        found = sample(seconds)
        ours = found if name == "ours" or ours is None else ours
        ratio = found.low / ours.low
        ratios.setdefault((nbytes <= SMALL, name), []).append(ratio)
        add_row(report, "allreduce", f"{nbytes} B", name, found, ratio)
    for name in ("gloo", "locked"):
        for small, size in ((True, "small"), (False, "large")):
            report.summary[f"allreduce_vs_{name}_{size}"] = min(
                ratios.get((small, name), []), default=None
            )


def run_plans(options: argparse.Namespace, report: Report, work: Path) -> None:
    """Add a row per phase and plan, and how close the chosen plan is to the best one there is.

    Figures are lower quartiles, which a busy machine disturbs least. A request is one prompt and
    `new_tokens` decode steps; the best is of all pairs of phases.
    """
    checkpoint, artifact = work / options.model, work / f"{options.model}.dove"
    write_checkpoint(checkpoint, options.model, "f32", seed=0)
    keep_current(artifact, lambda: compile_model(str(checkpoint), str(artifact)))
    chosen = planned_for(artifact)
    even = every_plan(read_hardware(), read_dimensions(checkpoint))
    plans = even | uneven_pairs(even)
    served = {name: plan for name, plan in plans.items() if not same_plan(plan, chosen)}
    request = Load(options.prompt, options.new_tokens)
    contestants = {name: (artifact, plan) for name, plan in {CHOSEN: chosen, **served}.items()}
    times = measure_plans(contestants, request, options.rounds, options.seconds)
    for phase in PHASES:
        best = min(found[phase].low for found in times.values())
        for name, found in times.items():
            add_row(report, "plans", phase, name, found[phase], best / found[phase].low)
    report.config["chosen"] = msgspec.to_builtins(chosen)
    report.summary |= compare_plans(times, {CHOSEN: chosen, **served}, options.new_tokens)


def same_plan(one: ServicePlan, other: ServicePlan) -> bool:
    """Tell whether two plans run the same processes, threads and PUs."""
    return all(same_phase(one, other, phase) for phase in PHASES)


def same_phase(one: ServicePlan, other: ServicePlan, phase: str) -> bool:
    """Tell whether a phase runs on the same processes, threads and PUs in two plans."""
    mine, theirs = getattr(one, phase), getattr(other, phase)
    pinned = sorted(mine.cpus) == sorted(theirs.cpus)
    same = one.processes_of(phase) == other.processes_of(phase)
    return same and mine.threads == theirs.threads and pinned


def compare_plans(
    times: Times, plans: Mapping[str, ServicePlan], new_tokens: int
) -> dict[str, float]:
    """Return best over chosen: by phase, for a request, and against plans alike in both phases."""

    def seconds(name: str, phase: str) -> float:
        """Return the least of the equal plans': one that runs twice is not two candidates."""
        alike = (n for n in plans if same_phase(plans[n], plans[name], phase))
        steps = new_tokens if phase == "decode" else 1
        return steps * min(times[n][phase].low for n in alike)

    pairs = {
        (p, d): seconds(p, "prefill") + seconds(d, "decode") for p, d in product(plans, repeat=2)
    }
    own = pairs[CHOSEN, CHOSEN]
    fixed = {name: pairs[name, name] for name in plans if plans[name].prefill == plans[name].decode}
    threads = {name: plans[name].processes * plans[name].decode.threads for name in fixed}
    most, least = (
        min(fixed[name] for name in fixed if threads[name] == pick(threads.values()))
        for pick in (max, min)
    )
    return {
        "plan_vs_best": min(pairs.values()) / own,
        **{
            f"plan_vs_best_{phase}": min(seconds(n, phase) for n in plans) / seconds(CHOSEN, phase)
            for phase in PHASES
        },
        "plan_vs_best_fixed": min(fixed.values()) / own,
        "plan_vs_all_cores": most / own,
        "plan_vs_one_thread": least / own,
    }


def run_simulated(options: argparse.Namespace, report: Report) -> None:
    """Add a row per machine of the corpus, and the worst ratio of the best pair to the choice.

    And, on the whole machines, what two plans and two numbers of processes save.
    """
    model = preset_model("llama-3-8b")
    ratios, gains = [], []
    for file in sorted(options.corpus.rglob("*.*")):
        if file.suffix == ".md":
            continue
        machine = load_hardware(file)
        gains.append(exhaustive.gains_of_two_plans(machine, model))
        spec = exhaustive.cut_machine(machine, options.cores)
        chosen, best, count = exhaustive.compare(spec, model)
        ratios.append(best / chosen)
        case = f"{file.name.split('.')[0]}, {len(spec.allowed_pus)} PUs"
        row = {"part": "simulated", "case": case, "contestant": f"best of {count} configurations"}
        report.rows.append({**row, "seconds": best, "ratio": best / chosen})
    report.summary["sim_plan_vs_exhaustive_min"] = min(ratios, default=None)
    for name, found in zip(("even_processes", "one_plan"), zip(*gains, strict=True), strict=False):
        report.summary[f"sim_plan_vs_{name}"] = geometric_mean(found)
        report.summary[f"sim_plan_vs_{name}_most"] = max(found)
        report.summary[f"sim_machines_better_than_{name}"] = sum(each > 1.001 for each in found)


def add_row(
    report: Report, part: str, case: str, contestant: str, found: Any, ratio: float
) -> None:
    """Add what one contestant took; `ratio` is relative to ours, or the best plan's to it."""
    report.rows.append(
        {
            "part": part,
            "case": case,
            "contestant": contestant,
            "seconds": found.median,
            "low": found.low,
            "high": found.high,
            "noisy": found.noisy,
            "ratio": ratio,
        }
    )


def main() -> None:
    """Measure, print and write."""
    options = parse_arguments()
    hidden = ("json", "work", "corpus")
    shown = {k: v for k, v in vars(options).items() if k not in hidden}
    report = Report("topology", shown)
    with work_folder(options.work) as work:
        if "allreduce" in options.parts:
            run_allreduce(options, report)
        if "plans" in options.parts:
            run_plans(options, report, work)
    if "simulated" in options.parts and options.corpus.is_dir():
        run_simulated(options, report)
    report.print(COLUMNS)
    report.write(options.json)


if __name__ == "__main__":
    main()
