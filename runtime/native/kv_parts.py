"""Into how many parts decode attention cuts each sequence's keys, so that all threads have work.

In: decodes, KV heads, lengths, threads. Out: the number of parts, which a merge joins again.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from dovetail.ir.model import MAX_KV_SPLITS

PART_TOKENS = 64
"""Keys below which a part is not worth its merge, where no schedule says otherwise. Kernels cut no
more, of each sequence by its own length: there is no need to count by the longest."""
LONG_TOKENS = 256
"""Keys from which on a part is worth its merge for the sake of reading heads in one stretch.

Measured with two threads on one Xeon.
"""
EVEN_ITEMS = 4
"""Work items for each thread from which on it matters little that some threads have one more."""


def count_parts(
    sequences: int, n_kv: int, longest: int, threads: int, least: int = PART_TOKENS
) -> int:
    """Return the fewest parts of each sequence that keep all threads equally busy.

    A thread that takes all KV heads of a part reads its blocks from end to end; one that takes some
    skips what lies between, which costs a sixth of the bandwidth with 16 bits. So threads are dealt
    as many neighbouring heads as leave parts long: all, half of them, a quarter, ...

    Args:
        sequences: those that decode.
        n_kv: KV heads.
        longest: tokens of the longest sequence.
        threads: those that share the work.
        least: each sequence has at most one part more than the longest has stretches of so many
            tokens, up to `PART_TOKENS` than it has itself; 0 = sequences stay whole.
    """
    most = MAX_KV_SPLITS if least else 1
    if least > PART_TOKENS:
        most = min(most, 1 + longest // least)
    return _count_parts(sequences, n_kv, most, min(most, longest // LONG_TOKENS), threads)


@lru_cache
def _count_parts(sequences: int, n_kv: int, most: int, most_long: int, threads: int) -> int:
    """Return the parts of sequences that may be cut in `most`, in `most_long` long ones."""
    long = range(1, most_long + 1)
    shares = (n for n in range(1, n_kv) if n_kv % n == 0)  # of a part, by its heads
    found = (_even_parts(sequences * n, long, threads) for n in shares)
    return (
        next(filter(None, found), 0)
        or _even_parts(sequences * n_kv, range(1, most), threads)
        or most
    )


def _even_parts(units: int, choices: Iterable[int], threads: int) -> int:
    """Return the first of `choices` of parts that gives all threads as many, 0 where none does."""
    even = (n for n in choices if units * n % threads == 0 or units * n >= EVEN_ITEMS * threads)
    return next(even, 0)
