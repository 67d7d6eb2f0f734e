from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from tests.codegen.kernels.harness import Runner


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


def test_gelu_and_tanh_over_the_whole_range(any_runner: Runner) -> None:
    x = np.concatenate([np.linspace(-30, 30, 997), [-1e4, 1e4, 0.0, 1e-20]]).astype(np.float32)
    wide = x.astype(np.float64)
    gelu = apply(any_runner, "vgelu", x)
    assert (np.abs(gelu - wide * ndtr(wide)) <= 3e-7 * (np.abs(wide) + 1e-20)).all()
    tanh = wide / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    got = apply(any_runner, "vgelu_tanh", x)
    assert (np.abs(got - tanh) <= 5e-7 * (np.abs(wide) + 1e-20)).all()
    np.testing.assert_allclose(apply(any_runner, "vtanh", x), np.tanh(wide), atol=2e-7)
