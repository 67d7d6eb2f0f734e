"""Workflows on real parts: passages, encoder, model, engines and servers, by the wall clock.

Out: a row for each cell (workflow, questions, seed, what is asked how) and column; see
`rag_columns.py` for the columns, `rag_gains.py` for what is made of rows. Groups of cells:

    main      two workflows, all columns: the rate with AT_ONCE questions under way, and latencies
              of questions that come at random at RATE of the best stack's rate; what is not
              compared (free, without one transformation, latencies of others) by one seed
    turns     the same workflows, also from 4 bits, TURN questions at a time by the best stack,
              our engine under LangGraph, plain and full, in changing order, while the others wait:
              ratios are of the same minute of a machine whose speed changes. Turns are the seeds
    others    the other workflows, the best stack and ours, one seed, half the questions
    variants  the first workflow: one document instead of five, all questions at once, bursts, and
              a mix of both workflows; different questions, one seed
    q4_0      the rates of main from one file of 4-bit weights, one seed
    vectors   where searches weigh: an index of sentences, by its size and the clusters probed, our
              engine under LangGraph, plain, full, and under rivals' rules of guessing

A row tells the mean seconds of a request by what it was for (`search` with the embedding of the
query; `reply`, of which `decode` after the first token; `other` is orchestration), tokens of
prompts that were computed, transformations that were applied and why others were not, CPU seconds,
and cores that other processes used meanwhile. `again` is the rate of a second pass, whose prompts
have all been read: a bound on what reuse may gain. Rows that a report has are not measured again; a
column without a transformation is only measured where `full` has applied it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeAlias

import numpy as np

from common import BUSY_LIMIT, Report, rows_table, timed_region, work_folder
from dovetail.ir.workflow import Workflow
from generate_peers import installed_peers
from http_servers import SERVERS
from rag_cells import GRAPHS
from rag_columns import TOKENS, Asked, Opened, find_known, open_column
from rag_gains import (
    FREE,
    FULL,
    PLAIN,
    RAGCACHE,
    RALMSPEC,
    SERVED,
    STACK,
    WITHOUT,
    Row,
    ablate,
    best_stack,
    compare,
    divide_time,
    map_gains,
    predict_seconds,
    stacks_to_measure,
    summarize,
)
from rag_parts import (
    BF16,
    DIFFERENT,
    Q4_0,
    TOPK,
    ZIPF,
    Parts,
    build_parts,
    build_sentences,
    pick_questions,
)

AT_ONCE = 32
"""Questions under way at the same time."""
WARM = ("Who wrote the first book about a river?", "Which of the two films is older?")
ALONE = 4
"""Questions by which the search and the reply of a request alone are timed."""
RATE = 0.7
"""Part of the stack's rate at which latencies are compared."""
BURST = 16
"""Questions that come together."""
TRIES = 2
"""Runs of a cell beside which other processes worked; the least disturbed one counts."""
TURNS, TURN = 10, 12
"""Turns of a cell of `turns`, and the questions of each, all at once."""
GROUPS = ("main", "turns", "others", "variants", "q4_0", "vectors")
MAIN = ("one-shot", "hyde")
VECTORS = {100_000: (128, 512), 1_000_000: (128, 256, 512)}
"""Clusters probed, by the size of an index of sentences."""
RIVALS = (SERVED, PLAIN, FULL, RALMSPEC, RAGCACHE)
CELL_SECONDS = 45.0
"""What a cell takes, until some have been measured."""
TIMES = ("search", "reply", "decode", "other")
Cell: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be measured. peers: servers that can read the weights, by their width."""

    peers: Mapping[str, Sequence[str]]
    groups: Sequence[str] = GROUPS
    workflows: Sequence[str] = MAIN
    seeds: int = 3
    turns: int = TURNS
    count: int = 48
    vectors: Mapping[int, Sequence[int]]
    quick: bool = False


def plan_cells(plan: Plan, rows: Sequence[Row]) -> Iterator[Cell]:
    """Yield all cells of a plan, as far as they can be told by the rows that there are.

    The best stack is known once all have a rate, and what `full` applies once it has a row.
    """
    makers = {
        "main": _main,
        "turns": _turns,
        "others": _others,
        "variants": _variants,
        "q4_0": _small,
        "vectors": _vectors,
    }
    for group in GROUPS:
        if group in plan.groups:
            yield from makers[group](plan, rows)


def _cell(plan: Plan, workflow: str, questions: str, **fields: Any) -> Cell:
    made = {"part": "rate", "workflow": workflow, "questions": questions, "weights": BF16}
    return {**made, "topk": TOPK, "seed": 0, "count": plan.count, **fields}


def _rates(plan: Plan, cell: Cell, rows: Sequence[Row]) -> Iterator[Cell]:
    """Yield the cell for each stack that may be the best, and for ours."""
    for peer in stacks_to_measure(cell, rows, plan.peers[cell["weights"]]):
        yield {**cell, "column": f"{STACK}:{peer}"}
    yield {**cell, "column": FULL}


def _beside(cell: Cell, rows: Sequence[Row], *columns: str, **fields: Any) -> Iterator[Cell]:
    """Yield the cell, with other fields, for the stack that is the best in it, and columns."""
    if (best := best_rate(cell, rows)) is not None:
        for column in (str(best["column"]), *columns):
            yield {**cell, **fields, "column": column}


def best_rate(cell: Row, rows: Sequence[Row]) -> Row | None:
    """Return the row of the stack with the highest rate for a cell's questions."""
    wanted = {name: cell[name] for name in ("workflow", "questions", "weights", "topk", "seed")}
    wanted["part"] = "rate"
    return best_stack(row for row in rows if wanted.items() <= row.items())


def _main(plan: Plan, rows: Sequence[Row]) -> Iterator[Cell]:
    for seed in range(plan.seeds):
        for workflow in plan.workflows:
            for kind in (ZIPF, DIFFERENT):
                cell = _cell(plan, workflow, kind, seed=seed)
                yield from _rates(plan, cell, rows)
                for column in (SERVED, PLAIN, *([] if seed else [FREE])):
                    yield {**cell, "column": column}
                yield from [] if seed else _without(cell, rows)
                beside = (FULL,) if seed else (SERVED, PLAIN, FULL)
                yield from _beside(cell, rows, *beside, part="latency")


def _without(cell: Cell, rows: Sequence[Row]) -> Iterator[Cell]:
    """Yield the cell without each transformation that ours has applied in it."""
    full = {**cell, "column": FULL}
    done = next((row for row in rows if full.items() <= row.items()), None)
    for name in done["applied"] if done else ():
        yield {**cell, "column": f"{WITHOUT}{name}"}


def _turns(plan: Plan, rows: Sequence[Row]) -> Iterator[Cell]:
    for weights, workflow in product((BF16, Q4_0), plan.workflows):
        for kind in (ZIPF, DIFFERENT):
            cell = _cell(plan, workflow, kind, part="turns", count=TURN, weights=weights)
            rated = {**cell, "seed": None, "count": plan.count}
            known = stacks_to_measure(rated, rows, plan.peers[weights])
            for turn in range(plan.turns):
                for column in (*(f"{STACK}:{peer}" for peer in known), SERVED, PLAIN, FULL):
                    yield {**cell, "seed": turn, "column": column}


def _others(plan: Plan, rows: Sequence[Row]) -> Iterator[Cell]:
    for workflow in (name for name in GRAPHS if name not in plan.workflows):
        for kind in (ZIPF, DIFFERENT):
            cell = _cell(plan, workflow, kind, count=plan.count // 2)
            yield from _rates(plan, cell, rows)
            yield from _beside(cell, rows, FULL, part="latency")


def _variants(plan: Plan, rows: Sequence[Row]) -> Iterator[Cell]:
    cell = _cell(plan, plan.workflows[0], DIFFERENT)
    yield from _rates(plan, {**cell, "topk": 1}, rows)
    yield from _beside(cell, rows, FULL, part="offline", count=2 * plan.count)
    yield from _beside(cell, rows, FULL, part="bursts")
    mixed = {**cell, "workflow": "+".join(MAIN)}
    yield from _rates(plan, mixed, rows)
    yield from _beside(mixed, rows, FULL, part="latency")


def _small(plan: Plan, rows: Sequence[Row]) -> Iterator[Cell]:
    for workflow in plan.workflows:
        for kind in (ZIPF, DIFFERENT):
            yield from _rates(plan, _cell(plan, workflow, kind, weights=Q4_0), rows)


def _vectors(plan: Plan, rows: Sequence[Row]) -> Iterator[Cell]:
    for vectors, widths in plan.vectors.items():
        for nprobe in widths:
            for workflow in ("irg", "hyde"):
                cell = _cell(plan, workflow, DIFFERENT, part="vectors", count=plan.count // 2)
                for column in RIVALS:
                    yield {**cell, "vectors": vectors, "nprobe": nprobe, "column": column}


# ---- how questions come ----


async def time_burst(
    opened: Opened,
    questions: Sequence[str],
    *,
    at_once: int = AT_ONCE,
    again: bool = False,
    alone: Sequence[str] = (),
) -> dict[str, Any]:
    """Return how fast questions are answered, `at_once` of them under way.

    again: once more, all prompts being known. alone: questions that are asked one by one before.
    """
    room = asyncio.Semaphore(at_once)
    async with opened as asked:

        async def one(question: str, turn: int) -> float:
            async with room:
                start = time.perf_counter()
                await asked.ask(question, turn)
                return time.perf_counter() - start

        async def run() -> list[float]:
            return await asyncio.gather(*map(one, questions, range(len(questions))))

        figures = await _time(asked, run, alone)
        if again:
            with timed_region() as region:
                await run()
            figures["again"] = len(questions) / region.seconds
    return {"rate": len(questions) / figures["seconds"], **figures}


async def time_turns(
    opened: Mapping[str, Opened], questions: Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
    """Return rows of columns that answer the same questions, some at once, in turns."""
    rows: list[dict[str, Any]] = []
    rng = np.random.default_rng(0)
    async with AsyncExitStack() as stack:
        asked = {name: await stack.enter_async_context(one) for name, one in opened.items()}
        for turn, some in enumerate(questions):
            for column in rng.permutation(list(asked)).tolist():
                mine = asked[column]

                async def run(mine: Asked = mine, some: Sequence[str] = some) -> list[float]:
                    return await asyncio.gather(*(_seconds(mine, one) for one in some))

                figures = await _time(mine, run)
                rate = len(some) / figures["seconds"]
                rows.append({"seed": turn, "column": column, "rate": rate, **figures})
    return rows


async def _seconds(asked: Asked, question: str) -> float:
    start = time.perf_counter()
    await asked.ask(question, 0)
    return time.perf_counter() - start


async def time_arrivals(
    opened: Opened, questions: Sequence[str], due: Sequence[float]
) -> dict[str, Any]:
    """Return the latencies of questions that come at times."""
    async with opened as asked:

        async def run() -> list[float]:
            start = time.perf_counter()

            async def one(question: str, turn: int, at: float) -> float:
                await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
                await asked.ask(question, turn)
                return time.perf_counter() - start - at

            return await asyncio.gather(*map(one, questions, range(len(questions)), due))

        return await _time(asked, run)


def poisson_times(count: int, rate: float, seed: int) -> list[float]:
    """Return when questions come that come at random, so many each second."""
    due: list[float] = np.random.default_rng(seed).exponential(1 / rate, count).cumsum().tolist()
    return due


def burst_times(count: int, rate: float) -> list[float]:
    """Return when questions come that come BURST at a time, so many each second on average."""
    return [number // BURST * BURST / rate for number in range(count)]


async def _time(
    asked: Asked, run: Callable[[], Awaitable[list[float]]], alone: Sequence[str] = ()
) -> dict[str, Any]:
    """Return what requests take, and what they take it for."""
    for turn, question in enumerate(WARM):
        await asked.ask(question, turn)
    figures: dict[str, Any] = {}
    if alone:
        before = Counter(asked.spent)
        for turn, question in enumerate(alone):
            await asked.ask(question, turn)
        for name in ("search", "reply"):
            figures[f"alone_{name}"] = (asked.spent[name] - before[name]) / len(alone)
    before = Counter(asked.spent)
    applied, left = Counter(asked.applied), Counter(asked.left)
    with timed_region() as region:
        latencies = await run()
    count, spent = len(latencies), asked.spent
    mean = {name: (spent[name] - before[name]) / count for name in TIMES}
    mean["other"] = statistics.fmean(latencies) - mean["search"] - mean["reply"]
    return {
        "seconds": region.seconds,
        **_spread(latencies),
        **mean,
        **figures,
        "computed": spent["computed"] - before["computed"],
        "applied": dict(asked.applied - applied),
        "left": dict(asked.left - left),
        "cpu": region.own,
        "others": region.others,
    }


def _spread(latencies: Sequence[float]) -> dict[str, float]:
    return {
        "mean": statistics.fmean(latencies),
        "p50": statistics.median(latencies),
        "p95": float(np.quantile(latencies, 0.95)),
    }


# ---- cells measured ----


def measure_real(options: argparse.Namespace, report: Report) -> None:
    """Run the cells that a report lacks, and write it after each."""
    plan, started = make_plan(options), time.perf_counter()
    widths = [BF16, *([Q4_0] if {"q4_0", "turns"} & {*plan.groups} else [])]
    with work_folder(options.work) as folder:
        parts = build_parts(folder, options.traces, widths, options.passages)
        while left := cells_left(plan, report.rows):
            minutes = predict_seconds(left, report.rows, CELL_SECONDS) / 60
            print(f"{len(left)} cells are left, about {minutes:.0f} minutes", flush=True)
            if time.perf_counter() - started > options.limit:
                print("the time is up; --resume goes on", flush=True)
                break
            begun = time.perf_counter()
            if left[0]["part"] == "turns":
                rows = _run_turns(left[0], parts, plan, report)
            else:
                rows = [{**left[0], **_run_cell(left[0], parts, plan, options, report.rows)}]
            wall = (time.perf_counter() - begun) / len(rows)
            report.rows += [{**row, "wall": wall} for row in rows]
            print(*report.rows[-len(rows) :], sep="\n", flush=True)
            report.summary = summarize(report.rows)
            report.write(options.json)
    report.summary = summarize(report.rows)


def make_plan(options: argparse.Namespace) -> Plan:
    """Return what a command line asks for."""
    peers = installed_peers(options.peers, SERVERS)
    by_width = {
        width: [peer for peer in peers if SERVERS[peer].reads(width)] for width in (BF16, Q4_0)
    }
    plan = Plan(
        peers=by_width,
        groups=options.only or GROUPS,
        workflows=options.workflow or MAIN,
        seeds=options.seeds,
        count=options.count,
        vectors=VECTORS,
    )
    if options.quick:
        groups = [group for group in plan.groups if group != "others" or options.only]
        few = {"workflows": plan.workflows[:1], "vectors": {20_000: (256,)}}
        plan = replace(plan, groups=groups, seeds=1, turns=1, count=8, quick=True, **few)
    return plan


def cells_left(plan: Plan, rows: Sequence[Row]) -> list[Cell]:
    """Return the cells that have no row."""
    return [
        cell
        for cell in plan_cells(plan, rows)
        if not any(cell.items() <= row.items() for row in rows)
    ]


def _graphs(cell: Cell) -> list[Workflow]:
    """Return the workflows of a cell, which take turns."""
    return [
        GRAPHS[name](topk=cell["topk"], max_tokens=TOKENS, ignore_eos=True).workflow()
        for name in cell["workflow"].split("+")
    ]


def _run_turns(one: Cell, parts: Parts, plan: Plan, report: Report) -> list[dict[str, Any]]:
    """Return the rows of all turns of a cell's questions, in place of those that there are of some.

    Rows of another run would be of other minutes.
    """
    same = ("part", "workflow", "questions", "weights", "topk", "count")
    cell = {name: one[name] for name in same}
    report.rows = [row for row in report.rows if not cell.items() <= row.items()]
    mine = [found for found in plan_cells(plan, report.rows) if cell.items() <= found.items()]
    every = pick_questions(parts.questions, cell["questions"], TURN * plan.turns, 0)
    questions = [every[at : at + TURN] for at in range(0, len(every), TURN)]
    opened = {
        column: open_column(column, parts, cell["weights"], _graphs(cell))
        for column in dict.fromkeys(found["column"] for found in mine)
    }
    return [{**cell, **row} for row in asyncio.run(time_turns(opened, questions))]


def _run_cell(
    cell: Cell, parts: Parts, plan: Plan, options: argparse.Namespace, rows: Sequence[Row]
) -> dict[str, Any]:
    graphs = _graphs(cell)
    count, seed, column, part = (cell[name] for name in ("count", "seed", "column", "part"))
    questions = pick_questions(parts.questions, cell["questions"], count, seed)
    if part == "vectors":
        index = build_sentences(parts, options.traces, cell["vectors"])
        parts = replace(parts, index=index, nprobe=cell["nprobe"])
    known = None
    if column == FREE:
        found = open_column(FULL, parts, cell["weights"], graphs)
        known = asyncio.run(find_known(found, graphs, [*WARM, *questions]))

    def run() -> Coroutine[Any, Any, dict[str, Any]]:
        opened = open_column(column, parts, cell["weights"], graphs, known)
        if part == "vectors":
            alone = pick_questions(parts.questions, DIFFERENT, count + ALONE, seed)[count:]
            return time_burst(opened, questions, alone=alone)
        if part in ("rate", "offline"):
            at_once = count if part == "offline" else AT_ONCE
            return time_burst(opened, questions, at_once=at_once, again=column in (FULL, FREE))
        best = best_rate({**cell, "part": "rate"}, rows)
        assert best is not None, "a cell beside the best stack comes after its rate"
        rate = RATE * best["rate"]
        due = burst_times(count, rate) if part == "bursts" else poisson_times(count, rate, seed)
        return time_arrivals(opened, questions, due)

    return _run_quiet(run, 1 if plan.quick else TRIES)


def _run_quiet(
    run: Callable[[], Coroutine[Any, Any, dict[str, Any]]], tries: int
) -> dict[str, Any]:
    """Return the figures of the run beside which others worked least."""
    best: dict[str, Any] = {}
    for _ in range(tries):
        figures = asyncio.run(run())
        if not best or figures["others"] < best["others"]:
            best = figures
        if best["others"] <= BUSY_LIMIT:
            break
    return best


def print_real(report: Report) -> None:
    """Print what the rows say, and the summary."""
    from rich.console import Console

    from common import WIDTH

    console = Console(highlight=False, width=WIDTH)
    for title, lines in (
        ("questions answered a second, seconds of latency; gains", compare(report.rows)),
        ("full over full without a transformation", ablate(report.rows)),
        ("where the seconds of a request go, by latency", divide_time(report.rows)),
        ("by the search over the reply of a request alone", map_gains(report.rows)),
    ):
        if lines:
            console.print(rows_table(title, lines))
    replace(report, rows=[]).print()
