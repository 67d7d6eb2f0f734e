from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.codegen.targets import TARGETS
from tests.codegen.kernels.harness import NATIVE, Runner, interpreted_runner, native_runner

CPUS = [name for name in NATIVE if name in TARGETS]


def reference(
    lengths: list[int], heads: int, hd: int, qkv: np.ndarray, bias: np.ndarray | None, reach: int
) -> np.ndarray:
    """Attention of every sequence and head on its own, in float64."""
    out, first = np.zeros((sum(lengths), heads * hd)), 0
    for length in lengths:
        part = qkv[first : first + length].astype(np.float64)
        q, k, v = np.split(part[:, : 3 * heads * hd], 3, axis=1)
        away = np.arange(length)[:, None] - np.arange(length)
        for head in range(heads):
            at = slice(head * hd, (head + 1) * hd)
            scores = q[:, at] @ k[:, at].T * hd**-0.5
            if bias is not None:
                scores += bias[head][away + bias.shape[1] // 2]
            scores[(abs(away) > reach) & (reach > 0)] = -np.inf
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out[first : first + length, at] = weights / weights.sum(1, keepdims=True) @ v[:, at]
        first += length
    return out


def check(
    run: Runner,
    lengths: list[int],
    heads: int,
    hd: int,
    *,
    biased: bool,
    reach: int,
    nth: int,
    kernel: str = "packed_attention",
) -> None:
    rng = np.random.default_rng(sum(lengths) + hd)
    qkv = rng.standard_normal((sum(lengths), 3 * heads * hd + 8)).astype(np.float32)
    span = max(lengths) + 64
    bias = rng.standard_normal((heads, 2 * span)).astype(np.float32) if biased else None
    if bias is not None:
        bias[:, span + max(lengths) :] = np.nan  # of rows that fill up vectors
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    out = np.full((sum(lengths), heads * hd + 4), 7, np.float32)
    args = (len(lengths), heads, hd, hd**-0.5, reach, bias, span, qkv, qkv.shape[1], starts)
    run(kernel, *args, out, out.shape[1], nth=nth)
    wanted = reference(lengths, heads, hd, qkv, bias, reach)
    np.testing.assert_allclose(out[:, : heads * hd], wanted, rtol=2e-5, atol=2e-5)
    assert (out[:, heads * hd :] == 7).all()


@pytest.mark.parametrize("target", CPUS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("reach", [0, 3, 64])
def test_packed_sequences_attend_within_themselves(target: str, biased: bool, reach: int) -> None:
    run = native_runner(target)
    for hd in (16, 32, 64, 128):
        check(run, [1, 17, 63, 64, 65, 2], 3, hd, biased=biased, reach=reach, nth=3)


@settings(max_examples=25, deadline=None)
@given(
    target=st.sampled_from(CPUS),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    heads=st.integers(1, 5),
    hd=st.sampled_from([16, 48, 80]),
    biased=st.booleans(),
    reach=st.integers(0, 220),
    nth=st.integers(1, 4),
)
def test_any_lengths(target: str, lengths, heads, hd, biased, reach, nth) -> None:
    check(native_runner(target), lengths, heads, hd, biased=biased, reach=reach, nth=nth)


@pytest.mark.parametrize("target", sorted(TARGETS.keys() - set(CPUS)))
def test_the_text_of_other_targets(target: str) -> None:
    if not TARGETS[target].bf16_dot:
        check(interpreted_runner(target), [5, 18], 2, 16, biased=True, reach=9, nth=1)
