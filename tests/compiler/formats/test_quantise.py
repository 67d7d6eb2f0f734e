"""Quantised rows: codes of their range, errors below bounds, and less where inputs are strong."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.compiler.formats.quantise import TILE, quantise_rows, squared_error
from dovetail.compiler.formats.quantising import ERROR_BOUNDS
from dovetail.ir.block_format import BlockFormat
from dovetail.ir.formats import FORMATS

Array = npt.NDArray[Any]
NAMES = tuple(ERROR_BOUNDS)


def block_format(name: str) -> BlockFormat:
    form = FORMATS[name]
    assert isinstance(form, BlockFormat)
    return form


def relative(rows: Array, name: str, weight: Array | None = None) -> float:
    lost, whole = squared_error(rows, block_format(name), weight)
    return float(np.sqrt(lost / whole))


def rounded_to_largest(rows: Array, form: BlockFormat) -> Array:
    """Return rows rounded in steps that the largest value of a block fills, as files have them."""
    blocks = rows.reshape(len(rows), -1, form.block)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(2)[:, :, None], axis=2)
    half = 1 << (form.bits - 1)
    step = largest / -half if form.bits < 8 else np.abs(largest) / (half - 1)
    return np.asarray(np.clip(np.rint(blocks / step), -half, half - 1) * step).reshape(rows.shape)


@pytest.mark.parametrize("name", NAMES)
def test_normal_values_lose_less_than_by_their_largest(name: str) -> None:
    rows = np.random.default_rng(1).standard_normal((64, 512)).astype(np.float32)
    plain = rounded_to_largest(rows, block_format(name)) - rows
    error = relative(rows, name)
    assert error < ERROR_BOUNDS[name] * 0.7
    if not block_format(name).nested:  # its scales are rounded, too
        assert error < 0.96 * np.linalg.norm(plain) / np.linalg.norm(rows)


@given(
    rows=st.integers(1, 40),
    units=st.integers(1, 5),
    name=st.sampled_from(NAMES),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_shapes_and_codes_are_exact(rows: int, units: int, name: str, seed: int) -> None:
    form = block_format(name)
    values = np.random.default_rng(seed).standard_normal((rows, units * form.unit))
    found = quantise_rows(values.astype(np.float32), form)
    assert found.codes.shape == values.shape and found.codes.dtype == np.uint8
    count = values.shape[1] // (256 if form.nested else form.block)
    assert found.scales.shape == (rows, count) and found.scales.dtype == np.float16
    if form.bits == 8:
        assert found.codes.view(np.int8).min() >= -127  # as no file has the one below
    else:
        assert found.codes.max() < 1 << form.bits
    packed = form.unpack(form.pack(found), *values.shape)
    np.testing.assert_array_equal(packed, form.values(found))


@pytest.mark.parametrize("name", NAMES)
def test_values_of_a_grid_are_found_again(name: str) -> None:
    form = block_format(name)
    half = 1 << (form.bits - 1)
    codes = np.random.default_rng(2).integers(1 - half, half, (16, 256)).astype(np.float32)
    codes[:, :: form.block] = 1 - half
    rows = codes * np.float32(2.0**-7)
    assert relative(rows, name) < 2e-3  # nested scales are multiples of another


@pytest.mark.parametrize("name", NAMES)
def test_zeros_extremes_and_tiles_are_kept(name: str) -> None:
    form = block_format(name)
    assert not form.values(quantise_rows(np.zeros((3, 256), np.float32), form)).any()
    alone = np.zeros((1, 256), np.float32)
    alone[0, 77] = -3.0
    assert form.values(quantise_rows(alone, form))[0, 77] == pytest.approx(-3.0, rel=2e-2)
    rows = np.random.default_rng(3).standard_normal((3 * TILE // 256 + 5, 256)).astype(np.float32)
    whole = quantise_rows(rows, form)
    part = quantise_rows(rows[-7:], form)
    np.testing.assert_array_equal(whole.codes[-7:], part.codes)
    np.testing.assert_array_equal(whole.scales[-7:], part.scales)


@pytest.mark.parametrize("name", NAMES)
def test_strong_inputs_lose_less_where_they_are_known(name: str) -> None:
    random = np.random.default_rng(4)
    rows = random.standard_normal((64, 512)).astype(np.float32)
    power = random.lognormal(sigma=1.5, size=512).astype(np.float32)
    blind = block_format(name).values(quantise_rows(rows, block_format(name))) - rows
    unweighted = np.sqrt((blind**2 * power).sum() / (rows**2 * power).sum())
    assert relative(rows, name, power) < 0.95 * unweighted
