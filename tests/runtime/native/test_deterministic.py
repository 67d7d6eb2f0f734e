"""The rewriting of schedule tables: one order of sums, no rounding, and what it leaves alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dovetail.ir.artifact import KernelEntry
from dovetail.ir.schedule import ORDERS, SCHEDULE_VALUES, Row, ScheduleTable
from dovetail.runtime.native.deterministic import fix_reduction, keep_floats


def kernel(family: str, name: str = "", **binding: int | str) -> KernelEntry:
    return KernelEntry(name=name or family, family=family, params=(), binding=binding)


KERNELS = (
    kernel("gemm_linear", DOT=0, SUMS=32768),
    kernel("gemm_linear", "gemm_dot", DOT=16, SUMS=32768),
    kernel("gemm_linear", "gemm_older", DOT=0),
    kernel("gemm_linear_reduce"),
    kernel("gemm_silu", DOT=0),
    kernel("rmsnorm"),
    kernel("prefill_attention", "prefill_v3", KT=8, KB=128),
    kernel("prefill_attention", KT=8),
    kernel("decode_attention", KT=8),
    kernel("decode_attention_merge"),
    kernel("decode_attention_rows", KT=8),
)


def table(op: str, *rows: Row, phase: str = "any", threads: int = 1) -> ScheduleTable:
    return ScheduleTable(
        target="t", op=op, n=8, k=8, dtype="f32", phase=phase, threads=threads, rows=rows
    )


def row(name: str, m_lo: int = 1, reduce: str | None = None, **values: int) -> Row:
    schedule = tuple(values.get(name, 1) for name in SCHEDULE_VALUES)
    return Row(m_lo=m_lo, kernel=name, schedule=schedule, reduce_kernel=reduce)


def value(fixed: Row, name: str) -> int:
    return fixed.schedule[SCHEDULE_VALUES.index(name)]


sides = st.integers(0, 8)
orders = st.integers(0, len(ORDERS) - 1)
products = st.sampled_from(["gemm_linear", "gemm_dot", "gemm_older"])


@given(sides, sides, sides, st.integers(0, 512), orders, products)
def test_products_sum_k_in_one_chain(
    m: int, n: int, k: int, block: int, order: int, name: str
) -> None:
    """Slices of K go on with it where they are innermost; threads that shared K share columns."""
    grid = {"grid_m": m, "grid_n": n, "grid_k": k}
    found = row(name, reduce="gemm_linear_reduce", **grid, block_k=block, order=order)
    (fixed,) = fix_reduction([table("o", found, replace(found, m_lo=9))], KERNELS)
    assert [r.m_lo for r in fixed.rows] == [1, 9]
    goes_on = ORDERS[order] in ("mnk", "nmk") and name != "gemm_older"
    for after in fixed.rows:
        assert value(after, "grid_k") == 1
        assert (value(after, "block_k"), value(after, "order")) == (block if goes_on else 0, order)
        assert after.reduce_kernel is None and after.kernel == name
        assert value(after, "grid_m") == m
        assert value(after, "grid_n") == max(n, 1) * max(k, 1)


def test_rounding_of_activations_is_the_same_at_any_m() -> None:
    (fixed,) = fix_reduction([table("qkv", row("gemm_dot", m_tile=6))], KERNELS)
    assert value(fixed.rows[0], "m_tile") == -6
    (again,) = fix_reduction([fixed], KERNELS)
    assert again == fixed
    (plain,) = fix_reduction([table("qkv", row("gemm_linear", m_tile=6))], KERNELS)
    assert value(plain.rows[0], "m_tile") == 6


def test_attention_is_one_text_for_prompts_and_decodes_in_every_phase() -> None:
    merge = "decode_attention_merge"
    tables = [
        table("prefill_attention", row("prefill_v3"), row("prefill_attention", 64), threads=4),
        table("prefill_attention", row("prefill_attention"), phase="decode"),
        table("decode_attention", row("decode_attention", reduce=merge)),
    ]
    fixed = fix_reduction(tables, KERNELS)
    kernels = [[(r.m_lo, r.kernel, r.reduce_kernel) for r in t.rows] for t in fixed]
    assert kernels[:2] == [[(1, "prefill_attention", None)]] * 2
    assert kernels[2] == [(1, "decode_attention_rows", None)]
    assert [t.threads for t in fixed] == [4, 1, 1]


def test_kernels_whose_rows_stand_alone_keep_their_tables() -> None:
    found = table("rmsnorm", row("rmsnorm", 1, m_tile=7))
    assert fix_reduction([found], KERNELS) == (found,)


def test_a_missing_kernel_is_named() -> None:
    known = [k for k in KERNELS if k.family != "decode_attention_rows"]
    with pytest.raises(LookupError, match="decode_attention_rows"):
        fix_reduction([table("decode_attention", row("decode_attention"))], known)


ATTENTION = (
    kernel("prefill_attention", "f16", KV="f16"),
    kernel("prefill_attention", "f32_pairs_kb128", KV="f32", DOT=1, KB=128),
    kernel("prefill_attention", "f32", KV="f32", DOT=0),
    kernel("decode_attention_rows", "rows_pairs", KV="f32", DOT=1),
    kernel("decode_attention", "decode_pairs", KV="f32", DOT=512),
    kernel("decode_attention", "decode", KV="f32"),
    kernel("gemm_linear", "codes", ROUNDED="i8"),
    kernel("gemm_linear", "bf16", ROUNDED="bf16", DOT=16),
)


def test_float_activations_are_rounded_by_no_product_and_no_attention() -> None:
    found = [table("o", row(name, m_tile=6)) for name in ("codes", "bf16")]
    found += [table("a", row(k.name, m_tile=6)) for k in ATTENTION[:6] if "rows" not in k.name]
    kept = keep_floats(found, ATTENTION)
    assert [t.rows[0].kernel for t in kept] == [
        "codes",
        "bf16",
        "f16",
        "f32",
        "f32",
        "decode",
        "decode",
    ]
    assert [value(t.rows[0], "m_tile") for t in kept] == [-6, 6, 6, 6, 6, 6, 6]
    with pytest.raises(LookupError, match="prefill_attention"):
        keep_floats(found, [k for k in ATTENTION if k.name != "f32"])
