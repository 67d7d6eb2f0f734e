"""Paired ratios: drift cancels out, and the bound is rarely too low whatever the noise is like."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from dovetail.compiler.measure.paired import DOUBT, PairedRatio, bound_rank, pair_times


def test_drift_cancels_out():
    drift = [1.0, 3.0, 2.0, 9.0, 1.0, 5.0, 4.0]
    found = pair_times([0.5 * d for d in drift], drift)
    assert found == PairedRatio(0.5, 0.5)
    assert pair_times([], []) == PairedRatio()


@pytest.mark.parametrize("count", [1, 6, 7, 9, 25, 100])
def test_the_bound_is_the_lowest_that_is_sure(count):
    rank = bound_rank(count)
    if rank == 0:
        assert binom.sf(count - 1, count, 0.5) > DOUBT
    else:
        assert binom.sf(rank - 1, count, 0.5) <= DOUBT < binom.sf(rank - 2, count, 0.5)
    assert bool(pair_times([1.0] * count, [1.0] * count).bound) == (count >= 7)


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=7, max_size=40))
def test_the_bound_is_one_of_the_ratios_above_the_median(pairs):
    found = pair_times(*zip(*pairs, strict=True))
    assert found.bound in [mine / other for mine, other in pairs]
    assert found.median <= found.bound


def test_the_bound_rarely_lies_below_the_true_median():
    random = np.random.default_rng(0)
    noise = np.exp(random.standard_cauchy((2000, 21)).clip(-9, 9))
    low = sum(pair_times(row.tolist(), [1.0] * 21).bound < 1 for row in noise)
    assert low <= 1.5 * DOUBT * len(noise)
