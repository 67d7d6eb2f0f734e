"""Attention of encoders on accelerators: tile edges, distances and reaches against float64."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail.codegen.catalog import HeadShape, kernel_request
from dovetail.codegen.library import lower_request
from dovetail.codegen.targets import DEVICE_TARGETS
from tests.codegen.kernels.harness import Runner, interpreted_runner
from tests.codegen.kernels.test_attention_packed import check as check_packed
from tests.codegen.warp_host import WarpLibrary

CUDA = DEVICE_TARGETS["cuda"]
check = partial(check_packed, kernel="packed_attention_lanes")


@pytest.mark.parametrize("hd", [16, 32, 48, 64, 80, 128])
def test_each_head_dim(cuda: Runner, hd: int) -> None:
    check(cuda, [1, 2, 3, 4, 5, 9], 3, hd, alibi=hd == 48, reach=0, nth=3)


@pytest.mark.parametrize("reach", [0, 1, 3, 64])
@pytest.mark.parametrize("alibi", [False, True])
def test_distances_count_around_tiles(cuda: Runner, alibi: bool, reach: int) -> None:
    check(cuda, [17, 1, 40], 2, 32, alibi=alibi, reach=reach, nth=7)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    heads=st.integers(1, 5),
    hd=st.sampled_from([16, 48, 80]),
    alibi=st.booleans(),
    reach=st.integers(0, 80),
    nth=st.integers(1, 9),
)
def test_any_lengths(cuda: Runner, lengths, heads, hd, alibi, reach, nth) -> None:
    check(cuda, lengths, heads, hd, alibi=alibi, reach=reach, nth=nth)


@pytest.mark.parametrize(("hd", "width", "rows"), [(32, 32, 8), (48, 64, 4), (128, 128, 4)])
def test_an_encoder_gets_registers_for_its_own_heads(hd: int, width: int, rows: int) -> None:
    request = kernel_request("packed_attention_lanes", CUDA, None, HeadShape(hd, 1))
    assert request.name == f"packed_attention_lanes_{width}"
    assert request.binding == {"HD": width, "RT": rows}
    lowered = lower_request(request, CUDA)
    assert lowered.entry.warps == 8, "no shared memory"
    library = WarpLibrary([lowered])

    def call(kernel: str, slots: tuple[object, ...], tid: int, nth: int) -> None:
        library.call(kernel, slots, tid, nth)

    run = Runner("cuda", 32, call)
    check_packed(run, [21, 8], 2, hd, alibi=False, reach=5, nth=2, kernel=request.name)


def test_the_meaning_of_the_text_is_the_same() -> None:
    check(interpreted_runner("cuda"), [3, 6], 2, 16, alibi=True, reach=2, nth=4)


def test_large_scores_do_not_overflow(cuda: Runner) -> None:
    qkv = np.random.default_rng(5).standard_normal((30, 48)).astype(np.float32)
    qkv[:, :16] *= 300
    out, starts = np.zeros((30, 16), np.float32), np.array([0, 30], np.int32)
    cuda("packed_attention_lanes", 1, 1, 16, 1.0, 0, None, qkv, 48, starts, out, 16)
    scores = qkv[:, :16].astype(np.float64) @ qkv[:, 16:32].T
    weights = np.exp(scores - scores.max(1, keepdims=True))
    want = weights / weights.sum(1, keepdims=True) @ qkv[:, 32:]
    np.testing.assert_allclose(out, want, rtol=2e-3, atol=2e-3)
