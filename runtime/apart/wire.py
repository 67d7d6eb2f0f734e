"""What an app and its engine's process say to each other: msgpack structs after their length.

In: structs. Out: messages. All that a step brought to all requests is one message, `Told`. Requests
have the app's numbers; times are those of this machine's monotonic clock, which processes share.
"""

from __future__ import annotations

from typing import ClassVar, TypeAlias

import msgspec

from dovetail.ir import errors
from dovetail.ir.artifact import ServicePlan
from dovetail.ir.errors import CapacityError, DeviceError, DovetailError
from dovetail.runtime.host import EngineLoad
from dovetail.runtime.open_engine import EngineOptions
from dovetail.runtime.request import Metrics, SamplingParams, TokenLogprob
from dovetail.runtime.timeline import Drawn


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

    live: tokens are wanted as they come, else with the end. flow: see `host.Ask`.
    """

    numbers: tuple[int, ...]
    prompts: tuple[list[int], ...]
    params: SamplingParams
    priority: int
    live: bool
    flow: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens that it names, which is most of its size; other orders have none."""
        return sum(map(len, self.prompts))


class Drop(msgspec.Struct, frozen=True, tag=True):
    """End requests; what has ended stays as it is. A ticket is given back once that is done."""

    numbers: tuple[int, ...]
    ticket: int | None = None
    tokens: ClassVar[int] = 0


class Record(msgspec.Struct, frozen=True, tag=True):
    """Draw the steps from now on, or no longer; a ticket is given back then."""

    on: bool
    ticket: int | None = None
    tokens: ClassVar[int] = 0


Order: TypeAlias = Submit | Drop | Record


class Orders(msgspec.Struct, frozen=True, array_like=True):
    """Orders in turn."""

    orders: list[Order]


# ---- from the child ----


class Ready(msgspec.Struct, frozen=True):
    """The child serves now, with this plan, or why it cannot."""

    service: ServicePlan | None = None
    error: ErrorText | None = None


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """The end of a request: its reason, or why it failed."""

    reason: str
    error: ErrorText | None = None


class News(msgspec.Struct, frozen=True, array_like=True):
    """What a request got since it was last told of.

    metrics: with its first tokens and its end.
    """

    number: int
    tokens: list[int]
    logprobs: list[TokenLogprob] = []
    metrics: Metrics | None = None
    end: Ended | None = None


class Told(msgspec.Struct, frozen=True, array_like=True):
    """All there is to tell after a step: at time `now`, tickets of orders that are done."""

    now: float
    load: EngineLoad
    news: list[News]
    tickets: list[int] = []
    drawn: Drawn | None = None
