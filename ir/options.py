"""The options of calls that generate, by name, and the check of names that every such call makes.

In: keyword options of a caller. Out: nothing, or an error that names the option that is meant.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypedDict

from dovetail.ir.errors import DovetailError, RequestError


class SamplingOptions(TypedDict, total=False):
    """How tokens are chosen, with vLLM's names; greedy and 16 tokens by default.

    `SamplingParams` (`runtime/schedule/request.py`) has the defaults and the meaning of each.
    """

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: str | Sequence[str] | None
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    n: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    min_tokens: int
    stop_token_ids: Sequence[int] | None
    include_stop_str_in_output: bool
    bad_words: Sequence[str] | None
    allowed_token_ids: Sequence[int] | None
    skip_special_tokens: bool
    structured_outputs: Any
    schema: Any


class GenerateOptions(SamplingOptions, total=False):
    """The same, and when the request has its turn: -100..100, lower goes first."""

    priority: int


class ChatOptions(GenerateOptions, total=False):
    """The same, and what the chat template may read."""

    chat_template_kwargs: Mapping[str, Any] | None


def check_names(
    what: str,
    given: Iterable[str],
    known: Collection[str],
    error: type[DovetailError] = RequestError,
) -> None:
    """Raise `error` for the first of `given` that is not `known`; `what` is what has options."""
    for name in given:
        if name not in known:
            names = sorted(known)
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise error(f"{what} has no option {name!r}{hint} The options are {', '.join(names)}")
