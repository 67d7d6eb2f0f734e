"""Jobs under way, who waits for each, and orders that nobody has taken yet.

In: orders, reports. Out: orders in sequence, each once; reports to those who wait for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, TypeVar

from dovetail.ir.errors import DovetailError
from dovetail.runtime.flows.control.messages import Cancel, Failed, Order, Progressed, Report

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Callbacks(Generic[T]):
    """Who is told of searches, or replies: when one has got further, is over, has failed."""

    changed: Callable[[T, float], None]
    ended: Callable[[T, float], None]
    failed: Callable[[T, DovetailError, float], None]


@dataclass(frozen=True, slots=True)
class Waiter:
    """Whom a report goes to. request: whose job it is, None where several share it."""

    request: int | None
    take: Callable[[Any, float], None]
    fail: Callable[[DovetailError, float], None]


class Board:
    """All jobs. A job ends with its last report or by being cancelled, and is never heard again."""

    def __init__(self) -> None:
        self._waiters: dict[int, Waiter] = {}
        self._orders: list[Order] = []
        self._numbers = count(1)

    def post(self, make: Callable[[int], Order], waiter: Waiter) -> int:
        """Order a job, which `make` gets the number of; return the number."""
        job = next(self._numbers)
        self._waiters[job] = waiter
        self._orders.append(make(job))
        return job

    def add(self, order: Order) -> None:
        """Order what nobody reports about."""
        self._orders.append(order)

    def cancel(self, job: int) -> None:
        """End a job, if it is under way."""
        if self._waiters.pop(job, None) is not None:
            self._orders.append(Cancel(job))

    def cancel_request(self, request: int) -> None:
        """End all jobs of a request."""
        for job in [j for j, waiter in self._waiters.items() if waiter.request == request]:
            self.cancel(job)

    def tell(self, report: Report, now: float) -> None:
        """Hand a report on; nothing happens where nobody waits for it."""
        waiter = self._waiters.get(report.job)
        if waiter is None:
            return
        if not isinstance(report, Progressed):
            del self._waiters[report.job]
        if isinstance(report, Failed):
            waiter.fail(report.error, now)
        else:
            waiter.take(report, now)

    def take(self) -> tuple[Order, ...]:
        """Return the orders since the last call."""
        orders, self._orders = tuple(self._orders), []
        return orders
