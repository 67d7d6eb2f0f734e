"""Vector loops of one instruction set come out for all: proved elementwise, or left alone."""

import numpy as np
import pytest

from dovetail.codegen.lift import lift
from dovetail.ir.high.print import print_high
from tests.codegen.lift.native import EACH, NATIVE, both, lifted, parsed
from tests.codegen.lift.test_scalar import SIZES, draw, loops
from tests.shares import in_turns, share

AVX2, AVX512, NEON = "x86-64-avx2", "x86-64-avx512", "aarch64-neon"
CASES = {
    "kn_add_avx_u16": ("add_avx.c", AVX2),
    "kn_clamp_avx512f_u32": ("clamp_avx512.c", AVX512),
    "kn_mulc_neon_u8": ("mul_neon.c", NEON),
    "axpy": ("axpy_index.c", AVX2),
    "whole_vectors": ("axpy_index.c", AVX2),
    "dot": ("sums.c", AVX2),
    "norm_avx": ("sums.c", AVX2),
    "most": ("most.c", AVX512),
}


def arguments(function, n):
    x, y, out = draw(n + 8), draw(n + 8, seed=1), np.zeros(n + 8, np.float32)
    if function == "axpy":
        return [n, 0.75, x, y]
    if function == "whole_vectors":
        return [n, x, y]
    if function == "dot":
        return [x, y, out, n]
    if function == "norm_avx":
        return [draw(8 * n), draw(8 * n, seed=1), np.zeros(8 * n, np.float32), 8 * n]
    if function == "most":
        return [x - 3, out, n]
    params = np.array([-0.5, 0.5], np.float32)
    return [4 * n, x, y, out, params]


@pytest.mark.parametrize("function", CASES)
def test_a_chain_becomes_one_loop_of_any_width(function):
    file, _ = CASES[function]
    module = lifted(file, function)
    wanted = ["vrange"] * (2 if function == "norm_avx" else 1)
    assert loops(module.function(function)) == wanted
    assert not any("pinned" in note for note in module.notes)


@pytest.mark.parametrize(("function", "target"), share(in_turns(list(CASES), EACH), 3))
def test_lifted_chains_give_the_numbers_of_the_original(function, target):
    file, original = CASES[function]
    if original not in NATIVE and original != NEON:
        pytest.skip(f"this CPU does not run {original}")
    for n in SIZES:
        for want, got in both(file, function, original, target, arguments(function, n)):
            assert np.all(np.abs(got - want) <= 2e-6 * np.maximum(np.abs(want), 1)), n


def test_the_function_is_what_the_lanes_compute():
    text = print_high(lift(parsed("clamp_avx512.c"), "kn_clamp_avx512f_u32"))
    store = next(line.strip() for line in text.splitlines() if "vstore" in line)
    assert (
        store == "vstore(out + i, vmin(all, vmax(all_2, vfma(vload(a + i), all_3, vload(b + i)))))"
    )
    assert "_mm512" not in text and "params[1]" in text


@pytest.mark.parametrize(
    ("function", "target"),
    share(in_turns(["neighbours", "different_tail", "long_tail", "fixed_place"], EACH), 3),
)
def test_what_is_not_elementwise_keeps_its_width_and_its_numbers(function, target):
    assert any("pinned" in note for note in lifted("vectors.c", function).notes)
    for n in SIZES:
        args = [n, np.abs(draw(n + 16)), np.zeros(n + 16, np.float32)]
        for want, got in both("vectors.c", function, AVX2, target, args):
            assert np.all(np.abs(got - want) <= 1e-6 * np.maximum(np.abs(want), 1)), n


@pytest.mark.parametrize(
    "function", ["rows_in_a_row", "in_a_block", "beginning_of_another", "twice_as_far"]
)
def test_what_loops_leave_changed_is_kept_where_it_is_read(function):
    for n in SIZES:
        args = [n, np.abs(draw(n + 16)), np.zeros(n + 16, np.float32)]
        for want, got in both("vectors.c", function, AVX2, "generic", args):
            assert np.all(np.abs(got - want) <= 1e-5 * np.maximum(np.abs(want), 1)), n


@pytest.mark.parametrize(
    ("file", "function", "reason"),
    [
        ("sums.c", "wrong_sum", "not only joined with terms"),
        ("vectors.c", "reversed", "a load that is not whole"),
    ],
)
def test_what_is_no_strip_is_written_out(file, function, reason):
    assert reason in lift(parsed(file), function).notes[0]
