"""Attention of prompts on accelerators: tile edges, groups, chunks and windows against float64."""

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
from tests.codegen.kernels.reference import attention, paged
from tests.codegen.kernels.test_attention_prefill import check as check_prefill
from tests.codegen.warp_host import WarpLibrary

CUDA = DEVICE_TARGETS["cuda"]
check = partial(check_prefill, kernel="prefill_attention_lanes")


@pytest.mark.parametrize("kv", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("hd", [16, 48, 64, 80, 128, 240, 256])
def test_each_head_dim_and_dtype(cuda: Runner, kv: str, hd: int) -> None:
    check(cuda, kv, (4, 2), hd, [19], [19], nth=3)


@pytest.mark.parametrize("nth", [1, 2, 7, 40])
def test_several_prompts_around_tiles_and_blocks(cuda: Runner, nth: int) -> None:
    check(cuda, "f32", (6, 2), 32, [1, 3, 16, 5, 33], [17, 3, 16, 70, 33], nth=nth)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40, 500])
def test_sliding_window(cuda: Runner, window: int) -> None:
    check(cuda, "f32", (3, 1), 32, [40], [61], window, nth=2)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_shape(cuda: Runner, data: st.DataObject) -> None:
    n_kv, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    rows = data.draw(st.lists(st.integers(1, 36), min_size=1, max_size=3))
    lengths = [n + data.draw(st.integers(0, 40)) for n in rows]
    window, nth = data.draw(st.integers(0, 50)), data.draw(st.integers(1, 9))
    hd = 16 * data.draw(st.integers(1, 6))
    check(cuda, "bf16", (n_kv * group, n_kv), hd, rows, lengths, window, nth)


def test_a_model_gets_registers_for_its_own_heads() -> None:
    request = kernel_request("prefill_attention_lanes", CUDA, "f32", HeadShape(80, 4))
    assert request.binding["HD"] == 96
    lowered = lower_request(request, CUDA)
    assert lowered.entry.warps == 8, "no shared memory"
    library = WarpLibrary([lowered])

    def call(kernel: str, slots: tuple[object, ...], tid: int, nth: int) -> None:
        library.call(kernel, slots, tid, nth)

    check(Runner("cuda", 32, call), "f32", (8, 2), 80, [21], [30], nth=2)


def test_the_meaning_of_the_text_is_the_same() -> None:
    check(interpreted_runner("cuda"), "f32", (2, 1), 16, [2, 1], [3, 17], 4)


def test_large_scores_do_not_overflow(cuda: Runner) -> None:
    rng = np.random.default_rng(5)
    pool = paged(rng, [40], 1, 16, "f32")
    q = (rng.standard_normal((40, 16)) * 300).astype(np.float32)
    out = np.zeros((40, 16), np.float32)
    starts, length = np.array([0, 40], np.int32), np.array([40], np.int32)
    where = (starts, length, pool.tables, pool.tables.shape[1], pool.k, pool.v)
    cuda("prefill_attention_lanes_f32", 1, 1, 1, 16, 1.0, 0, q, 16, *where, out, 16)
    want = attention(q[:, None], pool.keys[0], pool.values[0], 1.0, 0)[:, 0]
    np.testing.assert_allclose(out, want, rtol=2e-3, atol=2e-3)
