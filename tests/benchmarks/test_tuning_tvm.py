"""MetaSchedule's own side: the product it tunes, the weights it packs, the records it is cut to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.repository import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def tuning_tvm() -> Any:
    """The module, which takes seconds to import: not where tests are only collected."""
    return pytest.importorskip("tuning_tvm", reason="TVM with MetaSchedule is not installed")


def test_the_product_is_right_and_its_weights_may_be_laid_out_anew(tuning_tvm: Any) -> None:
    tvm = tuning_tvm.tvm
    m, n, k = 3, 8, 5
    module = tuning_tvm.product(m, n, k)
    assert [int(i) for i in module["main"].attrs["layout_free_buffers"]] == [1]
    rows, weight = (np.random.rand(*shape).astype(np.float32) for shape in ((m, k), (n, k)))
    out = tvm.runtime.tensor(np.zeros((m, n), np.float32))
    built = tvm.compile(module, target=tuning_tvm.target())["main"]
    built(tvm.runtime.tensor(rows), tuning_tvm.pack(weight, None), out)
    np.testing.assert_allclose(out.numpy(), rows @ weight.T, rtol=1e-5)


def test_weights_go_where_the_kernel_wants_them(tuning_tvm: Any) -> None:
    weight = np.arange(12, dtype=np.float32).reshape(4, 3)
    row, column = np.indices(weight.shape)
    packed = tuning_tvm.pack(weight, (row // 2, column, row % 2)).numpy()
    assert packed.shape == (2, 3, 2)
    assert (packed[1, 2] == weight[2:4, 2]).all() and (packed[0, 1] == weight[:2, 1]).all()


def test_a_shorter_run_is_the_first_trials_of_a_longer_one(
    tuning_tvm: Any, tmp_path, monkeypatch
) -> None:
    """The files alone are looked at: MetaSchedule's database crashes beside a newer tvm-ffi."""

    def read(work_dir: str) -> tuple[str, str]:
        files = (tuning_tvm.WORKLOAD, tuning_tvm.RECORDS)
        return tuple((Path(work_dir) / name).read_text() for name in files)

    monkeypatch.setattr(tuning_tvm.ms.database, "JSONDatabase", read)
    (tmp_path / tuning_tvm.WORKLOAD).write_text("product")
    (tmp_path / tuning_tvm.RECORDS).write_text("first\nsecond\nthird\n")
    assert tuning_tvm.first_records(tmp_path, 2) == ("product", "first\nsecond\n")
    assert tuning_tvm.first_records(tmp_path, 9) == ("product", "first\nsecond\nthird\n")
