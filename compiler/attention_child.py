"""The child process that times attention kernels: one `AttentionJob` in, `AttentionTimes` out."""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from dovetail.compiler.attention_search import (
    DECODE,
    AttentionCase,
    AttentionJob,
    AttentionTimes,
)
from dovetail.ir.artifact import PhasePlan
from dovetail.ir.dtypes import DTYPES, narrow_bf16, widen_bf16
from dovetail.ir.model import KV_BLOCK
from dovetail.runtime import abi
from dovetail.runtime.library import KernelLibrary, Team

POOL_BYTES = 160 << 20
"""Keys and values cycle through this much, so that they come from memory as in a decode step."""
ROUNDS, SPIN = 9, 2000
PERIOD = 1_000_003
Array = npt.NDArray[np.float32]


class AttentionRun:
    """One case bound to operands: layers of keys and values, of which each call reads the next."""

    def __init__(self, library: KernelLibrary, case: AttentionCase) -> None:
        self.library, self.case = library, case
        self.team: Team = library.make_team(case.threads, SPIN)
        self.team.set_active(PhasePlan(threads=case.threads, cpus=case.cpus))
        self.blocks = -(-case.context // KV_BLOCK)
        self.layer = self.blocks * case.n_kv * KV_BLOCK * case.head_dim
        size = DTYPES[case.kv_dtype].size
        self.layers = max(2, POOL_BYTES // (2 * self.layer * size))
        random = np.random.default_rng(3)
        self.pools = [self._pool(random) for _ in range(2)]
        self.stride = (case.n_q + 2 * case.n_kv) * case.head_dim + 16
        self.q: Array = random.standard_normal((case.rows, self.stride), np.float32)
        self.out: Array = np.zeros((case.rows, case.n_q * case.head_dim + 16), np.float32)
        self.partial: Array = np.zeros(case.n_q * (case.head_dim + 16), np.float32)
        self.starts = np.array([0, case.rows], np.int32)
        self.lengths = np.array([case.context], np.int32)
        self.table = np.arange(self.blocks + 1, dtype=np.int32) % self.blocks
        self.turn = 0

    def _pool(self, random: np.random.Generator) -> npt.NDArray[np.generic]:
        values = random.standard_normal(PERIOD, np.float32)
        stored = (
            values.astype(np.float16).view(np.uint16) if self.case.kv_dtype == "f16" else values
        )
        if self.case.kv_dtype == "bf16":
            stored = narrow_bf16(values)
        pool: npt.NDArray[np.generic] = np.resize(stored, self.layers * self.layer)
        return pool

    def call(self, kernel: str, layer: int | None = None) -> float:
        """Run `kernel` on a layer, the next one by default; return seconds."""
        case, size = self.case, DTYPES[self.case.kv_dtype].size
        if layer is None:
            layer, self.turn = self.turn % self.layers, self.turn + 1
        decode = case.family == DECODE
        heads = (case.n_q, case.n_kv, case.head_dim)
        values: list[int | float] = [0, 1] if decode else [1]
        values += [*heads, case.head_dim**-0.5, 0, *((1,) if decode else ())]
        arrays = (self.starts, self.lengths, self.table)
        values += [self.q.ctypes.data, self.stride, *(a.ctypes.data for a in arrays), self.blocks]
        values += [pool.ctypes.data + layer * self.layer * size for pool in self.pools]
        values += [self.partial.ctypes.data] if decode else []
        values += [self.out.ctypes.data, self.out.shape[1]]
        slots = (abi.Slot * len(values))(
            *(abi.Slot(f=v) if isinstance(v, float) else abi.Slot(i=v) for v in values)
        )
        reduce = self.library.entry(f"{DECODE}_merge_{case.kv_dtype}") if decode else None
        schedule = (ctypes.c_int64 * abi.SCHEDULE_LENGTH)()
        rows = (abi.Row * 1)(abi.Row(1, self.library.entry(kernel), reduce, schedule))
        entries = (abi.Entry * 1)(abi.Entry(rows, 1, 0, 0, -1, 0))
        tape = abi.Tape(entries, 1, slots, None, 0)
        args = (abi.Slot * 1)(abi.Slot(i=1))
        start = time.perf_counter()
        self.library.run(self.team, tape, args, range(1))
        return time.perf_counter() - start

    def right(self, kernel: str) -> bool:
        """Run once and compare the last token with float64."""
        self.out[:] = np.nan
        self.call(kernel, layer=0)
        case = self.case
        keys, values = (self._wide(pool) for pool in self.pools)
        q = self.q[-1, : case.n_q * case.head_dim].reshape(case.n_q, case.head_dim)
        scores = np.einsum("nd,lnd->nl", q.astype(np.float64), keys) * case.head_dim**-0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        wanted = np.einsum("nl,lnd->nd", weights / weights.sum(-1, keepdims=True), values)
        got = self.out[-1, : wanted.size].reshape(wanted.shape)
        return bool(np.abs(got - wanted).max() <= 1e-4)

    def _wide(self, pool: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
        """Return the first layer of a pool as float64 [context][n_q][head_dim]."""
        case = self.case
        stored = pool[: self.layer]
        if case.kv_dtype == "bf16":
            stored = widen_bf16(stored.view(np.uint16))
        elif case.kv_dtype == "f16":
            stored = stored.view(np.float16)
        wide = stored.astype(np.float64)
        shape = (self.blocks, case.n_kv, KV_BLOCK, case.head_dim)
        rows = wide.reshape(shape).swapaxes(1, 2).reshape(-1, case.n_kv, case.head_dim)
        return np.repeat(rows[: case.context], case.n_q // case.n_kv, axis=1)


def time_kernels(run: AttentionRun, kernels: tuple[str, ...]) -> tuple[float, ...]:
    """Return the lower quartile of each kernel's times, taken in turns; infinite where wrong."""
    good = [run.right(kernel) for kernel in kernels]
    times: list[list[float]] = [[] for _ in kernels]
    for _ in range(ROUNDS):
        for i, kernel in enumerate(kernels):
            if good[i]:
                times[i].append(run.call(kernel))
    return tuple(sorted(t)[len(t) // 4] if t else float("inf") for t in times)


def main() -> None:
    """Measure the job on stdin."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=AttentionJob)
    library = KernelLibrary(Path(job.library), job.index)
    found = tuple(time_kernels(AttentionRun(library, case), names) for case, names in job.cases)
    sys.stdout.buffer.write(msgspec.json.encode(AttentionTimes(seconds=found)))


if __name__ == "__main__":
    main()
