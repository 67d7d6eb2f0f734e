"""Kernel search against TVM MetaSchedule and against the rival policies, with ablations.

Run `python benchmarks/tuning.py --json F`; `--parts` picks some of policies, ablations, tvm, and
`--resume` keeps what F has already: a whole shape's policies, all ablations, one cell of TVM's. All
policies choose among the same micro-kernels with the same measuring; ours, whole and in its
ablations, also tries the slice of the rules with each of them, its rivals do not. What they chose
is then timed in turns. Each ablation switches one part of ours off (micro-kernel choice, thread
grids, split-K, loop orders, reuse) or changes its window. `vs_tvm_tuning_cost` is the tuning time
of a whole table per M it covers, over the time that MetaSchedule takes for one M. MetaSchedule's
tuning (minutes per cell, 2 to 5 at 200 trials) is kept in the cache directory. `--quick` takes one
shape, few M and no MetaSchedule.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from common import (
    Patience,
    Report,
    add_report_options,
    geometric_mean,
    open_report,
    parse_numbers,
    parse_shapes,
)
from dovetail.codegen.library import LibrarySpec, build_library
from dovetail.codegen.targets import host_target
from dovetail.compiler.measure import CACHE_FACTOR, Candidate, Meter
from dovetail.compiler.schedules import LINEAR, GemmOp, gemm_requests
from dovetail.compiler.search.policy import MEASURED, Choice, Policy, SearchResult, SearchTask
from dovetail.compiler.search.sandwich import Sandwich
from dovetail.compiler.search.tables import DENSE_POINTS, EFFORTS, POINTS
from dovetail.ir.artifact import PhasePlan
from dovetail.ir.tuning import OK
from dovetail.runtime.machine.library import KernelLibrary
from dovetail.topology.binding import choose_pus
from dovetail.topology.hardware import read_hardware
from gemm_ours import Setting
from tuning_cell import compare_with_tvm
from tuning_rivals import POLICIES
from tvm_cells import Cell, TvmError, environment

SHAPES = ((2048, 2048), (11008, 2048), (2048, 5504))
"""(N, K) whose tables are searched; the first one is the ablations'."""
ABLATION_POINTS = tuple(m for m in DENSE_POINTS if m <= 128)
"""Dense, or no window of those below would ever be full."""
QUICK_SHAPES, QUICK_POINTS = SHAPES[:1], (1, 8, 64)
CELLS = ((1, 2048, 2048), (16, 2048, 2048), (64, 2048, 2048), (512, 2048, 2048))
CELLS += ((16, 11008, 2048), (128, 2048, 5504))
"""(M, N, K) of the cells that MetaSchedule tunes."""
LONG_CELL, LONG_TRIALS = CELLS[2], 800
PARTS = ("policies", "ablations", "tvm")
WINDOWS = (5, 10, 15, 20)
"""Sigma of the sliding window, as in the paper's Table 3."""
SEARCH_SECONDS = 45.0
FINAL_ROUNDS, FINAL_SECONDS = 15, 60.0
SHOWN = ("part", "n", "k", "m", "threads", "policy", "gflops", "vs_sandwich", "tuning_seconds")
SHOWN += ("trials", "ratio", "cost_ratio")
SAME = ("target", "compiler", "threads", "effort", "seconds")
"""Settings in which a report must agree with the run that goes on with it."""


@dataclass(frozen=True, slots=True)
class Run:
    """What all parts share: the setting of the machine, the meter and the options."""

    setting: Setting
    meter: Meter
    options: argparse.Namespace

    def points(self, part: str) -> tuple[int, ...]:
        """Return the M that a part searches."""
        if self.options.m or self.options.quick:
            return self.options.m or QUICK_POINTS
        return ABLATION_POINTS if part == "ablations" else POINTS

    def task(self, shape: tuple[int, int], part: str = "policies") -> SearchTask:
        """Return the search of one product."""
        hardware, threads = self.setting.hardware, self.options.threads
        return SearchTask(
            op=GemmOp("linear", LINEAR, *shape, "f32"),
            target=host_target(),
            phase=PhasePlan(threads=threads, cpus=choose_pus(hardware, threads)),
            hardware=hardware,
            points=self.points(part),
            seconds=self.options.seconds,
            rounds=EFFORTS[self.options.effort].rounds,
        )


def sandwich(options: argparse.Namespace) -> Sandwich:
    """Return the policy with the settings of the chosen effort."""
    return EFFORTS[options.effort].policy


def policies(options: argparse.Namespace) -> dict[str, Policy]:
    """Return all policies, ours with the settings of the chosen effort."""
    return {**POLICIES, "sandwich": sandwich(options)}


def ablations(options: argparse.Namespace) -> dict[str, Policy]:
    """Return our policy whole, with each part switched off, and with other windows."""
    whole = sandwich(options)
    return {
        "sandwich": whole,
        "no micro-kernel choice": replace(whole, micro_kernel_choice=False),
        "no polymerization": replace(whole, polymerization=False),
        "no split-K": replace(whole, split_k=False),
        "no loop orders": replace(whole, orders=False),
        "no reuse": replace(whole, reuse=False),
        **{f"window {sigma}": replace(whole, window=sigma) for sigma in WINDOWS},
    }


def search(run: Run, task: SearchTask, table: Mapping[str, Policy]) -> dict[str, SearchResult]:
    """Return what each policy finds; ours comes first."""
    names = sorted(table, key=lambda name: name != "sandwich")
    found = {}
    for name in names:
        found[name] = table[name].search(task, run.meter)
        print(f"{name}: {found[name].trials} trials, {found[name].seconds:.1f} s", flush=True)
    return found


def compare(
    run: Run, part: str, task: SearchTask, found: Mapping[str, SearchResult]
) -> Iterator[dict[str, Any]]:
    """Yield a row per M and policy: what it chose, timed in turns with the others' choices.

    Ratios are of times in the same round; `found` has our policy first, to which all are compared.
    """
    for m in task.points:
        problem = task.problem(m)
        chosen = {name: problem.candidate(r.choices[m].program) for name, r in found.items()}
        unique = tuple(dict.fromkeys(chosen.values()))
        measured = run.meter.measure(
            problem.case, unique, rounds=FINAL_ROUNDS, seconds=FINAL_SECONDS
        )
        timed = {each.candidate: each for each in measured if each.status == OK}
        if len(timed) < len(unique):
            raise SystemExit(f"a chosen kernel failed at M={m}: {measured}")
        flop = 2e-9 * task.op.n * task.op.k * m
        for name, candidate in chosen.items():
            yield {
                "part": part,
                "n": task.op.n,
                "k": task.op.k,
                "m": m,
                "threads": task.phase.threads,
                "policy": name,
                "gflops": flop / timed[candidate].low,
                "vs_sandwich": 1 / timed[candidate].ratio.median,
                "tuning_seconds": found[name].seconds,
                "trials": found[name].trials,
                "kernel": candidate.kernel,
                "schedule": list(candidate.schedule),
            }


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures the issue names; parts that were not run are left out."""
    summary: dict[str, Any] = {}
    for part, key in (("policies", "sandwich"), ("ablations", "ablations")):
        mine = [row for row in rows if row["part"] == part and row["policy"] != "sandwich"]
        names = dict.fromkeys(row["policy"] for row in mine)
        if names:
            summary[key] = {name: _gain(mine, policy=name) for name in names}
            summary[f"{part}_tuning_seconds"] = _tuning_cost(rows, part)
        if names and part == "policies":
            points = sorted({row["m"] for row in mine})
            summary["sandwich_by_m"] = {
                name: {m: _gain(mine, policy=name, m=m) for m in points} for name in names
            }
    tvm = [row for row in rows if row["part"] == "tvm"]
    if tvm:
        summary["vs_tvm_speed"] = geometric_mean(row["ratio"] for row in tvm)
        summary["min_vs_tvm_speed"] = min(row["ratio"] for row in tvm)
        summary["vs_tvm_tuning_cost"] = geometric_mean(row["cost_ratio"] for row in tvm)
        summary["vs_tvm_tuning_cost_of_searched"] = geometric_mean(
            row["cost_ratio_of_searched"] for row in tvm
        )
    return summary


def _gain(rows: Sequence[dict[str, Any]], **wanted: object) -> float | None:
    """Return our speed over that in the rows `wanted`, as geometric mean."""
    chosen = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return geometric_mean(1 / row["vs_sandwich"] for row in chosen)


def _tuning_cost(rows: Sequence[dict[str, Any]], part: str) -> dict[str, float]:
    """Return policy -> mean tuning seconds of a whole table, as in the paper's Fig. 8(b)."""
    seconds: dict[str, dict[tuple[int, int], float]] = {}
    for row in rows:
        if row["part"] == part:
            seconds.setdefault(row["policy"], {})[row["n"], row["k"]] = row["tuning_seconds"]
    return {name: float(np.mean(list(each.values()))) for name, each in seconds.items()}


def measure_all(run: Run, report: Report) -> None:
    """Run the parts asked for, but for what the report has; write it after each step."""
    options = run.options
    shapes = options.shapes or (QUICK_SHAPES if options.quick else SHAPES)
    parts = {
        "policies": (policies(options), shapes),
        "ablations": (ablations(options), shapes[:1]),
    }
    for part, (table, chosen) in parts.items():
        for shape in chosen if part in options.parts else ():
            task = run.task(shape, part)
            if known_search(report.rows, part, task) is None:
                rows = compare(run, part, task, search(run, task, table))
                add(report, list(rows), options.json)
    if "tvm" in options.parts:
        measure_tvm(run, report)


def measure_tvm(run: Run, report: Report) -> None:
    """Compare with MetaSchedule cell by cell, by the tables that `policies` searched."""
    options = run.options
    python = environment(options.tvm_python)
    done = {(r["m"], r["n"], r["k"], r["trials"]) for r in report.rows if r["part"] == "tvm"}
    searched: dict[tuple[int, int], SearchResult] = {}
    for cell in cells(options):
        if (cell.m, cell.n, cell.k, cell.trials) in done:
            continue
        shape, task = (cell.n, cell.k), run.task((cell.n, cell.k))
        if shape not in searched:
            known = known_search(report.rows, "policies", task)
            searched[shape] = known or sandwich(options).search(task, run.meter)
        try:
            row = compare_with_tvm(run.setting, python, cell, task, searched[shape])
        except TvmError as error:
            print(f"{cell.name} is left out: {error}", flush=True)
            continue
        add(report, [row], options.json)


def known_search(
    rows: Sequence[dict[str, Any]], part: str, task: SearchTask
) -> SearchResult | None:
    """Return what our policy found for a task according to the report; None if it is not there."""
    mine = {
        row["m"]: row
        for row in rows
        if (row["part"], row["policy"]) == (part, "sandwich")
        and (row["n"], row["k"]) == (task.op.n, task.op.k)
    }
    if not set(task.points) <= set(mine):
        return None
    choices = {}
    for m in task.points:
        candidate = Candidate(mine[m]["kernel"], tuple(mine[m]["schedule"]))
        program = task.problem(m).program(candidate)
        if program is None:
            return None
        choices[m] = Choice(program, MEASURED)
    first = mine[task.points[0]]
    return SearchResult(choices, first["trials"], first["tuning_seconds"])


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Yield the cells of the baseline, the long one last."""
    longest = options.long_trials if options.cells >= len(CELLS) else 0
    for size in CELLS[: options.cells]:
        most = max(options.trials, longest if size == LONG_CELL else 0)
        yield Cell(*size, options.threads, options.trials, most)
    if longest > options.trials:
        yield Cell(*LONG_CELL, options.threads, longest, longest)


def add(report: Report, rows: list[dict[str, Any]], file: Path | None) -> None:
    """Add rows to the report and write it."""
    report.rows += rows
    report.summary = summarize(report.rows)
    report.write(file)


def parse_parts(text: str) -> tuple[str, ...]:
    """Parse `--parts`."""
    parts = tuple(text.split(","))
    if set(parts) - set(PARTS):
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(PARTS)}")
    return parts


def parse_options() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    add_report_options(parser)
    parser.add_argument("--parts", type=parse_parts, help="of policies,ablations,tvm; default all")
    parser.add_argument("--quick", action="store_true", help="one shape, three M, no MetaSchedule")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", type=parse_shapes, metavar="NxK,...", help="searched weights")
    parser.add_argument("--m", type=parse_numbers, help="rows that are searched")
    parser.add_argument("--effort", choices=sorted(EFFORTS), default="full")
    parser.add_argument(
        "--seconds", type=float, default=SEARCH_SECONDS, help="most seconds of one search"
    )
    parser.add_argument(
        "--patience", type=float, default=300.0, help="seconds to wait for other processes at most"
    )
    parser.add_argument("--trials", type=int, default=200, help="MetaSchedule's, per cell")
    parser.add_argument("--long-trials", type=int, default=LONG_TRIALS, help="of one cell; 0: none")
    parser.add_argument("--cells", type=int, default=len(CELLS), help="only the first cells")
    parser.add_argument("--tvm-python", type=Path, help="interpreter that has TVM; default: made")
    options = parser.parse_args()
    options.parts = options.parts or (PARTS[:2] if options.quick else PARTS)
    return options


def main() -> None:
    """Run all parts, print the table, write the report."""
    options = parse_options()
    hardware, target = read_hardware(), host_target()
    requests = gemm_requests(("f32",), target)
    built = build_library(LibrarySpec(target, requests, name="tuning", tvm_ffi=False))
    pool = CACHE_FACTOR * hardware.l3_bytes
    config = {
        **{name: vars(options)[name] for name in ("threads", "effort", "seconds", "trials")},
        "long_trials": options.long_trials,
        "compiler": built.index.compiler,
        "target": target.name,
    }
    report = open_report("tuning", options, config, SAME)
    report.summary = summarize(report.rows)
    library = KernelLibrary(built.path, built.index)
    with Meter(built.path, built.index, pool_bytes=pool) as meter:
        setting = Setting(
            hardware, built, library, meter, options.seconds, 1, Patience(options.patience)
        )
        measure_all(Run(setting, meter, options), report)
    report.print(SHOWN)
    report.write(options.json)


if __name__ == "__main__":
    main()
