"""How much longer one thing takes than another timed in turns with it, and how sure that is. Pure.

In: times of both, round by round. Out: the median of their ratios, and what it hardly exceeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import lru_cache
from math import comb
from typing import NamedTuple

DOUBT = 0.01
"""How likely a bound may be too low, however times are distributed."""


class PairedRatio(NamedTuple):
    """The median of ratios, and a bound that the true one exceeds with probability DOUBT at most.

    Both are 0 where they are not known: a bound takes seven rounds.
    """

    median: float = 0.0
    bound: float = 0.0


def pair_times(times: Sequence[float], beside: Sequence[float]) -> PairedRatio:
    """Return the ratio of `times` to the times `beside` them, of the same rounds.

    Drift of the machine cancels out in each round. The bound is an order statistic (sign test).
    """
    ratios = sorted(mine / other for mine, other in zip(times, beside, strict=True))
    if not ratios:
        return PairedRatio()
    rank = bound_rank(len(ratios))
    return PairedRatio(statistics.median(ratios), ratios[rank - 1] if rank else 0.0)


@lru_cache
def bound_rank(count: int) -> int:
    """Return which of `count` sorted values bounds their true median, from 1 on; 0 where none does.

    The median lies above the r-th value if at least r of them fall below it: each does with
    probability 1/2.
    """
    above, rank = 0, count + 1
    while rank > 1 and above + comb(count, rank - 1) <= DOUBT * 2**count:
        rank -= 1
        above += comb(count, rank)
    return rank if rank <= count else 0
