"""Cuts a step into rounds where its prompts have no room to land, or memory ran out: pure values.

In: the batches of a StepPlan. Out: batches that fit beside each other, or what is left of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dovetail.runtime.schedule.plan import Batch, PrefillChunk, StepPlan


def split_rounds(
    batches: tuple[Batch, ...], landed: Callable[[PrefillChunk], Sequence[int]], room: int
) -> list[tuple[Batch, ...]]:
    """Return the batches, and behind them one for each `room` blocks of prompts beyond the first.

    `landed` names the CPU's blocks that a chunk has to have on the GPU while it is computed.
    """
    used: set[int] = set()
    first: list[Batch] = []
    later: list[PrefillChunk] = []
    for batch in batches:
        kept = []
        for chunk in batch.prefill:
            blocks = set(landed(chunk))
            if len(used | blocks) <= room:
                used |= blocks
                kept.append(chunk)
            else:
                later.append(chunk)
        first.append(replace(batch, prefill=tuple(kept)))
    rounds = [tuple(batch for batch in first if batch.sequences)]
    if later:
        rounds += [(Batch(prefill=(chunk,)),) for chunk in later]
    return [batch for batch in rounds if batch]


def largest_member(plan: StepPlan) -> int:
    """Return the request of a step with the most tokens in it; of equals, the last."""
    sizes = [(1, n) for batch in plan.batches for n in (*batch.gpu_decode, *batch.cpu_decode)]
    sizes += [(chunk.length, chunk.request) for batch in plan.batches for chunk in batch.prefill]
    return max(sizes)[1]


def without(plan: StepPlan, request: int) -> StepPlan:
    """Return the plan without a request, and without batches that nothing is left of."""
    batches = (
        Batch(
            prefill=tuple(c for c in batch.prefill if c.request != request),
            gpu_decode=tuple(n for n in batch.gpu_decode if n != request),
            cpu_decode=tuple(n for n in batch.cpu_decode if n != request),
        )
        for batch in plan.batches
    )
    return replace(plan, batches=tuple(batch for batch in batches if batch.sequences))
