"""The options of calls that generate, by name, and the check of names that every such call makes.

In: keyword options of a caller. Out: nothing, or an error that names the option that is meant.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypedDict, Union, get_args, get_origin, get_type_hints

from dovetail.ir.errors import DovetailError, RequestError, SpecError

ADVISED = ("temperature", "top_p", "top_k", "min_p")
"""What a model's generation_config.json may set."""
LIVELY: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""How a talk draws tokens where nobody says it: small models that always take the likeliest one
repeat themselves. The values are those that llama.cpp takes then."""


def advised(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling options that a generation_config.json advises."""
    found = {name: generation[name] for name in ADVISED if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


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
    adapter: str | None


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


TYPES: dict[type, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    **dict.fromkeys((dict, Mapping), "a dictionary"),
    **dict.fromkeys((tuple, Sequence), "a list"),
    **dict.fromkeys((os.PathLike, Path), "a path"),
    NoneType: "None",
}
"""What values of a type are called; others by the type's name."""
CHOICES = (Union, UnionType, Literal)
"""Hints that name several types, or words."""
METHODS = {int: "__index__", float: "__float__"}
"""What numbers of whatever library have."""


def check_types(
    given: Mapping[str, object],
    hints: Mapping[str, Any],
    error: type[DovetailError] = RequestError,
) -> None:
    """Raise `error` for the first value of `given` that is of no type of its hint."""
    for name, value in given.items():
        kinds = [*_kinds(hints[name])]
        if not any(_is(value, kind) for kind in kinds):
            wanted = " or ".join(dict.fromkeys(TYPES.get(kind, kind.__name__) for kind in kinds))
            raise error(f"{name} must be {wanted}, not {value!r}")


def check_fields(value: Any, error: type[DovetailError] = SpecError) -> None:
    """Raise `error` for the first field of a dataclass that is of no type of its hint."""
    given = {field.name: getattr(value, field.name) for field in fields(value)}
    check_types(given, get_type_hints(type(value)), error)


def _kinds(hint: Any) -> Iterator[type]:
    """Yield the types of a hint: a Literal has words, and a tuple may be any list."""
    if get_origin(hint) in CHOICES:
        for part in get_args(hint):
            yield from _kinds(part)
    else:
        kind = str if isinstance(hint, str) else get_origin(hint) or hint
        yield Sequence if kind is tuple else kind


def _is(value: object, kind: type) -> bool:
    return hasattr(value, METHODS[kind]) if kind in METHODS else isinstance(value, kind)
