from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.codegen.targets import TARGETS
from tests.codegen.kernels.harness import NATIVE, Runner, interpreted_runner, native_runner

CPUS = [name for name in NATIVE if name in TARGETS]


def reference(
    lengths: list[int],
    heads: tuple[int, int],
    hd: int,
    qkv: np.ndarray,
    bias: np.ndarray | None,
    reach: int,
    causal: bool,
) -> np.ndarray:
    """Attention of every sequence and head on its own, in float64."""
    (n_q, n_kv), first = heads, 0
    out = np.zeros((sum(lengths), n_q * hd))
    for length in lengths:
        part = qkv[first : first + length].astype(np.float64)
        away = np.arange(length)[:, None] - np.arange(length)
        for head in range(n_q):
            key = n_q + head // (n_q // n_kv)
            places = (head, key, key + n_kv)
            q, k, v = (part[:, at * hd : (at + 1) * hd] for at in places)
            scores = q @ k.T * hd**-0.5
            if bias is not None:
                scores += bias[head][away + bias.shape[1] // 2]
            scores[((abs(away) > reach) & (reach > 0)) | ((away < 0) & causal)] = -np.inf
            weights = np.exp(scores - scores.max(1, keepdims=True))
            at = slice(head * hd, (head + 1) * hd)
            out[first : first + length, at] = weights / weights.sum(1, keepdims=True) @ v
        first += length
    return out


def check(
    run: Runner,
    lengths: list[int],
    heads: tuple[int, int],
    hd: int,
    *,
    biased: bool,
    reach: int,
    nth: int,
    causal: bool = False,
) -> None:
    rng, (n_q, n_kv) = np.random.default_rng(sum(lengths) + hd), heads
    qkv = rng.standard_normal((sum(lengths), (n_q + 2 * n_kv) * hd + 8)).astype(np.float32)
    span = max(lengths) + 64
    bias = rng.standard_normal((n_q, 2 * span)).astype(np.float32) if biased else None
    if bias is not None:
        bias[:, span + max(lengths) :] = np.nan  # of rows that fill up vectors
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    out = np.full((sum(lengths), n_q * hd + 4), 7, np.float32)
    how = (*heads, hd, hd**-0.5, reach, int(causal), bias, span)
    args = (len(lengths), *how, qkv, qkv.shape[1], starts)
    run("packed_attention", *args, out, out.shape[1], nth=nth)
    wanted = reference(lengths, heads, hd, qkv, bias, reach, causal)
    np.testing.assert_allclose(out[:, : n_q * hd], wanted, rtol=2e-5, atol=2e-5)
    assert (out[:, n_q * hd :] == 7).all()


@pytest.mark.parametrize("target", CPUS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("reach", [0, 3, 64])
def test_packed_sequences_attend_within_themselves(target: str, biased: bool, reach: int) -> None:
    run = native_runner(target)
    for hd in (16, 32, 64, 128):
        check(run, [1, 17, 63, 64, 65, 2], (3, 3), hd, biased=biased, reach=reach, nth=3)


@pytest.mark.parametrize("target", CPUS)
@pytest.mark.parametrize("reach", [0, 1, 40])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (7, 1)])
def test_heads_of_decoders_share_keys_and_see_what_came_before(
    target: str, reach: int, heads: tuple[int, int]
) -> None:
    run, lengths = native_runner(target), [1, 17, 63, 130, 2]
    for hd in (16, 128, 256):
        check(run, lengths, heads, hd, biased=hd == 16, reach=reach, causal=True, nth=3)


@settings(max_examples=25, deadline=None)
@given(
    target=st.sampled_from(CPUS),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    keys=st.integers(1, 3),
    group=st.integers(1, 4),
    hd=st.sampled_from([16, 48, 80]),
    biased=st.booleans(),
    reach=st.integers(0, 220),
    causal=st.booleans(),
    nth=st.integers(1, 4),
)
def test_any_lengths(target: str, lengths, keys, group, hd, nth, **how) -> None:
    check(native_runner(target), lengths, (keys * group, keys), hd, nth=nth, **how)


@pytest.mark.parametrize("target", sorted(TARGETS.keys() - set(CPUS)))
def test_the_text_of_other_targets(target: str) -> None:
    if not TARGETS[target].bf16_dot:
        run = interpreted_runner(target)
        check(run, [5, 18], (2, 2), 16, biased=True, reach=9, nth=1)
        check(run, [5, 18], (4, 2), 16, biased=False, reach=0, causal=True, nth=1)
