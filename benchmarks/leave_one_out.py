"""Leave one machine out: what rules and a prior learnt on one machine choose on another.

Run `python benchmarks/leave_one_out.py [FILE...]`; nothing is measured. The files are reports of
`tuning.py`, those of this folder by default; a machine of another kind that resumes one of them
adds its rows. For machines A and B, B's programs of each cell were timed in turns; told are the
speeds, over the rules that were B's at the time, of what is chosen among them by

- `rules`: today's closed rules with B's registers and caches, no record;
- `prior`: a cost model fitted to A's times (A = B: to those of its other weights);
- `winner`: the program that A's search found for the same cell, as it is;
- `search`: B's own search; `best`: the fastest that was timed.

`rules` and `winner` hold for the cells alone in which B timed that program, if need be with another
prefetch distance: `of` counts these.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from common import Report, geometric_mean, print_rows
from dovetail.codegen.targets import get_target
from dovetail.compiler.measure.meter import Candidate
from dovetail.compiler.rules.schedules import LINEAR, GemmOp
from dovetail.compiler.search.cost_model import CostModel
from dovetail.compiler.search.fit_cost_model import LEAST_SAMPLES, Sample, fit_cost_model
from dovetail.compiler.search.policy import SearchTask
from dovetail.compiler.search.space import Program
from dovetail.ir.artifact import PhasePlan
from dovetail.topology.values import CacheSpec, HardwareSpec, PuSpec

RESULTS = Path(__file__).with_name("results")
REPORTS = ("tuning.json", "xeon/tuning.json", "rivals.json")
RULES, SEARCH = "default", "sandwich"
CHOICES = ("rules", "prior", "winner", "search", "best")


class Machine(NamedTuple):
    """A machine and the version measured on it."""

    name: str
    commit: str
    target: str
    dtype: str
    threads: int


class Shape(NamedTuple):
    """A cell: a product at one M."""

    n: int
    k: int
    m: int


@dataclass(slots=True)
class Cell:
    """What was timed at one cell: GFLOPS by program, and by the policy that chose it."""

    task: SearchTask
    speeds: dict[Program, float] = field(default_factory=dict)
    chosen: dict[str, Program] = field(default_factory=dict)


Cells = dict[Shape, Cell]


def read_reports(files: Iterable[Path]) -> dict[Machine, Cells]:
    """Return all programs of whole products that the reports' policies timed."""
    found: dict[Machine, Cells] = defaultdict(dict)
    for file in files:
        report = json.loads(file.read_text())
        facts, config = report["machine"], report["config"]
        for row in report["rows"]:
            if row["part"] != "policies" or "absent" in row or "regions" in row:
                continue
            machine = Machine(
                row.get("machine", facts["cpu"]),
                row.get("commit") or commit_of(file),
                row.get("target") or config["target"],
                row.get("dtype", "f32"),
                row["threads"],
            )
            caches = row.get("caches") or list(facts["caches"].values())
            add_row(found[machine], machine, row, caches)
    return dict(found)


def add_row(cells: Cells, machine: Machine, row: Mapping[str, Any], caches: Sequence[int]) -> None:
    """Add a row to the cells of its machine; one of kernels that are no more adds nothing."""
    shape = Shape(row["n"], row["k"], row["m"])
    cell = cells.setdefault(shape, Cell(make_task(machine, shape, caches)))
    candidate = Candidate(row["kernel"], tuple(row["schedule"]))
    program = cell.task.problem(shape.m).program(candidate)
    if program is not None:
        program = cell.task.problem(shape.m).effective(program)
        cell.speeds[program] = max(row["gflops"], cell.speeds.get(program, 0.0))
        cell.chosen[row["policy"]] = program


def make_task(machine: Machine, shape: Shape, caches: Sequence[int]) -> SearchTask:
    """Return the search of a cell on a machine with these caches (bytes of L1, L2, L3)."""
    pus = tuple(PuSpec(id=i, core=i, socket=0, node=0) for i in range(machine.threads))
    every = tuple(pu.id for pu in pus)
    hardware = HardwareSpec(
        source="report",
        arch="",
        cpu_vendor="",
        cpu_model=machine.name,
        isa_flags=(),
        pus=pus,
        allowed_pus=every,
        nodes=(),
        caches=tuple(
            CacheSpec(level=level, kind="unified", bytes=size, line_bytes=64, pus=every)
            for level, size in enumerate(caches, 1)
        ),
        memory_bytes=0,
    )
    return SearchTask(
        op=GemmOp("linear", LINEAR, shape.n, shape.k, machine.dtype),
        target=get_target(machine.target),
        phase=PhasePlan(threads=machine.threads, cpus=()),
        hardware=hardware,
        points=(shape.m,),
    )


def commit_of(file: Path) -> str:
    """Return the commit that a report without commits in its rows is of."""
    command = ["git", "log", "-1", "--format=%h", "--", file.name]
    run = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, check=False)
    return run.stdout.strip()


def samples(cells: Cells) -> list[Sample]:
    """Return what a cost model learns from."""
    return [
        Sample(cell.task, m, program, 2e-9 * n * k * m / speed)
        for (n, k, m), cell in cells.items()
        for program, speed in cell.speeds.items()
    ]


def learn(cells: Cells, left_out: tuple[int, int] | None = None) -> CostModel | None:
    """Return a prior from all weights but one; None where they are too few to fit one."""
    known = samples({shape: c for shape, c in cells.items() if shape[:2] != left_out})
    return fit_cost_model(known) if len(known) >= LEAST_SAMPLES else None


def transfers(machines: Mapping[Machine, Cells]) -> Iterator[dict[str, Any]]:
    """Yield a row for each two machines of the same dtype and threads, and for each by itself."""
    for a, learnt in machines.items():
        for b, applied in machines.items():
            if (a.dtype, a.threads) != (b.dtype, b.threads):
                continue
            weights = {shape[:2] for shape in applied}
            if a == b:
                priors = {weight: learn(learnt, weight) for weight in weights}
            else:
                priors = dict.fromkeys(weights, learn(learnt))
            speeds = _speeds(learnt, applied, priors)
            cells = len(speeds["search"])
            row = {
                "learnt_on": a.name,
                "learnt_commit": a.commit,
                "applied_on": b.name,
                "applied_commit": b.commit,
                "dtype": a.dtype,
                "threads": a.threads,
                "cells": cells,
            }
            for name in CHOICES:
                row[name] = geometric_mean(speeds[name])
                row |= {f"{name}_of": len(speeds[name])} if len(speeds[name]) < cells else {}
            yield row


def _speeds(
    learnt: Cells, applied: Cells, priors: Mapping[tuple[int, int], CostModel | None]
) -> dict[str, list[float]]:
    """Return the speeds over the rules of the time, by who chose, at B's cells."""
    found: dict[str, list[float]] = defaultdict(list)
    for shape, cell in applied.items():
        task, timed = cell.task, cell.speeds
        if RULES not in cell.chosen or SEARCH not in cell.chosen:
            continue
        problem = task.problem(shape.m)
        choices: dict[str, Program | None] = {
            "rules": problem.effective(task.default(shape.m)),
            "search": cell.chosen[SEARCH],
            "best": max(timed, key=timed.__getitem__),
        }
        if prior := priors[shape[:2]]:
            choices["prior"] = prior.best(task, shape.m, timed, 1)[0]
        if other := learnt.get(shape):
            choices["winner"] = other.chosen.get(SEARCH)
        base = timed[cell.chosen[RULES]]
        for name, program in choices.items():
            if known := program and find(timed, program):
                found[name].append(timed[known] / base)
    return found


def find(timed: Iterable[Program], program: Program) -> Program | None:
    """Return the program among those timed, or what it is but for its prefetch distance."""
    alike = [one for one in timed if replace(one, prefetch=program.prefetch) == program]
    return program if program in alike else next(iter(alike), None)


def brief(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with short names of machines, and what its figures hold for beside them."""
    shown = {f"{side} on": f"{row[f'{side}_on'].split()[0]} {row[f'{side}_commit'][:7]}"
             for side in ("learnt", "applied")}  # fmt: skip
    for name in ("dtype", "threads", "cells"):
        shown[name] = row[name]
    for name in CHOICES:
        value = row[name]
        of = f" of {row[f'{name}_of']}" if f"{name}_of" in row else ""
        shown[name] = f"{value:.3f}{of}" if value else "unknown"
    return shown


def main() -> None:
    """Print the table, and write it if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("files", nargs="*", type=Path, help="reports of tuning.py")
    parser.add_argument("--json", type=Path, metavar="F", help="write the report to F")
    options = parser.parse_args()
    known = [RESULTS / name for name in REPORTS]
    files = options.files or [file for file in known if file.exists()]
    rows = list(transfers(read_reports(files)))
    kinds = {row["applied_on"] for row in rows}
    report = Report("leave_one_out", {"files": [file.name for file in files]}, rows)
    print_rows("leave one machine out", list(map(brief, rows)))
    if len(kinds) < 2:
        print("one kind of machine alone is on record: run tuning.py --resume on another")
    report.write(options.json)


if __name__ == "__main__":
    main()
