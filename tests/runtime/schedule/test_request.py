"""Sampling parameters: vLLM's names, and one clear sentence for every wrong value."""

from __future__ import annotations

import math

import pytest

from dovetail.ir.errors import RequestError
from dovetail.runtime.schedule.request import SamplingParams


def test_defaults_are_greedy() -> None:
    params = SamplingParams.make({})
    assert (params.temperature, params.max_tokens, params.n, params.seed) == (0.0, 16, 1, None)


def test_values_are_taken_and_normalised() -> None:
    params = SamplingParams.make(
        {"temperature": 1, "top_k": -1, "top_p": 0.5, "stop": "a", "seed": -3, "logprobs": 0}
    )
    assert (params.temperature, params.top_k, params.stop) == (1.0, 0, ("a",))
    assert (params.top_p, params.seed, params.logprobs) == (0.5, -3, 0)
    assert SamplingParams.make({"stop": ["a", "b"]}).stop == ("a", "b")
    assert SamplingParams.make({"stop": None}).stop == ()
    assert SamplingParams.make({"logit_bias": {"7": 2, 8: -1}}).logit_bias == ((7, 2.0), (8, -1.0))


WRONG: list[tuple[str, object]] = [
    ("max_tokens", 0),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_tokens", "8"),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", 10**400),  # no float is as large
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("min_p", -0.1),
    ("min_p", 2),
    ("seed", "x"),
    ("seed", 1 << 64),
    ("stop", ""),
    ("stop", [""]),
    ("stop", [3]),
    ("stop", 3),
    ("ignore_eos", 1),
    ("logprobs", -1),
    ("logprobs", 101),
    ("n", 0),
    ("n", 10_000),
    ("presence_penalty", 2.1),
    ("frequency_penalty", "1"),
    ("repetition_penalty", 0),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"9" * 5000: 1}),  # more digits than Python reads
    ("logit_bias", {5: 10**400}),
    ("logit_bias", {5: math.nan}),
    ("logit_bias", [5]),
    ("min_tokens", 17),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", "5"),
    ("bad_words", [" "]),
    ("bad_words", "word"),
    ("allowed_token_ids", []),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_values_are_named(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name) as error:
        SamplingParams.make({name: value})
    assert "\n" not in str(error.value)


def test_unknown_options_are_named() -> None:
    with pytest.raises(RequestError, match=r"'temprature'.*temperature"):
        SamplingParams.make({"temprature": 1.0})
