"""A live server on a timeline: requests from arrival to reply, joined to the steps that serve them.

In: requests as they end. Out: the tracks `http` and `submit` beside those of the engine, in a file
for ui.perfetto.dev. Times are `time.perf_counter` throughout, the engine's clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from dovetail.ir.errors import SpecError
from dovetail.runtime.engine.recorder import PROCESS
from dovetail.runtime.hosting.generator import Job
from dovetail.runtime.server.models import Models, ServedModel
from dovetail.runtime.timeline import Timeline


class ServerTimeline:
    """What a server adds to the recording of its first model that generates."""

    def __init__(self, timeline: Timeline, model: ServedModel) -> None:
        self._timeline, self._model = timeline, model
        self._http = timeline.track(PROCESS, "http")
        self._submit = timeline.track(PROCESS, "submit")
        self._numbers = count()

    def serve(self, path: str, id: str, arrival: float, status: int) -> None:
        """Add a request from its arrival to now."""
        number, now = next(self._numbers), time.perf_counter()
        self._timeline.life(self._http, path, number, arrival, now, id=id, status=status)

    def join(self, model: ServedModel, id: str, job: Job, start: float, end: float) -> None:
        """Add that a job was handed to the engine from `start` to `end`, and lead its arrow there.

        The choices of one request are handed over together: they share a span.
        """
        request = getattr(job, "request", None)  # none where it was refused
        if model.app is not self._model.app or request is None:
            return
        if request.index == 0:
            self._timeline.span(self._submit, "submit", start, end, id=id)
        self._timeline.arrow(request.id, self._submit, start)


def recorded_model(models: Models) -> ServedModel:
    """Return the first model that generates; SpecError where none does: encoders record nothing."""
    model = next((model for model in models if "generate" in model.skills), None)
    if model is None:
        raise SpecError("a timeline is recorded of a model that generates; none is served")
    return model


@contextmanager
def recording(models: Models, path: Path | None) -> Iterator[ServerTimeline | None]:
    """Record the body into `path`, None where there is none; raises as `recorded_model`."""
    if path is None:
        yield None
        return
    model = recorded_model(models)
    with model.app.record(path) as timeline:
        yield ServerTimeline(timeline, model)
