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
    # as parsers count lines: to `splitlines` a form feed ends one, too
    return text.replace("\r\n", "\n").split("\n")


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
            whole = self.span.end_line == self.span.line
            width = max(1, (self.span.end_column if whole else len(line) + 1) - self.span.column)
            pad = "".join("\t" if c == "\t" else " " for c in line[: self.span.column - 1])
            shown += [f"  {line}", f"  {pad}{'^' * width}"]
        if self.hint:
            shown.append(f"  hint: {self.hint}")
        return "\n".join(shown)


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """Return the hint for a name that is not known, None where no known one is near it."""
    from difflib import get_close_matches  # noqa: PLC0415 - only after a fault

    near = get_close_matches(name, list(known), 1)
    return f"did you mean `{near[0]}`?" if near else None
