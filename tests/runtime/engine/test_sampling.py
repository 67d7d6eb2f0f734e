"""Random numbers by counter, and log probabilities against float64."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dovetail.runtime.engine.logits import log_sum, top_logprobs
from dovetail.runtime.native.step import draw_uniform
from dovetail.runtime.schedule.request import Metrics, Request, SamplingParams


def make_request(seed: int, index: int, generated: int) -> Request:
    return Request(
        id=0,
        tokens=[0] * (3 + generated),
        prompt_length=3,
        max_tokens=100,
        params=SamplingParams(),
        metrics=Metrics(0.0),
        index=index,
        seed=seed,
    )


def test_uniform_numbers_depend_on_seed_sample_and_step_alone() -> None:
    cases = [(s, i, g) for s in (-1, 0, 1, 1 << 62) for i in (0, 1) for g in range(50)]
    draws = [draw_uniform(make_request(*case)) for case in cases]
    assert draws == [draw_uniform(make_request(*case)) for case in cases]
    assert len(set(draws)) == len(draws)
    assert all(0 <= value < 1 and np.float32(value) < 1 for value in draws)
    assert abs(float(np.mean(draws)) - 0.5) < 0.05


@given(
    seed=st.integers(-(1 << 63), (1 << 64) - 1),
    index=st.integers(0, 255),
    place=st.integers(0, 1 << 17),
    again=st.integers(0, 1),
)
def test_a_uniform_number_is_that_of_its_counter(
    seed: int, index: int, place: int, again: int
) -> None:
    """Numbers are made in blocks; artifacts and seeds of users outlive how."""
    alone = np.random.Philox(
        key=np.array([seed % (1 << 64), index], np.uint64),
        counter=np.array([place, again, 0, 0], np.uint64),
    )
    expected = min(
        float(np.random.Generator(alone).random()), float(np.nextafter(np.float32(1), 0))
    )
    assert draw_uniform(make_request(seed, index, 0), place, again) == expected


def test_top_logprobs_equal_a_log_softmax() -> None:
    logits = np.random.default_rng(0).normal(0, 5, 1000).astype(np.float32)
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()
    best = np.argsort(-expected)[:7]
    got = top_logprobs(logits, 7, log_sum(logits))
    assert [token for token, _ in got] == best.tolist()
    np.testing.assert_allclose([value for _, value in got], expected[best], rtol=1e-12)
    assert top_logprobs(logits, 0, 0.0) == ()
    assert len(top_logprobs(logits[:3], 10, 0.0)) == 3
