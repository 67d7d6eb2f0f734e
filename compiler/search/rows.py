"""Choices at some M to schedule rows for every M, and how far they are from the exact optimum."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from dovetail.compiler.measure.meter import Measurer
from dovetail.compiler.rules.schedules import (
    MOST_ROWS,
    default_gemm_rows,
    merge_rows,
    reduce_kernel,
)
from dovetail.compiler.search.policy import DEFAULT, FINAL_ROUNDS, Bench, Choice, SearchTask
from dovetail.compiler.search.space import WHOLE
from dovetail.ir.schedule import ORDERS, Row

FEW_TILES = 2
"""Up to so many row tiles the last one of another M may be far from full."""
FINALISTS, LOSS_ROUNDS = 6, FINAL_ROUNDS + 2
"""Other rounds than those of a confirmation, which may be on record: all are timed in turns now."""


def make_rows(
    task: SearchTask,
    choices: Mapping[int, Choice],
    losses: Mapping[int, float] | None = None,
    alone: Container[int] = (),
) -> tuple[Row, ...]:
    """Return rows that cover every M >= 1.

    A choice serves the M from the point before it up to its own, cut into nearly equal tiles of
    its height; one whose point is in `alone`, and the default, leave those below to the rules. The
    largest one also serves all larger M, which divide into its slices (Sandwich
    §6), unless it was searched at one row tile or is the default: larger M then get the rules.
    """
    op, threads = task.op, task.phase.threads
    rules = default_gemm_rows(op, task.target, threads, task.hardware)
    rows: list[Row] = []
    low = 1
    for point in sorted(choices):
        choice = choices[point]
        if choice.source == DEFAULT:
            rows += _between(rules, low, point)
        else:
            if choice.program == task.default(point):
                *below, own = _between(rules, low, point)
                rows, low = [*rows, *below], own.m_lo
            elif point in alone:
                rows, low = [*rows, *_between(rules, low, point - 1)], point
            rows.append(_row(task, low, point, choice, (losses or {}).get(point)))
        low = point + 1
    as_rules = low > 1 and choices[low - 1].program == task.default(low - 1)
    if low <= MOST_ROWS[op.kind] or not rows or rows[-1].source == DEFAULT or as_rules:
        rows += _between(rules, low, math.inf)
    return merge_rows(rows)


def _between(rules: Sequence[Row], low: int, high: float) -> Iterator[Row]:
    """Yield the rules' rows for M in [low, high]."""
    for row, following in zip(rules, (*rules[1:], None), strict=True):
        end = following.m_lo - 1 if following else math.inf
        if row.m_lo <= high and end >= low:
            yield replace(row, m_lo=max(row.m_lo, low))


def _row(task: SearchTask, low: int, point: int, choice: Choice, loss: float | None) -> Row:
    candidate = task.problem(point).candidate(choice.program)
    return Row(
        m_lo=low,
        kernel=candidate.kernel,
        schedule=candidate.schedule,
        reduce_kernel=reduce_kernel(task.op.kind, task.op.dtype, candidate.schedule),
        source=choice.source,
        seconds=choice.seconds,
        measured_loss=loss,
    )


def find_alone(
    task: SearchTask, measurer: Measurer, choices: Mapping[int, Choice], seconds: float = math.inf
) -> frozenset[int]:
    """Return the points whose choice is not known to beat the default where it would serve first.

    That is at the least M above the point before. With many row tiles one M is like the next.
    """
    end, below, alone = measurer.now() + seconds, 0, set[int]()
    for m, choice in sorted(choices.items()):
        first, below = below + 1, m
        if first == m or m > FEW_TILES * MOST_ROWS[task.op.kind] or choice.source == DEFAULT:
            continue
        bench = Bench(task, measurer, first, end, final=0.0)
        if choice.program != task.default(m) and not bench.beats_default(choice.program):
            alone.add(m)
    return frozenset(alone)


def measure_losses(
    task: SearchTask,
    measurer: Measurer,
    choices: Mapping[int, Choice],
    points: Iterable[int],
    seconds: float = math.inf,
) -> dict[int, float]:
    """Return M -> how much slower the choice is than the best of an exhaustively timed space.

    That space is every micro-kernel under every scheme, with the rules' slice and with the chosen
    one, and the choice in every order; the best of it and the choice are then timed in turns. M
    that find no time are left out.
    """
    end = measurer.now() + seconds
    losses: dict[int, float] = {}
    for m in points:
        bench = Bench(task, measurer, m, end, final=0.0)
        chosen, problem = choices[m].program, bench.problem
        space = dict.fromkeys(
            task.program(m, tile, part, scheme, order)
            for part, order in ((WHOLE, ORDERS[0]), (chosen.slice, chosen.order))
            for tile in problem.tiles()
            for scheme in problem.schemes()
        )
        space |= dict.fromkeys(problem.orders(chosen))
        if not all(cost < math.inf for cost in bench.time((chosen, *space), rounds=2)):
            continue
        finalists = sorted(space, key=bench.cost)[:FINALISTS]
        cost, *others = bench.time((chosen, *finalists), rounds=LOSS_ROUNDS)
        losses[m] = max(0.0, cost / min(others) - 1)
    return losses
