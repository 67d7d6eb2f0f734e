"""The device's own header, lane by lane: results are right, and no lane outruns another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.codegen.catalog import device_kernels
from dovetail.codegen.library import lower_request
from dovetail.codegen.targets import DEVICE_TARGETS
from dovetail.runtime.native.polymerize import Region, SkinnyPlan, Tile
from tests.codegen.kernels import test_gemm_skinny
from tests.codegen.kernels.harness import Runner
from tests.codegen.test_emit_cuda import kernel
from tests.codegen.warp_lanes import LaneProgram

CUDA = DEVICE_TARGETS["cuda"]
TYPES = ("f32", "bf16")


@pytest.fixture(scope="module")
def lanes(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    wanted = [r for r in device_kernels(()) if r.name.endswith(TYPES)]
    kernels = [lower_request(request, CUDA) for request in wanted]
    program = LaneProgram(kernels, tmp_path_factory.mktemp("lanes"))

    def call(name: str, slots: tuple[Any, ...], tid: int, nth: int) -> None:
        if tid == 0:
            assert program.call(name, slots, nth) == ""

    return Runner("lanes", CUDA.lanes, call)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("splits", [1, 2])
def test_products(lanes: Runner, dtype: str, splits: int) -> None:
    regions = (Region(0, 0, 1, 2, Tile(1, 1)), Region(2, 0, 1, 1, Tile(0, 2)))
    weights = test_gemm_skinny.row_major(4, 70, dtype)
    test_gemm_skinny.check(lanes, SkinnyPlan(regions, splits, 0.0), 3, weights, nth=2)


@pytest.mark.parametrize("apart", [False, True])
def test_the_sanitizer_sees_lanes_that_do_not_wait(tmp_path: Path, apart: bool) -> None:
    flags = ("-DDT_LANES_APART",) if apart else ()
    program = LaneProgram([kernel("turn")], tmp_path, flags)
    x, out = np.arange(192, dtype=np.float32), np.zeros(192, np.float32)
    said = program.call("turn", (x, out), 2)
    assert ("data race" in said) == apart
    if not apart:
        np.testing.assert_array_equal(out.reshape(3, 64), x.reshape(3, 64)[:, ::-1])
