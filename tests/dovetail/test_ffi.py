"""Every exported kernel refuses wrong tensors with a Python error: dtype, size, device, strides."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from dovetail.codegen.catalog import HeadShape, KernelRequest, kernel_request, weight_binding
from dovetail.codegen.emit import FLOATS, pointee
from dovetail.codegen.extents import EXTENTS
from dovetail.codegen.library import LibrarySpec, build_library
from dovetail.codegen.targets import host_target
from dovetail.ir.artifact import KernelIndex
from dovetail.ir.formats import FORMATS

pytest.importorskip("torch")

GEMM = {"W": "bf16", "MR": 2, "NP": 2}
PROBE = '''
"""Calls each kernel with one wrong argument after the other; prints the count of refusals."""
import json, sys
import torch, tvm_ffi

DTYPES = {"f32": torch.float32, "f64": torch.float64, "i32": torch.int32, "i64": torch.int64,
          "bf16": torch.bfloat16, "f16": torch.float16, "u16": torch.uint16, "u32": torch.uint32,
          "u8": torch.uint8}
module = tvm_ffi.load_module(sys.argv[1])
cases = json.loads(sys.argv[2])
refused = 0
FIXED = ("tid", "nth", "n_q", "n_kv", "hd")


def sizes(params, args, number):
    return [a if p["element"] else p["least"] if p["name"] in FIXED else number
            for p, a in zip(params, args, strict=True)]


def change(params, args, **values):
    return [values.get(p["name"], a) for p, a in zip(params, args, strict=True)]


def check_decodes(name, params, idle):
    """One decode of one key in two parts: `partial` has room for just those."""
    where = {p["name"]: i for i, p in enumerate(params)}
    hd, n_q = idle[where["hd"]], idle[where["n_q"]]
    must_refuse(name, idle, where["n_prefill"], -1, "n_prefill")
    if n_q > 1:  # unrolled for these heads
        must_refuse(name, idle, where["hd"], hd - 16, "hd")
        must_refuse(name, idle, where["n_q"], n_q - 1, "n_q")
    one_key = torch.ones(1, dtype=torch.int32)
    busy = change(params, idle, n_decode=1, kv_splits=2, seq_lengths=one_key)
    room = torch.zeros(n_q * 2 * (hd + 16))
    must_refuse(name, busy, where["partial"], room[:-1], "partial")
    assert module[name](*change(params, busy, partial=room)) is None
    out = torch.ones(4096)
    no_key = change(params, busy, partial=room, seq_lengths=one_key - 1, out=out)
    assert module[name](*no_key) is None
    assert "merge" not in name or not out[: n_q * hd].any()


def check_weights(name, params, idle):
    """No rows of a panel of one unit, or of a pair of panels: `B` has room for just those."""
    at = next(i for i, p in enumerate(params) if p["name"] == "B")
    values, elements = params[at]["unit"]
    panels = 2 if "silu" in name else 1
    room = torch.zeros(panels * elements, dtype=idle[at].dtype)
    one = change(params, idle, N=16, K=values, B=room)
    assert module[name](*one) is None
    must_refuse(name, one, at, room[:-1], "B")


def must_refuse(name, args, position, value, parameter):
    global refused
    changed = [*args[:position], value, *args[position + 1:]]
    try:
        module[name](*changed)
    except TypeError as error:
        assert name in str(error) and parameter in str(error), error
        refused += 1
    except RuntimeError:  # torch's own: a tensor without memory has nothing to pass
        assert value.device.type == "meta"
        refused += 1
    else:
        raise AssertionError(f"{name} took {value!r} for {parameter}")


for name, params in cases.items():
    args = [torch.zeros(4096, dtype=DTYPES[p["element"]]) if p["element"] else 0 for p in params]
    idle = [a if p["element"] else p["least"] for p, a in zip(params, args, strict=True)]
    wrong_heads = [7 if p["name"] == "hd" else a for p, a in zip(params, idle, strict=True)]
    for i, p in enumerate(params):
        if p["name"] == "hd":
            must_refuse(name, wrong_heads, i, 7, "hd")
    assert module[name](*idle) is None
    if name.startswith("decode_attention"):
        check_decodes(name, params, idle)
    if name.startswith("gemm"):
        check_weights(name, params, idle)
    for i, p in enumerate(params):
        if not p["element"]:
            must_refuse(name, idle, i, "1", p["name"])
            must_refuse(name, idle, i, torch.zeros(1), p["name"])
            if p["float"]:
                continue
            for number in (-(2**62), -(2**31) - 1, 2**49, 2**62):
                must_refuse(name, idle, i, number, p["name"])
            if p["name"] not in ("m_tile", "prefetch"):
                must_refuse(name, idle, i, -1, "must")
            continue
        good = args[i]
        other = torch.int8 if p["element"] != "i8" else torch.int16
        must_refuse(name, idle, i, good.to(other), p["name"])
        must_refuse(name, idle, i, torch.zeros(64, 64, dtype=good.dtype).t()[:, 1:], p["name"])
        must_refuse(name, idle, i, good[::2], p["name"])
        must_refuse(name, idle, i, torch.zeros(4096, dtype=good.dtype, device="meta"), p["name"])
        must_refuse(name, idle, i, 17, p["name"])
        if p["sized"]:
            few = 0 if p["name"] == "sinks" else 1  # of one head they are one
            small = torch.zeros(few, dtype=good.dtype)
            must_refuse(name, sizes(params, args, 16), i, small, p["name"])
            must_refuse(name, sizes(params, args, 2**62), i, good, "must")
    sized = [i for i, p in enumerate(params) if p["element"] and p["sized"]]
    for i, p in enumerate(params):  # rows that lie upon each other, or are empty, are still rows
        if sized and p["name"] in ("T", "M", "R", "Q", "S"):
            many = [*idle[:i], 2**30, *idle[i + 1:]]
            try:
                module[name](*many)
            except TypeError as error:
                assert "must" in str(error)
            else:
                raise AssertionError(f"{name} went through {p['name']} = {2**30}")
    for thread in ((1, 1), (-1, 1), (0, 0)):
        wrong = [*idle[:-2], *thread]
        must_refuse(name, wrong, len(wrong) - 2, thread[0], "tid")
print(refused)
'''


def requests() -> tuple[KernelRequest, ...]:
    """Return every bundled kernel that a library of a model may export, and single ones."""
    target = host_target()
    bf16 = [kernel_request(f, target, "bf16") for f in ("embed", "embed_packed", "rope_store")]
    bf16 += [
        kernel_request(f, target, "bf16")
        for f in ("prefill_attention", "decode_attention", "decode_attention_merge")
    ]
    unrolled = kernel_request("decode_attention", target, "bf16", HeadShape(64, 2))
    bf16.append(replace(unrolled, name="decode_attention_unrolled"))
    plain = [kernel_request(f, target) for f in ("gather_rows", "rmsnorm", "sample")]
    families = {"gemm_linear": GEMM, "gemm_linear_reduce": {"W": "bf16"}, "gemm_silu": GEMM}
    gemm = [KernelRequest("gemm", k, binding, k) for k, binding in families.items()]
    gemm += [
        KernelRequest("gemm", k, {**weight_binding(form), "MR": 1}, f"{k}_{form}")
        for k, form in (("gemm_linear", "q4_32"), ("gemm_linear", "q8_32"), ("gemm_silu", "q4_32"))
    ]
    gemm += [KernelRequest("ivf", "ivf_scan", {}, "ivf_scan")]
    return (*bf16, *plain, *gemm)


def least_values(binding: Mapping[str, int | str]) -> dict[str, int | str]:
    """Return the least that integers of a kernel may be, where that is not 0."""
    heads = {"n_q": binding.get("GROUP") or 1, "n_kv": 1, "hd": binding.get("HD") or 16}
    return {"nth": 1, "kv_splits": 1, **heads}


def unit_of(binding: Mapping[str, int | str]) -> tuple[int, int] | None:
    """Return how many values of K of a weight lie together, and the elements of a panel of them."""
    for form in FORMATS.values():
        if weight_binding(form.name).items() <= binding.items():
            return form.unit, form.panel_elements(form.unit)
    return None


def describe(index: KernelIndex) -> bytes:
    return msgspec.json.encode(
        {
            kernel.name: [
                {
                    "name": p.name,
                    "element": pointee(p.type),
                    "float": p.type in FLOATS,
                    "sized": p.name in EXTENTS.get(kernel.family, {}),
                    "least": least_values(kernel.binding).get(p.name, 0),
                    "unit": unit_of(kernel.binding),
                }
                for p in kernel.params
            ]
            for kernel in index.kernels
        }
    )


def test_every_kernel_refuses_wrong_arguments(tmp_path: Path) -> None:
    """In a process of its own: a crash must not end the tests."""
    built = build_library(LibrarySpec(host_target(), requests(), name="ffi"))
    command = [sys.executable, "-P", "-c", PROBE, str(built.path), describe(built.index).decode()]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    pointers = sum(bool(pointee(p.type)) for k in built.index.kernels for p in k.params)
    assert int(done.stdout) > 5 * pointers


def test_every_extent_names_a_parameter() -> None:
    """A renamed parameter would lose its check in silence."""
    known = {
        k.family: {p.name for p in k.params}
        for k in build_library(LibrarySpec(host_target(), requests(), name="ffi")).index.kernels
    }
    for family in known.keys() & EXTENTS.keys():
        assert EXTENTS[family].keys() <= known[family], family
