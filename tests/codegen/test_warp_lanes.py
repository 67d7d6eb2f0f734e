"""The device's own header, lane by lane: results are right, and no lane outruns another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.codegen.catalog import kernel_request
from dovetail.codegen.library import lower_request
from dovetail.codegen.targets import DEVICE_TARGETS
from tests.codegen.kernels import test_attention_decode, test_ivf, test_norm, test_rope
from tests.codegen.kernels.harness import Runner
from tests.codegen.test_emit_cuda import kernel
from tests.codegen.warp_lanes import LaneProgram

CUDA = DEVICE_TARGETS["cuda"]
FAMILIES = {
    "rmsnorm": None,
    "rope_store": "f32",
    "decode_attention": "f32",
    "decode_attention_merge": "f32",
    "ivf_scan": "l2",
}


@pytest.fixture(scope="module")
def lanes(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    requests = [kernel_request(family, CUDA, dtype) for family, dtype in FAMILIES.items()]
    kernels = [lower_request(request, CUDA) for request in requests]
    program = LaneProgram(kernels, tmp_path_factory.mktemp("lanes"))

    def call(name: str, slots: tuple[Any, ...], tid: int, nth: int) -> None:
        if tid == 0:
            assert program.call(name, slots, nth) == ""

    return Runner("lanes", CUDA.lanes, call)


def test_rmsnorm(lanes: Runner) -> None:
    test_norm.check(lanes, 2, 165, 3)


def test_rope_and_norm_in_place(lanes: Runner) -> None:
    test_rope.check(lanes, "f32", True, (2, 1), 48, 34, 2)


def test_decode_attention_shares_scores_between_lanes(lanes: Runner) -> None:
    test_attention_decode.check(lanes, "f32", (3, 1), 48, [19, 2], splits=2, nth=2)


def test_list_scan(lanes: Runner) -> None:
    test_ivf.check(lanes, "l2", 5, 6, 40, 2)


@pytest.mark.parametrize("apart", [False, True])
def test_the_sanitizer_sees_lanes_that_do_not_wait(tmp_path: Path, apart: bool) -> None:
    flags = ("-DDT_LANES_APART",) if apart else ()
    program = LaneProgram([kernel("turn")], tmp_path, flags)
    x, out = np.arange(192, dtype=np.float32), np.zeros(192, np.float32)
    said = program.call("turn", (x, out), 2)
    assert ("data race" in said) == apart
    if not apart:
        np.testing.assert_array_equal(out.reshape(3, 64), x.reshape(3, 64)[:, ::-1])
