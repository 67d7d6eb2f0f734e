"""Lowering whole kernels: tiles, vector loops, inlining, constants. Numbers against numpy."""

from functools import cache
from importlib.resources import files
from itertools import product

import numpy as np
import pytest

from dovetail.codegen.isa.signatures import known_constants, known_functions
from dovetail.codegen.lower import lower
from dovetail.codegen.targets import ALL_TARGETS, TARGETS
from dovetail.ir.diagnostics import Source
from dovetail.ir.errors import ScheduleError
from dovetail.ir.high.parse import parse_high
from dovetail.ir.high.verify import load_modules
from dovetail.ir.low.verify import verify_low
from tests.codegen.float_targets import FLOAT_TARGETS
from tests.codegen.lower.native import NATIVE, RUNNING, low_text, run
from tests.shares import share

RNG = np.random.default_rng(3)

GEMM = """
@inline
def tile(h: const, K: i64, A: ptr[f32], B: ptr[W], C: ptr[f32]):
    parts = 16 // VL
    acc = regs((h, parts), f32)
    for k in range(K):
        b = regs((parts,), f32)
        for j in unroll(parts):
            b[j] = vload(B + k * 16 + j * VL)
        for i in unroll(h):
            a = vbroadcast(A[i * K + k])
            for j in unroll(parts):
                acc[i, j] = vfma(a, b[j], acc[i, j])
    for i in unroll(h):
        for j in unroll(parts):
            vstore(C + i * 16 + j * VL, acc[i, j])

@kernel
def gemm(M: i64, K: i64, A: ptr[f32], B: ptr[W], C: ptr[f32]):
    W: param = choice("f32", "bf16")
    MR: param = choice(range(1, 15), default=4)
    for m in range(0, M, MR):
        rows = min(MR, M - m)
        for h in unroll(1, MR + 1):
            if rows == h:
                tile(h, K, A + m * K, B, C + m * 16)
"""


@pytest.mark.parametrize("target", NATIVE)
@pytest.mark.parametrize("height", [1, 5])
def test_gemm_tile_at_every_edge(height, target):
    for m in (1, height - 1, height, height + 1, 2 * height + 1):
        a, b = RNG.standard_normal((m, 37)), RNG.standard_normal((37, 16))
        a, b = a.astype(np.float32), b.astype(np.float32)
        c = np.zeros((m + 1, 16), np.float32)
        run(GEMM, "gemm", target, m, 37, a, b, c, MR=height)
        np.testing.assert_allclose(c[:m], a.astype(np.float64) @ b, rtol=1e-5, atol=1e-5)
        assert not c[m:].any()


RMSNORM = """
@kernel
def rmsnorm(T: i64, H: i64, x: ptr[f32], w: ptr[f32], eps: f32, out: ptr[f32]):
    for t in range(T):
        row = x + t * H
        squares = vzero()
        for i in vrange(0, H):
            v = vload(row + i)
            squares = vfma(v, v, squares)
        scale = vbroadcast(1.0 / sqrt(vreduce_add(squares) / cast(f32, H) + eps))
        for i in vrange(0, H):
            v = vmul(vload(row + i), scale)
            vstore(out + t * H + i, vmul(v, vload(w + i)))
"""


@pytest.mark.parametrize("target", RUNNING)
def test_rmsnorm_at_vector_edges(target):
    lanes = ALL_TARGETS[target].lanes
    for h in {1, max(lanes - 1, 1), lanes, lanes + 1, 3 * lanes + 2}:
        x, w = RNG.standard_normal((3, h)).astype(np.float32), RNG.standard_normal(h)
        w, out = w.astype(np.float32), np.full((4, h), 5, np.float32)
        run(RMSNORM, "rmsnorm", target, 3, h, x, w, 1e-5, out)
        wide = x.astype(np.float64)
        expected = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * w
        np.testing.assert_allclose(out[:3], expected, rtol=2e-5, atol=1e-6)
        assert (out[3] == 5).all()


def test_parameters_may_be_called_like_functions_of_c():
    text = """
@kernel
def k(powf: f32, out: ptr[f32]):
    out[0] = pow(2.0, powf)
"""
    out = np.zeros(1, np.float32)
    run(text, "k", NATIVE[0], 3.0, out)
    assert out[0] == 8


@pytest.mark.parametrize("target", RUNNING)
def test_vrange_from_anywhere_to_anywhere(target):
    text = """
@kernel
def k(first: i64, last: i64, out: ptr[f32]):
    for i in vrange(first, last):
        vstore(out + i, vbroadcast(1.0))
"""
    for first, last in ((0, 0), (5, 3), (3, 4), (2, 19), (1, 33), (7, 40), (40, 7)):
        out = np.zeros(64, np.float32)
        run(text, "k", target, first, last, out)
        at = np.arange(64)
        np.testing.assert_array_equal(out, (at >= first) & (at < last))


STOPS = (0, 3, 8, 20, 32)
CONSTANT_STOPS = "".join(
    f"""
@kernel
def k{stop}(out: ptr[f32]):
    for i in vrange({stop}):
        vstore(out + i, vbroadcast(1.0))
"""
    for stop in STOPS
)


@pytest.mark.parametrize("stop", STOPS)
def test_constant_vranges_need_no_conditions(stop):
    text = low_text(CONSTANT_STOPS, f"k{stop}", "x86-64-avx2")
    assert "if" not in text.split(f"void k{stop}")[1]
    out = np.zeros(64, np.float32)
    run(CONSTANT_STOPS, f"k{stop}", NATIVE[0], out)
    assert out.sum() == stop


CONTROL = """
@inline
def square(x: f32) -> f32:
    y = x * x
    return y

@inline
def bigger(x: f32, y: f32) -> f32:
    return x if x > y else y

@inline
def count(n: i64, p: ptr[f32]) -> i64:
    i = 0
    while i < n and square(p[i]) < 100.0:
        i += 1
    return i

@inline
def swap(x: ptr[f32], i: i64, j: i64):
    i = i + 0
    y = x[i]
    x[i] = x[j]
    x[j] = y

@kernel
def k(n: i64, p: ptr[f32], out: ptr[f32]):
    y = 3.0
    i: i64 = 1
    for x in range(2):
        y += square(p[x]) + y
    out[0] = y
    out[1] = cast(f32, count(n, p))
    out[2] = square(p[0]) if n > 100 else bigger(square(p[1]), 2.0)
    out[3] = 1.0 if n < 0 or square(p[2]) >= 0.0 else 0.0
    swap(out, 2, 3)
    if n > 2:
        z = 1.0
    else:
        z = square(p[0])
    out[4] = z
    for j in range(n):
        if j == 2:
            continue
        if j > 4:
            break
        i += j
    out[5] = cast(f32, i)
    for j in range(3, 0, -1):
        out[5 + j] = cast(f32, j)
    if p == null:
        return
    out[9] = 9.0
"""


@pytest.mark.parametrize("target", RUNNING)
def test_inlined_functions_keep_their_names_and_order_apart(target):
    p = np.array([1, 2, 3, 4, 11, 5, 6], np.float32)
    out = np.zeros(10, np.float32)
    run(CONTROL, "k", target, 7, p, out)
    assert out.tolist() == [18, 4, 1, 4, 1, 9, 1, 2, 3, 9]


ORDER = """
@inline
def bump(p: ptr[f32]) -> f32:
    p[0] = p[0] + 1.0
    return p[0]

@kernel
def k(n: i64, p: ptr[f32], out: ptr[f32]):
    out[0] = p[0] * 10.0 + bump(p)
    out[1] = max(bump(p), bump(p))
    for i in vrange(n):
        n = n - 1
        vstore(out + 2 + i, vbroadcast(2.0))
    wide: f64 = 0.1 if n > 100 else 0.3
    out[5] = cast(f32, wide - 0.3)
"""


@pytest.mark.parametrize("target", RUNNING)
def test_operands_are_computed_left_to_right_and_bounds_once(target):
    p, out = np.ones(1, np.float32), np.full(6, 7, np.float32)
    run(ORDER, "k", target, 3, p, out)
    assert out.tolist() == [12, 4, 2, 2, 2, 0]


def test_loads_behind_a_condition_are_not_hoisted():
    """The right side of `and` reads past the end if it is computed first."""
    text = low_text(CONTROL, "k", "generic")
    loop = text[text.index("while (1)") :]
    assert loop.index("if (test)") < loop.index("p[i_1]")


CONSTANTS = """
@kernel
def k(n: i64, out: ptr[f32]):
    A: param = choice(3, 5)
    MODE: param = choice("plain", "twice")
    factor = 2.0 if MODE == "twice" else 1.0
    at = 0
    for i in unroll(A):
        if i % 2 == 0:
            out[at] = cast(f32, i * A) * factor
            at += 1
    tail = -7 // 2 + -7 % 2
    out[at] = cast(f32, tail) + cast(f32, n - tail)
    s = local(at + VL, f32)
    s[0] = 1.5
    out[at + 1] = s[0]
"""


@pytest.mark.parametrize(("a", "mode"), [(3, "plain"), (5, "twice")])
def test_constants_follow_the_binding(a, mode):
    out = np.zeros(8, np.float32)
    run(CONSTANTS, "k", NATIVE[0], 10, out, A=a, MODE=mode)
    factor = 2 if mode == "twice" else 1
    kept = [i * a * factor for i in range(0, a, 2)]
    assert out.tolist()[: len(kept) + 2] == [*kept, 10, 1.5]


def test_generated_text_reads_as_written():
    text = """
@kernel
def k(n: i64, x: ptr[f32], w: ptr[f32], out: ptr[f32]):
    acc = regs((2,), f32)
    unused = vzero()
    for i in range(0, n, 2 * VL):
        for u in unroll(2):
            v = vload(x + i + u * VL)
            acc[u] = vfma(v, vload(w + (i + u * VL)), acc[u])
    out[0] = vreduce_add(vadd(acc[0], acc[1])) * 1e-3
"""
    printed = low_text(text, "k", "x86-64-avx2").split("void k")[1]
    assert "const float *x, const float *w, float *out" in printed
    assert "__m256 acc_0 = _mm256_setzero_ps();" in printed
    assert "i += 16" in printed
    assert "const __m256 v_1 = _mm256_loadu_ps(x + i);" in printed
    assert "_mm256_loadu_ps(w + (i + 8))" in printed
    assert "* 0.001f;" in printed
    assert "unused" not in printed


def test_variables_are_declared_where_they_live():
    text = """
@kernel
def k(n: i64, x: ptr[f32], out: ptr[f32]):
    for i in range(n):
        v = x[i]
        out[i] = v
    for i in range(n):
        v = x[i]
        if v > 0.0:
            last = v
        else:
            last = -v
        out[i] += last
"""
    printed = low_text(text, "k", "generic")
    assert printed.count("const float v = x[i];") == 2
    assert "    float last;\n" in printed
    x, out = np.float32([1, -2]), np.zeros(2, np.float32)
    run(text, "k", NATIVE[0], 2, x, out)
    assert out.tolist() == [2, 0]


PRODUCT = files("dovetail.codegen") / "kernels"
MODULES = sorted(item.name[:-3] for item in PRODUCT.iterdir() if item.name.endswith(".dk"))


@cache
def functions_of(target):
    return known_functions([FLOAT_TARGETS[target]])


@pytest.mark.parametrize(("module", "target"), share(list(product(MODULES, FLOAT_TARGETS)), 3))
def test_kernels_of_the_product_lower_for_every_target(module, target):
    def resolve(name):
        return Source(f"{name}.dk", (PRODUCT / f"{name}.dk").read_text(encoding="utf-8"))

    unit = load_modules(resolve(module), resolve)
    chosen = FLOAT_TARGETS[target]
    for function in (f for f in unit.functions if f.kind == "kernel"):
        lowered = lower(unit, function.name, {}, chosen, name="k")
        verify_low(
            lowered,
            Source("lowered", ""),
            functions=functions_of(target),
            constants=known_constants([chosen]),
        )


REFUSED = [
    ("no kernel `other`", "other", {}, "pass"),
    ("no tunable `B`", "k", {"B": 1}, "pass"),
    ("none of its choices", "k", {"A": 9}, "pass"),
    ("line 5: `n` must be a compile-time integer", "k", {}, "for i in unroll(n): prefetch(p)"),
    ("line 5: `t[3]` lies outside its tile", "k", {}, "t = regs((2,), f32); vstore(p, t[A])"),
    ("too many copies", "k", {}, "for i in unroll(100000): prefetch(p)"),
    ("calls itself", "k", {}, "f()"),
    ("neither a builtin nor", "k", {}, "g()"),
    ("`nothing` is not known", "k", {}, "p[0] = nothing"),
    (
        "cannot be nested",
        "k",
        {},
        "for i in vrange(n):\n    for j in vrange(n): vstore(p, vzero())",
    ),
    ("must be a pointer to f32", "k", {}, "vstore(p, vload(cast(ptr[f64], p)))"),
    ("stands where a number", "k", {}, 'p[0] = "bf16"'),
]


@pytest.mark.parametrize(("message", "kernel", "binding", "body"), REFUSED)
def test_bindings_that_make_no_sense_are_schedule_errors(message, kernel, binding, body):
    head = "@kernel\ndef k(n: i64, p: ptr[f32]):\n  A: param = choice(3, 5)\n\n"
    loop = "\n@inline\ndef f():\n  f()\n"
    unit = parse_high(Source("k.dk", f"{head}  {body}\n{loop}"))
    with pytest.raises(ScheduleError, match=message.replace("[", r"\[")):
        lower(unit, kernel, binding, TARGETS["x86-64-avx2"], name="k")


def test_a_parameter_may_be_changed_before_it_is_assigned():
    text = "@kernel\ndef k(n: i64, y: ptr[f32]):\n    n -= 2\n    y[n] = 1.0\n"
    out = np.zeros(4, np.float32)
    run(text, "k", "generic", 4, out)
    assert out.tolist() == [0, 0, 1, 0]


def test_a_tile_assigned_to_itself_keeps_its_value():
    text = """
@kernel
def k(x: ptr[f32], y: ptr[f32]):
    a = regs((1,), f32)
    a[0] = vload(x)
    a[0] = a[0]
    vstore(y, a[0])
"""
    x, y = np.ones(16, np.float32), np.zeros(16, np.float32)
    run(text, "k", "generic", x, y)
    assert y[0] == 1


LOOP_NAME_AGAIN = """
@kernel
def k(n: i64, x: ptr[f32]):
    for i in range(n):
        x[i] = 2.0
    i = n - 1
    x[i] = 5.0
"""


def test_a_loop_variables_name_may_be_assigned_afterwards():
    x = np.zeros(4, np.float32)
    run(LOOP_NAME_AGAIN, "k", "generic", 4, x)
    assert x.tolist() == [2, 2, 2, 5]
