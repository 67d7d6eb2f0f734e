"""The RAG benchmark: all planes answer alike, baselines are what their names say, keys follow."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("faiss")

from dovetail.runtime.flows.control import messages as m
from dovetail.runtime.retrieval.budget import ScanCost

MODULES = ("rag", "rag_cells", "rag_costs", "rag_planes", "rag_script")
MODULES += ("rag_wall", "rag_world", "scripted_engine", "simulated_workflows")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})


class Quick:
    """An engine whose steps take 0.1 ms."""

    def seconds(self, prefills: Any, decodes: int, stored: int) -> float:
        return 1e-4


@pytest.fixture(scope="module")
def stage(bench: Any) -> Any:
    script = bench.rag_script.Script(bench.rag_script.make_corpus(64, 1500, 16))
    index = bench.rag_world.StandIn(script.corpus, 20_000)
    return make_stage(bench, script, index)


def make_stage(bench: Any, script: Any, index: Any, **fields: Any) -> Any:
    machine = bench.simulated_workflows.WorkflowMachine(
        scan=ScanCost(1e-4, 1e-6, 4), device=ScanCost(1e-5, 1e-7)
    )
    made = {"seconds": 0.1, "long": 0.1, "backlog": 200, **fields}
    return bench.rag_cells.Stage(script, index, machine, lambda model: Quick(), **made)


def cell(bench: Any, *names: str, **fields: Any) -> Any:
    planes = (*bench.rag_planes.MAKERS, bench.rag_cells.FREE)
    made = {"group": "online", "workflows": names, "nprobe": 16, "planes": planes, "point": "burst"}
    return bench.rag_cells.Cell(**{**made, **fields})


def test_every_plane_gives_every_workflow_the_same_answers(bench: Any, stage: Any) -> None:
    row = bench.rag_cells.run_cell(stage, cell(bench, *bench.rag_cells.WORKFLOWS, room=0.2), ())
    assert row["sequential_seconds"] > max(row["async_seconds"], row["dovetail_seconds"])
    assert row["dovetail_attempted"] >= row["dovetail_accepted"] > 0
    assert row["no_speculation_attempted"] == row["async_attempted"] == 0
    assert row["generation_bound"] > 0 and row["retrieval_bound"] > 0
    assert row["early_scanned"] < 0.9 * row["dovetail_scanned"] and row["early_same"] > 0.5


def test_no_plane_is_faster_than_searches_that_take_no_time(bench: Any, stage: Any) -> None:
    row = bench.rag_cells.run_cell(stage, cell(bench, "irg", point=0.8), ())
    means = {key: value for key, value in row.items() if key.endswith("_mean")}
    assert min(means, key=means.__getitem__) == "free_mean" and len(means) > 10


@pytest.mark.parametrize("nprobe", [1, 32], ids=["engine-bound", "index-bound"])
def test_no_plane_sustains_more_than_index_and_engine_can_take(
    bench: Any, stage: Any, nprobe: int
) -> None:
    one = cell(bench, "hyde", nprobe=nprobe, planes=("async", "dovetail"))
    row = bench.rag_cells.run_cell(stage, one, ())
    bounds = row["retrieval_bound"], row["generation_bound"]
    assert (bounds[0] < bounds[1]) == (nprobe == 32)
    best = max(row["async_rate"], row["dovetail_rate"])
    assert 0.5 * min(bounds) < best <= 1.05 * min(bounds)  # a short backlog has a tail


@pytest.mark.parametrize("point", ["burst", 0.8])
def test_workflows_in_sub_stages_take_no_longer_than_stage_by_stage(
    bench: Any, stage: Any, point: Any
) -> None:
    """The time bound of HedraRAG's test A6.10, on a virtual clock: the same requests, one trace."""
    planes = ("sequential", "dovetail")
    row = bench.rag_cells.run_cell(
        stage, cell(bench, "hyde", "multistep", point=point, planes=planes), ()
    )
    assert row["dovetail_mean"] <= row["sequential_mean"]


def orders(bench: Any, stage: Any, plane: Any, *names: str) -> list[m.Order]:
    """Return what a plane, or that of a name, orders for ten requests at once."""
    found: list[m.Order] = []
    wanted, cost = cell(bench, *names), stage.engine("any")
    scene = bench.rag_world.Scene(stage.index, stage.script, 16)
    if isinstance(plane, str):
        plane = bench.rag_planes.make_plane(
            plane, bench.rag_planes.Setting(scene, stage.machine, cost)
        )
    engine = bench.scripted_engine.ScriptedEngine(
        cost, stage.script.tokens, bench.rag_script.count_tokens
    )
    arrivals = bench.rag_world.begin_runs(stage.arrivals(wanted, 1.0)[:10])
    made = bench.simulated_workflows.WorkflowSimulation(plane, scene, stage.machine, engine)
    made.run(arrivals, lambda now, given: found.extend(given))
    return found


def scans(found: list[m.Order]) -> list[m.ScanClusters]:
    return [order for order in found if isinstance(order, m.ScanClusters)]


def test_the_sequential_baseline_does_one_stage_at_a_time(bench: Any, stage: Any) -> None:
    found = orders(bench, stage, "sequential", "irg")
    kinds = [
        type(order).__name__ for order in found if isinstance(order, m.ScanClusters | m.Generate)
    ]
    first, rest = kinds[:2], kinds[2:]  # the request that came first is a batch of its own
    assert first == ["ScanClusters", "Generate"]
    assert rest[:4] == ["ScanClusters", "Generate"] * 2
    batch = ["ScanClusters", *["Generate"] * 9] * 3
    assert rest[4:] == batch
    assert [len(scan.parts) for scan in scans(found)] == [1, 1, 1, 9, 9, 9]


def test_the_asynchronous_baseline_scans_all_that_wait_and_whole(bench: Any, stage: Any) -> None:
    found = scans(orders(bench, stage, "async", "one-shot"))
    assert sum(len(scan.parts) for scan in found) == 10
    assert all(len(part.clusters) == 16 for scan in found for part in scan.parts)
    assert len(found) == 2, "the first request, then all that came meanwhile"


def test_the_divided_baseline_deals_a_search_to_idle_threads(bench: Any, stage: Any) -> None:
    first, *_ = scans(orders(bench, stage, "async_divided", "one-shot"))
    assert len(first.parts) == 4, "one search, four threads"
    assert sum(len(part.clusters) for part in first.parts) == 16


def test_the_fixed_split_takes_its_count_of_each(bench: Any, stage: Any) -> None:
    wide = orders(bench, stage, "fixed", "one-shot")
    assert {len(p.clusters) for scan in scans(wide) for p in scan.parts} == {16}
    scene = bench.rag_world.Scene(stage.index, stage.script, 16)
    plane = importlib.import_module("baselines.stages").FixedSplit(scene, count=6, width=3)
    found = orders(bench, stage, plane, "one-shot")
    assert {len(p.clusters) for scan in scans(found) for p in scan.parts} == {6, 4}
    assert max(len(scan.parts) for scan in scans(found)) == 3


@pytest.mark.parametrize(("plane", "first"), [("ralmspec", False), ("piperag", True)])
def test_rules_of_guessing(bench: Any, stage: Any, plane: str, first: bool) -> None:
    found = orders(bench, stage, plane, "irg")
    guessed = {o.source for o in found if isinstance(o, m.Generate) and o.provisional}
    nodes = {str(source.node) for source in guessed}
    assert ("read 0" in nodes) is first, "only a fixed point can guess without a history"
    assert {"read 1", "read 2"} <= nodes


def test_the_wall_clock_gives_the_answers_of_virtual_time(bench: Any, stage: Any) -> None:
    index = bench.rag_wall.FaissIndex(stage.script.corpus)
    cost = bench.rag_wall.measure_scan(index, [stage.script.meaning("q1:0 word")])
    assert cost.fixed > 0
    wall = make_stage(bench, stage.script, index, simulation=bench.rag_wall.WallSimulation)
    asked = cell(bench, "multistep", "hyde")
    for plane in ("sequential", "async", "dovetail"):
        arrivals = stage.arrivals(asked, 1.0)[:4]
        done, wanted = (each.run(asked, plane, arrivals) for each in (wall, stage))
        answers, right = (
            {o.request: o.state["answer"] for o in each.outcomes} for each in (done, wanted)
        )
        assert answers == right and done.vectors["cpu"] > 0 and done.scans > 0


def test_the_wall_clock_scans_beside_the_thread_that_schedules(bench: Any, stage: Any) -> None:
    class Watched(bench.rag_wall.FaissIndex):
        threads: ClassVar[set[int]] = set()

        def scan(self, parts: Any) -> Any:
            self.threads.add(threading.get_ident())
            return super().scan(parts)

    index, asked = Watched(stage.script.corpus), cell(bench, "irg")
    wall = make_stage(bench, stage.script, index, simulation=bench.rag_wall.WallSimulation)
    done = wall.run(asked, "dovetail", stage.arrivals(asked, 1.0)[:4])
    assert len(index.threads) == 1 and threading.get_ident() not in index.threads
    assert done.busy["cpu"] > 0


def test_cells_cover_workflows_probes_and_figures(bench: Any) -> None:
    for scale in ("simulated", "cpu"):
        made = list(bench.rag.make_cells(scale))
        keys = [json.dumps(one.key) for one in made]
        assert len(set(keys)) == len(keys)
        online = {(one.workflows, one.nprobe) for one in made if one.group == "online"}
        assert len(online) == 15
    found = bench.rag.make_cells("simulated")
    assert {one.group for one in found} == set(bench.rag.GROUPS)


def test_a_small_run_writes_the_keys_and_resumes(
    bench: Any, stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = bench.rag_cells
    one = {"workflows": ("irg",), "nprobe": 16}
    single = bench.rag.SINGLE["simulated"]
    made = [
        cells.Cell(group="rates", planes=("sequential", "async", "dovetail"), **one),
        cells.Cell(group="online", planes=single, point=0.6, of="async", **one),
        cells.Cell(group="ablation", planes=bench.rag.ABLATION, point=0.8, **one),
        cells.Cell(group="cache", planes=("dovetail", "no_cache"), point=0.8, room=0.2, **one),
        cells.Cell(group="offline", planes=single, point="burst", **one),
        cells.Cell(group="saturation", planes=("async",), point=1.5, **one),
        cells.Cell(group="early", planes=bench.rag.ENDING, point=0.8, **one),
    ]
    monkeypatch.setattr(bench.rag, "make_cells", lambda *_: made)
    monkeypatch.setitem(bench.rag.STAGES, "simulated", lambda options: stage)
    out = tmp_path / "rag.json"
    report = bench.rag.main(["--json", str(out)])
    body = json.loads(out.read_text())
    assert len(body["rows"]) == len(made)
    wanted = {"rate_vs_sequential_irg_16", "rate_vs_async_min", "latency_vs_async_min"}
    wanted |= {"latency_vs_sequential_loaded_min", "split_gain", "spec_gain", "cache_gain"}
    wanted |= {"min_cell", "speculation_accuracy", "async_saturation_min", "early_gain"}
    wanted |= {"bound_vs_sequential_irg_16", "possible_vs_async_min", "early_same_answers"}
    assert wanted <= set(body["summary"])
    rate, latency = body["rows"][:2]
    assert latency["rate"] == pytest.approx(0.6 * rate["async_rate"])
    monkeypatch.setattr(bench.rag, "run_cell", None)  # nothing is run again
    assert bench.rag.main(["--json", str(out), "--resume"]).rows == report.rows
    other = ["--workflow", "hyde", "--nprobe", "16"]
    assert bench.rag.main(["--json", str(out), *other]).rows == []


def test_a_report_says_how_the_index_compares_with_the_last_cache(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cache, share in ((768_000_000, 2.0), (None, None)):
        monkeypatch.setattr(bench.rag, "machine_facts", lambda c=cache: {"caches": {"L3": c}})
        assert bench.rag._index_over_cache(1_000_000) == share


def test_the_page_names_the_load_that_its_rates_were_measured_at() -> None:
    root = Path(__file__).parents[2]
    stored = json.loads((root / "benchmarks" / "results" / "rag_cpu.json").read_text())
    (line,) = (
        line
        for line in (root / "docs" / "rag.md").read_text().splitlines()
        if line.startswith("| `rag_cpu.json`")
    )
    bursts = {row["point"] for row in stored["rows"] if row["group"] == "rates"} == {"burst"}
    assert bursts == ("the throughput of a burst" in line)
    for row in stored["rows"]:  # of bursts a bound is no bound where the engine's was not measured
        held = row["dovetail_rate"] <= 1.05 * min(row["retrieval_bound"], row["generation_bound"])
        assert held or "allow" not in line
