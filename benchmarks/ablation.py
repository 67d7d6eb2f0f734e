"""What each part of the plan is worth: the tables 1 and 2 of Sandwich on this machine.

Table `steps`: tokens per second of decoding at batch 1 and 8, one thing added after the other. The
start is as many processes as cores may be, of one thread, untuned, with gloo's all-reduce (our step
with the time of its all-reduces exchanged: derived, not run). Then come our all-reduce; the service
configuration that measures best of the `TOP` that the simulator likes best; kernel tuning of the
shapes that its processes run, with K shared out among no threads; tuning that may split K.
Table `top-k`: the best of the k likeliest decode configurations, and the seconds it took to measure
them. A small machine has fewer configurations than k.

    python benchmarks/ablation.py --json ablation.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import allreduce
import dovetail
from common import (
    Report,
    Sample,
    add_work_option,
    keep_current,
    parse_numbers,
    sample,
    work_folder,
)
from dovetail.compiler.models.spec import read_dimensions
from dovetail.compiler.search.tables import EFFORTS
from dovetail.ir.artifact import ServicePlan
from dovetail.ir.model import ModelSpec
from dovetail.topology.hardware import read_hardware
from dovetail.topology.plan import plan_topology
from dovetail.topology.replay import DEFAULT_TRACE
from generate_models import SHAPES, write_checkpoint
from plans import Load, every_plan, measure_plans, simulated_plan
from rivals.ablated import WholeK, without

TOP, TOPS = 10, (5, 10, 15, 20)
UNTUNED, WHOLE = "untuned", "tuned"
BUILDS: dict[str, dict[str, Any]] = {
    UNTUNED: {"effort": "none"},
    WHOLE: {"effort": "fast"},
    "tuned, split K": {"effort": "fast"},
}
START, BEST = "start", "best"
STEPS = (
    ("gloo all-reduce", UNTUNED, START),
    ("+ communication", UNTUNED, START),
    ("+ service configuration", UNTUNED, BEST),
    ("+ kernel tuning", WHOLE, BEST),
    ("+ split K", "tuned, split K", BEST),
)
COLUMNS = ("table", "step", "batch", "tokens_per_second", "seconds", "noisy", "plan", "source")


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--model", choices=SHAPES, default="160m")
    parser.add_argument("--batches", type=parse_numbers, default=(1, 8))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of a kernel search")
    parser.add_argument("--seconds", type=float, default=15.0, help="limit of a cell's rounds")
    add_work_option(parser)
    return parser.parse_args()


@dataclass(frozen=True, slots=True)
class Bench:
    """The model and its artifacts, and where results go."""

    options: argparse.Namespace
    work: Path
    model: ModelSpec
    report: Report

    def artifact(self, build: str, plan: ServicePlan) -> Path:
        """Return a build whose schedules are for a plan's threads and shards, compiled once."""
        name = f"{build}, {plan.processes} x {plan.decode.threads}"
        path = self.work / f"{self.options.model} {name}.dove"
        settings = dict(BUILDS[build])
        if settings["effort"] != "none":
            settings["budget"] = self.options.budget

        def make() -> None:
            start = time.perf_counter()
            checkpoint = self.work / self.options.model
            with whole_k(self.work) if build == WHOLE else nullcontext({}) as own:
                dovetail.compile(checkpoint, output=path, plan=plan, **settings, **own)
            self.report.summary[f"compile_seconds {name}"] = time.perf_counter() - start

        keep_current(path, make, settings)
        return path

    def measure(
        self, contestants: Mapping[str, tuple[str, ServicePlan]], batch: int
    ) -> dict[str, Sample]:
        """Return decode steps of builds under plans, timed in turns."""
        options = self.options
        served = {
            name: (self.artifact(build, plan), plan) for name, (build, plan) in contestants.items()
        }
        load = Load(options.prompt, options.new_tokens, batch)
        times = measure_plans(served, load, options.rounds, options.seconds * len(served))
        return {name: phases["decode"] for name, phases in times.items()}


@contextmanager
def whole_k(work: Path) -> Iterator[dict[str, Any]]:
    """Have searches split no K; yield the options that keep their records apart."""
    usual = EFFORTS["fast"]
    EFFORTS["fast"] = replace(usual, policy=without(WholeK, usual.policy))
    try:
        yield {"cache": work / "whole K"}
    finally:
        EFFORTS["fast"] = usual


def candidates(model: ModelSpec) -> dict[str, ServicePlan]:
    """Return the decode configurations that the simulator likes best, the best first."""
    found = plan_topology(read_hardware(), model, DEFAULT_TRACE).decode
    plans = [simulated_plan(item.configuration) for item in found]
    return {f"{plan.processes} x {plan.decode.threads}": plan for plan in plans}


def run_steps(bench: Bench, likely: Mapping[str, ServicePlan], batch: int) -> None:
    """Add the rows of table 1 at one batch."""
    every = every_plan(read_hardware(), bench.model)
    single = [name for name in every if every[name].decode.threads == 1]
    start = max(single, key=lambda name: every[name].processes)
    top = {name: (UNTUNED, likely[name]) for name in list(likely)[:TOP]}
    first = bench.measure(top, batch)
    best = min(first, key=lambda name: first[name].low)
    plans = {START: (start, every[start]), BEST: (best, likely[best])}
    found = bench.measure(
        {step: (build, plans[which][1]) for step, build, which in STEPS if step != STEPS[0][0]},
        batch,
    )
    gloo = exchange_seconds(bench.model, every[start].processes, batch)
    for step, _, which in STEPS:
        derived = step == STEPS[0][0]
        sample_ = found[STEPS[1][0] if derived else step]
        seconds = sample_.low + (gloo if derived else 0.0)
        source = "derived" if derived else "measured"
        add_row(bench, "steps", step, batch, seconds, plans[which][0], source)
        bench.report.rows[-1]["noisy"] = sample_.noisy


def exchange_seconds(model: ModelSpec, processes: int, batch: int) -> float:
    """Return how much longer a step takes with gloo's all-reduces of two processes than with ours.

    Nothing where there is one process.
    """
    if processes < 2:
        return 0.0
    size = batch * model.hidden_size * 4
    found = {name: sample(s).low for _, name, s in allreduce.measure((size,), rounds=7)}
    return 2 * model.n_layers * (found["gloo"] - found["ours"])


def run_top(bench: Bench, likely: Mapping[str, ServicePlan]) -> None:
    """Add the rows of table 2, at batch 1: configurations are measured one after the other."""
    found, spent = {}, {}
    for name, plan in likely.items():
        bench.artifact(UNTUNED, plan)
        start = time.perf_counter()
        found[name] = bench.measure({name: (UNTUNED, plan)}, 1)[name].low
        spent[name] = time.perf_counter() - start
    for k in TOPS:
        names = list(likely)[:k]
        best = min(names, key=found.__getitem__)
        tuning = sum(spent[name] for name in names)
        source = f"{len(names)} of {len(likely)} configurations in {tuning:.1f} s"
        add_row(bench, "top-k", f"k = {k}", 1, found[best], best, source)


def add_row(
    bench: Bench, table: str, step: str, batch: int, seconds: float, plan: str, source: str
) -> None:
    """Add a row: `seconds` is of a decode step of the whole batch, its lower quartile."""
    row = {"table": table, "step": step, "batch": batch, "tokens_per_second": batch / seconds}
    bench.report.rows.append({**row, "seconds": seconds, "plan": plan, "source": source})


def main() -> None:
    """Measure, print and write."""
    options = parse_arguments()
    shown = {k: v for k, v in vars(options).items() if k not in ("json", "work")}
    report = Report("ablation", shown)
    with work_folder(options.work) as work:
        write_checkpoint(work / options.model, options.model, "f32", seed=0)
        model = read_dimensions(work / options.model)
        bench, likely = Bench(options, work, model, report), candidates(model)
        for batch in options.batches:
            run_steps(bench, likely, batch)
        run_top(bench, likely)
    for batch in options.batches:
        steps = [r for r in report.rows if r["table"] == "steps" and r["batch"] == batch]
        whole = steps[-1]["tokens_per_second"] / steps[0]["tokens_per_second"]
        report.summary[f"ablation_gain_batch_{batch}"] = whole
    report.print(COLUMNS)
    report.write(options.json)


if __name__ == "__main__":
    main()
