"""Cost tables of a profile as a table to read.

In: a `ProfileFile`. Out: rows of where, how long, how far runs spread, and whether it was measured.
"""

from __future__ import annotations

from rich.table import Table

from dovetail.cli.report import make_table, show_count
from dovetail.ir.profile import ProfileFile


def profile_table(profile: ProfileFile) -> Table:
    """Return all rows of a profile, in microseconds."""
    key = profile.key
    return make_table(
        f"{key.device}, {show_count(key.threads, 'thread')}, {profile.created}",
        (">table", ">at", ">us", ">spread", ">origin"),
        [
            (
                name,
                " x ".join(map(str, row.at)),
                f"{1e6 * row.seconds:.1f}",
                f"{row.spread:.0%}",
                row.origin,
            )
            for name, rows in profile.tables.items()
            for row in rows
        ],
    )
