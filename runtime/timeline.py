"""Timelines: spans on named tracks, and arrows along a request -> Chrome trace JSON for Perfetto.

In: what happened when, on whatever clock, real or simulated. Out: a file that ui.perfetto.dev and
chrome://tracing open, and `check_timeline`, which holds such a file to the format.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias

import msgspec

from dovetail.ir.errors import SpecError
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
        self._arrows: dict[int, list[_Event]] = defaultdict(list)
        self._points = 0
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
        if len(self._events) + self._points < self.max_events:
            self._arrows[number].append(_Event(ARROW, name, track, at, number=number))
            self._points += 1
        else:
            self.dropped += 1

    def drain(self) -> Drawn | None:
        """Take out all that was added, if anything was. For the one thread that adds."""
        events, self._events = self._events, []
        arrows, self._arrows = self._arrows, defaultdict(list)
        events += [point for points in arrows.values() for point in points]
        self._points = 0
        return Drawn(list(self._tracks), events) if events else None

    def add(self, drawn: Drawn) -> None:
        """Add what another process drew on the same clock."""
        tracks = [self.track(*names) for names in drawn.tracks]
        for event in drawn.events:
            moved = replace(event, track=tracks[event.track.thread - 1])
            if event.phase == ARROW:
                self.arrow(event.number, moved.track, event.at, event.name)
            else:
                self._add(moved)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write all events to `path` in order of time, at once or not at all; OSError as usual."""
        write_whole(path, msgspec.json.encode(self.trace()))

    def trace(self) -> dict[str, Any]:
        """Return the trace as JSON values; its first event is at time 0."""
        arrows = [p for points in self._arrows.values() for p in _joined(points)]
        events = [*self._events, *arrows]
        first = min((event.at for event in events), default=0.0)
        shown = [one for event in events for one in _render(event, first)]
        shown.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
        return {
            "traceEvents": [*self._names(), *shown],
            "displayTimeUnit": "ms",
            "otherData": {"dropped": self.dropped},
        }

    def _add(self, event: _Event) -> None:
        if len(self._events) + self._points < self.max_events:
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
    return [
        _Event(phase, points[0].name, point.track, point.at, number=point.number)
        for phase, point in zip(phases, points, strict=True)
    ]


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


# ---- checking ----


@dataclass(frozen=True, slots=True)
class TimelineFacts:
    """What a checked file holds: spans (short and long), tracks, arrows, and seconds covered."""

    spans: int
    tracks: int
    arrows: int
    seconds: float


def check_timeline(path: str | os.PathLike[str]) -> TimelineFacts:
    """Check that `path` is a Chrome trace that Perfetto reads without import errors.

    Every event has what its phase needs; spans of one track nest or follow each other; begins
    (B, b) have their ends; every arrow starts once, ends once, and touches a span at each point.

    Raises:
        SpecError: the file breaks one of these rules; it names the event.
    """
    try:
        trace = msgspec.json.decode(Path(path).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise SpecError(f"{path}: cannot be read as a timeline ({error})") from None
    found = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(found, list):
        raise SpecError(f"{path}: has no list of traceEvents")
    try:
        return _check_events(found)
    except _Wrong as error:
        raise SpecError(f"{path}: {error}") from None


class _Wrong(Exception):
    """A rule of the format that an event breaks."""


def _check_events(found: list[Any]) -> TimelineFacts:
    for i, event in enumerate(found):
        _check_fields(i, event)
    timed = [event for event in found if event["ph"] != "M"]
    timed.sort(key=lambda event: float(event["ts"]))  # stable, as Perfetto sorts
    slices = _find_slices(timed)
    outer = {place: _check_nesting(place, spans) for place, spans in slices.items()}
    lives = _check_lives([e for e in timed if e["ph"] in "be"])
    arrows = _check_arrows([e for e in timed if e["ph"] in "stf"], outer)
    ends = [_end(event) for event in timed]
    return TimelineFacts(
        spans=sum(map(len, slices.values())) + lives,
        tracks=len({_place(event) for event in timed}),
        arrows=arrows,
        seconds=(max(ends) - _start(timed[0])) / NANOSECONDS if timed else 0.0,
    )


_NEEDED: dict[str, tuple[str, ...]] = {
    "M": ("pid", "args"),
    "X": ("ts", "dur", "pid", "tid"),
    "B": ("ts", "pid", "tid"),
    "E": ("ts", "pid", "tid"),
    "b": ("ts", "pid", "id", "cat"),
    "e": ("ts", "pid", "id", "cat"),
    "s": ("ts", "pid", "tid", "id", "cat"),
    "t": ("ts", "pid", "tid", "id", "cat"),
    "f": ("ts", "pid", "tid", "id", "cat"),
    "C": ("ts", "pid", "args"),
    "i": ("ts", "pid", "tid"),
}
"""Fields that an event of each phase needs."""


def _check_fields(i: int, event: Any) -> None:
    phase = event.get("ph") if isinstance(event, dict) else None
    if phase not in _NEEDED:
        raise _Wrong(f"event {i} has no known phase: {event!r}")
    lacking = [name for name in _NEEDED[phase] if name not in event]
    if lacking or (phase != "E" and not isinstance(event.get("name"), str)):
        raise _Wrong(f"event {i} lacks {', '.join(lacking) or 'a name'}: {event!r}")
    for name in ("ts", "dur"):
        value = event.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise _Wrong(f"event {i}: {name} must be a number of microseconds >= 0: {event!r}")


_JsonEvent: TypeAlias = Mapping[str, Any]
_Place: TypeAlias = tuple[Any, Any]
_Span: TypeAlias = tuple[int, int]


def _place(event: _JsonEvent) -> _Place:
    return event["pid"], event.get("tid")


def _start(event: _JsonEvent) -> int:
    """Return the nanosecond of an event: Perfetto counts in whole ones."""
    return round(float(event["ts"]) * 1000)


def _end(event: _JsonEvent) -> int:
    return _start(event) + round(float(event.get("dur", 0)) * 1000)


def _find_slices(events: Iterable[_JsonEvent]) -> dict[_Place, list[_Span]]:
    """Return start and end of the spans of each track, from whole ones and from pairs."""
    slices: dict[_Place, list[_Span]] = defaultdict(list)
    begun: dict[_Place, list[int]] = defaultdict(list)
    for event in events:
        place = _place(event)
        if event["ph"] == "X":
            slices[place].append((_start(event), _end(event)))
        elif event["ph"] == "B":
            begun[place].append(_start(event))
        elif event["ph"] == "E":
            if not begun[place]:
                raise _Wrong(f"an end without a begin: {event!r}")
            slices[place].append((begun[place].pop(), _start(event)))
    unended = [place for place, starts in begun.items() if starts]
    if unended:
        raise _Wrong(f"a begin without an end on (pid, tid) {unended[0]}")
    return slices


def _check_nesting(place: _Place, spans: list[_Span]) -> list[_Span]:
    """Return the spans that lie in no other one, in order."""
    around: list[int] = []
    outer: list[_Span] = []
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while around and around[-1] <= start:
            around.pop()
        if around and end > around[-1]:
            raise _Wrong(f"spans overlap on {place}: {start}..{end} ns, and one to {around[-1]}")
        if not around:
            outer.append((start, end))
        around.append(end)
    return outer


def _check_lives(events: Iterable[_JsonEvent]) -> int:
    """Return how many long spans there are; each end has its begin."""
    alive: dict[tuple[Any, ...], int] = defaultdict(int)
    count = 0
    for event in events:
        key = (event["pid"], event["cat"], event["id"], event["name"])
        alive[key] += 1 if event["ph"] == "b" else -1
        count += event["ph"] == "b"
        if alive[key] < 0:
            raise _Wrong(f"an end without a begin: {event!r}")
    unended = [key for key, left in alive.items() if left]
    if unended:
        raise _Wrong(f"a begin without an end: {unended[0]}")
    return count


def _check_arrows(events: Iterable[_JsonEvent], outer: Mapping[_Place, list[_Span]]) -> int:
    """Return how many arrows there are; each runs from s over t to f, through spans."""
    phases: dict[tuple[Any, Any], str] = defaultdict(str)
    for event in events:
        phases[event["cat"], event["id"]] += event["ph"]
        spans, at = outer.get(_place(event), []), _start(event)
        i = bisect_right(spans, at, key=itemgetter(0)) - 1
        if i < 0 or not any(at <= end for _, end in spans[max(0, i - 1) : i + 1]):
            raise _Wrong(f"an arrow touches no span: {event!r}")
    for key, letters in phases.items():
        if letters != "s" + "t" * (len(letters) - 2) + "f":
            raise _Wrong(f"the arrow {key} goes {letters}, not from s over t to f")
    return len(phases)
