"""Pure parts of the GPU's executor: runs of blocks, rounds of a step, the CPU's part of a tape."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dovetail.runtime.cuda_engine import largest_member, split_rounds, without
from dovetail.runtime.gpu_model import block_runs
from dovetail.runtime.plan import Batch, PrefillChunk, StepPlan

BLOCKS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12)


@given(pairs=BLOCKS)
def test_runs_are_the_pairs_and_as_few_as_can_be(pairs: list[tuple[int, int]]) -> None:
    left, right = (np.array([pair[i] for pair in pairs], np.int32) for i in range(2))
    runs = [*block_runs(left, right)]
    assert [(a + i, b + i) for a, b, count in runs for i in range(count)] == pairs
    for (a, b, count), (c, d, _) in itertools.pairwise(runs):
        assert (a + count, b + count) != (c, d)


@given(
    chunks=st.lists(st.frozensets(st.integers(0, 12), max_size=5), max_size=6),
    room=st.integers(5, 13),
    decodes=st.integers(0, 2),
)
def test_rounds_hold_everything_once_and_have_room(
    chunks: list[frozenset[int]], room: int, decodes: int
) -> None:
    first = Batch(
        prefill=tuple(PrefillChunk(i, 0, 1) for i in range(len(chunks))),
        gpu_decode=tuple(range(50, 50 + decodes)),
    )
    batches = (first, Batch(cpu_decode=(90,)))
    rounds = split_rounds(batches, lambda chunk: sorted(chunks[chunk.request]), room)
    members = [n for part in rounds for n in StepPlan(batches=part).members]
    assert sorted(members) == sorted(StepPlan(batches=batches).members)
    for part in rounds:
        landed = {b for batch in part for c in batch.prefill for b in chunks[c.request]}
        assert len(landed) <= room


def test_the_largest_request_gives_way_until_none_is_left() -> None:
    batch = Batch(prefill=(PrefillChunk(1, 0, 9), PrefillChunk(2, 0, 30)), gpu_decode=(3,))
    plan, gone = StepPlan(batches=(batch, Batch(cpu_decode=(4,)))), []
    while plan.batches:
        gone.append(largest_member(plan))
        plan = without(plan, gone[-1])
    assert gone == [2, 1, 4, 3]
