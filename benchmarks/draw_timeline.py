"""Draws a recorded timeline as a picture: what `dovetail serve --timeline FILE` or `record` wrote.

In: a trace for ui.perfetto.dev. Out: an SVG or PNG: a row for each span that others overlap, engine
steps by what they computed, and the arrows of requests through the tracks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

TRACKS = ("http", "submit", "workflows", "engine", "device", "CPU attention", "link", "encoder")
TRACKS += ("retrieval worker", "requests")
"""From top to bottom, where they were recorded."""
BATCHES = {"batch 0": "#69c", "batch 1": "#c96"}
"""Colours of what a device and the CPU do for either batch of a step."""
COLOURS = {"prefill": "#c96", "decode": "#69c", "mixed": "#999"}
OTHERS = ("#7a9", "#b7a", "#aa6", "#8ac")
PARTS = ("schedule", "fill", "sample", "step")
"""Parts of a step that are not drawn: its forward pass is."""


@dataclass(frozen=True, slots=True)
class Span:
    """What took place on a track, in milliseconds."""

    track: str
    name: str
    start: float
    end: float
    colour: str | None = None


def read_spans(events: Iterable[dict[str, Any]]) -> Iterator[Span]:
    """Yield the spans of a trace: those of threads, and lives of requests and nodes."""
    listed = list(events)
    names = {e["tid"]: e["args"]["name"] for e in listed if e["name"] == "thread_name"}
    begun: dict[tuple[int, int], dict[str, Any]] = {}
    for event in listed:
        place = event["tid"], event.get("id", 0)
        if event["ph"] == "X" and event["name"] not in PARTS:
            start = event["ts"] / 1e3
            colour = BATCHES.get(event["name"].partition(":")[0])
            if event["name"] == "forward":
                colour = _colour(event.get("args", {}))
            track, end = names[event["tid"]], start + event["dur"] / 1e3
            yield Span(track, event["name"], start, end, colour)
        elif event["ph"] == "b":
            begun[place] = event
        elif event["ph"] == "e" and place in begun:
            first = begun.pop(place)
            start, end = first["ts"] / 1e3, event["ts"] / 1e3
            yield Span(names[event["tid"]], first["name"], start, end)


def _colour(args: dict[str, Any]) -> str:
    kinds = [kind for kind in ("prefill", "decode") if args.get(kind)]
    return COLOURS[kinds[0] if len(kinds) == 1 else "mixed"]


def read_arrows(events: Iterable[dict[str, Any]]) -> list[list[tuple[str, float]]]:
    """Return for each arrow the tracks that it meets, and when, in milliseconds."""
    listed = list(events)
    names = {e["tid"]: e["args"]["name"] for e in listed if e["name"] == "thread_name"}
    found: dict[int, list[tuple[str, float]]] = defaultdict(list)
    for event in listed:
        if event["ph"] in "stf":
            found[event["id"]].append((names[event["tid"]], event["ts"] / 1e3))
    return [sorted(points, key=lambda point: point[1]) for points in found.values()]


def pack_rows(spans: Iterable[Span]) -> list[list[Span]]:
    """Return spans of one track in as few rows as none overlaps another in."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.start):
        row = next((row for row in rows if row[-1].end <= span.start), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows


def draw(
    events: list[dict[str, Any]],
    output: Path,
    window: tuple[float, float],
    only: Iterable[str] = TRACKS,
) -> None:
    """Draw what lies within `window`, milliseconds since the trace began, of the tracks `only`."""
    first, last = window
    spans = [
        replace(s, start=s.start - first, end=s.end - first)
        for s in read_spans(events)
        if s.end > first and s.start < last
    ]
    middles: dict[str, float] = {}
    labels, y = [], 0.0
    tracks = [track for track in only if any(s.track == track for s in spans)]
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots()
    for number, track in enumerate(tracks):
        rows = pack_rows(s for s in spans if s.track == track)
        height = max(1.0, 0.35 * len(rows))
        for i, row in enumerate(rows):
            _draw_row(axes, row, y + i * height / len(rows), height / len(rows), number)
        middles[track] = y + height / 2
        labels.append(y + height / 2)
        y += height + 0.4
    for points in read_arrows(events):
        known = [(at - first, middles[track]) for track, at in points if track in middles]
        if any(0 <= at <= last - first for at, _ in known):
            axes.plot(*zip(*known, strict=True), color="#444", lw=0.4, alpha=0.6)
    axes.set(xlim=(0, last - first), ylim=(y, -0.2), xlabel="ms")
    axes.set_yticks(labels, tracks)
    told, title = (
        (COLOURS, "engine steps") if "engine" in tracks else (BATCHES, "batches of a step")
    )
    for name, colour in told.items():
        axes.barh(0, 0, color=colour, label=name)
    axes.legend(loc="lower center", ncols=3, fontsize=7, title=title, title_fontsize=7)
    figure.savefig(output, dpi=120)


def _draw_row(axes: Axes, row: list[Span], y: float, height: float, number: int) -> None:
    axes.barh(
        [y + height / 2] * len(row),
        [span.end - span.start for span in row],
        left=[span.start for span in row],
        height=height * 0.85,
        color=[span.colour or OTHERS[number % len(OTHERS)] for span in row],
        edgecolor="white",
        linewidth=0.3,
    )


def main(
    trace: Annotated[Path, typer.Argument(help="The recorded file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="SVG or PNG to write.")],
    start: Annotated[float, typer.Option(help="Milliseconds to begin at.")] = 0.0,
    end: Annotated[float | None, typer.Option(help="Milliseconds to end at.")] = None,
    tracks: Annotated[str, typer.Option(help="Names with commas between; default all.")] = "",
) -> None:
    """Draw a recorded timeline."""
    shown = tracks.split(",") if tracks else TRACKS
    events = msgspec.json.decode(trace.read_bytes())["traceEvents"]
    last = max((span.end for span in read_spans(events)), default=1.0)
    draw(events, output, (start, last if end is None else end), shown)


if __name__ == "__main__":
    typer.run(main)
