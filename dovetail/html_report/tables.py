"""Tables of the terminal as values that a page lays out.

In: what `dovetail inspect` prints. Out: `Grid`s and lines of text.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Grid:
    """A table: a title, heads (none where the first column names the rows), rows of cells.

    numbers: whether a column holds numbers. strong: rows that stand above others.
    """

    title: str
    heads: tuple[str, ...]
    numbers: tuple[bool, ...]
    rows: tuple[tuple[str, ...], ...]
    strong: tuple[bool, ...] = ()


def read_grid(part: RenderableType) -> Grid | str:
    """Return a table as cells, or a line of text."""
    if not isinstance(part, Table):
        return str(part)
    columns = [[str(cell) for cell in column.cells] for column in part.columns]
    heads = tuple(str(column.header) for column in part.columns) if part.show_header else ()
    return Grid(
        title=str(part.title or ""),
        heads=heads,
        numbers=tuple(column.justify == "right" for column in part.columns),
        rows=tuple(zip(*columns, strict=True)),
        strong=tuple(row.style is not None for row in part.rows),
    )
