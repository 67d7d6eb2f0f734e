"""Keys are cut into as few parts as give all threads work, and into none too small."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dovetail.ir.model import MAX_KV_SPLITS
from dovetail.runtime.kv_parts import EVEN_ITEMS, PART_TOKENS, count_parts


def test_one_thread_or_enough_heads_leave_sequences_whole() -> None:
    assert count_parts(1, 4096, 1) == count_parts(8, 4096, 8) == count_parts(33, 4096, 8) == 1
    assert count_parts(3, 4096, 2) == 2 and count_parts(8, 4096, 64) == 8
    assert count_parts(1, PART_TOKENS - 1, 64) == 1 and count_parts(1, 2 * PART_TOKENS, 64) == 3
    assert count_parts(1, 4096, 64, 1024) == 5 and count_parts(1, 4096, 64, 0) == 1


@given(
    units=st.integers(1, 100),
    longest=st.integers(0, 10_000),
    threads=st.integers(1, 64),
    least=st.integers(0, 600),
)
def test_fewer_parts_would_leave_threads_without_work(
    units: int, longest: int, threads: int, least: int
) -> None:
    parts = count_parts(units, longest, threads, least)
    assert 1 <= parts <= min(MAX_KV_SPLITS, 1 + longest // least if least else 1)
    for fewer in range(1, parts):
        assert units * fewer % threads and units * fewer < EVEN_ITEMS * threads
