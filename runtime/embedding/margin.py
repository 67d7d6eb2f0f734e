"""How much later than foretold a batch may be: a bound measured from those that were.

In: what was taken, by what was foretold. Out: what 99 of 100 further ones stay below.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

SHARE_QUANTILE, SURE_QUANTILE = 2.326, 1.645
"""Normal quantiles of 99 % of what comes, and of 95 % certainty that it is."""
LEAST_VALUES = 8
"""Fewer say too little of their spread."""


def upper_bound(values: Sequence[float]) -> float:
    """Return what 99 of 100 further values stay below with 95 % certainty.

    One-sided tolerance bound of a normal distribution, mean + k deviations with k by Natrella's
    formula, and the greatest value where that is more, as disturbances are not normal. Of fewer
    than `LEAST_VALUES` it is the greatest alone.
    """
    if len(values) < LEAST_VALUES:
        return max(values)
    n = len(values)
    a = 1 - SURE_QUANTILE**2 / (2 * (n - 1))
    b = SHARE_QUANTILE**2 - SURE_QUANTILE**2 / n
    k = (SHARE_QUANTILE + math.sqrt(SHARE_QUANTILE**2 - a * b)) / a
    return max(*values, statistics.fmean(values) + k * statistics.stdev(values))
