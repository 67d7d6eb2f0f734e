"""Attention in the measuring child: one case bound to queries, keys and values, called and checked.

In: a library, its thread team and an `AttentionCase`. Out: seconds of a kernel on keys and values
that no cache holds, and whether its numbers agree with float64.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dovetail.compiler.measure.kernel_call import PERIOD, KernelCall, zeros
from dovetail.compiler.measure.meter import DECODE, AttentionCase, Candidate
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.model import KV_BLOCK, MAX_KV_SPLITS
from dovetail.ir.schedule import SCHEDULE_VALUES
from dovetail.runtime.machine.library import KernelLibrary
from dovetail.runtime.machine.memory import allocate
from dovetail.runtime.native.step import count_parts
from dovetail.runtime.native.tape import Team

EXACT, ROUNDED, SINGLE = 2e-5, 2e-3, 2e-2
"""How far a right kernel may be from float64, whose keys and values are as stored and of size one:
where it computes in float32, and where it rounds to pairs of bfloat16, over the fewest keys, or
over a single one.
"""


def tolerance(keys: int, least: int) -> float:
    """Return how far from float64 attention over `keys` may be that rounds from `least` keys on.

    0 = never. Errors of single keys even out, as the root of their number; what a key that is left
    out costs falls as their number, so nothing wider would notice it. In a prompt (1) the rows that
    see few keys notice it.
    """
    if least == 1:
        return SINGLE
    return ROUNDED * math.sqrt(least / keys) if 0 < least <= keys else EXACT


class AttentionRun:
    """One case bound to operands: layers of keys and values, of which each call reads the next.

    Together they fill `pool_bytes`, so that they come from memory as in a decode step.
    """

    def __init__(
        self, library: KernelLibrary, team: Team, case: AttentionCase, pool_bytes: int
    ) -> None:
        self.library, self.team, self.case = library, team, case
        self.blocks = -(-case.context // KV_BLOCK)
        self.layer = self.blocks * case.n_kv * KV_BLOCK * case.head_dim
        size = DTYPES[case.dtype].size
        self.layers = max(2, pool_bytes // (2 * self.layer * size))
        random = np.random.default_rng(3)
        self.pools = [self._pool(random) for _ in range(2)]
        self.stride = (case.n_q + 2 * case.n_kv) * case.head_dim + 16
        self.q = zeros(case.rows, self.stride)
        self.q[:] = random.standard_normal(self.q.shape, np.float32)
        self.out = zeros(case.rows, case.n_q * case.head_dim + 16)
        self.partial = zeros(case.n_q * MAX_KV_SPLITS, case.head_dim + 16)
        self.starts = np.array([0, case.rows], np.int32)
        self.lengths = np.array([case.context], np.int32)
        self.table = np.arange(self.blocks + 1, dtype=np.int32) % self.blocks
        self.turn = 0

    def _pool(self, random: np.random.Generator) -> npt.NDArray[np.generic]:
        values = random.standard_normal(PERIOD, np.float32)
        stored = DTYPES[self.case.dtype].narrow(values)
        size = self.layers * self.layer
        pool = allocate(size * stored.itemsize).view(stored.dtype)
        for start in range(0, size, PERIOD):
            pool[start : start + PERIOD] = stored[: size - start]
        return pool

    def bind(self, candidate: Candidate, calls: int) -> KernelCall:
        """Return calls on the next layers."""
        turns = range(self.turn, self.turn + calls)
        self.turn += calls
        merge = f"{DECODE}_merge_{self.case.dtype}" if self.case.kind == DECODE else None
        least = candidate.schedule[SCHEDULE_VALUES.index("block_k")]
        parts = count_parts(1, self.case.n_kv, self.case.context, self.case.threads, least)
        operands = (self.operands(turn % self.layers, parts) for turn in turns)
        return KernelCall(self.library, candidate, merge, *operands, rows=1)

    def operands(self, layer: int, parts: int) -> list[int | float]:
        """Return the operand values of a layer, in the order of the kernel's slots.

        parts: what decode attention cuts the sequence into.
        """
        case, size = self.case, DTYPES[self.case.dtype].size
        decode = case.kind == DECODE
        heads = (case.n_q, case.n_kv, case.head_dim)
        values: list[int | float] = [0, 1] if decode else [1]
        values += [*heads, case.head_dim**-0.5, 0, 0, *((parts,) if decode else ())]
        arrays = (self.starts, self.lengths, self.table)
        values += [self.q.ctypes.data, self.stride, *(a.ctypes.data for a in arrays), self.blocks]
        values += [pool.ctypes.data + layer * self.layer * size for pool in self.pools]
        values += [self.partial.ctypes.data] if decode else []
        return [*values, self.out.ctypes.data, self.out.shape[1]]

    def check(self, candidate: Candidate) -> bool:
        """Run once on the first layer: all rows as in float64, and nothing written beside them."""
        self.out[:] = np.nan
        self.turn = 0
        self.bind(candidate, 1).run(self.team)
        got, beside = np.split(self.out, [self.expected.shape[1]], axis=1)
        least = int(self.library.kernels[candidate.kernel].binding.get("DOT", 0))
        near = np.abs(got - self.expected) <= tolerance(self.case.context, least)
        return bool(near.all() and np.isnan(beside).all())

    @cached_property
    def expected(self) -> npt.NDArray[np.float64]:
        """What every right kernel makes of the first layer, [rows][n_q * head_dim].

        Row r is the token at context - rows + r, which attends to keys up to its own.
        """
        case = self.case
        keys, values = (self._wide(pool).transpose(1, 0, 2) for pool in self.pools)
        q = self.q[:, : case.n_q * case.head_dim].astype(np.float64)
        q = q.reshape(case.rows, case.n_q, case.head_dim).transpose(1, 0, 2)
        scores = q @ keys.transpose(0, 2, 1) * case.head_dim**-0.5
        if case.cap:
            scores = case.cap * np.tanh(scores / case.cap)
        last = np.arange(case.context - case.rows, case.context)
        scores[:, np.arange(case.context) > last[:, None]] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        found: npt.NDArray[np.float64] = (weights / weights.sum(-1, keepdims=True)) @ values
        return found.swapaxes(0, 1).reshape(case.rows, -1)

    def _wide(self, pool: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
        """Return the first layer of a pool as float64 [context][n_q][head_dim]."""
        case = self.case
        wide = DTYPES[case.dtype].widen(pool[: self.layer]).astype(np.float64)
        shape = (self.blocks, case.n_kv, KV_BLOCK, case.head_dim)
        rows = wide.reshape(shape).swapaxes(1, 2).reshape(-1, case.n_kv, case.head_dim)
        return np.repeat(rows[: case.context], case.n_q // case.n_kv, axis=1)
