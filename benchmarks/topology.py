"""Plans and the all-reduce on this machine.

All-reduce: two processes, 4 KB to 16 MB, against gloo and a naive one with a lock. Plans: decode
and prefill of a random model under the plan of its artifact, and under each other plan this machine
can run: all cores, one thread, two processes, and a mixture of thread counts.

    python benchmarks/topology.py --json topology.json
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import allreduce
from common import Report, geometric_mean, interleave, parse_numbers, sample
from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.runtime.app import App, load
from dovetail.topology.binding import choose_pus
from dovetail.topology.hardware import read_hardware
from generate_models import SHAPES, compile_model, write_checkpoint

SIZES = tuple(4096 << i for i in range(0, 13, 2))
SMALL = 64 << 10
CHOSEN = "chosen"
COLUMNS = ("part", "case", "contestant", "seconds", "low", "high", "noisy", "ratio")


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--parts", default="allreduce,plans", help="allreduce, plans or both")
    parser.add_argument("--sizes", type=parse_numbers, default=SIZES, help="bytes, e.g. 4096,65536")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", choices=SHAPES, default="160m")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prefill")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens of the decode")
    parser.add_argument("--work", type=Path, help="where the model is kept for the next run")
    return parser.parse_args()


def run_allreduce(options: argparse.Namespace, report: Report) -> None:
    """Add a row per size and contestant, and how many times faster ours is, at worst."""
    ratios: dict[tuple[bool, str], list[float]] = {}
    ours = None
    for nbytes, name, seconds in allreduce.measure(options.sizes, options.rounds):
        found = sample(seconds)
        ours = found if name == "ours" or ours is None else ours
        ratio = found.median / ours.median
        ratios.setdefault((nbytes <= SMALL, name), []).append(ratio)
        add_row(report, "allreduce", f"{nbytes} B", name, found, ratio)
    for name in ("gloo", "locked"):
        for small, size in ((True, "small"), (False, "large")):
            report.summary[f"allreduce_vs_{name}_{size}"] = min(
                ratios.get((small, name), []), default=None
            )


def run_plans(options: argparse.Namespace, report: Report, work: Path) -> None:
    """Add a row per phase and plan, and the chosen plan's speed relative to the best."""
    write_checkpoint(work / options.model, options.model, "f32", seed=0)
    artifact = work / f"{options.model}.dove"
    if not artifact.exists():
        compile_model(str(work / options.model), str(artifact))
    with ExitStack() as stack:
        apps: dict[str, App] = {CHOSEN: stack.enter_context(load(artifact))}
        for name, plan in other_plans().items():
            apps[name] = stack.enter_context(load(artifact, plan=plan))
        for phase, new_tokens in (("prefill", 1), ("decode", options.new_tokens)):
            prompt = options.prompt if phase == "prefill" else 4
            samples = interleave(
                {name: Run(app, prompt, new_tokens) for name, app in apps.items()},
                max(3, options.rounds // 3),
            )
            best = min(found.median for found in samples.values())
            for name, found in samples.items():
                add_row(report, "plans", phase, name, found, best / found.median)
            report.summary[f"plan_vs_best_{phase}"] = best / samples[CHOSEN].median
    phases = [report.summary[f"plan_vs_best_{phase}"] for phase in ("prefill", "decode")]
    report.summary["plan_vs_best"] = geometric_mean(phases)


class Run:
    """Generates for a prompt it has not seen, so that no KV is shared between runs."""

    def __init__(self, app: App, prompt: int, new_tokens: int) -> None:
        self.app, self.length, self.new_tokens = app, prompt, new_tokens

    def __call__(self) -> None:
        """Run once."""
        first = time.perf_counter_ns() % 900
        tokens = [1 + (first + 7 * i) % 900 for i in range(self.length)]
        self.app.generate(tokens, max_tokens=self.new_tokens, ignore_eos=True)


def other_plans() -> dict[str, ServicePlan]:
    """Return the plans this machine can run besides the chosen one, by what they are."""
    hardware = read_hardware()
    most = hardware.usable_threads
    one, every = (PhasePlan(threads=count, cpus=choose_pus(hardware, count)) for count in (1, most))
    plans = {
        "all cores": ServicePlan(prefill=every, decode=every),
        "one thread": ServicePlan(prefill=one, decode=one),
        "all cores, decode one": ServicePlan(prefill=every, decode=one),
    }
    if most > 1:
        half = PhasePlan(threads=most // 2, cpus=choose_pus(hardware, most // 2 * 2))
        plans["two processes"] = ServicePlan(processes=2, prefill=half, decode=half)
    return plans


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
    shown = {k: v for k, v in vars(options).items() if k not in ("json", "work")}
    report = Report("topology", shown)
    with tempfile.TemporaryDirectory() as folder:
        if "allreduce" in options.parts:
            run_allreduce(options, report)
        if "plans" in options.parts:
            run_plans(options, report, options.work or Path(folder))
    report.print(COLUMNS)
    report.write(options.json)


if __name__ == "__main__":
    main()
