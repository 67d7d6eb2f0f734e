"""Spans and diagnostics: where a text is wrong, in one sentence, with the line and a caret."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Source:
    """A named text; spans point into it."""

    name: str
    text: str

    def line(self, number: int) -> str:
        """Return line `number` (1-based) without its end, or an empty string past the end."""
        lines = _lines(self.text)
        return lines[number - 1] if 1 <= number <= len(lines) else ""


@lru_cache(maxsize=8)  # a parser asks for the line of every node
def _lines(text: str) -> list[str]:
    return text.splitlines()


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range of a source. Lines and columns are 1-based; `end_column` is exclusive."""

    line: int
    column: int
    end_line: int
    end_column: int

    def __str__(self) -> str:
        return f"{self.line}:{self.column}"


NO_SPAN = Span(0, 0, 0, 0)
"""The span of nodes that were made by a pass and stand in no text."""


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One fault. `code` is a stable short name such as `low-unknown-name`."""

    code: str
    message: str
    span: Span
    source: Source
    hint: str | None = None

    def render(self) -> str:
        """Return `file:line:column: error[code]: message`, the source line, a caret, the hint."""
        head = f"{self.source.name}:{self.span}: error[{self.code}]: {self.message}"
        line = self.source.line(self.span.line)
        shown = [head]
        if line:
            width = self._caret_width(line)
            pad = "".join("\t" if c == "\t" else " " for c in line[: self.span.column - 1])
            shown += [f"  {line}", f"  {pad}{'^' * width}"]
        if self.hint:
            shown.append(f"  hint: {self.hint}")
        return "\n".join(shown)

    def _caret_width(self, line: str) -> int:
        if self.span.end_line == self.span.line:
            return max(1, self.span.end_column - self.span.column)
        return max(1, len(line) - self.span.column + 1)


def render_all(diagnostics: Iterable[Diagnostic]) -> str:
    """Return every diagnostic as text, in order, separated by line ends."""
    return "\n".join(d.render() for d in diagnostics)
