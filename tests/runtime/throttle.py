"""An app whose engine takes only the steps that a test allows, and answers messages meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dovetail.runtime.app import App
from dovetail.runtime.schedule.request import Request

Before = Callable[[int], None]


class Throttle:
    def __init__(self, app: App, before: Before = lambda step: None) -> None:
        """`before` is called with the number of each step, from 0, on the engine's thread."""
        self._app, self._step, self._before = app, app.engine.step, before
        self._permits, self.steps = threading.Semaphore(0), 0
        app.engine.step = self._wait_and_step  # type: ignore[method-assign]

    def allow(self, steps: int) -> None:
        self._permits.release(steps)

    def run(self, steps: int) -> None:
        """Return when so many more steps are over; there must be work for them."""
        end = self.steps + steps
        self.allow(steps)
        while self.steps < end:
            self._app.generator.host.call(lambda: None).result()
        self._app.generator.host.call(lambda: None).result()

    def _wait_and_step(self) -> list[Request]:
        while not self._permits.acquire(timeout=0.001):
            if not self._app.generator.host._inbox.empty():
                return []
        self.steps += 1
        self._before(self.steps - 1)
        return self._step()
