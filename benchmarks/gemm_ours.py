"""Our side of the GEMM benchmark: operands in copies that outgrow the cache, and bound products.

In: a shape, a schedule row, a kernel library. Out: `OurGemm`, which runs products on the copies in
turn, each one call of a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from common import Patience
from dovetail.codegen.library import BuiltLibrary
from dovetail.codegen.targets import get_target
from dovetail.compiler.formats.quantise import quantise_rows
from dovetail.compiler.formats.weight_dtype import CHOICES
from dovetail.compiler.measure.kernel_call import KernelCall
from dovetail.compiler.measure.meter import CACHE_FACTOR, Candidate, Meter
from dovetail.compiler.measure.recorder import Identity, Recorder
from dovetail.compiler.rules.schedules import GemmOp, default_gemm_rows
from dovetail.compiler.search.policy import SearchTask
from dovetail.compiler.search.rows import make_rows
from dovetail.compiler.search.tables import EFFORTS
from dovetail.ir.artifact import PhasePlan
from dovetail.ir.block_format import BlockFormat
from dovetail.ir.formats import FORMATS, WeightFormat
from dovetail.ir.model import SPLIT_K_ELEMENTS
from dovetail.ir.schedule import Row
from dovetail.runtime.machine.library import KernelLibrary
from dovetail.runtime.native.tape import Team
from dovetail.topology.hardware import HardwareSpec

PAGE = 4096
PADDING = 16
"""Elements between rows of our activations, as in the runtime's buffers; peers get dense rows."""

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Setting:
    """What all cells share."""

    hardware: HardwareSpec
    built: BuiltLibrary
    library: KernelLibrary
    meter: Meter | None
    search_seconds: float
    rounds: int
    patience: Patience


def aligned_copy(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a page-aligned copy, as weights lie in an artifact; numpy's own start 16 bytes off."""
    raw = np.empty(values.nbytes + PAGE, np.uint8)
    start = -raw.ctypes.data % PAGE
    copy = raw[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def pack_weight(form: WeightFormat, weight: Array) -> npt.NDArray[Any]:
    """Return a weight's panels, rounded as a compile does."""
    if isinstance(form, BlockFormat):
        return form.pack(quantise_rows(weight, form))
    return form.pack(form.dtype.narrow(weight))


class Operands:
    """One weight as float32 and as we pack it, in as many copies as outgrow the cache; activations.

    All are page-aligned, the peers' too: no vector of theirs or ours straddles two cache lines.
    `plain` is in copies for those who multiply by float32; others make their own of each.
    """

    def __init__(self, n: int, k: int, m: int, cache_bytes: int, dtype: str = "f32") -> None:
        self.n, self.k = n, k
        self.form = FORMATS[CHOICES[dtype]]
        count = max(1, math.ceil(CACHE_FACTOR * cache_bytes / (self.form.value_bytes * n * k)))
        random = np.random.default_rng(0)
        weight = random.standard_normal((n, k), np.float32) * np.float32(k**-0.5)
        packed = pack_weight(self.form, weight)
        first = aligned_copy(weight)
        copies = [aligned_copy(weight) for _ in range(count - 1)] if dtype == "f32" else []
        self.plain = [first, *(copies or [first] * (count - 1))]
        self.packed = [aligned_copy(packed) for _ in range(count)]
        self.a = aligned_copy(np.zeros((m, k + PADDING), np.float32))
        self.a[:, :k] = random.standard_normal((m, k), np.float32)
        self.dense = aligned_copy(self.a[:, :k])
        self.c = aligned_copy(np.zeros((m, n + PADDING), np.float32))


class OurGemm:
    """Calls a schedule row on the copies of a weight in turn."""

    def __init__(self, setting: Setting, team: Team, row: Row, operands: Operands, m: int) -> None:
        self._team, self._turn, self._operands = team, 0, operands
        self._partial = np.empty(SPLIT_K_ELEMENTS, np.float32)
        self._calls = [self._bind(setting, row, weight, m) for weight in operands.packed]
        self._result = operands.c[:m, : operands.n]

    def _bind(self, setting: Setting, row: Row, weight: Array, m: int) -> KernelCall:
        n, k, a, c = self._operands.n, self._operands.k, self._operands.a, self._operands.c
        stride = self._operands.form.panel_elements(k)
        values = [m, n, k, a.ctypes.data, a.shape[1], weight.ctypes.data, stride, 0, 0, 0]
        values += [c.ctypes.data, c.shape[1], self._partial.ctypes.data, self._partial.size]
        candidate = Candidate(row.kernel, row.schedule)
        return KernelCall(setting.library, candidate, row.reduce_kernel, values, rows=m)

    def __call__(self, calls: int) -> Array:
        """Run `calls` products; return the last one's result."""
        for _ in range(calls):
            self._calls[self._turn % len(self._calls)].run(self._team)
            self._turn += 1
        return self._result


def pick_rows(
    setting: Setting, op: GemmOp, phase: PhasePlan, points: Sequence[int]
) -> tuple[Row, ...]:
    """Return the schedule rows of a product: by rules, refined by a search if one is asked for."""
    target = get_target(setting.built.index.target)
    defaults = default_gemm_rows(op, target, phase.threads, setting.hardware)
    if setting.meter is None:
        return defaults
    effort = EFFORTS["fast"]
    task = SearchTask(
        op=op,
        target=target,
        phase=phase,
        hardware=setting.hardware,
        points=tuple(points),
        seconds=setting.search_seconds,
        rounds=effort.rounds,
    )
    recorder = Recorder(setting.meter, Identity.of(setting.hardware, setting.built.index))
    return make_rows(task, effort.policy.search(task, recorder).choices)


def row_for(rows: Sequence[Row], m: int) -> Row:
    """Return the row that serves `m`."""
    return [row for row in rows if row.m_lo <= m][-1]
