"""Packed weights come out row by row, gate before up, at panel edges too."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from dovetail.ir.formats import FORMATS
from dovetail.ir.model import PANEL, WeightEntry
from dovetail.runtime.accel.weights import unpack_rows


def entry(layout: str, n: int, k: int, dtype: str = "f32") -> WeightEntry:
    return WeightEntry(name="w", layout=layout, dtype=dtype, n=n, k=k, offset=0, bytes=0)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("n", [15, 16, 17, 40])
def test_panels_come_out_as_rows(dtype: str, n: int) -> None:
    form, k = FORMATS[dtype], 9
    rows = np.arange(n * k).reshape(n, k).astype(form.dtype.numpy)
    got = unpack_rows(entry("packed", n, k, dtype), form.pack(rows).reshape(-1))
    np.testing.assert_array_equal(got, rows)
    assert got.flags.c_contiguous


@pytest.mark.parametrize("half", [15, 16, 17, 40])
def test_gate_comes_before_up_and_so_do_their_biases(half: int) -> None:
    k = 7
    gate, up = np.random.default_rng(half).random((2, half, k)).astype(np.float32)
    packed = np.stack([FORMATS["f32"].pack(part) for part in (gate, up)], axis=1)
    got = unpack_rows(entry("packed_pair", 2 * half, k), packed.reshape(-1))
    np.testing.assert_array_equal(got, np.concatenate([gate, up]))
    padded = np.zeros((2, -(-half // PANEL) * PANEL), np.float32)
    padded[:, :half] = gate[:, 0], up[:, 0]
    turns = padded.reshape(2, -1, PANEL).transpose(1, 0, 2).reshape(-1)
    bias = unpack_rows(entry("vector", len(turns), 1), turns, 2 * half)
    np.testing.assert_array_equal(bias[:, 0], np.concatenate([gate[:, 0], up[:, 0]]))


def test_vectors_and_tables_stay_as_they_are() -> None:
    values = np.arange(12, dtype=np.float32)
    np.testing.assert_array_equal(unpack_rows(entry("rows", 3, 4), values), values.reshape(3, 4))
    assert unpack_rows(entry("vector", 12, 1), values).shape == (12, 1)
