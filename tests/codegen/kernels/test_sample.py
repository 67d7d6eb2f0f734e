from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tests.codegen.kernels.harness import Runner, edges
from tests.codegen.kernels.reference import kept_tokens


def draw(
    run: Runner,
    logits: npt.NDArray,
    uniform: npt.ArrayLike = 0.0,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    nth: int = 1,
) -> tuple[npt.NDArray, npt.NDArray]:
    """Sample each row of logits with the same options; return ids and log probabilities."""
    rows, vocab = logits.shape
    padded = np.full((rows, vocab + 3), np.inf, np.float32)
    padded[:, :vocab] = logits
    f32 = [np.full(rows, x, np.float32) for x in (temperature, top_p, min_p)]
    numbers = np.broadcast_to(np.asarray(uniform, np.float32), rows).copy()
    ids, logprobs = np.full(rows, -1, np.int32), np.zeros(rows, np.float32)
    scratch = np.full(max(rows, nth) * vocab, np.nan, np.float32)
    options = (f32[0], np.full(rows, top_k, np.int32), f32[1], f32[2], numbers)
    run("sample", rows, vocab, padded, vocab + 3, *options, ids, logprobs, scratch, nth=nth)
    raw = logits.astype(np.float64)
    top = raw.max(-1, keepdims=True)
    want = raw - top - np.log(np.exp(raw - top).sum(-1, keepdims=True))
    np.testing.assert_allclose(logprobs, want[np.arange(rows), ids], rtol=1e-5, atol=2e-5)
    return ids, logprobs


def check_draws(run: Runner, vocab: int, nth: int = 1, **options: float) -> None:
    """Every drawn token is the one the sorted float64 reference draws for that number."""
    rng = np.random.default_rng(vocab)
    row = (rng.standard_normal(vocab) * 3).astype(np.float32)
    p = kept_tokens(
        row,
        options.get("temperature", 1.0),
        int(options.get("top_k", 0)),
        options.get("top_p", 1.0),
        options.get("min_p", 0.0),
    )
    steps = np.cumsum(p)
    uniform = rng.uniform(0, 1, 40).astype(np.float32)
    clear = np.abs(steps[None, :] - uniform[:, None]).min(-1) > 1e-6
    ids, _ = draw(run, np.tile(row, (40, 1)), uniform, nth=nth, **{"temperature": 1.0, **options})
    want = np.searchsorted(steps, uniform, side="right")
    np.testing.assert_array_equal(ids[clear], want[clear])
    assert (p[ids] > 0).all()


OPTIONS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 50},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 0.2},
    {"top_p": 0.0},
    {"min_p": 0.1},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_draws_equal_the_sorted_reference(native: Runner, options: dict[str, float]) -> None:
    for vocab in (3, 1000, 32003):
        check_draws(native, vocab, nth=1 + vocab % 3, **options)


def test_greedy_takes_the_lowest_of_equal_logits(native: Runner) -> None:
    for vocab in (1, 2, 15, 16, 17, 300, 4097):
        logits = np.random.default_rng(vocab).standard_normal((vocab, vocab)).astype(np.float32)
        logits = logits[:40]
        for i in range(len(logits)):
            logits[i, [i, vocab - 1]] = 9.5
        ids, _ = draw(native, logits, nth=2)
        np.testing.assert_array_equal(ids, np.arange(len(logits)))


def test_every_vocabulary_edge(any_runner: Runner) -> None:
    for vocab in edges(any_runner.lanes, 4 * any_runner.lanes):
        logits = np.random.default_rng(vocab).standard_normal((2, vocab)).astype(np.float32)
        ids, _ = draw(any_runner, logits)
        np.testing.assert_array_equal(ids, logits.argmax(-1))


def test_equal_weights_are_kept_together(native: Runner) -> None:
    logits = np.zeros((64, 37), np.float32)
    uniform = (np.arange(64) + 0.5) / 64
    ids, _ = draw(native, logits, uniform, temperature=1.0, top_k=5)
    np.testing.assert_array_equal(ids, np.floor(uniform * 37))


def test_forbidden_tokens_are_never_drawn(native: Runner) -> None:
    logits = np.full((50, 99), -np.inf, np.float32)
    logits[:, [7, 90]] = 1.0
    ids, _ = draw(native, logits, np.linspace(0, 0.9999, 50), temperature=1.5, top_p=0.999)
    np.testing.assert_array_equal(ids, np.where(np.linspace(0, 0.9999, 50) < 0.5, 7, 90))


def test_nan_logits_still_give_a_token(native: Runner) -> None:
    ids = np.full(2, -1, np.int32)
    logits = np.full((2, 40), np.nan, np.float32)
    ones = np.ones(2, np.float32)
    options = (
        np.array([0, 1], np.float32),
        np.array([3, 3], np.int32),
        ones * 0.5,
        ones * 0,
        ones / 2,
    )
    scratch = np.zeros(80, np.float32)
    native("sample", 2, 40, logits, 40, *options, ids, np.zeros(2, np.float32), scratch)
    assert ((ids >= 0) & (ids < 40)).all()


def test_filters_in_every_target(interpreted: Runner) -> None:
    logits = np.array([[0.1, 2.0, 1.5, -1.0, 1.9]] * 3, np.float32)
    uniform = np.array([0.0, 0.5, 0.99], np.float32)
    ids, _ = draw(interpreted, logits, uniform, temperature=1.0, top_k=3, top_p=0.7)
    np.testing.assert_array_equal(ids, [1, 1, 4])
