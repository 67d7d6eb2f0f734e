"""Quantised panels hold codes and scales exactly, in as many bytes as the format says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.ir.block_format import BlockFormat, stack_blocks
from dovetail.ir.code_books import BOOKS
from dovetail.ir.formats import FORMATS, is_quantised
from tests.blocks import random_blocks

FAMILY = [
    BlockFormat(bits, block, nested, minimum)
    for bits in (4, 5, 6, 8)
    for block in (16, 32, 64, 128)
    for nested in (False, True)
    for minimum in (False, True)
    if bits != 5 or block >= 32
]
FAMILY += [BlockFormat(4, 32, nested, book=book) for nested in (False, True) for book in BOOKS]


@given(st.sampled_from(FAMILY), st.integers(1, 40), st.integers(1, 3), st.integers(0, 9))
def test_panels_hold_what_was_packed(form: BlockFormat, n: int, units: int, seed: int) -> None:
    k = units * form.unit
    blocks = random_blocks(form, n, k, seed)
    packed = form.pack(blocks)
    assert packed.shape == (-(-n // 16), form.panel_bytes(k))
    found = form.unpack_blocks(packed, n, k)
    for name in ("codes", "scales", "minimums", "steps", "lows"):
        wanted, got = getattr(blocks, name), getattr(found, name)
        assert (wanted is None) == (got is None)
        assert wanted is None or np.array_equal(wanted, got), name
    assert np.array_equal(form.unpack(packed, n, k), form.values(blocks))


@pytest.mark.parametrize("form", FAMILY, ids=lambda form: form.name)
def test_a_panel_is_a_sequence_of_units(form: BlockFormat) -> None:
    blocks = random_blocks(form, 16, 2 * form.unit, 0)
    whole = form.pack(blocks)[0]
    cut = form.row_bytes(form.unit)
    assert cut == form.unit_bytes and len(whole) == 2 * cut
    assert np.array_equal(whole[cut:], form.pack(_from(blocks, form, form.unit))[0])
    a_block, a_unit = (8, 16) if form.nested else (16, 0)  # bits of a scale
    extra = (1 + form.minimum) * (a_block / form.block + a_unit / 256)
    assert form.value_bytes * 8 == form.bits + extra


def _from(blocks, form, start):
    """The columns of K from `start` on."""
    cuts = {"codes": 1, "scales": 256 if form.nested else form.block}
    cuts |= {"minimums": cuts["scales"], "steps": form.block, "lows": form.block}
    parts = {name: getattr(blocks, name) for name in cuts}
    return type(blocks)(
        **{n: None if a is None else a[:, start // cuts[n] :] for n, a in parts.items()}
    )


def test_values_are_scales_times_codes() -> None:
    form = BlockFormat(4, 32)
    blocks = random_blocks(form, 3, 64, 0)
    wanted = (blocks.codes.astype(np.float64) - 8) * blocks.scales.astype(np.float64).repeat(32, 1)
    assert np.array_equal(form.values(blocks), wanted)
    nested = BlockFormat(5, 32, nested=True, minimum=True)
    blocks = random_blocks(nested, 3, 256, 0)
    scale = blocks.scales.astype(np.float64) * blocks.steps
    low = blocks.minimums.astype(np.float64) * blocks.lows
    wanted = blocks.codes * scale.repeat(32, 1) + low.repeat(32, 1)
    assert np.abs(nested.values(blocks) - wanted).max() <= 1e-6 * np.abs(wanted).max()


def test_rows_are_cut_and_stacked() -> None:
    form = BlockFormat(6, 16, nested=True)
    blocks = random_blocks(form, 9, 256, 0)
    again = stack_blocks([blocks[:4], blocks[4:5], blocks[5:]])
    assert again.rows == 9 and np.array_equal(form.pack(again), form.pack(blocks))


def test_names_tell_the_formats_apart() -> None:
    assert len({form.name for form in FAMILY}) == len(FAMILY)
    listed = [form for name, form in FORMATS.items() if is_quantised(name)]
    assert {form.name for form in listed} <= {form.name for form in FAMILY}
    assert not is_quantised("f32") and not is_quantised("bf16") and not is_quantised("nothing")
