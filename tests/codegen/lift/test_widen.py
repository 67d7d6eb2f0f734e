"""Neighbouring groups of vectors become one, where that is right, and no bit changes."""

from dataclasses import replace

import numpy as np
import pytest

from dovetail.codegen.lift import lift
from dovetail.codegen.lift.unroll import unroll_kernel
from dovetail.codegen.lower import lower
from dovetail.codegen.targets import TARGETS
from dovetail.ir.diagnostics import Source
from dovetail.ir.low.parse import parse_low
from dovetail.ir.low.print import print_low
from tests.codegen.interpret import interpret
from tests.codegen.lift.native import EACH, NATIVE, build, lifted, run_original
from tests.codegen.lift.test_pinned import CASES, arguments
from tests.codegen.lower.native import _argument
from tests.shares import in_turns, share

WIDE = {"kn_gemm_2x16_fma3": (8, 16), "kn_gemm_1x8_neonfma": (4, 8)}
TYPES = "const float *x, const float *z, float *y, float *o"


def run(unit, function, target, args, **binding):
    """Lower with its loops unrolled, and run."""
    kernel = unroll_kernel(unit.function(function))
    others = tuple(f for f in unit.functions if f.name != function)
    unit = replace(unit, functions=(*others, kernel))
    lowered = lower(unit, function, binding, TARGETS[target], name=function)
    if target in NATIVE:
        getattr(build(print_low(lowered), target), function)(*map(_argument, args))
    else:
        interpret(lowered, function, list(args), TARGETS[target])
    return next(a for a in reversed(args[:-1]) if isinstance(a, np.ndarray))


def tunables(unit, function):
    return {t.name: t.choices for t in unit.function(function).tunables}


def lift_text(body):
    return lift(parse_low(Source("k.c", f"void f({TYPES}) {{ {body} }}")), "f")


@pytest.mark.parametrize("function", CASES)
def test_what_lies_side_by_side_becomes_one_group(function):
    wanted = {"LANES": WIDE[function]} if function in WIDE else {}
    assert tunables(lifted(CASES[function][0], function), function) == wanted


@pytest.mark.parametrize(("function", "target"), share(in_turns(list(WIDE), EACH), 3))
def test_every_width_and_unrolling_gives_the_same_bits(function, target):
    file, original, rows, columns, _ = CASES[function]
    unit = lifted(file, function)
    for k, columns_left in ((1, columns), (5, 3), (9, columns + 7), (18, 2 * columns - 1)):
        args, _ = arguments(rows, columns, rows, columns_left, k)
        run_original(file, function, original, args)
        own = args[6].copy()
        outs = []
        for lanes in WIDE[function]:
            for turns in (1, 2, 4):
                again, _ = arguments(rows, columns, rows, columns_left, k)
                run(unit, function, target, again, LANES=lanes, UNROLL=turns)
                outs.append(again[6])
        assert all(np.array_equal(out, outs[0]) for out in outs)
        if target == original or (target.startswith(original) and original in NATIVE):
            assert np.array_equal(own, outs[0])


LOADS = "__m256 a = _mm256_loadu_ps(x); __m256 b = _mm256_loadu_ps(x + 8); "
STORES = "_mm256_storeu_ps(y, a); _mm256_storeu_ps(y + 8, b);"
BODIES = {
    "alike": (LOADS + "a = _mm256_add_ps(a, a); b = _mm256_add_ps(b, b); " + STORES, True),
    "crossed": (
        LOADS + "__m256 c = _mm256_loadu_ps(z); __m256 d = _mm256_loadu_ps(z + 8); "
        "b = _mm256_mul_ps(b, d); a = _mm256_mul_ps(a, c); " + STORES,
        True,
    ),
    "one only": (LOADS + "a = _mm256_add_ps(a, a); " + STORES, False),
    "swapped": (LOADS + "_mm256_storeu_ps(y, b); _mm256_storeu_ps(y + 8, a);", False),
    "apart": (LOADS.replace("x + 8", "x + 9") + STORES, False),
    "another vector": (
        LOADS + "__m256 c = _mm256_loadu_ps(z); a = _mm256_mul_ps(a, c); "
        "b = _mm256_mul_ps(b, c); " + STORES,
        False,
    ),
    "another store between": (
        LOADS + "_mm256_storeu_ps(y, a); _mm256_storeu_ps(o, a); "
        "_mm256_storeu_ps(y + 8, b); _mm256_storeu_ps(o + 8, b);",
        False,
    ),
    "overwritten before": (
        LOADS.replace("__m256 b", "_mm256_storeu_ps(o, a); __m256 b") + STORES,
        False,
    ),
}


@pytest.mark.parametrize("kind", BODIES)
def test_only_what_is_done_to_both_is_joined(kind):
    body, joined = BODIES[kind]
    unit = lift_text(body)
    found = tunables(unit, "f")
    assert found == ({"LANES": (8, 16)} if joined else {})
    text = f"void f({TYPES}) {{ {body} }}"
    own = parse_low(Source("k.c", text)), "x86-64-avx2"
    bindings = [{"LANES": lanes} if joined else {} for lanes in (8, 16)]
    made = [
        (lower(unit, "f", b, TARGETS["aarch64-neon"], name="f"), "aarch64-neon") for b in bindings
    ]
    start = np.random.default_rng(1).standard_normal(120).astype(np.float32)
    for at in (0, 64, 4):  # what is written is what was read, lies far away, or over it
        results = []
        for lowered, target in (own, *made):
            memory = start.copy()
            places = [memory, memory[40:], memory[at:], memory[at + 20 :]]
            interpret(lowered, "f", places, TARGETS[target])
            results.append(memory)
        assert all(np.array_equal(results[0], result) for result in results), at


@pytest.mark.parametrize(
    "body",
    [
        "__m256 a = _mm256_loadu_ps(x); _mm256_storeu_ps(y, a); a = _mm256_broadcast_ss(y + 7);",
        "__m256 a = _mm256_loadu_ps(y); _mm256_storeu_ps(y + 4, a);",
    ],
)
def test_parts_of_a_group_do_not_overtake_a_store(body):
    """On NEON a group of 8 lanes is two vectors; the second follows all of the first statement."""
    text = f"void f({TYPES}) {{ {body} _mm256_storeu_ps(o, a); }}"
    unit = lift(parse_low(Source("k.c", text)), "f")
    lowered = lower(unit, "f", {}, TARGETS["aarch64-neon"], name="f")
    first, second = (
        [np.arange(16, dtype=np.float32) + 100 * n for n in range(4)] for _ in range(2)
    )
    interpret(parse_low(Source("k.c", text)), "f", first, TARGETS["x86-64-avx2"])
    interpret(lowered, "f", second, TARGETS["aarch64-neon"])
    assert np.array_equal(first, second)
