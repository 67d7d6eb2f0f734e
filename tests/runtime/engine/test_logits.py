"""Rules for logits against a plain reference, alone and in an engine that generates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.ir.errors import RequestError
from dovetail.runtime.app import load
from dovetail.runtime.engine.logits import LogitRules, log_sum, top_logprobs
from dovetail.runtime.schedule.request import SamplingParams

VOCAB = 97
ENDS = (5,)
Row = npt.NDArray[np.float32]


def reference(raw: Row, prompt: list[int], answer: list[int], params: SamplingParams) -> Row:
    """The rules as vLLM's documentation has them, token by token."""
    found = raw.copy()
    for token in range(len(found)):
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            found[token] = -np.inf
        for word in params.bad_word_ids:
            history = answer[len(answer) - len(word) + 1 :] if len(word) > 1 else []
            if token == word[-1] and [*history, token] == list(word):
                found[token] = -np.inf
        if len(answer) < params.min_tokens and token in (*ENDS, *params.stop_token_ids):
            found[token] = -np.inf
        found[token] += np.float32(dict(params.logit_bias).get(token, 0.0))
        if token in prompt or token in answer:
            factor = np.float32(params.repetition_penalty)
            found[token] = found[token] / factor if found[token] > 0 else found[token] * factor
        found[token] -= np.float32(params.frequency_penalty) * np.float32(answer.count(token))
        found[token] -= np.float32(params.presence_penalty) * np.float32(token in answer)
    return found


tokens = st.integers(0, VOCAB - 1)
few = st.integers(0, 7)  # so that they repeat
OPTIONS = {
    "presence_penalty": st.floats(-2, 2, width=32),
    "frequency_penalty": st.floats(-2, 2, width=32),
    "repetition_penalty": st.floats(0.125, 2, width=32),
    "logit_bias": st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=5),
    "min_tokens": st.integers(0, 6),
    "stop_token_ids": st.lists(tokens, max_size=3),
    "allowed_token_ids": st.lists(tokens, min_size=1, max_size=60),
}


@given(
    prompt=st.lists(few, min_size=1, max_size=8),
    answer=st.lists(few, max_size=8),
    options=st.fixed_dictionaries({"max_tokens": st.just(9)}, optional=OPTIONS),
    words=st.lists(st.lists(few, min_size=1, max_size=3).map(tuple), max_size=4),
    seed=st.integers(0, 1000),
)
def test_each_step_equals_the_reference(
    prompt: list[int],
    answer: list[int],
    options: dict[str, Any],
    words: list[tuple[int, ...]],
    seed: int,
) -> None:
    made = SamplingParams.make(options)
    params = SamplingParams(
        **{name: getattr(made, name) for name in options}, bad_word_ids=tuple(words)
    )
    rng = np.random.default_rng(seed)
    rules = LogitRules(params, prompt, ENDS)
    for step in range(len(answer) + 1):
        raw = rng.normal(0, 4, VOCAB).astype(np.float32)
        found = raw.copy()
        rules.apply(found, prompt + answer[:step])
        np.testing.assert_array_equal(found, reference(raw, prompt, answer[:step], params))


def test_tokens_that_only_a_tokenizer_or_a_configuration_knows_exclude_nothing() -> None:
    """Added tokens and ends may be more than the model has columns for."""
    words = ((VOCAB,), (3, VOCAB + 1), (3, 4))
    rules = LogitRules(SamplingParams(min_tokens=2, bad_word_ids=words), [1], (*ENDS, VOCAB))
    row = np.zeros(VOCAB, np.float32)
    rules.apply(row, [1, 3])
    assert np.flatnonzero(row).tolist() == [4, 5]


CASES: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.5, "presence_penalty": -2.0},
    {"logit_bias": {"17": 3.5, "4": -100}},
    {"min_tokens": 20},
    {"stop_token_ids": [9, 10, 11, 12], "min_tokens": 2},
    {"allowed_token_ids": [3, 5, 50, 51, 96]},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_an_engine_chooses_from_changed_logits_and_tells_the_models_own(
    make_artifact: Callable[..., Path], options: dict[str, Any]
) -> None:
    """Beside requests without rules, with blocks that run out: rules survive being put off."""
    prompt, plain = [1, 2, 3, 2, 40], [7] * 60
    params = SamplingParams.make({"max_tokens": 24, **options})
    with load(make_artifact(kv_blocks=16)) as app:
        (alone,) = app.generate([plain], max_tokens=40)
        jobs = [app.submit(plain, max_tokens=40) for _ in range(3)]
        job = app.submit(prompt, max_tokens=24, logprobs=97, **options)
        found = job.result()
        assert [other.result().token_ids for other in jobs] == [alone.token_ids] * 3
    assert found.logprobs is not None
    for step, (token, shown) in enumerate(zip(found.token_ids, found.logprobs, strict=True)):
        answer = list(found.token_ids[:step])
        raw = np.empty(VOCAB, np.float32)  # the toy's: 0.1 apart, the best at 0
        for place, (likely, _) in enumerate(shown.top):
            raw[likely] = np.float32(-0.1) * np.float32(place)
        assert token == int(np.argmax(reference(raw, prompt, answer, params)))
        assert dict(top_logprobs(raw, 97, log_sum(raw)))[token] == pytest.approx(
            shown.logprob, abs=1e-5
        )
    ends = {*ENDS, *params.stop_token_ids}
    assert not ends & set(found.token_ids[: params.min_tokens])
    assert (found.token_ids[-1] in ends) == (found.finish_reason == "stop")


def test_a_request_whose_rules_leave_nothing_fails_alone(
    make_artifact: Callable[..., Path],
) -> None:
    with load(make_artifact()) as app:
        job = app.submit([1, 2], allowed_token_ids=[5], min_tokens=3, max_tokens=8)
        other = app.submit([1, 2], max_tokens=8)
        with pytest.raises(RequestError, match="no token is left"):
            job.result()
        assert other.result().token_ids


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids", "allowed_token_ids"])
def test_tokens_that_the_model_has_not_are_refused(
    make_artifact: Callable[..., Path], name: str
) -> None:
    value: Any = {VOCAB: 1.0} if name == "logit_bias" else [VOCAB]
    with load(make_artifact()) as app, pytest.raises(RequestError, match="token id 97 is outside"):
        app.generate([[1]], **{name: value})
