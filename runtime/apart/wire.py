"""What an app and its engine's process say to each other: msgpack structs after their length.

In: structs. Out: messages. All that a step brought to all requests is one message, `Told`. Requests
have the app's numbers; times are those of this machine's monotonic clock, which processes share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from dovetail.ir import errors
from dovetail.ir.artifact import ServicePlan
from dovetail.ir.errors import CapacityError, DeviceError, DovetailError, RequestError
from dovetail.runtime.framing import MAX_MESSAGE, pack_value
from dovetail.runtime.host import Ask, EngineLoad
from dovetail.runtime.open_engine import EngineOptions
from dovetail.runtime.request import Metrics, SamplingParams, TokenLogprob
from dovetail.runtime.timeline import Drawn

MAX_ORDER = MAX_MESSAGE - 64
"""Bytes of the longest order that fits a message, with what is around it."""


class ErrorText(msgspec.Struct, frozen=True, array_like=True):
    """An error: its class in `ir.errors`, its text, and when there may be room."""

    kind: str
    message: str
    retry_after: float | None = None

    @classmethod
    def of(cls, error: BaseException) -> ErrorText:
        """Return an error as a message; one that is none of ours is a DeviceError's text."""
        if not isinstance(error, DovetailError):
            return cls("DeviceError", f"{type(error).__name__}: {error}")
        return cls(type(error).__name__, str(error), getattr(error, "retry_after", None))

    def make(self) -> DovetailError:
        """Return the error."""
        if self.kind == "CapacityError":
            return CapacityError(self.message, self.retry_after)
        found = getattr(errors, self.kind, DeviceError)
        known = isinstance(found, type) and issubclass(found, DovetailError)
        return (found if known else DeviceError)(self.message)


# ---- to the child ----


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a new child is to serve -> Ready. log_level: of its lines on stderr."""

    path: str
    options: EngineOptions
    log_level: int


class Submit(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Start the requests of a call, all or none; `numbers` has one for each sample in order.

    params: without texts, which the app looks for. live: tokens are wanted as they come, else with
    the end. flow: see `host.Ask`.
    """

    numbers: tuple[int, ...]
    prompts: tuple[list[int], ...]
    params: SamplingParams
    priority: int
    live: bool
    flow: int | None = None


class Drop(msgspec.Struct, frozen=True, tag=True):
    """End requests; what has ended stays as it is. A ticket is given back once that is done."""

    numbers: tuple[int, ...]
    ticket: int | None = None


class Record(msgspec.Struct, frozen=True, tag=True):
    """Draw the steps from now on, or no longer; a ticket is given back then."""

    on: bool
    ticket: int | None = None


Order: TypeAlias = Submit | Drop | Record


class Orders(msgspec.Struct, frozen=True, array_like=True):
    """Orders in turn."""

    orders: list[Order]


class PackedOrders(msgspec.Struct, frozen=True, array_like=True):
    """`Orders` as they are sent: each was encoded when it was given."""

    orders: list[msgspec.Raw]


def pack_order(order: Order) -> msgspec.Raw:
    """Return an order as it is sent; OverflowError where an integer has more than 64 bits."""
    return msgspec.Raw(msgspec.msgpack.encode(order))


def pack_call(ask: Ask, numbers: Sequence[int], vocab_size: int) -> msgspec.Raw:
    """Return a call as an order to start the requests `numbers`.

    Raises RequestError where it is longer than a message, and as the engine does where a token is
    no number that a message can have.
    """
    submit = Submit(
        numbers=tuple(numbers),
        prompts=tuple(ask.prompts),
        params=_without_texts(ask.params),
        priority=ask.priority,
        live=ask.chunks or bool(ask.params.stop),
        flow=ask.flow,
    )
    try:
        packed = pack_order(submit)
    except OverflowError:  # options have bounds: it is a token
        wrong = next(t for prompt in ask.prompts for t in prompt if not 0 <= t < vocab_size)
        raise RequestError(f"token id {wrong} is outside 0..{vocab_size - 1}") from None
    if len(packed) > MAX_ORDER:
        raise RequestError(
            f"the call takes {len(packed)} bytes, and the engine's process takes {MAX_ORDER} at "
            f"once; give fewer prompts in a call"
        )
    return packed


def _without_texts(params: SamplingParams) -> SamplingParams:
    """Return options without what only the app looks for, where there is text."""
    if not (params.stop or params.bad_words):
        return params
    return dataclasses.replace(params, stop=(), bad_words=())


# ---- from the child ----


class Ready(msgspec.Struct, frozen=True):
    """The child serves now, with this plan and tokens below `vocab_size`, or why it cannot."""

    service: ServicePlan | None = None
    vocab_size: int = 0
    error: ErrorText | None = None


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """The end of a request: its reason, or why it failed."""

    reason: str
    error: ErrorText | None = None


class News(msgspec.Struct, frozen=True, array_like=True):
    """What a request got since it was last told of.

    prompt_logprobs: with its first tokens, or its end where it has none. metrics: with its first
    tokens and its end.
    """

    number: int
    tokens: list[int]
    logprobs: list[TokenLogprob] = []
    metrics: Metrics | None = None
    end: Ended | None = None
    prompt_logprobs: list[TokenLogprob] = []


class Told(msgspec.Struct, frozen=True, array_like=True):
    """All there is to tell after a step: at time `now`, tickets of orders that are done."""

    now: float
    load: EngineLoad
    news: list[News]
    tickets: list[int] = []
    drawn: Drawn | None = None


def pack_told(told: Told, most: int = MAX_MESSAGE) -> list[bytes]:
    """Return messages that tell the same in turn, of at most `most` bytes each.

    Where the last token of a request or one drawn event is longer than that, so is its message.
    """
    packed = pack_value(told)
    parts = _halve(told) if len(packed) > most else ()
    return [message for part in parts for message in pack_told(part, most)] or [packed]


def _halve(told: Told) -> Sequence[Told]:
    """Return it in two, what was drawn apart from requests; none where it cannot be cut."""
    news, drawn = told.news, told.drawn
    if drawn is not None and (news or told.tickets):
        return replace(told, news=[], tickets=[]), replace(told, drawn=None)
    if drawn is not None and len(drawn.events) > 1:
        half = len(drawn.events) // 2
        events = drawn.events[:half], drawn.events[half:]
        return [replace(told, drawn=Drawn(drawn.tracks, part)) for part in events]
    if len(news) == 1:
        news = _halve_news(news[0])
    if len(news) > 1:
        half = len(news) // 2
        return replace(told, news=news[:half], tickets=[]), replace(told, news=news[half:])
    return ()


def _halve_news(news: News) -> list[News]:
    if half := len(news.prompt_logprobs) // 2:
        first, rest = news.prompt_logprobs[:half], news.prompt_logprobs[half:]
        alone = News(news.number, [], metrics=news.metrics, prompt_logprobs=first)
        return [alone, replace(news, prompt_logprobs=rest)]
    half = len(news.tokens) // 2
    if not half:
        return [news]
    return [
        replace(news, tokens=news.tokens[:half], logprobs=news.logprobs[:half], end=None),
        replace(news, tokens=news.tokens[half:], logprobs=news.logprobs[half:], prompt_logprobs=[]),
    ]
