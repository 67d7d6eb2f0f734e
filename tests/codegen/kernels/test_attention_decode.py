from __future__ import annotations

import ctypes
import platform
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from dovetail.codegen.catalog import SHARED_ROWS, HeadShape, kernel_request
from dovetail.codegen.isa.target import Target
from dovetail.codegen.library import LibrarySpec, build_library, lower_request
from dovetail.codegen.targets import TARGETS, host_features, runs_on
from dovetail.ir.low.print import print_low
from dovetail.runtime.machine import abi
from tests.codegen.interpret import interpret
from tests.codegen.kernels.harness import NATIVE, Runner, Slot, pack
from tests.codegen.kernels.reference import attention, drawn_sinks, paged
from tests.shares import share


def check(
    run: Runner,
    kv: str,
    heads: tuple[int, int],
    hd: int,
    lengths: list[int],
    window: int = 0,
    splits: int = 1,
    nth: int = 1,
    kernel: str = "decode_attention",
    unrounded: bool = False,
    bound: float = 2e-5,
    sinking: bool = False,
    cap: int = 0,
) -> None:
    """Decode rows behind one prefill sequence of three rows, against float64.

    The reference has the keys and values as stored, or `unrounded`, which may cost 2e-3.
    """
    n_q, n_kv = heads
    seed = sum(lengths) + hd + n_q
    rng = np.random.default_rng(seed)
    pool = paged(rng, [3, *lengths], n_kv, hd, kv)
    true = pool
    if unrounded:
        true = paged(np.random.default_rng(seed), [3, *lengths], n_kv, hd, "f32")
    n, first = len(lengths), 3
    ldq, ldo = (n_q + 2 * n_kv) * hd + 16, n_q * hd + 3
    q = rng.standard_normal((first + n, ldq)).astype(np.float32)
    out = np.full((first + n, ldo), 7, np.float32)
    partial = np.full((n, splits, n_q, hd + 16), np.nan, np.float32)
    scale = 1 / np.sqrt(hd)
    starts = np.array([0, first], np.int32)
    tables = (starts, np.array([3, *lengths], np.int32), pool.tables, pool.tables.shape[1])
    sinks = drawn_sinks(rng, n_q) if sinking else None
    head_args = (1, n, n_q, n_kv, hd, scale, window, sinks, splits, q, ldq)
    args = (*head_args, *tables, pool.k, pool.v, partial, out, ldo)
    run(f"{kernel}_{kv}" + f"_cap{cap}" * (cap > 0), *args, nth=nth)
    assert (out == 7).all()
    run(f"decode_attention_merge_{kv}", *args, nth=nth)
    for d in range(n):
        query = q[first + d, : n_q * hd].reshape(1, n_q, hd)
        want = attention(query, true.keys[1 + d], true.values[1 + d], scale, window, sinks, cap)[0]
        got = out[first + d, : n_q * hd].reshape(want.shape)
        np.testing.assert_allclose(got, want, rtol=bound if bound < 1e-3 else 0, atol=bound)
    assert (out[:first] == 7).all()
    assert (out[:, n_q * hd :] == 7).all()


@pytest.mark.parametrize("kv", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("hd", [16, 64, 80, 96, 128, 256, 512])
def test_each_head_dim_and_dtype(native: Runner, kv: str, hd: int) -> None:
    check(native, kv, (4, 2), hd, [83, 7], splits=2, nth=2)


def test_every_length_around_blocks_and_chunks(native: Runner) -> None:
    lengths = [1, 2, 3, 14, 15, 16, 17, 18, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200]
    check(native, "f32", (2, 1), 32, lengths, nth=3)
    check(native, "f32", (2, 1), 32, lengths, splits=3, nth=2)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 9, 12])
def test_any_group_ratio(native: Runner, group: int) -> None:
    check(native, "f32", (2 * group, 2), 32, [87], splits=2, nth=3)


@pytest.mark.parametrize("heads", [(70, 1), (72, 9), (130, 2)])
def test_more_rows_than_share_a_chunk(native: Runner, heads: tuple[int, int]) -> None:
    check(native, "f32", heads, 32, [150, 20], splits=2, nth=2)


@pytest.mark.parametrize("splits", [1, 2, 5, 40])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_more_parts_than_blocks_and_any_threads(native: Runner, splits: int, nth: int) -> None:
    check(native, "bf16", (4, 2), 32, [5, 300, 64], splits=splits, nth=nth)


def test_a_row_has_the_same_bits_beside_longer_ones_and_in_any_place(native: Runner) -> None:
    lengths, n_q, n_kv, hd, splits = [50, 300, 130, 64], 4, 2, 32, 3
    rng = np.random.default_rng(0)
    pool = paged(rng, lengths, n_kv, hd, "f32")
    q = rng.standard_normal((len(lengths), n_q * hd)).astype(np.float32)

    def decode(*rows: int) -> np.ndarray:
        partial = np.full((len(rows), splits, n_q, hd + 16), np.nan, np.float32)
        out = np.empty((len(rows), n_q * hd), np.float32)
        sizes, picked = (0, len(rows), n_q, n_kv, hd, 0.1, 0, None, splits), list(rows)
        tables = (np.zeros(1, np.int32), np.array(lengths, np.int32)[picked], pool.tables[picked])
        args = (*sizes, q[picked], n_q * hd, *tables, pool.tables.shape[1], pool.k, pool.v)
        for name in ("decode_attention_f32", "decode_attention_merge_f32"):
            native(name, *args, partial, out, n_q * hd, nth=2)
        return out

    together = decode(3, 0, 1, 2)
    for place, row in enumerate((3, 0, 1, 2)):
        assert (decode(row)[0] == together[place]).all()


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40, 500])
def test_sliding_window(native: Runner, window: int) -> None:
    check(native, "f32", (4, 2), 32, [1, 16, 17, 90, 144], window, splits=2, nth=2)


def check_without_keys(
    run: Runner, kernel: str, group: int, hd: int, sinking: bool = False
) -> None:
    """A sequence of no keys beside one of some: zeros, and the other as ever."""
    n_kv, splits = 2, 3
    n_q, lengths = n_kv * group, [0, 20]
    rng = np.random.default_rng(hd)
    pool = paged(rng, [20], n_kv, hd, "f32")
    q = rng.standard_normal((2, n_q * hd)).astype(np.float32)
    sinks = drawn_sinks(rng, n_q) if sinking else None
    partial = np.full((2, splits, n_q, hd + 16), np.nan, np.float32)
    out = np.full_like(q, np.nan)
    tables = (np.arange(2, dtype=np.int32), np.array(lengths, np.int32), pool.tables[[0, 0]])
    sizes = (0, 2, n_q, n_kv, hd, 0.1, 0, sinks, splits)
    args = (*sizes, q, q.shape[1], *tables, pool.tables.shape[1])
    for name in (kernel, "decode_attention_merge"):
        run(f"{name}_f32", *args, pool.k, pool.v, partial, out, out.shape[1], nth=2)
    want = attention(q[1:].reshape(1, n_q, hd), pool.keys[0], pool.values[0], 0.1, 0, sinks)[0]
    assert (out[0] == 0).all()
    np.testing.assert_allclose(out[1].reshape(want.shape), want, rtol=2e-5, atol=2e-5)


def test_no_keys_give_zeros(native: Runner) -> None:
    check_without_keys(native, "decode_attention", 2, 32)
    check_without_keys(native, "decode_attention", 2, 32, sinking=True)


@pytest.mark.parametrize("kv", ["f32", "bf16"])
@pytest.mark.parametrize("window", [0, 21])
@pytest.mark.parametrize("splits", [1, 3])
def test_sinks_take_their_part(native: Runner, kv: str, window: int, splits: int) -> None:
    check(native, kv, (8, 2), 32, [1, 17, 90, 300], window, splits, nth=2, sinking=True)


FIXED = [
    *(("f32", 128, 7), ("f32", 64, 1), ("f32", 64, 66), ("f32", 256, 6)),
    *(("bf16", 64, 1), ("bf16", 80, 2), ("bf16", 128, 7)),
    *(("f16", 96, 6), ("f16", 256, 3)),
]
"""(KV dtype, head_dim, query heads per KV head): every head_dim, whole tiles and what is left."""


@cache
def fixed_runner(name: str) -> Runner:
    """Return kernels of the target `name`, each made for one head_dim and group."""
    return make_runner(TARGETS[name], FIXED)


def make_runner(target: Target, shapes: list[tuple[str, int, int]]) -> Runner:
    """Return kernels of `target` for (KV dtype, head_dim, group), and the merges.

    Each is built when it is first called, in a library of its own.
    """
    fixed = {
        f"fixed_{hd}_{group}_{kv}": kernel_request("decode_attention", target, kv, heads)
        for kv, hd, group in shapes
        for heads in [HeadShape(hd, group)]
    }
    assert all(request.binding["HD"] for request in fixed.values())

    @cache
    def library(kernel: str) -> ctypes.CDLL:
        family, _, kv = kernel.rpartition("_")
        found = fixed.get(kernel) or kernel_request(family, target, kv)
        spec = LibrarySpec(target, (replace(found, name=kernel),), team=False, tvm_ffi=False)
        return ctypes.CDLL(str(build_library(spec).path))

    def call(kernel: str, slots: tuple[Any, ...], tid: int, nth: int) -> None:
        packed = (Slot * len(slots))(*(pack(slot) for slot in slots))
        schedule = (ctypes.c_int64 * abi.SCHEDULE_LENGTH)()
        pointers = (ctypes.addressof(packed), ctypes.addressof(schedule))
        library(kernel)[f"dt_entry_{kernel}"](
            *map(ctypes.c_void_p, pointers), *map(ctypes.c_int64, (tid, nth))
        )

    return Runner(target.name, target.lanes, call)


@pytest.mark.parametrize(
    "target", [n for n in NATIVE if n in TARGETS and TARGETS[n].isa in SHARED_ROWS]
)
@pytest.mark.parametrize(("kv", "hd", "group"), share(FIXED, 3))
@pytest.mark.parametrize("window", [0, 21])
def test_made_for_one_shape_of_heads(
    target: str, kv: str, hd: int, group: int, window: int
) -> None:
    lengths = [1, 3, 16, 17, 127, 130, 290]
    name = f"fixed_{hd}_{group}"
    heads = (3 * group, 3)
    check(fixed_runner(target), kv, heads, hd, lengths, window, splits=2, nth=2, kernel=name)


@pytest.mark.parametrize(
    "target", [n for n in NATIVE if n in TARGETS and TARGETS[n].isa in SHARED_ROWS]
)
def test_no_keys_give_zeros_to_one_shape_of_heads(target: str) -> None:
    check_without_keys(fixed_runner(target), "fixed_128_7", 7, 128)


@pytest.mark.parametrize(
    "target", [n for n in NATIVE if n in TARGETS and TARGETS[n].isa in SHARED_ROWS]
)
@pytest.mark.parametrize(("hd", "group"), [(96, 6), pytest.param(256, 3, marks=pytest.mark.long)])
def test_float16_keys_and_values_cost_less_than_2e_3(target: str, hd: int, group: int) -> None:
    kernel = f"fixed_{hd}_{group}"
    heads = (2 * group, 2)
    run, lengths = fixed_runner(target), [1, 40, 300]
    check(run, "f16", heads, hd, lengths, kernel=kernel, unrounded=True, bound=2e-3)


PAIRS = [
    *(("bf16", 64, 3), ("bf16", 96, 6), ("bf16", 256, 4), ("bf16", 64, 66)),
    ("f16", 128, 7),
]
"""(KV dtype, head_dim, query heads per KV head) that are multiplied in pairs where a CPU can."""


@cache
def pairs_runner() -> Runner:
    """Return kernels of the target with dot products of pairs, which multiply so from 512 keys."""
    target = TARGETS["x86-64-avx512bf16"]
    if not runs_on(target, platform.machine(), host_features()):
        pytest.skip("this CPU has no dot products of bfloat16 pairs")
    return make_runner(target, PAIRS)


@pytest.mark.parametrize(("kv", "hd", "group"), share(PAIRS, 3))
@pytest.mark.parametrize("window", [0, 523])
def test_many_keys_are_multiplied_in_pairs(kv: str, hd: int, group: int, window: int) -> None:
    kernel = f"fixed_{hd}_{group}"
    heads = (2 * group, 2)
    lengths = [512, 513, 529, 650, 655]
    check(pairs_runner(), kv, heads, hd, lengths, window, 2, 2, kernel, bound=2e-3)
    with pytest.raises(
        AssertionError, match="Not equal to tolerance"
    ):  # pairs round, others do not
        check(pairs_runner(), kv, heads, hd, lengths, window, 2, 2, kernel, bound=1e-6)


@pytest.mark.parametrize(("kv", "hd", "group"), share(PAIRS, 3))
@pytest.mark.parametrize("window", [0, 21])
def test_few_keys_are_not_rounded(kv: str, hd: int, group: int, window: int) -> None:
    lengths = [1, 3, 16, 17, 130, 511]
    check(pairs_runner(), kv, (2 * group, 2), hd, lengths, window, 2, 2, f"fixed_{hd}_{group}")


@pytest.mark.parametrize(
    ("kv", "hd", "group", "pairs"),
    [
        *(("bf16", 64, 3, True), ("bf16", 128, 8, True)),
        *(("bf16", 64, 2, False), ("bf16", 80, 8, False), ("f32", 64, 8, False)),
        *(("f16", 128, 8, True), ("f16", 128, 4, False)),
    ],
)
def test_pairs_are_multiplied_where_arithmetic_is_the_limit(
    kv: str, hd: int, group: int, pairs: bool
) -> None:
    target = TARGETS["x86-64-avx512bf16"]
    request = kernel_request("decode_attention", target, kv, HeadShape(hd, group))
    assert ("_mm512_dpbf16_ps" in print_low(lower_request(request, target).unit)) == pairs


def next_lines(
    target: Target, kv: str, heads: HeadShape, fetch: int
) -> tuple[dict[str, list[int]], list[int]]:
    """Return which cache lines of each pool a kernel asks for, and those of the second KV head.

    Two blocks of keys and two KV heads, in one chunk: the second head is what comes next.
    """
    hd, n_kv, length = heads.head_dim, 2, 32
    asked: dict[str, list[int]] = {"kpool": [], "vpool": []}
    request = kernel_request("decode_attention", target, kv, heads)
    request = replace(request, binding={**request.binding, "FETCH": fetch, "CHUNK": 32})
    hint = replace(
        target.intrinsics["_mm_prefetch"],
        meaning=lambda at, _: asked[at.memory.name].append(at.offset // 64),
    )
    listening = replace(target, intrinsics={**target.intrinsics, "_mm_prefetch": hint})
    pool = paged(np.random.default_rng(1), [length], n_kv, hd, kv)
    n_q = heads.group * n_kv
    q = np.ones((1, n_q * hd), np.float32)
    partial = np.zeros((1, 1, n_q, hd + 16), np.float32)
    lengths = (np.array([0], np.int32), np.array([length], np.int32))
    tables = (*lengths, pool.tables, pool.tables.shape[1])
    sizes = (0, 1, n_q, n_kv, hd, 0.1, 0, None, 1)
    args = (*sizes, q, q.size, *tables, pool.k, pool.v, partial, q, q.size, 0, 1)
    interpret(lower_request(request, target).unit, request.name, args, listening)
    lines = 16 * hd * (4 if kv == "f32" else 2) // 64  # of a block
    blocks = [block * n_kv + 1 for block in pool.tables[0, :2]]
    return asked, [block * lines + n for block in blocks for n in range(lines)]


@pytest.mark.parametrize("isa", sorted(SHARED_ROWS))
@pytest.mark.parametrize("fetch", [0, 1, 2])
def test_what_comes_next_is_asked_for_as_often_as_told(isa: str, fetch: int) -> None:
    target = next(t for t in TARGETS.values() if t.isa == isa)
    asked, lines = next_lines(target, "f32", HeadShape(64, 1), fetch)
    for pool in asked.values():
        assert [pool.count(line) for line in lines] == [fetch] * len(lines)


@pytest.mark.parametrize(("kv", "hd", "group"), [("bf16", 128, 2), ("f16", 96, 1), ("f32", 64, 2)])
def test_keys_and_values_are_asked_for_side_by_side_as_they_lie(
    kv: str, hd: int, group: int
) -> None:
    asked, lines = next_lines(TARGETS["x86-64-avx512"], kv, HeadShape(hd, group), 1)
    for pool in asked.values():
        assert [line for line in pool if line in lines] == lines


def test_processors_that_drop_nothing_are_asked_once() -> None:
    shape = HeadShape(128, 4)
    asks = [
        kernel_request("decode_attention", TARGETS[name], "bf16", shape).binding["FETCH"]
        for name in ("x86-64-avx512", "x86-64-avx512bf16", "x86-64-avx2")
    ]
    assert asks == [1, 2, 2]


def test_groups_read_block_after_block_where_hardware_fetches_ahead() -> None:
    chunks = [
        kernel_request("decode_attention", TARGETS[name], "f32", HeadShape(128, group)).binding
        for name, group in (("x86-64-avx512", 8), ("x86-64-avx512", 1), ("x86-64-avx2", 8))
    ]
    assert [binding["CHUNK"] for binding in chunks] == [16, 16, 32]


@pytest.mark.parametrize("kv", ["f32", "bf16", "f16"])
def test_large_groups_load_values_once(kv: str) -> None:
    found = [
        kernel_request("decode_attention", TARGETS["x86-64-avx512"], kv, HeadShape(128, group))
        for group in (4, 6, 8)
    ]
    assert [request.binding["VT"] for request in found] == [4, 8, 8]
    assert all(request.binding["DV"] == 2 for request in found[1:])


@pytest.mark.parametrize("isa", sorted(SHARED_ROWS))
@pytest.mark.parametrize("kv", ["f32", "bf16"])
@pytest.mark.parametrize("hd", [64, 80])
def test_bfloat16_is_widened_by_pairs_that_fill_two_vectors(isa: str, kv: str, hd: int) -> None:
    target = next(t for t in TARGETS.values() if t.isa == isa)
    request = kernel_request("decode_attention", target, kv, HeadShape(hd, 4))
    by_pairs = "-65536" in print_low(lower_request(request, target).unit)
    assert by_pairs == (kv == "bf16" and hd % (2 * target.lanes) == 0)


def test_small_shapes_in_every_target(interpreted: Runner) -> None:
    check(interpreted, "f32", (3, 1), 16, [1, 70], 67, splits=2)
    check(interpreted, "bf16", (2, 1), 16, [3])
    check(interpreted, "f16", (2, 1), 16, [3])
    check(interpreted, "f32", (2, 1), 16, [70, 3], splits=2, sinking=True)
