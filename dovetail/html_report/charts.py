"""Line charts and bars as SVG that takes its colours from the page around it.

In: series of points. Out: SVG text; series differ in dashes and marks, too, not in colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

WIDTH, HEIGHT = 600, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 40, 40
TICKS = 8
"""Most lines of a grid in one direction."""
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a chart; number picks its colour, dashes and marks (`report.css`)."""

    name: str
    points: Sequence[Point]
    number: int = 0
    marked: bool = True


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis shows. logarithmic: values are above 0. least: is shown if it is not."""

    name: str
    logarithmic: bool = False
    least: float = 0.0

    def span(self, values: Sequence[float]) -> tuple[float, float]:
        """Return the ends of the axis: the values', with `least` where it is linear."""
        low, high = (min(values), max(values)) if values else (1.0, 1.0)
        if not self.logarithmic:
            low = min(self.least, low)
            return low, high if high > low else low + 1.0
        return (low, high) if high > low else (low / 2, high * 2)

    def part(self, value: float, low: float, high: float) -> float:
        """Return where a value stands between the ends, 0 to 1."""
        if self.logarithmic:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return (value - low) / (high - low)

    def ticks(self, low: float, high: float) -> list[float]:
        """Return round values between the ends."""
        if not self.logarithmic:
            step = _round_up((high - low) / 5)
            return [i * step for i in range(math.ceil(low / step), int(high / step) + 1)]
        bases = [(1, 2, 5), (1, 3), (1,)]
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found: list[float] = []
        for factors in bases:
            found = [f * 10.0**d for d in decades for f in factors if low <= f * 10.0**d <= high]
            if len(found) <= TICKS:
                break
        return found or [low, high]


def draw_lines(title: str, x: Axis, y: Axis, lines: Sequence[Series]) -> str:
    """Return a chart; the values of points are shown under the pointer."""
    xs = [a for line in lines for a, _ in line.points]
    ys = [b for line in lines for _, b in line.points]
    across, up = x.span(xs), y.span(ys)

    def place(a: float, b: float) -> Point:
        width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return LEFT + width * x.part(a, *across), HEIGHT - BOTTOM - height * y.part(b, *up)

    shapes = [*_grid(x, y, across, up, place), *_legend(lines)]
    for line in lines:
        spots = [place(*point) for point in line.points]
        if len(spots) > 1:
            path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in spots)
            shapes.append(f'<path class="line l{line.number}" d="{path}"/>')
        marked = zip(spots, line.points, strict=True) if line.marked else ()
        shapes += (
            f'<circle class="mark l{line.number}" cx="{a:.1f}" cy="{b:.1f}" r="3"><title>'
            f"{escape(line.name)}: {show(value)} at {show(at)}</title></circle>"
            for (a, b), (at, value) in marked
        )
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f"aria-label={quoteattr(title)}>{''.join(shapes)}</svg>"
    )


def _grid(
    x: Axis,
    y: Axis,
    across: tuple[float, float],
    up: tuple[float, float],
    place: Callable[[float, float], Point],
) -> Iterator[str]:
    for value in x.ticks(*across):
        a, b = place(value, up[0])
        yield f'<path class="grid" d="M{a:.1f} {TOP}V{b:.1f}"/>'
        yield f'<text x="{a:.1f}" y="{b + 14:.1f}" text-anchor="middle">{show(value)}</text>'
    for value in y.ticks(*up):
        a, b = place(across[0], value)
        yield f'<path class="grid" d="M{LEFT} {b:.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 6}" y="{b + 4:.1f}" text-anchor="end">{show(value)}</text>'
    middle = (LEFT + WIDTH - RIGHT) // 2
    yield f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x.name)}</text>'
    yield f'<text x="0" y="{TOP - 8}">{escape(y.name)}</text>'


def _legend(lines: Sequence[Series]) -> Iterator[str]:
    left = LEFT
    for line in lines:
        yield f'<path class="line l{line.number}" d="M{left} 12H{left + 24}"/>'
        yield f'<text x="{left + 30}" y="16">{escape(line.name)}</text>'
        left += 44 + 7 * len(line.name)


def draw_bar(title: str, parts: Sequence[tuple[str, int, str]]) -> str:
    """Return a bar of parts: a name, a size, and the size in words, one colour each."""
    whole = sum(size for _, size, _ in parts) or 1
    left, shapes = 0.0, list[str]()
    for number, (name, size, words) in enumerate(parts):
        width = WIDTH * size / whole
        shapes.append(
            f'<rect class="l{number}" x="{left:.2f}" y="0" width="{width:.2f}" height="26">'
            f"<title>{escape(name)}: {escape(words)}</title></rect>"
        )
        left += width
        row = 46 + 20 * number
        shapes.append(f'<rect class="l{number}" x="0" y="{row - 10}" width="12" height="12"/>')
        shapes.append(f'<text x="20" y="{row}">{escape(name)}: {escape(words)}</text>')
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {40 + 20 * len(parts)}" role="img" '
        f"aria-label={quoteattr(title)}>{''.join(shapes)}</svg>"
    )


def show(value: float) -> str:
    """Return a number as short as it can be told."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _round_up(step: float) -> float:
    unit = 10.0 ** math.floor(math.log10(step))
    return next(f * unit for f in (1, 2, 5, 10) if f * unit >= step * (1 - 1e-9))
