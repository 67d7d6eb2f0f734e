"""Quads of bytes and integers of 8 bits, on each target: interpreted, and run where it can be."""

import numpy as np
import pytest

from dovetail.codegen.lower import lower
from dovetail.codegen.targets import TARGETS
from dovetail.ir.diagnostics import Source
from dovetail.ir.high.parse import parse_high
from dovetail.ir.low.parse import parse_low
from dovetail.ir.low.print import print_low
from tests.codegen.interp.meanings import meaning_of
from tests.codegen.interp.vectors import VECTOR_TYPES
from tests.codegen.interpret import interpret
from tests.codegen.lower.native import EVERY, run

QUAD_TEXT = """
@kernel
def dots(n: i64, w: ptr[u8], s: ptr[i8], x: ptr[i8], out: ptr[i32]):
    start = vload_i32(out)
    a = start
    b = start
    c = start
    d = start
    for i in range(n):
        q = vload_quads(x + 4 * VL * i)
        one = vbroadcast_quad(x + 4 * i)
        a = vdot_quads(vload_quads(w + 4 * VL * i), q, a)
        b = vdot_quads(vload_quads(w + 4 * VL * i), one, b)
        c = vdot_quads_signed(vload_quads(s + 4 * VL * i), q, c)
        d = vdot_quads_signed(vload_quads(s + 4 * VL * i), one, d)
    vstore_i32(out, a)
    vstore_i32(out + VL, b)
    vstore_i32(out + 2 * VL, c)
    vstore_i32(out + 3 * VL, d)

@kernel
def nibbles(w: ptr[u8], x: ptr[i8], out: ptr[i32]):
    low = vbroadcast_i32(252645135)
    codes = vload_quads(w)
    q = vload_quads(x)
    acc = vdot_quads(vand_i32(codes, low), q, vbroadcast_i32(0))
    vstore_i32(out, vdot_quads(vand_i32(vshr_i32(codes, 4), low), q, acc))

@kernel
def places(p: ptr[u8], out: ptr[i32]):
    vstore_i32(out, vlook_quads(vload_quads(p), 50462976, 117835012, -2147483648, 2139062143))

@kernel
def bytes(p: ptr[u8], q: ptr[i8], out: ptr[i32], back: ptr[i8]):
    vstore_i32(out, vload_u8(p))
    vstore_i32(out + VL, vload_i8(q))
    vstore_i8(back, vsub_i32(vload_u8(p), vbroadcast_i32(128)))
    vstore_i8(back + VL, vmul_i32(vload_i8(q), vbroadcast_i32(-1)))

@kernel
def scalars(n: i64, p: ptr[u8], q: ptr[i8], sums: ptr[i32], up: ptr[u8], to: ptr[i8]):
    for i in range(n):
        sums[i] = p[i] + q[i] * 2
        up[i] = cast(u8, max(p[i], 7))
        store(to + i, cast(i8, abs(q[i]) - 1))
"""
SUM_TEXT = """
@kernel
def pairs(w: ptr[u8], x: ptr[i8], out: ptr[i32]):
    first = vmul_quads(vload_quads(w), vload_quads(x))
    second = vmul_quads(vload_quads(w + 4 * VL), vload_quads(x + 4 * VL))
    vstore_i32(out, vfold_i16(vadd_i16(first, second)))
"""
RNG = np.random.default_rng(11)
UNIT = parse_high(Source("quads.dk", QUAD_TEXT))
QUADS = 9


def interpreted(kernel, target, *args):
    unit = lower(UNIT, kernel, {}, TARGETS[target], name=kernel)
    printed = parse_low(Source("quads.c", print_low(unit)))
    interpret(printed, kernel, args, TARGETS[target])


def native(kernel, target, *args):
    run(QUAD_TEXT, kernel, target, *args)


RUNS = [(interpreted, name) for name in TARGETS] + [(native, name) for name in EVERY]
on_all = pytest.mark.parametrize(("call", "target"), RUNS, ids=lambda v: getattr(v, "__name__", v))


def drawn(dtype, low, high, size):
    """Random bytes, of which every third is one of the ends: pairs of them meet."""
    values = RNG.integers(low, high + 1, size)
    ends = RNG.choice([low, high], size)
    return np.where(RNG.integers(0, 3, size) == 0, ends, values).astype(dtype)


def most_codes(target):
    return 255 if TARGETS[target].quads == "wide" else 127


def cases(target):
    """Bytes of w, s and x for `QUADS` vectors: drawn, and all at the ends."""
    size, most = QUADS * 4 * TARGETS[target].lanes, most_codes(target)
    yield (drawn(np.uint8, 0, most, size), *(drawn(np.int8, -n, 127, size) for n in (128, 127)))
    for w, s, x in ((most, -128, 127), (most, -128, -127), (most, 127, -127), (0, 0, -127)):
        yield np.full(size, w, np.uint8), np.full(size, s, np.int8), np.full(size, x, np.int8)


@on_all
def test_dot_products_of_quads_are_exact(call, target):
    lanes = TARGETS[target].lanes
    for w, s, x in cases(target):
        out = np.zeros(4 * lanes, np.int32)
        start = out[:lanes] = RNG.integers(-(2**30), 2**30, lanes)
        call("dots", target, QUADS, w, s, x, out)
        codes, signed, values = (v.astype(np.int64).reshape(QUADS, lanes, 4) for v in (w, s, x))
        one = x.astype(np.int64)[: 4 * QUADS].reshape(QUADS, 1, 4)
        want = [(a * b).sum((0, 2)) + start for a in (codes, signed) for b in (values, one)]
        np.testing.assert_array_equal(out, np.concatenate(want))


@on_all
def test_codes_of_four_bits_are_taken_apart(call, target):
    lanes = TARGETS[target].lanes
    w, x = drawn(np.uint8, 0, 255, 4 * lanes), drawn(np.int8, -127, 127, 4 * lanes)
    out = np.zeros(lanes, np.int32)
    call("nibbles", target, w, x, out)
    codes = (w & 15).astype(np.int32) + (w >> 4)
    np.testing.assert_array_equal(out, (codes * x).reshape(lanes, 4).sum(1))


@on_all
def test_codes_become_the_bytes_at_their_places_in_a_table(call, target):
    lanes = TARGETS[target].lanes
    codes = np.resize(RNG.permutation(16), 4 * lanes).astype(np.uint8)
    table = np.array([*range(8), 0, 0, 0, 128, 127, 127, 127, 127], np.uint8)
    out = np.zeros(lanes, np.int32)
    call("places", target, codes, out)
    np.testing.assert_array_equal(out.view(np.uint8), table[codes])


@on_all
def test_bytes_are_widened_and_narrowed_and_nothing_beside_them_changes(call, target):
    lanes = TARGETS[target].lanes
    p, q = drawn(np.uint8, 0, 255, lanes), drawn(np.int8, -127, 127, lanes)
    out, back = np.zeros(2 * lanes, np.int32), np.full(2 * lanes + 1, 99, np.int8)
    call("bytes", target, p, q, out, back)
    np.testing.assert_array_equal(out, np.concatenate([p, q], dtype=np.int32))
    want = np.concatenate([p.astype(np.int32) - 128, -q.astype(np.int32), [99]])
    np.testing.assert_array_equal(back, want)


@on_all
def test_scalar_bytes_are_computed_with_as_integers(call, target):
    n = 50
    p, q = drawn(np.uint8, 0, 255, n), drawn(np.int8, -127, 127, n)
    sums, up, to = np.zeros(n, np.int32), np.zeros(n, np.uint8), np.zeros(n, np.int8)
    call("scalars", target, n, p, q, sums, up, to)
    np.testing.assert_array_equal(sums, p.astype(np.int32) + 2 * q.astype(np.int32))
    np.testing.assert_array_equal(up, np.maximum(p, 7))
    np.testing.assert_array_equal(to, np.abs(q) - 1)


FORMS = {
    row.name: row
    for target in TARGETS.values()
    for row in target.intrinsics.values()
    if "vdot_quads" in row.op
}
FORM_KERNEL = """
@kernel
def form(acc: ptr[i32], a: ptr[u8], b: ptr[u8], out: ptr[i32]):
    vstore_i32(out, {})
"""


@pytest.mark.parametrize("name", FORMS)
def test_instructions_for_all_codes_have_forms_that_narrow_targets_compute_exactly(name):
    """Also with values of -128, which quantised activations leave out."""
    row, target = FORMS[name], TARGETS["x86-64-avx2"]
    operands = ("vload_i32(acc)", "vload_quads(a)", "vload_quads(b)")
    unit = parse_high(Source("form.dk", FORM_KERNEL.format(row.op.format(*operands))))
    lowered = lower(unit, "form", {}, target, name="form")
    types = [np.dtype(VECTOR_TYPES[kind].dtype) for kind in row.params]
    for high in (256, 1):  # drawn; all at the ends
        quads = [RNG.integers(0, high, 32, np.uint8) ^ np.uint8(128) for _ in range(2)]
        acc, out = RNG.integers(-(2**31), 2**31, 8, np.int32), np.zeros(8, np.int32)
        interpret(lowered, "form", (acc, *quads, out), target)
        given = [v.view(t) for v, t in zip((acc, *quads), types, strict=True)]
        np.testing.assert_array_equal(out, meaning_of(row)(*given))


SUMMING = [name for name, target in TARGETS.items() if target.sums_16]


@pytest.mark.parametrize("target", SUMMING)
def test_products_are_added_in_16_bits_where_they_fit(target):
    lanes = TARGETS[target].lanes
    w, x = drawn(np.uint8, 0, 15, 8 * lanes), drawn(np.int8, -127, 127, 8 * lanes)
    products = (w.astype(np.int32) * x).reshape(2, lanes, 4)
    unit = lower(parse_high(Source("s.dk", SUM_TEXT)), "pairs", {}, TARGETS[target], name="pairs")
    out = np.zeros(lanes, np.int32)
    interpret(parse_low(Source("s.c", print_low(unit))), "pairs", [w, x, out], TARGETS[target])
    np.testing.assert_array_equal(out, products.sum((0, 2)))
    if target in EVERY:
        again = np.zeros(lanes, np.int32)
        run(SUM_TEXT, "pairs", target, w, x, again)
        np.testing.assert_array_equal(again, out)
