from __future__ import annotations

import numpy as np
import pytest

from dovetail.ir.formats import FORMATS
from tests.codegen.kernels.harness import Runner, edges
from tests.codegen.kernels.reference import stored, widened


def check_embed(run: Runner, dtype: str, packed: bool, t: int, h: int, nth: int) -> None:
    rng = np.random.default_rng(h)
    table = stored(rng.standard_normal((37, h)), dtype)
    ids = rng.integers(0, 37, t).astype(np.int32)
    ids[0] = 36
    out = np.full((t, h + 2), 7, np.float32)
    name = f"embed_packed_{dtype}" if packed else f"embed_{dtype}"
    run(name, t, h, ids, FORMATS[dtype].pack(table) if packed else table, out, h + 2, nth=nth)
    np.testing.assert_array_equal(out[:, :h], widened(table[ids], dtype))
    assert (out[:, h:] == 7).all()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("packed", [False, True])
def test_tables_are_looked_up_at_every_edge(any_runner: Runner, dtype: str, packed: bool) -> None:
    for h in edges(any_runner.lanes):
        check_embed(any_runner, dtype, packed, 3, h, 2)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_long_rows_are_shared_between_threads(native: Runner, nth: int) -> None:
    for h in (511, 512, 513, 1100):
        for packed in (False, True):
            check_embed(native, "bf16", packed, 2, h, nth)


def test_gather_rows_copies_the_named_rows(any_runner: Runner) -> None:
    for h in edges(any_runner.lanes):
        x = np.random.default_rng(h).standard_normal((6, h + 4)).astype(np.float32)
        rows = np.array([5, 0, 5], np.int32)
        out = np.full((3, h + 1), 7, np.float32)
        any_runner("gather_rows", 3, h, rows, x, h + 4, out, h + 1, nth=2)
        np.testing.assert_array_equal(out[:, :h], x[rows, :h])
        assert (out[:, h:] == 7).all()
