"""Holds a timeline to the Chrome trace format, as Perfetto reads it without import errors."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from dovetail.ir.errors import SpecError
from dovetail.runtime.timeline import NANOSECONDS


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
