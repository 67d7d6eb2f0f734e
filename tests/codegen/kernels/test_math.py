from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from scipy.special import erf, erfc, ndtr

from tests.codegen.kernels.harness import MATH_H, PAIRS_H, Runner


def apply(run: Runner, function: str, x: npt.NDArray) -> npt.NDArray[np.float32]:
    x = x.astype(np.float32)
    out = np.zeros_like(x)
    run(f"{function}_probe", len(x), x, out)
    return out


def worst_ulp(got: npt.NDArray, want: npt.NDArray) -> float:
    return float((np.abs(got - want) / np.spacing(np.abs(want).astype(np.float32))).max())


def test_vexp_is_within_two_ulp(native: Runner) -> None:
    x = np.linspace(-87.3, 88.37, 400_001).astype(np.float32)
    assert worst_ulp(apply(native, "vexp", x), np.exp(x.astype(np.float64))) < 2


def test_vexp2_neg_is_within_three_ulp(native: Runner) -> None:
    x = np.linspace(-126.4, 0, 400_001).astype(np.float32)
    assert worst_ulp(apply(native, "vexp2_neg", x), np.exp2(x.astype(np.float64))) < 3


def test_exponentials_end_in_zero_and_infinity(any_runner: Runner) -> None:
    got = apply(any_runner, "vexp", np.array([-np.inf, -1e30, -88, 0, 88.8, 1e30, np.inf, np.nan]))
    np.testing.assert_array_equal(got, [0, 0, 0, 1, np.inf, np.inf, np.inf, np.nan])
    got = apply(any_runner, "vexp2_neg", np.array([-np.inf, -1e30, -127, -1, 0, np.nan]))
    np.testing.assert_array_equal(got, [0, 0, 0, 0.5, 1, np.nan])


def test_sigmoid_and_silu_over_the_whole_range(any_runner: Runner) -> None:
    x = np.concatenate([np.linspace(-80, 80, 65), [-1e4, 1e4, 0.0]]).astype(np.float32)
    sigmoid = 1 / (1 + np.exp(-np.clip(x.astype(np.float64), -700, 700)))
    np.testing.assert_allclose(apply(any_runner, "vsigmoid", x), sigmoid, rtol=4e-7, atol=1e-37)
    np.testing.assert_allclose(apply(any_runner, "vsilu", x), x * sigmoid, rtol=5e-7, atol=1e-33)


def test_gelu_over_the_whole_range(any_runner: Runner) -> None:
    x = np.concatenate([np.linspace(-30, 30, 997), [-1e4, 1e4, 0.0, 1e-20]]).astype(np.float32)
    wide = x.astype(np.float64)
    gelu = apply(any_runner, "vgelu", x)
    assert (np.abs(gelu - wide * ndtr(wide)) <= 3e-7 * (np.abs(wide) + 1e-20)).all()
    tanh = wide / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    got = apply(any_runner, "vgelu_tanh", x)
    assert (np.abs(got - tanh) <= 5e-7 * (np.abs(wide) + 1e-20)).all()


WANTED = {
    **{f"v{name}": getattr(np, name) for name in "cbrt cos cosh exp2 expm1 log log10".split()},
    **{f"v{name}": getattr(np, name) for name in "log1p log2 sin sinh tan tanh".split()},
    **{f"va{name}": getattr(np, f"arc{name}") for name in "cos cosh sin sinh tan tanh".split()},
    "verf": erf,
    "verfc": erfc,
    "vround_away": lambda x: np.trunc(x + np.copysign(0.5, x)),
}
WITHIN = {"verf": 8.0, "vfmod": 0.0}
"""Units in the last place, where it is not 4."""
LEAST = 1.1754944e-38
MARKS = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.5, 2.5, -2.5, 1e-45, -149, -151, 1e6, -3e9, 8388609]
THRESHOLDS = [
    *(LEAST, 3.4028235e38, 1e-30, 1e30, 1073741824, 8192, 1, 0.5, np.sqrt(0.5), np.sqrt(2)),
    *(np.sqrt(2) - 1, np.sqrt(2) + 1, 1 - np.sqrt(0.5), 3.92, 10, 30, 128, 126, 130, 152),
    *(88.0297, 88.7228, 89.41, 89.7, 104),
    *(1.523625, 3.654949),
]
"""Where a function of math_h changes its way, or its result becomes infinite, 0 or subnormal; and
where `verfc` is furthest off: 3.96 ulp without fused products, 3.78 with them."""
QUARTERS = np.arange(0, 5215, dtype=np.float64) * (np.pi / 2)


def arguments(count: int) -> npt.NDArray[np.float32]:
    """Marks, thresholds and the floats beside them, multiples of pi / 2, steps, all exponents."""
    at = np.array(THRESHOLDS, np.float32)
    cuts = np.concatenate([at, *(np.nextafter(at, np.float32(to)) for to in (0, np.inf))])
    bits = np.random.default_rng(0).integers(0, 1 << 32, count, dtype=np.uint32)
    every = np.sort(bits.view(np.float32))
    near = QUARTERS[:: max(1, len(QUARTERS) // count)].astype(np.float32)
    steps = [np.linspace(-b, b, count) for b in (1.5, 12.0, 105.0, 8192.0)]
    return np.concatenate([MARKS, cuts, -cuts, near, *steps, every]).astype(np.float32)


def check_as_c(function: str, got: npt.NDArray, want: npt.NDArray) -> None:
    """Results are within so many ulp; zeros, infinities and NaN those of C."""
    with np.errstate(over="ignore"):
        rounded = want.astype(np.float32)
    normal = np.isfinite(rounded) & (np.abs(rounded) >= LEAST)
    assert worst_ulp(got[normal], want[normal]) <= WITHIN.get(function, 4.0)
    small = np.abs(rounded) < LEAST
    assert (np.abs(got[small] - want[small]) <= 5e-45).all()
    zero = want == 0
    np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(want[zero]))
    rest = ~(normal | small)
    np.testing.assert_array_equal(got[rest], rounded[rest])


@pytest.mark.parametrize("function", MATH_H)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_functions_of_c_are_within_four_ulp_everywhere(native: Runner, function: str) -> None:
    x = arguments(20_001)
    check_as_c(function, apply(native, function, x), WANTED[function](x.astype(np.float64)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_functions_of_c_hold_on_every_target_and_in_its_tails(interpreted: Runner) -> None:
    x = arguments(5)
    for function in MATH_H:
        want = WANTED[function](x.astype(np.float64))
        check_as_c(function, apply(interpreted, function, x), want)
    for n in (1, interpreted.lanes - 1, interpreted.lanes + 1):
        out = np.full(n + 1, 7, np.float32)
        interpreted("vtanh_probe", n, x[:n].copy(), out)
        assert out[n] == 7


TWO = {f"v{name}": getattr(np, name) for name in "copysign fmod hypot".split()}
TWO |= {"vatan2": np.arctan2, "vpow": np.power}
SPECIAL = [np.nan, np.inf, 0, 1, 2, 3, 5, 0.5, 1.5, 3e38, 1e-40, 1e-45, LEAST, 16777215, 16777217]


def pairs(count: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Special numbers of both signs with each other, and others: near, far and of like results."""
    signed = np.array([*SPECIAL, *(-x for x in SPECIAL)])
    left, right = np.meshgrid(signed, signed)
    x = arguments(count)
    near = np.nextafter(x, np.float32(np.inf))
    random = np.random.default_rng(1)
    with np.errstate(all="ignore"):  # powers of all sizes, and quotients about a whole number
        power = random.uniform(-151, 129, len(x)) / np.log2(np.abs(x.astype(np.float64)))
        part = x / random.integers(1, 1 << 25, len(x))
    return (
        np.concatenate([left.ravel(), x, x, x, x]).astype(np.float32),
        np.concatenate([right.ravel(), np.roll(x, 123), near, power, part]).astype(np.float32),
    )


def apply_to_two(run: Runner, function: str, x: npt.NDArray, y: npt.NDArray) -> npt.NDArray:
    out = np.zeros_like(x)
    run(f"{function}_probe", len(x), x, y, out)
    return out


@pytest.mark.parametrize("function", PAIRS_H)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_functions_of_two_numbers_are_within_four_ulp(native: Runner, function: str) -> None:
    x, y = pairs(20_001)
    want = TWO[function](x.astype(np.float64), y.astype(np.float64))
    check_as_c(function, apply_to_two(native, function, x, y), want)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_functions_of_two_numbers_hold_on_every_target(interpreted: Runner) -> None:
    x, y = pairs(5)
    for function in PAIRS_H:
        want = TWO[function](x.astype(np.float64), y.astype(np.float64))
        check_as_c(function, apply_to_two(interpreted, function, x, y), want)
