"""Matrix products as tests ask for them: operands, float64 product, and ways to run a kernel."""

from __future__ import annotations

import ctypes
import itertools
import platform
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from dovetail.codegen.catalog import load_kernel_module
from dovetail.codegen.library import LibrarySpec, build_library
from dovetail.codegen.lower import lower
from dovetail.codegen.targets import TARGETS, host_features, runs_on
from dovetail.compiler.rules.schedules import (
    LINEAR,
    SILU,
    SUMS,
    dot_rows,
    gemm_requests,
    make_schedule,
    reduce_kernel,
)
from dovetail.ir.dtypes import narrow_bf16, widen_bf16
from dovetail.ir.formats import FORMATS
from dovetail.ir.low.nodes import Unit
from dovetail.ir.schedule import SCHEDULE_VALUES
from dovetail.runtime.machine import abi
from tests.codegen.float_targets import FLOAT_TARGETS
from tests.codegen.interpret import interpret

NATIVE = [n for n, t in FLOAT_TARGETS.items() if runs_on(t, platform.machine(), host_features())]
DTYPES = ("f32", "bf16")
Call = Callable[[str, list[int | np.ndarray | None], int], None]
GUARD = np.float32(1e30)
"""Fills C around the result, to see stores that go astray."""


@cache
def entry(target: str, kernel: str) -> Any:
    """Return the tape entry of a kernel, in a library of its own: what no test runs is not built.

    Its text is the one that models share, so that each is compiled once.
    """
    requests = {r.name: r for r in gemm_requests(own_dtypes(target), TARGETS[target])}
    spec = LibrarySpec(
        target=TARGETS[target], kernels=(requests[kernel],), team=False, tvm_ffi=False
    )
    return ctypes.CDLL(str(build_library(spec).path))[f"dt_entry_{kernel}"]


def own_dtypes(target: str) -> tuple[str, ...]:
    """The dtypes whose kernels the target has to itself: the rest is its fallback's text."""
    return ("bf16",) if TARGETS[target].rounds_rows else DTYPES


TEXTS = [target for target, t in FLOAT_TARGETS.items() if not t.tiles]
"""Targets with a text of their own for few rows: those with tiles have that of their fallback."""
OWN = [(target, dtype) for target in NATIVE for dtype in own_dtypes(target)]
PLAIN = [target for target, dtype in OWN if dtype == "f32"]


def kernel_names(kind: str, targets: list[str] = NATIVE) -> list[tuple[str, str]]:
    """Return targets with their kernels; the first of each is of another width, for `pick`."""
    found = []
    for at, target in enumerate(targets):
        requests = gemm_requests(own_dtypes(target), TARGETS[target])
        names = [r.name for r in requests if r.kernel == f"gemm_{kind}"]
        turn = 3 * at % len(names)  # of 4 widths and 2 dtypes
        found += [(target, name) for name in (*names[turn:], *names[:turn])]
    return found


def pack(weight: np.ndarray, dtype: str) -> np.ndarray:
    """[N][K] -> panels of the format `dtype`."""
    return FORMATS[dtype].pack(narrow_bf16(weight) if dtype == "bf16" else weight)


def rounded(weight: np.ndarray, dtype: str) -> np.ndarray:
    return widen_bf16(narrow_bf16(weight)) if dtype == "bf16" else weight


def listen(monkeypatch: pytest.MonkeyPatch, target: str) -> dict[int, list[int]]:
    """Return the lines that interpreted kernels of a target ask for from now on, by cache level."""
    asked: dict[int, list[int]] = {1: [], 2: []}
    intrinsics = TARGETS[target].intrinsics
    hints = {
        "__builtin_prefetch": lambda at, *_: asked[1].append(at.offset // 64),
        "_mm_prefetch": lambda at, *_: asked[2].append(at.offset // 64),
    }
    heard = {name: replace(intrinsics[name], meaning=meaning) for name, meaning in hints.items()}
    listening = replace(TARGETS[target], intrinsics={**intrinsics, **heard})
    monkeypatch.setitem(TARGETS, target, listening)
    return asked


@dataclass
class Problem:
    m: int
    n: int
    k: int
    dtype: str
    kind: str = LINEAR
    bias: bool = False
    residual: bool = False
    in_place: bool = False
    seed: int = 0
    partial_size: int = 1 << 16
    a: np.ndarray = field(init=False)
    weights: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng((self.seed, self.m, self.n, self.k))
        self.a = random.standard_normal((self.m, self.k + 3), np.float32)
        count = 2 if self.kind == SILU else 1
        self.weights = [random.standard_normal((self.n, self.k), np.float32) for _ in range(count)]
        panels = -(-self.n // 16)
        self.biases = random.standard_normal((count, panels * 16), np.float32)
        self.r = random.standard_normal((self.m, self.n + 5), np.float32)

    def packed(self) -> np.ndarray:
        panels = [pack(w, self.dtype) for w in self.weights]
        return np.ascontiguousarray(np.stack(panels, 1)) if self.kind == SILU else panels[0]

    def wanted(self, dot: bool) -> tuple[np.ndarray, np.ndarray]:
        """The float64 result, and the bound on what float32 may be off; `dot`: of rounded rows."""
        a = self.a[:, : self.k].astype(np.float64)
        if dot:
            a = widen_bf16(narrow_bf16(self.a[:, : self.k])).astype(np.float64)
        sums, sizes = [], []
        for weight, bias in zip(self.weights, self.biases, strict=True):
            w = rounded(weight, self.dtype).astype(np.float64)
            b = bias[: self.n] if self.bias else np.zeros(self.n)
            sums.append(a @ w.T + b)
            sizes.append(np.abs(a) @ np.abs(w.T) + np.abs(b))
        if self.kind == LINEAR:
            r = self.r[:, : self.n] if self.residual else 0
            return sums[0] + r, 4e-7 * (self.k**0.5 + 2) * (sizes[0] + np.abs(r))
        gate, up = sums
        out = gate / (1 + np.exp(-gate)) * up
        return out, 1e-6 * (self.k**0.5 + 4) * (1 + sizes[0]) * (1 + np.abs(up) + sizes[1])

    def run(self, target: str, name: str, threads: int = 1, **schedule: int) -> np.ndarray:
        """Call the compiled kernel on all threads' shares, then what adds up the parts of K."""

        def call(kernel: str, values: list[int | np.ndarray | None], tid: int) -> None:
            slots = (abi.Slot * len(values))(*(slot(v) for v in values))
            row = (ctypes.c_int64 * abi.SCHEDULE_LENGTH)(*make_schedule(**schedule))
            entry(target, kernel)(slots, row, ctypes.c_int64(tid), ctypes.c_int64(threads))

        return self.guarded(call, self.phases(name, schedule), threads)

    def interpret(
        self, target: str, name: str, threads: int = 1, sums: int = SUMS, **schedule: int
    ) -> np.ndarray:
        """Interpret the text lowered for the target, on all threads' shares, and return C.

        sums: elements that sums of slices of K have room for in it.
        """
        row = dict(zip(SCHEDULE_VALUES, make_schedule(**schedule), strict=True))

        def call(kernel: str, values: list[int | np.ndarray | None], tid: int) -> None:
            program, params = lowered(target, kernel, sums)
            given = {**row, "tid": tid, "nth": threads}
            interpret(program, kernel, [*values, *(given[p] for p in params)], TARGETS[target])

        return self.guarded(call, self.phases(name, schedule), threads)

    def phases(self, name: str, schedule: dict[str, int]) -> list[str]:
        second = reduce_kernel(self.kind, self.dtype, make_schedule(**schedule))
        return [name, second] if second else [name]

    def guarded(self, call: Call, kernels: list[str], threads: int) -> np.ndarray:
        """Return C, after checking that nothing around it was written."""
        ldc = self.n + 5
        c = np.full((self.m + 1, ldc), GUARD)
        r: np.ndarray | None = self.r if self.residual else None
        if self.in_place:
            c[: self.m, : self.n] = self.r[:, : self.n]
            r = c
        bias = np.ascontiguousarray(self.biases.reshape(len(self.weights), -1, 16).swapaxes(0, 1))
        if self.kind == LINEAR:  # which ends with the last column, not with the last panel
            bias = self.biases[0][: self.n].copy()
        values = [
            self.m,
            self.n,
            self.k,
            self.a,
            self.a.shape[1],
            self.packed(),
            FORMATS[self.dtype].panel_elements(self.k),
        ]
        values += [bias if self.bias else None]
        partial = np.full(self.partial_size + 1, np.nan, np.float32)
        sums = [partial, self.partial_size]
        values += [r, ldc, c, ldc, *sums] if self.kind == LINEAR else [c, ldc]
        for kernel, tid in itertools.product(kernels, reversed(range(threads))):
            call(kernel, values, tid)
        assert (c[self.m] == GUARD).all() and (c[:, self.n :] == GUARD).all()
        assert np.isnan(partial[-1])
        return c[: self.m, : self.n]

    def assert_right(self, got: np.ndarray, target: str) -> None:
        least = dot_rows(self.dtype, TARGETS[target])
        wanted, bound = self.wanted(dot=0 < least <= self.m)
        error = np.abs(got - wanted)
        assert (error <= bound).all(), (self, (error / bound).max())

    def check(self, target: str, name: str, threads: int = 1, **schedule: int) -> None:
        self.assert_right(self.run(target, name, threads, **schedule), target)


def slot(value: int | np.ndarray | None) -> abi.Slot:
    if isinstance(value, np.ndarray):
        return abi.Slot(p=value.ctypes.data)
    return abi.Slot(p=None) if value is None else abi.Slot(i=value)


@cache
def lowered(target: str, name: str, sums: int = SUMS) -> tuple[Unit, tuple[str, ...]]:
    """The kernel's low IR, and its schedule and thread parameters."""
    requests = gemm_requests(DTYPES, TARGETS[target])
    request = next(r for r in requests if r.name == name)
    module = load_kernel_module(request.module)
    params = module.function(request.kernel).params
    special = tuple(p.name for p in params if getattr(p.type, "name", "") in ("sched", "thread"))
    binding = {n: sums if n == "SUMS" else value for n, value in request.binding.items()}
    return lower(module, request.kernel, binding, TARGETS[target], name=name), special


def tile_of(name: str) -> tuple[int, int]:
    rows, panels = name.rsplit("_", 1)[1].split("x")
    return int(rows), int(panels)


def sizes(name: str) -> list[tuple[int, int, int]]:
    """M at every height and past it, N around whole groups of panels, K at 1, 2 and odd."""
    rows, panels = tile_of(name)
    heights = [(m, 16 * panels + 1, 5) for m in range(1, rows + 2)]
    edges = {1, 15, 16, 17, *(16 * panels + d for d in (-17, -16, -1, 0, 1, 15, 16, 17))}
    widths = [(rows + 1, n, 3) for n in sorted(edges) if n > 0]
    return [*heights, *widths, *((2 * rows, 16 * panels, k) for k in (1, 2, 33, 64))]
