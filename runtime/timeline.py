"""Timelines: spans on named tracks, and arrows along a request -> Chrome trace JSON for Perfetto.

In: what happened when, on whatever clock, real or simulated. Out: a file that ui.perfetto.dev and
chrome://tracing open.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, TypeAlias

import msgspec

from dovetail.ir.files import write_whole

MAX_EVENTS = 1_000_000
"""Spans and arrows kept by default, about 200 MB of JSON; later ones are counted, not kept."""
NANOSECONDS = 1e9
ARROW = "s"
"""The phase of an arrow's points until all are known."""

Args: TypeAlias = Mapping[str, str | float | int]


@dataclass(frozen=True, slots=True)
class Track:
    """A row of the picture: one thread of one process, by their numbers."""

    process: int
    thread: int


@dataclass(frozen=True, slots=True)
class _Event:
    """One event of the trace format: its phase letter, place and time in seconds."""

    phase: str
    name: str
    track: Track
    at: float
    seconds: float = 0.0
    number: int = 0  # joins what belongs together: an arrow's points, the ends of a long span
    args: Args = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a process drew, for the timeline of another: names of tracks, and events on them.

    The threads of events are places in `tracks`, from 1 on.
    """

    tracks: list[tuple[str, str]]
    events: list[_Event]


class Timeline:
    """Collects events; several threads may add at once. Times are seconds on `clock`."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, max_events: int = MAX_EVENTS
    ) -> None:
        self.clock, self.max_events, self.dropped = clock, max_events, 0
        self._tracks: dict[tuple[str, str], Track] = {}
        self._events: list[_Event] = []
        self._lock = Lock()  # of tracks; lists are appended to by one thread at a time anyway

    def track(self, process: str, thread: str) -> Track:
        """Return the track of that name, the same one each time."""
        with self._lock:
            found = self._tracks.get((process, thread))
            if found is None:
                numbers = {name: track.process for (name, _), track in self._tracks.items()}
                number = numbers.get(process, len(set(numbers.values())) + 1)
                found = self._tracks[process, thread] = Track(number, len(self._tracks) + 1)
            return found

    def span(self, track: Track, name: str, start: float, end: float, **args: Any) -> None:
        """Add what `track` did from `start` to `end`; spans of a track nest or follow on."""
        self._add(_Event("X", name, track, start, max(0.0, end - start), args=args))

    @contextmanager
    def measure(self, track: Track, name: str, **args: Any) -> Iterator[None]:
        """Add the body as a span."""
        start = self.clock()
        try:
            yield
        finally:
            self.span(track, name, start, self.clock(), **args)

    def life(
        self, track: Track, name: str, number: int, start: float, end: float, **args: Any
    ) -> None:
        """Add a span that may overlap others of its track, as the lives of requests do."""
        self._add(_Event("b", name, track, start, end - start, number, args))

    def count(self, track: Track, name: str, at: float, **values: float) -> None:
        """Add values that are drawn as curves over time."""
        self._add(_Event("C", name, track, at, args=values))

    def mark(self, track: Track, name: str, at: float, **args: Any) -> None:
        """Add a point in time."""
        self._add(_Event("i", name, track, at, args=args))

    def arrow(self, number: int, track: Track, at: float, name: str = "request") -> None:
        """Lead the arrow `number` through the span of `track` at that time."""
        self._add(_Event(ARROW, name, track, at, number=number))

    def drain(self) -> Drawn | None:
        """Take out all that was added, if anything was. For the one thread that adds."""
        events, self._events = self._events, []
        return Drawn(list(self._tracks), events) if events else None

    def add(self, drawn: Drawn) -> None:
        """Add what another process drew on the same clock."""
        tracks = [self.track(*names) for names in drawn.tracks]
        for event in drawn.events:
            self._add(replace(event, track=tracks[event.track.thread - 1]))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write all events to `path` in order of time, at once or not at all; OSError as usual."""
        write_whole(path, msgspec.json.encode(self.trace()))

    def trace(self) -> dict[str, Any]:
        """Return the trace as JSON values; its first event is at time 0."""
        arrows: dict[int, list[_Event]] = defaultdict(list)
        events: list[_Event] = []
        for event in self._events:
            (arrows[event.number] if event.phase == ARROW else events).append(event)
        events += [point for points in arrows.values() for point in _joined(points)]
        first = min((event.at for event in events), default=0.0)
        shown = [one for event in events for one in _render(event, first)]
        shown.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
        return {
            "traceEvents": [*self._names(), *shown],
            "displayTimeUnit": "ms",
            "otherData": {"dropped": self.dropped},
        }

    def _add(self, event: _Event) -> None:
        if len(self._events) < self.max_events:
            self._events.append(event)
        else:
            self.dropped += 1

    def _names(self) -> Iterator[dict[str, Any]]:
        for (process, thread), track in self._tracks.items():
            place = {"ph": "M", "pid": track.process, "tid": track.thread, "ts": 0}
            yield {**place, "name": "process_name", "args": {"name": process}}
            yield {**place, "name": "thread_name", "args": {"name": thread}}
            yield {**place, "name": "thread_sort_index", "args": {"sort_index": track.thread}}


def _joined(points: list[_Event]) -> list[_Event]:
    """Return an arrow's points as start, steps and finish; none where it leads nowhere."""
    if len(points) < 2:
        return []
    points = sorted(points, key=lambda point: point.at)  # several threads draw it
    phases = ["s", *["t"] * (len(points) - 2), "f"]
    name = points[0].name
    return [replace(p, phase=phase, name=name) for phase, p in zip(phases, points, strict=True)]


def _render(event: _Event, first: float) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of one event."""
    # Ends are rounded, not lengths, so that spans which touch or nest still do as whole numbers
    at, end = (round((t - first) * NANOSECONDS) for t in (event.at, event.at + event.seconds))
    body: dict[str, Any] = {
        "ph": event.phase,
        "name": event.name,
        "pid": event.track.process,
        "tid": event.track.thread,
        "ts": at / 1000,
        **_MORE.get(event.phase, {}),
    }
    if event.args:
        body["args"] = dict(event.args)
    if event.phase == "X":
        body["dur"] = (end - at) / 1000
    if event.phase in "stfb":
        body["id"] = event.number
    yield body
    if event.phase == "b":
        yield {**body, "ph": "e", "ts": end / 1000, "args": {}}


_MORE: dict[str, dict[str, Any]] = {
    "s": {"cat": "request"},
    "t": {"cat": "request"},
    "f": {"cat": "request", "bp": "e"},  # binds to the span around it, not to the next one
    "b": {"cat": "life"},
    "i": {"s": "t"},
}
