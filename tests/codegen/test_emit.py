"""Emission: entries unpack slots, parts split the text, tvm-ffi wrappers check their arguments."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import textwrap
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from dovetail.codegen import emit
from dovetail.codegen.emit import KernelSpec, emit_unit, kernel_text, part_texts
from dovetail.codegen.library import ABI
from dovetail.codegen.lower.helpers import collect_helpers
from dovetail.codegen.targets import TARGETS, host_target
from dovetail.codegen.toolchain import BuildSpec, compile_shared
from dovetail.ir.artifact import KernelEntry, KernelParam
from dovetail.ir.diagnostics import Source
from dovetail.ir.low.nodes import Unit
from dovetail.ir.low.parse import parse_low
from dovetail.ir.low.print import print_low
from dovetail.runtime.machine import abi

SCALE = """
void scale(int64_t n, const float* x, const float* bias, float factor, float* out, int64_t block_k,
           int64_t tid, int64_t nth) {
  int64_t i;
  for (i = tid; i < n; i += nth) {
    out[i] = x[i] * factor + (float)block_k;
    const float* addend = bias;
    const float* term = addend;
    if (term != 0) {
      out[i] += term[i];
    }
  }
}
"""
WIDEN = """
void widen(int64_t n, const uint16_t* x, float* out) {
  int64_t i;
  for (i = 0; i < n; ++i) {
    out[i] = dt_load_bf16(x + i);
  }
}
"""


def param(name: str, kind: str, role: str = "slot") -> KernelParam:
    return KernelParam(name=name, type=kind, kind=role)


def kernel(name: str, text: str, *params: KernelParam) -> KernelSpec:
    function = parse_low(Source(name, text)).function(name)
    unit = Unit(items=(*collect_helpers(function, TARGETS["generic"]), function))
    entry = KernelEntry(name=name, family=name, params=params, binding={"VL": 1})
    return KernelSpec(entry, unit, tuple(map(print_low, unit.items)))


def scale() -> KernelSpec:
    return kernel(
        "scale",
        SCALE,
        param("n", "i64"),
        param("x", "ptr[f32]"),
        param("bias", "ptr[f32]"),
        param("factor", "f32"),
        param("out", "ptr[f32]"),
        param("block_k", "i64", "sched"),
        param("tid", "i64", "thread"),
        param("nth", "i64", "thread"),
    )


def widen() -> KernelSpec:
    return kernel(
        "widen", WIDEN, param("n", "i64"), param("x", "ptr[bf16]"), param("out", "ptr[f32]")
    )


def build(cache, texts=None):
    target = host_target()
    if texts is None:
        kernels = [kernel_text(kernel, target) for kernel in (scale(), widen())]
        texts = [emit_unit("probe", target, kernels, kernels)]
    return compile_shared(BuildSpec(name="probe", target=target, parts=tuple(texts)), cache)


class Slot(ctypes.Union):
    _fields_ = (("p", ctypes.c_void_p), ("i", ctypes.c_int64), ("f", ctypes.c_double))


@pytest.mark.parametrize("parts", [1, 3])
def test_entries_unpack_slots_schedule_and_threads(tmp_path, parts, monkeypatch):
    texts = None
    if parts > 1:  # one for each kernel, and one that tells the ABI
        monkeypatch.setattr(emit, "PART_SIZE", 0)
        kernels = [kernel_text(kernel, host_target()) for kernel in (scale(), widen())]
        texts = part_texts(host_target(), kernels, kernels)
        assert len(texts) == parts
    library = ctypes.CDLL(str(build(tmp_path, texts)))
    x, bias, out = (np.arange(5, dtype=np.float32) + i for i in range(3))
    slots = (Slot * 5)(
        Slot(i=5),
        Slot(p=x.ctypes.data),
        Slot(p=bias.ctypes.data),
        Slot(f=2.5),
        Slot(p=out.ctypes.data),
    )
    schedule = (ctypes.c_int64 * abi.SCHEDULE_LENGTH)(0, 0, 7)  # block_k is the third value
    nth = 2
    for tid in range(nth):
        library.dt_entry_scale(slots, schedule, ctypes.c_int64(tid), ctypes.c_int64(nth))
    np.testing.assert_array_equal(out, x * np.float32(2.5) + 7 + bias)
    assert library.dt_abi() == ABI


def test_helpers_of_lowered_units_are_emitted_once_at_the_head():
    target = TARGETS["generic"]
    spec = widen()
    other = replace(spec, entry=msgspec.structs.replace(spec.entry, family="other"))
    both = [kernel_text(k, target) for k in (spec, other, scale())]
    text = emit_unit("probe", target, both, ())
    assert text.count("static inline float dt_load_bf16") == 1
    assert text.index("dt_load_bf16") < text.index("void widen")
    assert "tvm" not in text


def test_small_kernels_share_a_part_and_large_ones_have_their_own(monkeypatch):
    target = TARGETS["generic"]
    small, large = (kernel_text(k, target) for k in (widen(), scale()))
    monkeypatch.setattr(emit, "PART_SIZE", 150)
    first, second = part_texts(target, [large, small], [large, small])
    assert "void widen(" in first and "dt_abi(void)" in first
    assert "void scale(" in second and "dt_abi(void)" not in second
    assert "__tvm_ffi_scale(" in first and "tvm" not in second
    assert part_texts(target, [large])[1] == second
    assert len(part_texts(target, [])) == 1


def test_small_kernels_of_more_than_a_share_are_dealt_to_several_parts(monkeypatch):
    target = TARGETS["generic"]
    one, two = (kernel_text(k, target) for k in (widen(), scale()))
    assert len(part_texts(target, [one, two])) == 1
    monkeypatch.setattr(emit, "SHARE_SIZE", 1)
    first, second = part_texts(target, [one, two])
    assert "void widen(" in first and "void scale(" not in first
    assert "void scale(" in second and "dt_abi(void)" not in second
    assert "__tvm_ffi_scale(" in part_texts(target, [one, two], [one, two])[0]


TVM_FFI = """
    import numpy, sys, tvm_ffi
    scale = tvm_ffi.load_module(sys.argv[1])["scale"]
    x = tvm_ffi.from_dlpack(numpy.arange(4, dtype="float32"))
    out = numpy.zeros(4, "float32")
    assert scale(4, x, None, 2, out, 1, 0, 1) is None
    assert out.tolist() == [1, 3, 5, 7], out
    def refused(text, *args):
        try:
            scale(*args)
        except TypeError as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)
    wide = numpy.zeros((4, 8), "float32")
    refused("takes 8 arguments", 4)
    refused("argument 0 (n) must be an integer", 4.5, x, None, 2, out, 1, 0, 1)
    refused("(x) must be a contiguous float32 CPU tensor", 4, None, None, 2, out, 1, 0, 1)
    refused("argument 1 (x)", 4, numpy.zeros(4), None, 2, out, 1, 0, 1)
    refused("(bias) must be a contiguous float32 CPU tensor or None", 4, x, 3, 2, out, 1, 0, 1)
    refused("argument 3 (factor) must be a number", 4, x, None, "2", out, 1, 0, 1)
    refused("argument 4 (out)", 4, x, None, 2, wide[:, :2], 1, 0, 1)
    print("passed")
"""


def test_tvm_ffi_wrappers_check_their_arguments(tmp_path):
    """In a process of its own: importing tvm_ffi brings torch along."""
    command = [sys.executable, "-P", "-c", textwrap.dedent(TVM_FFI), str(build(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "passed\n", done.stderr
