"""Verifying the high IR: what is accepted, and each kind of fault with its place."""

from contextlib import suppress
from importlib.resources import files

import pytest
from hypothesis import given, settings

from dovetail.ir.diagnostics import Source
from dovetail.ir.errors import SyntaxDiagnostic
from dovetail.ir.high.parse import parse_high
from dovetail.ir.high.print import print_high
from dovetail.ir.high.verify import load_modules, verify_high
from tests.ir.high.trees import UNITS

KERNELS = files("dovetail.codegen") / "kernels"


def verify(text):
    source = Source("k.dk", text)
    verify_high(parse_high(source), source)


def faults(text):
    with pytest.raises(SyntaxDiagnostic) as caught:
        verify(text)
    return [(d.code, d.span.line, d.span.column) for d in caught.value.diagnostics]


HEAD = """@kernel
def k(n: i64, m: i32, x: f32, p: ptr[f32], b: ptr[bf16], w: ptr[W], q: ptr[i32]):
    W: param = choice("f32", "bf16", default="f32")
    MR: param = choice(1, 2, 4, default=2)
"""
FIRST = 5
"""Line on which a body begins."""


def kernel(body):
    return HEAD + "".join(f"    {line}\n" for line in body.strip("\n").split("\n"))


ACCEPTED = {
    "widening": "y: i64 = m\nz: f64 = x\ny += m",
    "literals take the type they meet": "y = 2 * x + 1\nz: f64 = 0\ni = m + 1",
    "either branch assigns": "if n > 2:\n    y = 1\nelse:\n    y = 2\np[y] = 0.0",
    "return ends a path": "if n > 2:\n    return\nelse:\n    y = 2\np[y] = 0.0",
    "constants count up": "s = 0\nfor i in unroll(MR):\n    s += 2\nt = local(s, f32)\nt[0] = x",
    "constant if": 'if W == "bf16":\n    s = 2\nelse:\n    s = 4\nt = local(s * VL, f32)\nt[0] = x',
    "one loop name twice": "for i in range(n):\n    p[i] = x\nfor i in unroll(2):\n    p[i] = x",
    "null": "r = p\nif n > 0:\n    r = null\nif r != null and p == r:\n    p[0] = x",
    "pointers": "d = (p + n) - p\nr = q if n > 0 else null\np[d] = cast(f32, load(r))",
    "storage": "store(b, load(w) + load(b + n))\nvstore(b, vload(w, n), n)",
    "tail": "t = vzero()\nfor i in vrange(n):\n    t = vtail(vload(p + i), 0.0)\nvstore(p, t)",
    "loops are left": "for i in range(n):\n    if i > 3:\n        break\n    continue",
    "dtype names": "if W == bf16:\n    store(w, 1.0)",
}


@pytest.mark.parametrize("body", ACCEPTED.values(), ids=ACCEPTED)
def test_accepted(body):
    verify(kernel(body))


@pytest.mark.parametrize(
    "name", sorted(item.name for item in KERNELS.iterdir() if item.name.endswith(".dk"))
)
def test_kernels_of_the_product_are_accepted(name):
    load_modules(kernel_source(name), lambda module: kernel_source(f"{module}.dk"))


def kernel_source(name):
    return Source(name, (KERNELS / name).read_text(encoding="utf-8"))


REFUSED = [
    ("high-unknown-name", "y = nn", 0, 9),
    ("high-unknown-function", "y = vlod(p)", 0, 9),
    ("high-arity", "y = vadd(vzero())", 0, 9),
    ("high-type-mismatch", "y = vadd(vzero(), x)", 0, 9),
    ("high-type-mismatch", "y = x + n", 0, 9),
    ("high-type-mismatch", "y = x // 2", 0, 9),
    ("high-type-mismatch", "y = n % x", 0, 9),
    ("high-type-mismatch", "y = ~x", 0, 9),
    ("high-type-mismatch", "p[0] = n", 0, 12),
    ("high-type-mismatch", "y: i32 = n", 0, 14),
    ("high-type-mismatch", "y = sqrt(n)", 0, 9),
    ("high-type-mismatch", "y = vload(q)", 0, 9),
    ("high-type-mismatch", "y = vload_i32(p)", 0, 9),
    ("high-type-mismatch", "y = x[0]", 0, 9),
    ("high-type-mismatch", "y = p[x]", 0, 9),
    ("high-type-mismatch", "y = p * 2", 0, 9),
    ("high-type-mismatch", "y = p if n > 0 else q", 0, 9),
    ("high-type-mismatch", "y = 1 if x else 2", 0, 9),
    ("high-type-mismatch", "if p:\n    n = 1", 0, 8),
    ("high-type-mismatch", "y = cast(f32, p)", 0, 9),
    ("high-type-mismatch", "m += n", 0, 5),
    ("high-type-mismatch", "for i in range(x):\n    n = i", 0, 20),
    ("high-type-mismatch", "y = x + W", 0, 9),
    ("high-int-division", "y = n / m", 0, 9),
    ("high-vector-operator", "y = vzero() + vzero()", 0, 9),
    ("high-vector-operator", "y = -vzero()", 0, 9),
    ("high-storage-access", "y = b[0]", 0, 9),
    ("high-storage-access", "w[n] = x", 0, 5),
    ("high-storage-access", "y: bf16 = x", 0, 8),
    ("high-unknown-type", "y: f80 = x", 0, 8),
    ("high-unknown-type", "y = cast(ptr[V], p)", 0, 14),
    ("high-unknown-type", "t = regs((2,), bf16)", 0, 5),
    ("high-type-change", "y = 1\ny = x\ny = vzero()", 1, 9),
    ("high-type-change", "y = x\ny: i64 = n", 1, 5),
    ("high-maybe-unassigned", "if n > 0:\n    y = x\np[0] = y", 2, 12),
    ("high-maybe-unassigned", "for i in range(n):\n    y = x\np[0] = y", 2, 12),
    ("high-maybe-unassigned", "for i in range(n):\n    n = i\np[0] = x + cast(f32, i)", 2, 26),
    ("high-not-constant", "t = regs((n,), f32)", 0, 15),
    ("high-not-constant", "t = local(n, f32)", 0, 15),
    ("high-not-constant", "for i in unroll(n):\n    p[i] = x", 0, 21),
    ("high-not-constant", "t = regs((2,), f32)\nvstore(p, t[n])", 1, 17),
    ("high-not-constant", "s = 1\nif n > 0:\n    s = 2\nt = regs((s,), f32)", 3, 15),
    ("high-not-constant", "y = vshl_i32(viota(), n)", 0, 27),
    ("high-tile-rank", "t = regs((2, 2), f32)\nvstore(p, t[0])", 1, 15),
    ("high-tile-rank", "y = p[0, 1]", 0, 9),
    ("high-tile-use", "t = regs((2,), f32)\nvstore(p, t)", 1, 15),
    ("high-vtail-outside", "y = vtail(vzero(), 0.0)", 0, 9),
    (
        "high-nested-vrange",
        "for i in vrange(n):\n    for j in vrange(n):\n        vstore(p + j, vzero())",
        1,
        9,
    ),
    ("high-break-position", "break", 0, 5),
    ("high-break-position", "for i in unroll(2):\n    continue", 1, 9),
    ("high-unreachable", "return\nn = 1", 1, 5),
    ("high-kernel-return", "return n", 0, 5),
    ("high-return-position", "for i in vrange(n):\n    return", 1, 9),
    ("high-bad-assignment", "MR = 3", 0, 5),
    ("high-bad-assignment", "VL = 3", 0, 5),
    ("high-bad-assignment", "vload = 3", 0, 5),
    ("high-bad-assignment", "for i in range(n):\n    i = 3", 1, 9),
    ("high-loop-variable", "for n in range(3):\n    p[n] = x", 0, 5),
    ("high-no-value", "y = vstore(p, vzero())", 0, 9),
    ("high-unused-value", "vload(p)", 0, 5),
]


@pytest.mark.parametrize(
    ("code", "body", "line", "column"),
    REFUSED,
    ids=[f"{r[0]}-{r[1].split()[0]}-{i}" for i, r in enumerate(REFUSED)],
)
def test_refused_statements_say_where(code, body, line, column):
    assert faults(kernel(body))[:1] == [(code, FIRST + line, column)]


INLINE = "@inline\ndef f({}){}:\n    {}\n"
REFUSED_HEADS = [
    ("high-duplicate", INLINE.format("", "", "pass") * 2, 5, 1),
    ("high-duplicate", "@inline\ndef vload(p: ptr[f32]):\n    pass\n", 2, 1),
    ("high-duplicate", INLINE.format("a: i64, a: i64", "", "pass"), 2, 15),
    ("high-duplicate", INLINE.format("inf: f32", "", "pass"), 2, 7),
    ("high-recursion", INLINE.format("", "", "f()"), 2, 1),
    (
        "high-arity",
        INLINE.format("a: i64", "", "g()") + "@inline\ndef g(a: i64):\n    pass\n",
        3,
        5,
    ),
    ("high-missing-return", INLINE.format("", " -> f32", "pass"), 2, 1),
    ("high-type-mismatch", INLINE.format("a: ptr[f32]", " -> f32", "return a"), 3, 12),
    (
        "high-return-position",
        INLINE.format("a: i64", "", "if a > 0:\n        return a\n    return 2"),
        4,
        9,
    ),
    ("high-unknown-type", INLINE.format("a: f80", "", "pass"), 2, 10),
    ("high-unknown-type", INLINE.format("a: ptr[V]", "", "pass"), 2, 10),
    ("high-special-parameter", INLINE.format("a: sched", "", "pass"), 2, 7),
    ("high-special-parameter", "@kernel\ndef k(a: const):\n    pass\n", 2, 7),
    ("high-special-parameter", "@kernel\ndef k(block_q: sched):\n    pass\n", 2, 7),
    ("high-special-parameter", "@kernel\ndef k(me: thread):\n    pass\n", 2, 7),
    ("high-unknown-type", "@kernel\ndef k(v: vec[f32]):\n    pass\n", 2, 10),
    ("high-kernel-return", "@kernel\ndef k() -> f32:\n    pass\n", 2, 12),
    ("high-tunable", INLINE.format("", "", "M: param = choice(1)"), 3, 5),
    ("high-tunable", '@kernel\ndef k():\n    M: param = choice(1, "a")\n', 3, 5),
    ("high-tunable", "@kernel\ndef k():\n    M: param = choice(1, 1)\n", 3, 5),
    ("high-tunable-default", "@kernel\ndef k():\n    M: param = choice(1, default=2)\n", 3, 5),
    (
        "high-not-constant",
        "@inline\ndef f(h: const):\n    pass\n@kernel\ndef k(n: i64):\n    f(n)\n",
        6,
        7,
    ),
    (
        "high-tile-use",
        "@inline\ndef f(t: tile):\n    pass\n@kernel\ndef k(n: i64):\n    f(n)\n",
        6,
        7,
    ),
    (
        "high-type-mismatch",
        "@inline\ndef f(t: dtype):\n    pass\n@kernel\ndef k(n: i64):\n    f(n)\n",
        6,
        7,
    ),
    ("high-bad-assignment", "@inline\ndef f(h: const):\n    h = 2\n", 3, 5),
    (
        "high-missing-tunable",
        "@inline\ndef f(p: ptr[f32]):\n    p[M] = 0.0\n"
        "@kernel\ndef k(p: ptr[f32]):\n    M: param = choice(1)\n    f(p)\n"
        "@kernel\ndef j(p: ptr[f32]):\n    f(p)\n",
        9,
        1,
    ),
    (
        "high-nested-vrange",
        "@inline\ndef f(n: i64, p: ptr[f32]):\n"
        "    for i in vrange(n):\n        vstore(p + i, vzero())\n"
        "@kernel\ndef k(n: i64, p: ptr[f32]):\n    for i in vrange(n):\n        f(n, p)\n",
        8,
        9,
    ),
]


@pytest.mark.parametrize(
    ("code", "text", "line", "column"),
    REFUSED_HEADS,
    ids=[f"{r[0]}-{i}" for i, r in enumerate(REFUSED_HEADS)],
)
def test_refused_functions_say_where(code, text, line, column):
    assert faults(text)[:1] == [(code, line, column)]


def test_all_faults_come_in_text_order():
    found = faults(kernel("y = nn\nz = x + n\nbreak"))
    assert [line for _, line, _ in found] == [FIRST, FIRST + 1, FIRST + 2]


def test_result_types_are_inferred_through_calls():
    text = INLINE.format("a: f32", "", "return g(a)")
    text += "@inline\ndef g(a: f32):\n    return vbroadcast(a)\n"
    verify(text + "@kernel\ndef k(p: ptr[f32]):\n    vstore(p, f(1.0))\n")
    assert faults(text + "@kernel\ndef k(p: ptr[f32]):\n    p[0] = f(1.0)\n")[0][1:] == (9, 12)


def modules(**texts):
    def resolve(name):
        return Source(f"{name}.dk", texts[name])

    return load_modules(resolve("main"), resolve)


def test_modules_merge_the_functions_they_import():
    leaf = "@inline\ndef twice(x: f32) -> f32:\n    return x + x\n@kernel\ndef other():\n    pass\n"
    unit = modules(
        main="import middle\n@kernel\ndef k(p: ptr[f32]):\n    p[0] = four(p[0])\n",
        middle="import leaf\n@inline\ndef four(x: f32) -> f32:\n    return twice(twice(x))\n",
        leaf=leaf,
    )
    assert [f.name for f in unit.functions] == ["twice", "four", "k"]


@pytest.mark.parametrize(
    ("texts", "source", "column"),
    [
        ({"main": "import missing\n"}, "main.dk", 8),
        ({"main": "import a\n", "a": "import a\n"}, "a.dk", 8),
        ({"main": "import a\n", "a": "x = 1\n"}, "a.dk", 1),
    ],
)
def test_bad_imports_name_the_file(texts, source, column):
    with pytest.raises(SyntaxDiagnostic) as caught:
        modules(**texts)
    (found,) = caught.value.diagnostics
    assert (found.source.name, found.span.line, found.span.column) == (source, 1, column)


@settings(max_examples=200, deadline=None)
@given(UNITS)
def test_no_text_ends_in_another_exception(unit):
    source = Source("k.dk", print_high(unit))
    with suppress(SyntaxDiagnostic):
        verify_high(parse_high(source), source)
