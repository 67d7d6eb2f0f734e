"""The tuning benchmark runs alone: every policy and ablation is compared with ours, cells once."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from dovetail.compiler.rules.schedules import FAR_PREFETCH, SPREAD_PREFETCH
from dovetail.topology.hardware import read_hardware
from tests.compiler.search.landscape import Landscape, task
from tests.repository import ROOT

pytest.importorskip("torch")
sys.path.insert(0, str(ROOT / "benchmarks"))

import tuning
from tvm_cells import TvmError

SCRIPT = ROOT / "benchmarks" / "tuning.py"
RIVALS = {"roller", "dietcode", "mikpoly", "ansor", "default"}
ABLATIONS = {"no micro-kernel choice", "no polymerization", "no split-K", "no loop orders"}
ABLATIONS |= {"no slices", "no reuse", "no prefetch distances", "rules alone"}


@pytest.mark.long
def test_policies_and_ablations_are_compared_and_a_run_is_resumed(tmp_path):
    file = tmp_path / "report.json"
    options = ["--quick", "--effort", "fast", "--shapes", "256x128", "--m", "1,5", "--threads", "1"]
    machine = tuning.machine_facts()["cpu"]
    options += ["--seconds", "1", "--patience", "0", "--json", file]
    subprocess.run([sys.executable, SCRIPT, *options, "--parts", "policies"], check=True)
    policies = json.loads(file.read_text())["rows"]
    subprocess.run([sys.executable, SCRIPT, *options, "--resume"], check=True)
    report = json.loads(file.read_text())
    assert report["rows"][: len(policies)] == policies
    summary = report["summary"][machine]
    assert summary["sandwich"].keys() == RIVALS
    assert summary["ablations"].keys() == ABLATIONS
    assert summary["policies_seconds_per_shape"].keys() == RIVALS | {"sandwich"}
    for row in report["rows"]:
        assert row["machine"] == machine and row["commit"] and row["target"]
        assert (row["n"], row["k"]) == (256, 128)
        assert row["gflops"] > 0 if "absent" not in row else row["policy"] in RIVALS
        assert row["policy"] != "sandwich" or row["vs_sandwich"] == 1
    assert {row["m"] for row in report["rows"]} == {1, 5}


def test_each_ablation_leaves_out_its_part():
    table = tuning.ablations(SimpleNamespace(effort="full"), range(1, 12))
    assert table.keys() == ABLATIONS | {"sandwich", "window 5", "window 10"}
    parts = [policy for name, policy in table.items() if name != "rules alone"]
    assert all(policy.breadth == table["sandwich"].breadth for policy in parts)

    def asked(name, points=(1, 8, 64)):
        one, land = task(points=points), Landscape()
        table[name].search(one, land)
        return one, [candidate for _, candidate in land.asked]

    one, tried = asked("no micro-kernel choice")
    kernels = {one.problem(m).candidate(one.default(m)).kernel for m in one.points}
    assert {candidate.kernel for candidate in tried} == kernels
    grids = {
        name: {candidate.schedule[3:6] for candidate in asked(name)[1]}
        for name in ("sandwich", "no polymerization", "no split-K")
    }
    assert grids["no polymerization"] == {(1, 2, 1)} < grids["no split-K"] < grids["sandwich"]
    assert all(grid[2] == 1 for grid in grids["no split-K"])
    rows = {c.schedule[1] for c in asked("no slices")[1]}
    assert rows < {c.schedule[1] for c in asked("sandwich")[1]}
    assert len(asked("no loop orders")[1]) < len(asked("sandwich")[1])
    distances = {c.schedule[7] for c in asked("no prefetch distances", (64,))[1]}
    assert distances <= {SPREAD_PREFETCH, FAR_PREFETCH}


def test_cells_that_a_report_has_are_not_timed_again(monkeypatch):
    options = SimpleNamespace(
        threads=1, effort="fast", seconds=0.0, m=(1,), quick=False, json=None, trials=8,
        long_trials=16, cells=len(tuning.CELLS), tvm_python=sys.executable, shapes=None,
    )  # fmt: skip
    first, second, *_, last = cells = list(tuning.cells(options))
    row = {
        "part": "tvm",
        "policy": "MetaSchedule",
        "ratio": 1.0,
        "cost_ratio": 1.0,
        "machine": tuning.machine_facts()["cpu"],
        "threads": 1,
    }
    report = SimpleNamespace(rows=[], summary={}, write=lambda path: None)
    asked = []

    def compare(setting, python, cell, task, found):
        asked.append(cell)
        if cell == second:
            raise TvmError("no such kernel")
        return row | {"m": cell.m, "n": cell.n, "k": cell.k, "trials": cell.trials}

    monkeypatch.setattr(tuning, "compare_with_tvm", compare)
    monkeypatch.setattr(tuning, "sandwich", lambda options: tuning.POLICIES["default"])
    index = SimpleNamespace(target=tuning.host_target().name, compiler="cc")
    setting = SimpleNamespace(hardware=read_hardware(), built=SimpleNamespace(index=index))
    run = tuning.Run(setting, None, options)
    report.rows.append(compare(None, None, first, None, None))
    asked.clear()
    tuning.measure_tvm(run, report)
    assert asked == cells[1:] and last.trials == 16  # and not the one that is there
    asked.clear()
    tuning.measure_tvm(run, report)
    assert asked == [second]


def row(policy, m=1, **rest):
    return {
        "part": "policies", "policy": policy, "m": m, "dtype": "f32", "machine": "A",
        "seconds_per_shape": 2.0, **rest,
    }  # fmt: skip


def test_a_cell_without_a_program_counts_as_absent_and_not_as_slow():
    rows = [row("sandwich", vs_sandwich=1.0), row("sandwich", m=8, vs_sandwich=1.0)]
    rows += [row("roller", vs_sandwich=0.5), row("roller", m=8, absent=True)]
    rows += [row("sandwich", machine="B", vs_sandwich=1.0, seconds_per_shape=4.0)]
    found = tuning.summarize([*rows, row("roller", machine="B", vs_sandwich=0.8)])
    assert found["A"]["sandwich"] == {"roller": 2.0}
    assert found["A"]["policies_absent"] == {"roller": 1}
    assert found["A"]["sandwich_by_m"] == {"roller": {1: 2.0, 8: None}}
    assert found["B"]["policies_least"] == {"roller": 1.25}
    assert found["B"]["policies_seconds_per_shape"] == {"sandwich": 4.0, "roller": 2.0}


def test_what_each_part_gains_is_told_for_each_shape():
    ablated = {"part": "ablations", "n": 64, "k": 32, "threads": 2}
    rows = [row("sandwich", vs_sandwich=1.0, **ablated), row("roller", vs_sandwich=0.1)]
    rows += [
        row("no slices", vs_sandwich=v, **ablated | {"n": n}) for n, v in ((64, 1), (96, 0.25))
    ]
    (told,) = tuning.by_cause(rows)
    assert told == {
        "machine": "A", "search over": "no slices", "f32 64x32, 2 thr.": 1.0,
        "f32 96x32, 2 thr.": 4.0, "all": 2.0,
    }  # fmt: skip


def test_a_table_of_another_machine_is_searched_anew():
    options = SimpleNamespace(threads=1, effort="fast", seconds=0.0, m=(1,), quick=False)
    run = tuning.Run(SimpleNamespace(hardware=read_hardware()), None, options)
    task = run.task((64, 64))
    candidate = task.problem(1).candidate(task.default(1))
    known = row(
        "sandwich", n=64, k=64, threads=1, target=task.target.name, kernel=candidate.kernel,
        schedule=list(candidate.schedule), trials=3, tuning_seconds=2.0,
        machine=tuning.machine_facts()["cpu"],
    )  # fmt: skip
    found = tuning.known_search([known], "policies", task)
    assert found.choices[1].program == task.default(1) and found.seconds == 2.0
    for other in ({"machine": "B"}, {"dtype": "bf16"}, {"threads": 2}):
        assert tuning.known_search([known | other], "policies", task) is None


def test_cells_follow_the_shapes_and_rows_asked_for():
    options = SimpleNamespace(
        shapes=((576, 1536), (2048, 2048)), m=(8, 128), cells=3, threads=1, trials=50
    )
    cells = list(tuning.cells(options))
    assert [(c.m, c.n, c.k) for c in cells] == [(8, 576, 1536), (128, 576, 1536), (8, 2048, 2048)]
    assert {(c.trials, c.tuned) for c in cells} == {(50, 50)}
