"""Cost tables of a profile as a table to read.

In: a `ProfileFile`. Out: rows of where, how long, how far runs spread, and whether it was measured.
"""

from __future__ import annotations

from rich.table import Table

from dovetail.cli.report import show_count
from dovetail.ir.profile import ProfileFile


def profile_table(profile: ProfileFile) -> Table:
    """Return all rows of a profile, in microseconds."""
    key = profile.key
    table = Table(
        title=f"{key.device}, {show_count(key.threads, 'thread')}, {profile.created}",
        title_justify="left",
    )
    for name in ("table", "at", "us", "spread", "origin"):
        table.add_column(name, justify="right")
    for name, rows in profile.tables.items():
        for row in rows:
            at = " x ".join(map(str, row.at))
            table.add_row(name, at, f"{1e6 * row.seconds:.1f}", f"{row.spread:.0%}", row.origin)
    return table
