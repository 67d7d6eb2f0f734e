"""Kernel search against TVM MetaSchedule and against the rival policies, with ablations.

Run `python benchmarks/tuning.py --json F`; `--parts` picks some of policies, ablations, tvm, and
`--resume` keeps what F has already, rows of other machines too: a whole shape's policies, all
shape's ablations, one cell of TVM's. All policies choose among the same micro-kernels with the same
measuring; what they chose is then timed in turns. A rival without a program for a cell has a row
that is `absent`. Each ablation switches one part of ours off (micro-kernel choice, thread grids,
split-K, slices, loop orders, reuse, prefetch distances) or changes its window; of each shape and
type a column is printed, the search over what it is without. Tuning costs are wall
seconds, told per shape searched, which is one M of one weight. MetaSchedule's tuning (minutes per
cell, 2 to 5 at 200 trials) is kept in the cache directory. `--quick` takes one shape, few M and no
MetaSchedule.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from common import (
    Patience,
    Report,
    add_report_options,
    geometric_mean,
    machine_facts,
    open_report,
    origin,
    parse_numbers,
    parse_shapes,
    print_rows,
    sample,
    speedup,
)
from dovetail.codegen.library import LibrarySpec, build_library
from dovetail.codegen.targets import host_target
from dovetail.compiler.measure.child import WeightPool
from dovetail.compiler.measure.meter import Candidate, Meter, pool_bytes
from dovetail.compiler.rules.schedules import LINEAR, GemmOp, gemm_requests
from dovetail.compiler.search.policy import MEASURED, Choice, SearchResult, SearchTask
from dovetail.compiler.search.sandwich import Sandwich
from dovetail.compiler.search.tables import DENSE_POINTS, EFFORTS, POINTS
from dovetail.ir.artifact import PhasePlan
from dovetail.ir.formats import FORMATS
from dovetail.runtime.machine.library import KernelLibrary
from dovetail.topology.binding import choose_pus
from dovetail.topology.hardware import read_hardware
from gemm_ours import Setting
from rivals import POLICIES
from rivals.ablated import ABLATED, without
from rivals.result import Found, Regions, Searcher, as_found
from tuning_cell import compare_with_tvm
from tuning_regions import Product, make_team, region_candidate, time_in_turns
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
SHOWN = ("part", "dtype", "n", "k", "m", "threads", "policy", "gflops", "spread", "vs_sandwich")
SHOWN += ("bound", "seconds_per_shape", "trials", "ratio", "cost_ratio")
SAME = ("effort", "seconds")
"""Settings in which a report must agree with the run that goes on with it."""


@dataclass(frozen=True, slots=True)
class Run:
    """What all parts share: the setting of the machine, the meter and the options."""

    setting: Setting
    meter: Meter
    options: argparse.Namespace
    pools: dict[str, WeightPool] = field(default_factory=dict)

    def pool(self, dtype: str) -> WeightPool:
        """Return random weights that outgrow the caches."""
        if dtype not in self.pools:
            self.pools[dtype] = WeightPool(dtype, pool_bytes(self.setting.hardware))
        return self.pools[dtype]

    @property
    def origin(self) -> dict[str, Any]:
        """Return what tells rows of different machines, versions and targets apart."""
        index = self.setting.built.index
        return {
            **origin(),
            "caches": list(machine_facts()["caches"].values()),
            "target": index.target,
            "compiler": index.compiler,
        }

    def points(self, part: str) -> tuple[int, ...]:
        """Return the M that a part searches."""
        if self.options.m or self.options.quick:
            return self.options.m or QUICK_POINTS
        return ABLATION_POINTS if part == "ablations" else POINTS

    def task(
        self, shape: tuple[int, int], part: str = "policies", dtype: str = "f32"
    ) -> SearchTask:
        """Return the search of one product."""
        hardware, threads = self.setting.hardware, self.options.threads
        return SearchTask(
            op=GemmOp("linear", LINEAR, *shape, dtype),
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


def policies(options: argparse.Namespace) -> dict[str, Searcher]:
    """Return all policies, ours with the settings of the chosen effort."""
    return {**POLICIES, "sandwich": sandwich(options)}


def ablations(options: argparse.Namespace, points: Sequence[int]) -> dict[str, Searcher]:
    """Return our policy whole, without each of its parts, with other windows, and the rules.

    Windows that hold all `points` are as the whole.
    """
    whole, windows = sandwich(options), (sigma for sigma in WINDOWS if sigma < len(points))
    return {
        "sandwich": whole,
        **{name: without(part, whole) for name, part in ABLATED.items()},
        **{f"window {sigma}": replace(whole, window=sigma) for sigma in windows},
        "rules alone": POLICIES["default"],
    }


def search(run: Run, task: SearchTask, table: Mapping[str, Searcher]) -> dict[str, Found]:
    """Return what each policy finds, in wall seconds; ours comes first."""
    names = sorted(table, key=lambda name: name != "sandwich")
    found = {}
    for name in names:
        start = time.perf_counter()
        result = as_found(task, table[name].search(task, run.meter))
        found[name] = replace(result, seconds=time.perf_counter() - start)
        print(f"{name}: {found[name].trials} trials, {found[name].seconds:.1f} s", flush=True)
    return found


def compare(
    run: Run, part: str, task: SearchTask, found: Mapping[str, Found]
) -> Iterator[dict[str, Any]]:
    """Yield a row per M and policy: what it chose, timed in turns with the others' choices.

    Ratios are of times in the same round; `found` has our policy first, to which all are compared.
    """
    library = run.setting.library
    with closing(make_team(library, task)) as team:
        for m in task.points:
            chosen = {name: result.picks[m] for name, result in found.items()}
            unique = tuple(dict.fromkeys(regions for regions in chosen.values() if regions))
            product = Product(library, team, task, m, run.pool(task.op.dtype))
            measured = time_in_turns(
                product, unique, FINAL_ROUNDS, FINAL_SECONDS, run.setting.patience
            )
            times = dict(zip(unique, measured, strict=True))
            ours = times[chosen["sandwich"]]
            for name, regions in chosen.items():
                shape = {"n": task.op.n, "k": task.op.k, "m": m, "dtype": task.op.dtype}
                yield {
                    "part": part,
                    **shape,
                    "threads": task.phase.threads,
                    "policy": name,
                    "tuning_seconds": found[name].seconds,
                    "seconds_per_shape": found[name].seconds / len(task.points),
                    "trials": found[name].trials,
                    **run.origin,
                    **(describe(task, m, regions, times[regions], ours) if regions else ABSENT),
                }


ABSENT = {"absent": True}
"""Of a row whose policy has no program for the cell."""


def describe(
    task: SearchTask, m: int, regions: Regions, times: Sequence[float], ours: Sequence[float]
) -> dict[str, Any]:
    """Return the figures of a choice: `vs_sandwich` is its speed over ours.

    bound: what our speed over its speed exceeds with a probability of 0.99.
    """
    timed, gain = sample(times), speedup(ours, times)
    ratio, bound = gain["ratio"], gain["bound"]
    assert ratio is not None
    parts = [(r, region_candidate(task, m, r)) for r in regions]
    several = [
        [r.row, r.rows, r.column, r.columns, each.kernel, list(each.schedule)] for r, each in parts
    ]
    first = parts[0][1]
    return {
        "gflops": 2e-9 * task.op.n * task.op.k * m / timed.low,
        "spread": timed.spread,
        "vs_sandwich": 1 / ratio,
        "bound": bound,
        "kernel": first.kernel,
        "schedule": list(first.schedule),
        **({"regions": several} if len(several) > 1 else {}),
    }


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of each machine; parts that were not run are left out."""
    machines = dict.fromkeys(row["machine"] for row in rows)
    return {name: _summary([row for row in rows if row["machine"] == name]) for name in machines}


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for part, key in (("policies", "sandwich"), ("ablations", "ablations")):
        mine = [row for row in rows if row["part"] == part]
        names = [n for n in dict.fromkeys(row["policy"] for row in mine) if n != "sandwich"]
        if not names:
            continue
        summary[key] = {name: _gain(mine, policy=name) for name in names}
        summary[f"{part}_least"] = {name: _least(mine, name) for name in names}
        summary[f"{part}_absent"] = {
            name: sum(row["policy"] == name and "absent" in row for row in mine) for name in names
        }
        summary[f"{part}_seconds_per_shape"] = {
            name: _mean_seconds(mine, name) for name in ("sandwich", *names)
        }
        for side in ("m", "dtype") if part == "policies" else ():
            values = sorted({row.get(side, "f32") for row in mine})
            summary[f"sandwich_by_{side}"] = {
                name: {value: _gain(mine, policy=name, **{side: value}) for value in values}
                for name in names
            }
    tvm = [row for row in rows if row["part"] == "tvm"]
    if tvm:
        summary["vs_tvm_speed"] = geometric_mean(row["ratio"] for row in tvm)
        summary["min_vs_tvm_speed"] = min(row["ratio"] for row in tvm)
        summary["vs_tvm_seconds_per_shape"] = geometric_mean(row["cost_ratio"] for row in tvm)
    return summary


def _gain(rows: Sequence[dict[str, Any]], **wanted: object) -> float | None:
    """Return our speed over that in the rows `wanted`, as geometric mean."""
    chosen = (row for row in rows if all(row.get(name) == v for name, v in wanted.items()))
    return geometric_mean(1 / row["vs_sandwich"] for row in chosen if "absent" not in row)


def _least(rows: Sequence[dict[str, Any]], policy: str) -> float | None:
    """Return the least of our speeds over a policy's."""
    mine = (row for row in rows if row["policy"] == policy and "absent" not in row)
    return min((1 / row["vs_sandwich"] for row in mine), default=None)


def _mean_seconds(rows: Sequence[dict[str, Any]], policy: str) -> float:
    """Return the mean wall seconds that a policy tuned per shape searched."""
    return float(np.mean([row["seconds_per_shape"] for row in rows if row["policy"] == policy]))


def measure_all(run: Run, report: Report) -> None:
    """Run the parts asked for, but for what the report has; write it after each step."""
    options = run.options
    shapes = options.shapes or (QUICK_SHAPES if options.quick else SHAPES)
    parts = {
        "policies": (policies(options), shapes),
        "ablations": (ablations(options, run.points("ablations")), options.shapes or shapes[:1]),
    }
    for part, (table, chosen) in parts.items():
        work = [(shape, dtype) for dtype in options.dtypes for shape in chosen]
        for shape, dtype in work if part in options.parts else ():
            task = run.task(shape, part, dtype)
            if known_search(report.rows, part, task) is None:
                rows = compare(run, part, task, search(run, task, table))
                add(report, list(rows), options.json)
    if "tvm" in options.parts:
        measure_tvm(run, report)


def by_cause(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each part what the search gains by it on each shape, all M together."""
    mine = [row for row in rows if row["part"] == "ablations"]
    shapes = dict.fromkeys((row["dtype"], row["n"], row["k"], row["threads"]) for row in mine)
    table = []
    for machine, policy in dict.fromkeys((row["machine"], row["policy"]) for row in mine):
        gain = partial(_gain, mine, machine=machine, policy=policy)
        told = {
            f"{dtype} {n}x{k}, {threads} thr.": gain(dtype=dtype, n=n, k=k, threads=threads)
            for dtype, n, k, threads in shapes
        }
        if policy != "sandwich":
            table.append({"machine": machine, "search over": policy, **told, "all": gain()})
    return table


def measure_tvm(run: Run, report: Report) -> None:
    """Compare with MetaSchedule cell by cell, by the tables that `policies` searched."""
    options = run.options
    python = environment(options.tvm_python)
    cpu, rows = machine_facts()["cpu"], [row for row in report.rows if row["part"] == "tvm"]
    here = [r for r in rows if (r["machine"], r["threads"]) == (cpu, options.threads)]
    done = {(r["m"], r["n"], r["k"], r["trials"]) for r in here}
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
        add(report, [row | run.origin], options.json)


def known_search(
    rows: Sequence[dict[str, Any]], part: str, task: SearchTask
) -> SearchResult | None:
    """Return what our policy found for a task on this machine; None if the report has it not."""
    op, cpu = task.op, machine_facts()["cpu"]
    wanted = {"part": part, "policy": "sandwich", "machine": cpu, "threads": task.phase.threads}
    wanted |= {"n": op.n, "k": op.k, "dtype": op.dtype, "target": task.target.name}
    mine = {
        row["m"]: row
        for row in rows
        if all(row.get(name) == value for name, value in wanted.items())
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
    """Yield the cells of the baseline: those of the options, else ours, the long one last."""
    if options.shapes and options.m:
        sizes = tuple((m, n, k) for n, k in options.shapes for m in options.m)[: options.cells]
        yield from (Cell(*s, options.threads, options.trials, options.trials) for s in sizes)
        return
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


def parse_dtypes(text: str) -> tuple[str, ...]:
    """Parse `--dtypes`."""
    dtypes = tuple(text.split(","))
    if unknown := set(dtypes) - set(FORMATS):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(FORMATS)}")
    return dtypes


def parse_options() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    add_report_options(parser)
    parser.add_argument("--parts", type=parse_parts, help="of policies,ablations,tvm; default all")
    parser.add_argument("--quick", action="store_true", help="one shape, three M, no MetaSchedule")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", type=parse_shapes, metavar="NxK,...", help="searched weights")
    parser.add_argument("--m", type=parse_numbers, help="rows that are searched")
    parser.add_argument("--dtypes", type=parse_dtypes, default=("f32",), help="of the weights")
    parser.add_argument("--effort", choices=sorted(EFFORTS), default="full")
    parser.add_argument(
        "--seconds", type=float, default=SEARCH_SECONDS, help="most seconds of one search"
    )
    parser.add_argument(
        "--patience", type=float, default=300.0, help="seconds to wait for other processes at most"
    )
    parser.add_argument("--trials", type=int, default=200, help="MetaSchedule's, per cell")
    parser.add_argument("--long-trials", type=int, default=LONG_TRIALS, help="of one cell; 0: none")
    parser.add_argument("--cells", type=int, default=64, help="only the first cells of TVM's")
    parser.add_argument("--tvm-python", type=Path, help="interpreter that has TVM; default: made")
    options = parser.parse_args()
    options.parts = options.parts or (PARTS[:2] if options.quick else PARTS)
    return options


def main() -> None:
    """Run all parts, print the table, write the report."""
    options = parse_options()
    hardware, target = read_hardware(), host_target()
    also = ("f32",) if "tvm" in options.parts else ()  # which MetaSchedule's cells are in
    requests = gemm_requests(dict.fromkeys((*options.dtypes, *also)), target, (LINEAR,))
    built = build_library(LibrarySpec(target, requests, name="tuning", tvm_ffi=False))
    config = {name: vars(options)[name] for name in (*SAME, "trials", "long_trials")}
    report = open_report("tuning", options, config, SAME, any_machine=True)
    report.summary = summarize(report.rows)
    library = KernelLibrary(built.path, built.index)
    with Meter(built.path, built.index, pool_bytes=pool_bytes(hardware)) as meter:
        setting = Setting(
            hardware, built, library, meter, options.seconds, 1, Patience(options.patience)
        )
        measure_all(Run(setting, meter, options), report)
    report.print(SHOWN)
    if causes := by_cause(report.rows):
        print_rows("the gain by cause: the search over what it is without", causes)
    report.write(options.json)


if __name__ == "__main__":
    main()
