"""The values of the queue manager: a query, the queue of a device, a batch.

In: what a caller asks for. Out: named values; only the manager changes a query.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from dovetail.runtime.embedding.line import Line

PRIORITY_SECONDS = 0.25
"""One step of priority moves a query as far ahead as an earlier arrival by this time would."""


class State(Enum):
    """Where a query is."""

    NEW = auto()
    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class QueryClass:
    """Queries of one model with up to `tokens` tokens."""

    tokens: int
    model: str = ""


def length_classes(lengths: Iterable[int], model: str = "") -> tuple[QueryClass, ...]:
    """Return the classes of a model with these most tokens of each."""
    return tuple(QueryClass(tokens, model) for tokens in sorted(lengths))


@dataclass(slots=True, eq=False)
class Query:
    """One text to embed, as the manager sees it.

    model: the encoder that is asked, of those that share the devices.
    target: when it should be done (the SLO); infinite for bulk work, which has no SLO.
    deadline: when it is of no use any more. Both are times of the caller's clock.
    kind: its class on every device. limit: the largest batch it may be in.
    admitted, promised: when it was taken, and when it would be done by the lines; infinite where
    that holds no longer.
    """

    number: int
    tokens: int
    target: float = math.inf
    deadline: float = math.inf
    priority: int = 0
    payload: object = None
    model: str = ""
    state: State = State.NEW
    device: str = ""
    kind: int = 0
    limit: int = 1 << 30
    deaths: int = 0
    cancelled: bool = False
    admitted: float = 0.0
    promised: float = math.inf

    @property
    def bulk(self) -> bool:
        """Whether it has no SLO."""
        return self.target == math.inf

    @property
    def order(self) -> tuple[float, int]:
        """Place in a queue: earliest target first, moved ahead by priority."""
        target = self.target if self.target < math.inf else 1e18
        return target - PRIORITY_SECONDS * self.priority, self.number


@dataclass(frozen=True, slots=True)
class QueueSpec:
    """A device's queue. `depths` and `lines` have one value per class of queries.

    token_budget: most tokens of a batch, padding included where the device pads. margin: part by
    which promises may be exceeded, until enough of them have shown by how much they are.
    """

    name: str
    accelerator: bool
    depths: tuple[int, ...]
    lines: tuple[Line, ...]
    instances: int = 1
    token_budget: int = 1 << 30
    pads: bool = False
    margin: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Queries of one model that one instance runs together, from `started` to about `expected`.

    limit: seconds after which an instance that is not done is taken for hung.
    """

    number: int
    device: str
    queries: tuple[Query, ...]
    counts: tuple[int, ...]
    started: float
    expected: float
    limit: float = math.inf
    model: str = ""
