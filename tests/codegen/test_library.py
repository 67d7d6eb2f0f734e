"""Libraries: requests become exported kernels with entries, an index, and clear refusals."""

from __future__ import annotations

import ctypes
import platform

import numpy as np
import pytest

from dovetail.codegen import emit
from dovetail.codegen import library as library_module
from dovetail.codegen.catalog import KernelRequest, kernel_request
from dovetail.codegen.library import ABI, LibrarySpec, build_library, index_library
from dovetail.codegen.targets import TARGETS, host_features, host_target, runs_on
from dovetail.ir.artifact import KernelParam
from dovetail.ir.diagnostics import Source
from dovetail.ir.errors import ScheduleError, SpecError
from dovetail.ir.high.parse import parse_high

MODULE = parse_high(
    Source(
        "axpy.dk",
        '''
@kernel
def axpy(N: i64, a: f32, x: ptr[W], y: ptr[f32], block_k: sched, tid: thread, nth: thread):
    """y += a * x, `block_k` times."""
    W: param = choice("f32", "bf16", "f16", default="f32")
    if tid > 0:
        return
    va = vbroadcast(a)
    for r in range(block_k):
        for i in vrange(0, N):
            vstore(y + i, vfma(va, vload(x + i), vload(y + i)))
''',
    )
)


def spec_of(*names: str, target=None, **changes) -> LibrarySpec:
    requests = tuple(
        KernelRequest("mine", "axpy", {"W": name.rpartition("_")[2]}, name) for name in names
    )
    return LibrarySpec(target or host_target(), requests, modules={"mine": MODULE}, **changes)


def call_axpy(library: ctypes.CDLL, name: str, a: float, x, y, times: int) -> None:
    f, i, p = ctypes.c_float, ctypes.c_int64, ctypes.c_void_p
    getattr(library, name)(
        i(y.size), f(a), p(x.ctypes.data), p(y.ctypes.data), i(times), i(0), i(1)
    )


@pytest.mark.parametrize("name", ["x86-64-avx512", "x86-64-avx2", "generic"])
def test_kernels_of_every_target_run_at_tile_edges(name, tmp_path):
    target = TARGETS[name]
    built = build_library(spec_of("axpy_f32", "axpy_f16", target=target), tmp_path)
    if not runs_on(target, platform.machine(), host_features()):
        pytest.skip(f"{name} compiles, but this CPU does not run it")
    library = ctypes.CDLL(str(built.path))
    rng = np.random.default_rng(0)
    for n in {0, 1, target.lanes - 1, target.lanes, target.lanes + 1, 3 * target.lanes + 1}:
        x = rng.integers(-8, 8, n).astype(np.float32)
        for suffix, values in (("f32", x), ("f16", x.astype(np.float16))):
            y = np.ones(n + 1, np.float32)
            call_axpy(library, f"axpy_{suffix}", 0.5, values, y[:n], 2)
            np.testing.assert_array_equal(y, np.append(1 + x, 1))


def test_index_describes_the_kernels(tmp_path):
    built = build_library(spec_of("axpy_bf16"), tmp_path)
    (entry,) = built.index.kernels
    assert (entry.name, entry.family, entry.binding) == ("axpy_bf16", "mine.axpy", {"W": "bf16"})
    assert [p.kind for p in entry.params] == ["slot"] * 4 + ["sched", "thread", "thread"]
    assert entry.params[2] == KernelParam(name="x", type="ptr[bf16]", kind="slot")
    assert built.index.library == built.path.name
    assert "-march=native" not in built.index.flags
    assert "void dt_entry_axpy_bf16(" in built.source


def test_team_is_part_of_the_library_unless_left_out(tmp_path):
    with_team = ctypes.CDLL(str(build_library(spec_of("axpy_f32"), tmp_path).path))
    assert with_team.dt_team_create
    assert with_team.dt_abi() == ABI
    without = ctypes.CDLL(str(build_library(spec_of("axpy_f32", team=False), tmp_path).path))
    assert not hasattr(without, "dt_team_create")


def test_a_large_kernel_is_compiled_once_for_all_libraries(tmp_path, monkeypatch):
    monkeypatch.setattr(emit, "PART_SIZE", 0)  # all are large
    cases = (("f32", "bf16"), False, 3), (("f16", "f32"), True, 5)  # one more tells the ABI
    for dtypes, wrapped, compiled in cases:
        names = [f"axpy_{dtype}" for dtype in dtypes]
        built = build_library(spec_of(*names, tvm_ffi=wrapped, team=False), tmp_path)
        assert len([*tmp_path.glob("*/*/unit.o")]) == compiled
        library = ctypes.CDLL(str(built.path))
        assert library.dt_abi() == ABI
        assert all(hasattr(library, f"dt_entry_{name}") for name in names)
        assert [entry.name for entry in built.index.kernels] == names


def test_ours_are_the_same_beside_kernels_of_users(tmp_path):
    target = host_target()
    norm, theirs = kernel_request("rmsnorm", target), spec_of("axpy_f32").kernels
    parts = {"team": False, "tvm_ffi": False}
    build_library(LibrarySpec(target, (norm,), **parts), tmp_path)
    both = LibrarySpec(target, (*theirs, norm), modules={"mine": MODULE}, **parts)
    built = build_library(both, tmp_path)
    assert len([*tmp_path.glob("*/*/unit.o")]) == 2
    library = ctypes.CDLL(str(built.path))
    assert [entry.name for entry in built.index.kernels] == ["axpy_f32", norm.name]
    assert all(hasattr(library, f"dt_entry_{entry.name}") for entry in built.index.kernels)


def test_a_bundled_kernel_is_lowered_once_for_all_libraries(tmp_path, monkeypatch):
    target = host_target()
    norm, other = (kernel_request(name, target) for name in ("rmsnorm", "layernorm"))
    index_library(LibrarySpec(target, (norm,)), tmp_path)
    monkeypatch.setattr(library_module, "lower", None)
    index = index_library(LibrarySpec(target, (norm,), name="other", tvm_ffi=False), tmp_path)
    assert [entry.name for entry in index.kernels] == [norm.name]
    with pytest.raises(TypeError):
        index_library(LibrarySpec(target, (norm, other)), tmp_path)


def test_bad_requests_are_refused(tmp_path):
    with pytest.raises(SpecError, match="axpy_f32"):
        build_library(spec_of("axpy_f32", "axpy_f32"), tmp_path)
    with pytest.raises(ScheduleError, match="f8"):
        build_library(spec_of("axpy_f8"), tmp_path)
    request = KernelRequest("mine", "axpz", {}, "axpz")
    with pytest.raises(ScheduleError, match="axpy"):
        build_library(LibrarySpec(host_target(), (request,), modules={"mine": MODULE}), tmp_path)
