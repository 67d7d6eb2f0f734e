"""The real RAG benchmark without servers: questions, cells, gains with intervals, variations."""

from __future__ import annotations

import asyncio
import importlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("faiss")

from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import END, START, Retrieval, Workflow
from dovetail.workflows import BUNDLED
from tests.repository import ROOT

PEERS = {"BF16": ["llamacpp", "vllm", "openvino"], "Q4_0": ["llamacpp", "openvino"]}
RATES = {"llamacpp": 1.5, "vllm": 3.0, "openvino": 2.8}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    names = ("rag_parts", "rag_gains", "rag_real", "rag_columns", "http_servers")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


# ---- questions and passages ----


def test_questions_are_made_about_what_passages_begin_with(bench: Any) -> None:
    parts = bench.rag_parts
    texts = [f"Title {number}: words: more" for number in range(300)]
    made = list(parts.make_questions(texts))
    assert len(made) == len(set(made)) == 600 and all(": " not in one for one in made)
    for kind in (parts.ZIPF, parts.DIFFERENT):
        picked = parts.pick_questions(made, kind, 100, seed=1)
        assert len(picked) == 100 and set(picked) <= set(made)
        assert (len(set(picked)) == 100) == (kind == parts.DIFFERENT)
        assert picked == parts.pick_questions(made, kind, 100, seed=1)


def test_questions_by_zipf_come_as_often_as_their_rank_says(bench: Any) -> None:
    every = [str(number) for number in range(50)]
    picked = bench.rag_parts.pick_questions(every, bench.rag_parts.ZIPF, 20_000, seed=3)
    counts = [count for _, count in Counter(picked).most_common()]
    harmonic = sum(1 / rank for rank in range(1, 51))
    for rank in (1, 2, 5):
        assert counts[rank - 1] / 20_000 == pytest.approx(1 / rank / harmonic, rel=0.1)
    others = bench.rag_parts.pick_questions(every, bench.rag_parts.ZIPF, 20_000, seed=4)
    assert Counter(picked).most_common(3) != Counter(others).most_common(3)


TEXTS = [
    f"Town {n}: It lies by river number {n}. Its walls are {n} feet high. Few people know of it."
    for n in range(3)
]


def test_variations_have_the_title_and_all_sentences_but_one(bench: Any) -> None:
    made = list(bench.rag_parts.vary(TEXTS, 10))
    assert made[:3] == TEXTS and len(set(made)) == len(made) == 10
    for text in made[3:]:
        title, sentences = bench.rag_parts.split_passage(text)
        number = int(title.removeprefix("Town "))
        whole = bench.rag_parts.split_passage(TEXTS[number])[1]
        assert len(whole) == 3 and len(sentences) == 2 and set(sentences) < set(whole)
    with pytest.raises(SystemExit, match="no 100 variations"):
        list(bench.rag_parts.vary(TEXTS, 100))


class Letters:
    """An encoder by the letters of a text."""

    def embed(self, texts: Sequence[str], *, prompt: str | None = None) -> Any:
        rows = np.array([[1 + text.count(chr(97 + n)) for n in range(26)] for text in texts])
        return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def test_numbered_sentences_lie_around_theirs(bench: Any) -> None:
    parts = bench.rag_parts
    made = parts.number_sentences(TEXTS, 25)
    assert len(set(made)) == 25 and made[9:11] == [f"{made[0]} [1]", f"{made[1]} [1]"]
    encoder = parts.SentenceEncoder(Letters(), made[:9])
    found = encoder.embed([*made, "a text by itself"], prompt="")
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(
        found[[*range(9), 25]], Letters().embed([*made[:9], "a text by itself"])
    )
    away = np.linalg.norm(found[9:18] - found[:9], axis=1)
    angle = math.atan(parts.NOISE)  # noise at a right angle
    assert abs(np.median(away) - 2 * math.sin(angle / 2)) < 0.05 and away.std() > 0
    np.testing.assert_array_equal(found, encoder.embed([*made, "a text by itself"]))


# ---- gains ----


def row(column: str, rate: float, seed: int = 0, **fields: Any) -> dict[str, Any]:
    made = {"part": "rate", "workflow": "one-shot", "questions": "zipf", "weights": "BF16"}
    made |= {"topk": 5, "seed": seed, "count": 8, "column": column, "rate": rate, "wall": 10.0}
    times = {"mean": 1 / rate, "search": 0.1, "reply": 0.8, "decode": 0.2, "other": 0.1}
    return {**made, **times, "applied": {}, **fields}


def test_a_gain_is_the_geometric_mean_over_seeds_with_students_interval(bench: Any) -> None:
    ratios = [1.1, 1.3, 1.2, 1.25]
    found = bench.rag_gains.average(ratios)
    logs = np.log(ratios)
    half = 3.182 * logs.std(ddof=1) / 2
    expected = np.exp([logs.mean(), logs.mean() - half, logs.mean() + half])
    assert (found.mean, found.low, found.high) == pytest.approx(expected)
    assert bench.rag_gains.average([1.5]) == bench.rag_gains.Gain(pytest.approx(1.5))
    same = bench.rag_gains.average([2.0, 2.0])
    assert (same.low, same.high) == pytest.approx((2, 2))


def test_an_interval_holds_the_truth_about_as_often_as_it_says(bench: Any) -> None:
    rng = np.random.default_rng(0)
    held = 0
    for ratios in np.exp(0.2 + 0.1 * rng.standard_normal((2000, 3))):
        found = bench.rag_gains.average(ratios.tolist())
        held += found.low <= math.exp(0.2) <= found.high
    assert 0.93 < held / 2000 < 0.97


def test_the_best_stack_of_each_seed_is_what_counts(bench: Any) -> None:
    gains = bench.rag_gains
    rows = [row("stack:llamacpp", 2.0), row("stack:vllm", 3.0), row("full", 6.0)]
    rows += [row("stack:llamacpp", 4.0, 1), row("stack:vllm", 3.0, 1), row("full", 8.0, 1)]
    assert gains.gain(rows, "full", "stack").mean == pytest.approx(2.0)
    assert gains.gain(rows, "full", "stack:llamacpp").mean == pytest.approx(math.sqrt(6))
    assert gains.gain(rows, "full", "plain") is None and gains.best_stack([rows[2]]) is None
    slow = [row("stack:vllm", 2.0, part="latency"), row("full", 4.0, part="latency")]
    assert gains.gain(slow, "full", "stack").mean == pytest.approx(2.0), "half the latency"


def test_the_summary_takes_the_least_cell_of_each_key(bench: Any) -> None:
    rows = []
    for seed in range(3):
        for workflow, faster in (("one-shot", 1.5), ("hyde", 1.2)):
            for column, rate in (("stack:vllm", 2.0), ("served", 2.2), ("plain", 2.4 - 0.1 * seed),
                                 ("full", 2.0 * faster), ("no_split", 1.0 * faster)):  # fmt: skip
                rows.append(row(column, rate, seed, workflow=workflow))
    rows.append(row("free", 5.0, again=50.0))
    rows += [row("stack:vllm", 1.0, weights="Q4_0"), row("full", 3.0, weights="Q4_0")]
    found = bench.rag_gains.summarize(rows)
    assert found["rate_vs_stack_zipf_min"] == pytest.approx(1.2)
    assert found["rate_vs_stack_zipf_interval"] == pytest.approx([1.2, 1.2])
    assert found["kernels_min"] == pytest.approx(1.1)
    assert found["orchestration_min"] < 2.3 / 2.2, "its lower end"
    assert found["orchestration_min"] == found["orchestration_interval"][0]
    assert found["bound_of_free_searches_and_prompts_min"] == pytest.approx(50 / 3)
    assert found["gain_of_split"] == pytest.approx(2.0)
    assert found["q4_0_rate_vs_stack_min"] == pytest.approx(3.0)
    assert "rate_vs_stack_min" not in found and "latency_vs_stack_min" not in found
    assert bench.rag_gains.summarize([]) == {}


def test_tables_tell_the_best_stack_the_waterfall_and_the_map(bench: Any) -> None:
    gains = bench.rag_gains
    rows = [row("stack:vllm", 3.0), row("stack:llamacpp", 2.0), row("full", 6.0)]
    (line,) = gains.compare(rows)
    assert (line["stack"], line["full"], line["best"], line["d/a"]) == (3.0, 6.0, "vllm", "2.00")
    assert gains.ablate([*rows, row("no_stop", 4.0)])[0]["no_stop"] == "1.50"
    first, second = gains.divide_time(
        [row("stack:vllm", 1.0, part="latency"), row("full", 2.0, part="latency")]
    )
    assert first["column"] == "stack" and first["wait"] == pytest.approx(0.6)
    spent = [second[name] for name in ("wait", "search", "decode", "other")]
    assert sum(spent) == pytest.approx(1.0)
    weighed = [
        row(column, rate, part="vectors", vectors=10, nprobe=n, alone_search=n / 10, alone_reply=1)
        for n in (20, 10) for column, rate in (("plain", 1.0), ("full", n / 10))
    ]  # fmt: skip
    assert [(one["ratio"], one["full/plain"]) for one in gains.map_gains(weighed)] == [
        (1.0, "1.00"),
        (2.0, "2.00"),
    ]


# ---- cells ----


def run_plan(bench: Any, plan: Any) -> list[dict[str, Any]]:
    """Measure a plan on a made-up machine."""
    rows: list[dict[str, Any]] = []
    while left := bench.rag_real.cells_left(plan, rows):
        cell = left[0]
        peer = cell["column"].partition(":")[2]
        applied = {"split": 3, "stop": 1} if cell["column"] == "full" else {}
        made = row("", RATES.get(peer, 4.0), again=9.0)
        rows.append({**made, **cell, "applied": applied})
    return rows


def test_a_plan_measures_each_cell_once_and_the_likely_stacks(bench: Any) -> None:
    plan = bench.rag_real.Plan(peers=PEERS, vectors={1000: (8, 16)}, count=16, turns=2)
    rows = run_plan(bench, plan)
    keys = [
        tuple(str(one.get(name)) for name in (*bench.rag_gains.PLACE, "seed", "column"))
        for one in rows
    ]
    assert len(set(keys)) == len(keys)
    main = [one for one in rows if one["part"] == "rate" and one["workflow"] == "hyde"
            and one["questions"] == "zipf" and one["weights"] == "BF16"]  # fmt: skip
    columns = {seed: [one["column"] for one in main if one["seed"] == seed] for seed in range(3)}
    stacks = {seed: [c for c in found if c.startswith("stack")] for seed, found in columns.items()}
    assert stacks[0] == ["stack:llamacpp", "stack:vllm", "stack:openvino"]
    assert stacks[1] == stacks[2] == ["stack:vllm", "stack:openvino"], "llama.cpp is far behind"
    for found in columns.values():
        assert {"served", "plain", "full"} <= set(found)
    by_one_seed = {"free", "no_split", "no_stop"}
    assert by_one_seed <= {*columns[0]} and not by_one_seed & {*columns[1]}
    late = {one["column"] for one in rows if one["part"] == "latency"}
    assert late == {"stack:vllm", "served", "plain", "full"}
    assert {one["workflow"] for one in rows} == {*BUNDLED, "one-shot+hyde"}
    parts = {"rate", "latency", "turns", "offline", "bursts", "vectors"}
    assert {one["part"] for one in rows} == parts
    small = [one for one in rows if one["weights"] == "Q4_0"]
    stacks = {"stack:llamacpp", "stack:openvino"}
    assert {one["column"] for one in small if one["part"] == "rate"} == stacks | {"full"}
    assert {one["column"] for one in small if one["part"] == "turns"} >= {"served", "plain", "full"}
    assert bench.rag_gains.summarize(rows)["latency_vs_stack_min"] == pytest.approx(4 / 3)


def test_a_plan_goes_on_where_a_report_ends_and_without_any_stack(bench: Any) -> None:
    plan = bench.rag_real.Plan(peers=PEERS, vectors={}, count=16, seeds=1, groups=("main",))
    rows = run_plan(bench, plan)
    for kept in (0, 3, len(rows) - 1):
        left = bench.rag_real.cells_left(plan, rows[:kept])
        assert left and left[0].items() <= rows[kept].items()
    assert bench.rag_real.cells_left(plan, rows) == []
    alone = bench.rag_real.Plan(peers={"BF16": [], "Q4_0": []}, vectors={}, seeds=1, turns=1)
    assert {one["part"] for one in run_plan(bench, alone)} == {"rate", "turns"}, (
        "there is no rate to be 0.7 of"
    )


def test_the_time_left_is_told_by_what_like_cells_took(bench: Any) -> None:
    predict = bench.rag_gains.predict_seconds
    done = [row("full", 1.0, wall=10.0), row("plain", 1.0, wall=20.0)]
    done.append(row("full", 1.0, wall=90.0, workflow="irg"))
    cells = [row("full", 0.1), row("served", 0.1), row("full", 0.1, workflow="recomp")]
    assert predict(cells, done, 1.0) == pytest.approx(10 + 15 + 40)
    assert predict(cells, [], 7.0) == 21.0


def test_columns_answer_the_same_questions_in_turns_of_changing_order(bench: Any) -> None:
    heard = list[tuple[str, str]]()

    @asynccontextmanager
    async def open_fake(column: str) -> AsyncIterator[Any]:
        async def ask(question: str, turn: int) -> dict[str, Any]:
            heard.append((column, question))
            return {}

        yield bench.rag_columns.Asked(ask)

    turns = [[f"{turn} {n}" for n in range(3)] for turn in range(8)]
    columns = ("stack:vllm", "plain", "full")
    opened = {column: open_fake(column) for column in columns}
    rows = asyncio.run(bench.rag_real.time_turns(opened, turns))
    asked = [question for turn in turns for question in turn]
    for column in columns:
        mine = [question for name, question in heard if name == column]
        assert [question for question in mine if question not in bench.rag_real.WARM] == asked
    orders = [[one["column"] for one in rows if one["seed"] == turn] for turn in range(8)]
    assert all(sorted(order) == sorted(columns) for order in orders)
    assert len({tuple(order) for order in orders}) > 1


def test_turns_of_another_run_are_measured_anew(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns are compared only within the same minutes, also where a run is resumed."""
    real = bench.rag_real

    @asynccontextmanager
    async def open_fake(*given: Any) -> AsyncIterator[Any]:
        async def ask(question: str, turn: int) -> dict[str, Any]:
            return {}

        yield bench.rag_columns.Asked(ask)

    monkeypatch.setattr(real, "open_column", open_fake)
    plan = real.Plan(peers={"BF16": [], "Q4_0": []}, vectors={}, groups=("turns",), turns=3)
    first = real.cells_left(plan, [])[0]
    report = SimpleNamespace(rows=[{**first, "rate": 1.0}, row("full", 1.0)])
    parts = SimpleNamespace(questions=[str(number) for number in range(100)])
    rows = real._run_turns(real.cells_left(plan, report.rows)[0], parts, plan, report)
    assert [one["part"] for one in report.rows] == ["rate"]
    assert {(one["seed"], one["column"]) for one in rows} == {
        (turn, column) for turn in range(3) for column in ("served", "plain", "full")
    }


def test_gains_of_turns_are_paired_by_turn(bench: Any) -> None:
    rows = [
        row(column, rate / (1 + turn), turn, part="turns")
        for turn in range(4)
        for column, rate in (("stack:vllm", 2.0), ("served", 2.0), ("plain", 2.0), ("full", 3.0))
    ]
    found = bench.rag_gains.summarize(rows)
    assert found["turns_vs_stack_zipf_interval"] == pytest.approx([1.5, 1.5])
    assert found["turns_orchestration_min"] == pytest.approx(1.0)
    assert not any("rate" in name for name in found)


def test_questions_come_at_random_or_in_bursts_at_the_same_rate(bench: Any) -> None:
    due = bench.rag_real.poisson_times(4000, 2.0, seed=0)
    assert due == sorted(due) and due[-1] == pytest.approx(2000, rel=0.1)
    bursts = bench.rag_real.burst_times(40, 2.0)
    assert Counter(bursts) == {0.0: 16, 8.0: 16, 16.0: 8}


# ---- columns ----


@pytest.mark.parametrize("name", BUNDLED)
def test_changed_nodes_leave_the_way_through_a_workflow(bench: Any, name: str) -> None:
    columns = bench.rag_columns
    workflow = BUNDLED[name](topk=3).workflow()
    same = columns.change_nodes(workflow, lambda node: node)
    assert (same.order, same.away, same.template) == (
        workflow.order,
        workflow.away,
        workflow.template,
    )
    free = columns.change_nodes(workflow, columns.show_in_any_order)
    orders = {node.order for node in free.nodes.values() if isinstance(node, Retrieval)}
    assert orders == {"any"}


def test_known_documents_stand_in_for_a_search(bench: Any) -> None:
    graph = RAGraph("find")
    graph.add_retrieval("search", query="input", output="docs")
    graph.add_edge(START, "search")
    graph.add_edge("search", END)
    known = {("what?", "docs"): ("a", "b")}
    made: Workflow = bench.rag_columns.change_nodes(
        graph.workflow(), lambda node: bench.rag_columns.recall(node, known)
    )
    assert made.nodes["search"].function({"input": "what?"}) == ["a", "b"]  # type: ignore[union-attr]


def test_faiss_gets_settings_and_finds_the_nearest_with_any(bench: Any) -> None:
    import faiss

    vectors = np.random.default_rng(0).standard_normal((400, 8)).astype(np.float32)
    index = faiss.index_factory(8, "IVF4,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    index.nprobe = 4
    threads, mode = bench.rag_columns.choose_faiss(index, 3)
    assert threads >= 1 and mode in (0, 1)
    best = np.argsort(-(vectors[:1] @ vectors.T))[:, :3]
    for each in (0, 1):
        found = bench.rag_columns.search_faiss(index, vectors[:1], 3, threads, each)[1]
        np.testing.assert_array_equal(found, best)


# ---- peers ----


def test_vllm_is_where_its_variable_says(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    servers = bench.http_servers
    monkeypatch.setenv("DOVETAIL_VLLM", str(tmp_path / "python"))
    assert "DOVETAIL_VLLM" in servers.vllm_missing()
    (tmp_path / "python").touch()
    assert "DOVETAIL_VLLM" not in servers.vllm_missing()
    assert servers.vllm_python() == str(tmp_path / "python")


def test_what_peers_read_for_a_width_of_weights(bench: Any) -> None:
    reads = {name: peer.reads for name, peer in bench.http_servers.SERVERS.items()}
    assert [reads[name]("BF16") for name in reads] == ["BF16", "directory", "F16"]
    assert [reads[name]("Q4_0") for name in reads] == ["Q4_0", None, "Q4_0"]
