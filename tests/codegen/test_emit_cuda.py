"""The CUDA text: arrays in shared memory, kernels that do not share work, guards of the tail."""

from __future__ import annotations

import numpy as np
import pytest

from dovetail.codegen.catalog import KernelRequest
from dovetail.codegen.emit import KernelSpec
from dovetail.codegen.emit_cuda import SHARED_BYTES, emit_cuda
from dovetail.codegen.library import lower_request
from dovetail.codegen.targets import DEVICE_TARGETS
from dovetail.ir.diagnostics import Source
from dovetail.ir.errors import ScheduleError
from dovetail.ir.high.parse import parse_high
from tests.codegen.interpret import interpret
from tests.codegen.warp_host import warp_library

CUDA = DEVICE_TARGETS["cuda"]
TEXT = """
@kernel
def bump(n: i64, p: ptr[f32], q: ptr[i64]):
    for i in range(n):
        p[i] += 1.5
        q[i] -= i

@kernel
def turn(x: ptr[f32], out: ptr[f32], tid: thread, nth: thread):
    COUNT: param = choice(64, 4096, 16384, default=64)
    kept = local(COUNT, f32)
    for t in range(tid, 3, nth):
        for i in vrange(0, 64):
            vstore(kept + i, vload(x + t * 64 + i))
        for i in range(64):
            out[t * 64 + i] = kept[63 - i]
"""


UNIT = parse_high(Source("test.dk", TEXT))


def request(name: str, **binding: int) -> KernelRequest:
    return KernelRequest("test", name, binding, name)


def kernel(name: str, **binding: int) -> KernelSpec:
    return lower_request(request(name, **binding), CUDA, UNIT)


def text_of(spec: KernelSpec) -> str:
    text = emit_cuda("test", CUDA, (spec,))
    return text[text.index("#endif\n", text.index("DT_REDUCE(min")) :]


def test_arrays_are_pieces_of_shared_memory() -> None:
    assert "DT_LOCAL(float, kept, 64, 8);" in text_of(kernel("turn"))


@pytest.mark.parametrize(("count", "warps"), [(64, 8), (4096, 3)])
def test_a_block_has_as_many_warps_as_have_room(count: int, warps: int) -> None:
    spec = kernel("turn", COUNT=count)
    assert spec.entry.warps == warps
    assert count * 4 * warps <= SHARED_BYTES
    assert f"DT_ENTRY({warps}) dt_cuda_turn(const float *x, float *out)" in text_of(spec)


def test_arrays_too_large_for_a_block_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"65536 bytes of shared memory.* bind smaller tiles"):
        kernel("turn", COUNT=16384)


def test_scalar_stores_are_done_by_one_lane() -> None:
    text = text_of(kernel("bump"))
    assert "dt_store_f32(p + i, p[i] + 1.5f);" in text
    assert "dt_store_i64(q + i, q[i] - i);" in text


def test_kernels_without_thread_parameters_run_on_the_first_warp_only() -> None:
    library = warp_library([request("bump")], {"test": UNIT})
    p, q = np.zeros(5, np.float32), np.zeros(5, np.int64)
    for tid in range(4):
        library.call("bump", (5, p, q), tid, 4)
    np.testing.assert_array_equal(p, np.full(5, 1.5))
    np.testing.assert_array_equal(q, -np.arange(5))
    assert "dt_warp() != 0" not in text_of(kernel("turn"))


@pytest.mark.parametrize("way", ["compiled", "interpreted"])
def test_lanes_read_what_others_wrote_to_a_shared_array(way: str) -> None:
    spec = kernel("turn")
    x, out = np.arange(192, dtype=np.float32), np.zeros(192, np.float32)
    library = warp_library([request("turn")], {"test": UNIT})
    for tid in range(2):
        if way == "compiled":
            library.call("turn", (x, out), tid, 2)
        else:
            interpret(spec.unit, "turn", (x, out, tid, 2), CUDA)
    np.testing.assert_array_equal(out.reshape(3, 64), x.reshape(3, 64)[:, ::-1])
