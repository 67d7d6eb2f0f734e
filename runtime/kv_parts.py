"""Into how many parts decode attention cuts each sequence's keys, so that all threads have work.

In: decodes, KV heads, lengths, threads. Out: the number of parts, which a merge joins again.
"""

from __future__ import annotations

from dovetail.ir.model import MAX_KV_SPLITS

PART_TOKENS = 64
"""Keys below which a part is not worth its merge, where no schedule says otherwise."""
EVEN_ITEMS = 4
"""Work items for each thread from which on it matters little that some threads have one more."""


def count_parts(units: int, longest: int, threads: int, least: int = PART_TOKENS) -> int:
    """Return the fewest parts of each sequence that keep all threads equally busy.

    Args:
        units: sequences times KV heads.
        longest: tokens of the longest sequence.
        threads: those that share the work.
        least: no part of the longest sequence has fewer tokens; 0 = sequences stay whole.
    """
    most = min(MAX_KV_SPLITS, 1 + longest // least) if least else 1
    for parts in range(1, most):
        if units * parts % threads == 0 or units * parts >= EVEN_ITEMS * threads:
            return parts
    return most
