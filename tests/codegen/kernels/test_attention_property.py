"""Any batch of prefill chunks and decode rows gives what float64 gives."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codegen.kernels.harness import Runner
from tests.codegen.kernels.test_attention_decode import check as check_decode
from tests.codegen.kernels.test_attention_prefill import check as check_prefill

HEADS = st.sampled_from([(1, 1), (3, 1), (4, 2), (7, 1), (6, 3), (14, 2)])
DIMS = st.sampled_from([16, 48, 80])
KV = st.sampled_from(["f32", "bf16", "f16"])
WINDOW = st.one_of(st.just(0), st.integers(1, 90))
RELAXED = settings(max_examples=25, deadline=None, derandomize=True)


@RELAXED
@given(
    kv=KV,
    heads=HEADS,
    hd=DIMS,
    chunks=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 90)), min_size=1, max_size=3),
    window=WINDOW,
    nth=st.integers(1, 5),
)
def test_any_prefill(
    native: Runner,
    kv: str,
    heads: tuple[int, int],
    hd: int,
    chunks: list[tuple[int, int]],
    window: int,
    nth: int,
) -> None:
    rows = [new for new, _ in chunks]
    lengths = [new + old for new, old in chunks]
    check_prefill(native, kv, heads, hd, rows, lengths, window, nth)


@RELAXED
@given(
    kv=KV,
    heads=HEADS,
    hd=DIMS,
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    window=WINDOW,
    splits=st.integers(1, 6),
    nth=st.integers(1, 5),
)
def test_any_decode(
    native: Runner,
    kv: str,
    heads: tuple[int, int],
    hd: int,
    lengths: list[int],
    window: int,
    splits: int,
    nth: int,
) -> None:
    check_decode(native, kv, heads, hd, lengths, window, splits, nth)
