"""Keys are cut into as few parts as give all threads work, and into none too small."""

from __future__ import annotations

from importlib.resources import files

from hypothesis import given
from hypothesis import strategies as st

from dovetail.ir.model import MAX_KV_SPLITS
from dovetail.runtime.native.step import EVEN_ITEMS, LONG_TOKENS, PART_TOKENS, count_parts


def test_one_thread_or_enough_sequences_leave_them_whole() -> None:
    assert (
        count_parts(1, 1, 4096, 1) == count_parts(8, 1, 4096, 8) == count_parts(33, 8, 64, 8) == 1
    )
    assert count_parts(3, 1, 4096, 2) == 2 and count_parts(8, 1, 4096, 64) == 8
    assert count_parts(1, 1, 4096, 64, 1024) == 5 and count_parts(1, 1, 4096, 64, 0) == 1


def test_short_sequences_are_cut_by_the_kernel_whatever_stands_beside_them() -> None:
    assert count_parts(1, 1, 1, 64) == count_parts(1, 1, 4096, 64) == MAX_KV_SPLITS
    text = (files("dovetail.codegen") / "kernels" / "attention_decode.dk").read_text()
    assert f"// {PART_TOKENS}, kv_splits)" in text


def test_long_parts_are_dealt_with_all_their_heads() -> None:
    """Two threads with eight heads: half the keys each, not half the heads; few keys stay whole."""
    assert count_parts(1, 8, 2 * LONG_TOKENS, 2) == 2
    assert count_parts(1, 8, 2 * LONG_TOKENS - 1, 2) == 1
    assert count_parts(2, 8, 4096, 2) == 1 and count_parts(1, 8, 4096, 2, 0) == 1


def test_the_longer_the_keys_the_more_heads_are_dealt_together() -> None:
    """Sixteen threads: one of eight heads each, two, four, all of them."""
    lengths = [4 * LONG_TOKENS, 8 * LONG_TOKENS, 16 * LONG_TOKENS]
    assert [count_parts(1, 8, n - 1, 16) for n in lengths] == [2, 4, 8]
    assert [count_parts(1, 8, n, 16) for n in lengths] == [4, 8, 16]


@given(
    sequences=st.integers(1, 20),
    n_kv=st.integers(1, 9),
    longest=st.integers(0, 10_000),
    threads=st.integers(1, 64),
    least=st.integers(0, 600),
)
def test_fewer_parts_would_leave_threads_without_work(
    sequences: int, n_kv: int, longest: int, threads: int, least: int
) -> None:
    parts = count_parts(sequences, n_kv, longest, threads, least)
    most = MAX_KV_SPLITS if 0 < least <= PART_TOKENS else 1 + longest // least if least else 1
    assert 1 <= parts <= min(MAX_KV_SPLITS, most)
    long = longest >= parts * LONG_TOKENS
    shares = [n for n in range(1, n_kv + 1) if n_kv % n == 0] if long else [n_kv]

    def leaves_some_idle(units: int, fewer: int) -> bool:
        return units * fewer % threads > 0 and units * fewer < EVEN_ITEMS * threads

    assert any(
        all(leaves_some_idle(sequences * n, fewer) for fewer in range(1, parts)) for n in shares
    )
