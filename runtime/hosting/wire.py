"""What an app and its engine's process say to each other: msgpack structs after their length.

In: structs. Out: messages. All that a step brought to all requests is one message, `StepReport`.
Requests have the app's numbers; times are those of this machine's monotonic clock, which processes
share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import msgspec
from msgspec import structs

from dovetail.ir.artifact import ServicePlan
from dovetail.ir.errors import RequestError
from dovetail.runtime.child.framing import ErrorText, pack_value
from dovetail.runtime.engine.engine import DeviceWaits
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.engine.step_watch import STEP_TOKENS
from dovetail.runtime.engine.tally import Histogram, Tally
from dovetail.runtime.schedule.request import Metrics, SamplingParams, TokenLogprob
from dovetail.runtime.timeline import Drawn

N = TypeVar("N", int, float)

MAX_ORDER = 1 << 24
"""Bytes of an order: the child does not read for long at once."""
NO_STEPS = Tally(STEP_TOKENS).read()


# ---- of any engine, on a thread (`loop.py`) or in a process: callers know no difference ----


@dataclass(frozen=True, slots=True)
class Ask:
    """A call that has been read: prompts as token ids, and their options."""

    prompts: list[list[int]]
    params: SamplingParams
    priority: int
    chunks: bool = False
    flow: int | None = None  # the arrow on a timeline that its requests are part of
    beside: tuple[int, ...] = ()  # tokens that answers may quote; see Request


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    """Requests that are being computed, those that wait, and the part of KV blocks in use, 0..1.

    pools: the same of each device's pool, `gpu` (what computes beside the CPU) and `cpu`; homes: of
    the requests that are being computed, those whose KV is there. Since the
    engine was opened: waits of CPU and accelerator for each other, steps by the tokens that they
    computed, prompt_tokens of these, swaps, requests whose KV went to the device of that name;
    drafts, their tokens and those accepted.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    waits: DeviceWaits = DeviceWaits()
    steps: Histogram = NO_STEPS
    pools: dict[str, float] = {}
    swaps: dict[str, int] = {}
    homes: dict[str, int] = {}
    prompt_tokens: int = 0
    drafts: dict[str, int] = {}

    def after(self, past: EngineLoad) -> EngineLoad:
        """Return this load with what an engine before had counted, so that counts only grow."""
        waits = DeviceWaits(
            self.waits.attention + past.waits.attention,
            _add(self.waits.bubbles, past.waits.bubbles),
        )
        return structs.replace(
            self,
            waits=waits,
            steps=Histogram(
                self.steps.bounds,
                tuple(map(sum, zip(self.steps.counts, past.steps.counts, strict=True))),
                self.steps.total + past.steps.total,
            ),
            swaps=_add(self.swaps, past.swaps),
            prompt_tokens=self.prompt_tokens + past.prompt_tokens,
            drafts=_add(self.drafts, past.drafts),
        )

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens that steps computed: of prompts, and of answers, one a step and sequence."""
        every = int(self.steps.total)
        return {"prefill": self.prompt_tokens, "decode": every - self.prompt_tokens}


def _add(first: Mapping[str, N], second: Mapping[str, N]) -> dict[str, N]:
    return {name: first.get(name, 0) + second.get(name, 0) for name in {**first, **second}}


# ---- to the child ----


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a new child is to serve -> EngineReady.

    log_level: of its lines on stderr. model: the fingerprint, "" for any.
    """

    path: str
    options: EngineOptions
    log_level: int
    model: str = ""


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Start the requests of a call, all or none; `numbers` has one for each sample in order.

    ask: without texts, which the app looks for; its `chunks` are also wanted for these.
    """

    numbers: tuple[int, ...]
    ask: Ask


class Drop(msgspec.Struct, frozen=True, tag=True):
    """End requests; what has ended stays as it is. A ticket is given back once that is done."""

    numbers: tuple[int, ...]
    ticket: int | None = None


class Record(msgspec.Struct, frozen=True, tag=True):
    """Draw the steps from now on, or no longer; a ticket is given back then."""

    on: bool
    ticket: int | None = None


Order: TypeAlias = Submit | Drop | Record


def pack_call(ask: Ask, numbers: Sequence[int], vocab_size: int) -> bytes:
    """Return a call as a message that starts the requests `numbers`.

    Raises RequestError where it is too long for one, and as the engine does where a token is
    no number that a message can have.
    """
    params = replace(ask.params, stop=(), bad_words=(), structured_outputs=None)
    chunks = ask.chunks or bool(ask.params.stop)
    submit = Submit(tuple(numbers), replace(ask, params=params, chunks=chunks))
    try:
        packed = pack_value(submit)
    except OverflowError:  # options have bounds: it is a token
        wrong = next(t for prompt in ask.prompts for t in prompt if not 0 <= t < vocab_size)
        raise RequestError(f"token id {wrong} is outside 0..{vocab_size - 1}") from None
    if len(packed) > MAX_ORDER:
        raise RequestError(
            f"the call takes {len(packed)} bytes, and the engine's process takes {MAX_ORDER} at "
            f"once; give fewer prompts in a call"
        )
    return packed


# ---- from the child ----


class EngineReady(msgspec.Struct, frozen=True):
    """The child serves now, with this plan and tokens below `vocab_size`. model: fingerprint."""

    service: ServicePlan
    vocab_size: int
    model: str


class RequestEnd(msgspec.Struct, frozen=True, array_like=True):
    """The end of a request: its reason, or why it failed."""

    reason: str
    error: ErrorText | None = None


class RequestUpdate(msgspec.Struct, frozen=True, array_like=True):
    """What a request got since it was last told of.

    prompt_logprobs: with its first tokens, or its end where it has none. metrics: with its first
    tokens and its end.
    """

    number: int
    tokens: list[int]
    logprobs: list[TokenLogprob] = []
    metrics: Metrics | None = None
    end: RequestEnd | None = None
    prompt_logprobs: list[TokenLogprob] = []


class StepReport(msgspec.Struct, frozen=True, array_like=True):
    """All there is to tell after a step: at time `now`, tickets of orders that are done."""

    now: float
    load: EngineLoad
    updates: list[RequestUpdate]
    tickets: list[int] = []
    drawn: Drawn | None = None
