"""Packed panels hold every value once, where the format says, and zeros besides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.ir.formats import FORMATS, is_quantised

NAMES = st.sampled_from(sorted(name for name in FORMATS if not is_quantised(name)))


@given(st.integers(1, 50), st.integers(1, 9), NAMES)
def test_panels_round_trip(n: int, k: int, name: str) -> None:
    form = FORMATS[name]
    rows = np.arange(1, n * k + 1).astype(form.dtype.numpy).reshape(n, k)
    packed = form.pack(rows)
    assert packed.shape == (-(-n // 16), form.panel_elements(k))
    assert packed.nbytes == len(packed) * form.panel_bytes(k)
    assert np.count_nonzero(packed) == n * k
    np.testing.assert_array_equal(form.unpack(packed, n, k), rows)


@pytest.mark.parametrize(("name", "at"), [("f32", (2 * 16 + 3) * 4), ("bf16", (16 + 3) * 4)])
def test_values_lie_where_kernels_read_them(name: str, at: int) -> None:
    """Column 3 of k = 2: row 2 of [K][16], or lane 0 of pair 1 of [K / 2][16][2]."""
    form = FORMATS[name]
    rows = np.zeros((20, 5), form.dtype.numpy)
    rows[3, 2] = 7
    data = form.pack(rows).tobytes()
    assert np.frombuffer(data, form.dtype.numpy, 1, at)[0] == 7
