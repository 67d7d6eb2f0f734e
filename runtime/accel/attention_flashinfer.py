"""Attention over paged KV by FlashInfer (extra `gpu`), on NVIDIA's GPUs: planned once a step.

In: a step's block tables and lengths. Out: rows of attention. It has not run where this was
written: `choose_attention` compares it with plain torch before it is used.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dovetail.ir.model import KV_BLOCK
from dovetail.runtime.accel.graph_cache import ROWS
from dovetail.runtime.accel.step import Attended, PagedAttention, Step

WORKSPACE = 128 << 20
"""Bytes for partial sums of long sequences, which FlashInfer's documentation recommends."""
PLANNED = 8 << 20
"""Bytes that each plan's wrapper takes for itself, as it is documented."""
LAYOUT = "HND"
SIZES = (64, 128, 256)
"""Values of a head that its kernels are made for."""
TENSOR_CORES = 4
"""Heads of queries for one of keys from which tensor cores are faster, also for one token."""
HALVES = {torch.float16: (7, 5), torch.bfloat16: (8, 0)}
"""Types of q, K and V, and the first compute capability that has products of them."""

Ints = npt.NDArray[np.int32]


class Pages(NamedTuple):
    """Blocks of sequences one behind another: `indices`, from `indptr[i]` on those of the i-th.

    last: tokens in each one's last block.
    """

    indptr: Ints
    indices: Ints
    last: Ints

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return them as FlashInfer's plans take them, on the host."""
        return tuple(map(torch.from_numpy, self))


def list_pages(tables: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> Pages:
    """Return the pages of sequences of so many tokens; tables [n][width] of blocks, in order."""
    counts = -(-lengths // KV_BLOCK)
    used = np.arange(tables.shape[1]) < counts[:, None]
    indptr = np.concatenate([[0], np.cumsum(counts)])
    last = lengths - (counts - 1) * KV_BLOCK
    return Pages(*(part.astype(np.int32) for part in (indptr, tables[used], last)))


class FlashInferAttention(PagedAttention):
    """A wrapper for prompts, one for decodes, and one for each number of recorded decodes."""

    name = "FlashInfer"
    records = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        import flashinfer  # noqa: PLC0415 - an extra, and slow

        self._library: Any = flashinfer
        self._space = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
        self._indices = torch.zeros(0, dtype=torch.int32, device=device)
        self._wrappers: dict[tuple[str, int, int], Any] = {}

    @classmethod
    def workspace(cls, device: torch.device, kv_row: int, context: int, widened: float) -> int:
        """See PagedAttention; kinds of layers are two at most."""
        return 2 * (WORKSPACE + 2 * (2 + len(ROWS)) * PLANNED)

    @staticmethod
    def fits(device: torch.device, dtype: torch.dtype, kv: torch.dtype, size: int) -> bool:
        """Tell whether there may be kernels for such a device, activations, KV and heads."""
        if device.type != "cuda" or torch.version.hip or dtype is not kv or size not in SIZES:
            return False
        least = HALVES.get(dtype)
        if least is None or torch.cuda.get_device_capability(device) < least:
            return False
        return importlib.util.find_spec("flashinfer") is not None

    def begin(self, step: Step) -> None:
        """See PagedAttention: each kind of layer is planned for, on the host."""
        counts, host = step.counts, step.host
        prompts, decodes = counts["n_prefill"], counts["n_decode"]
        tables, lengths = host["block_tables"], host["seq_lengths"]
        whole = step.recorded and decodes == counts["n_tokens"]  # of a few numbers of rows
        rows = decodes if whole else 0
        if rows and not len(self._indices):
            self._indices = torch.zeros(tables.size, dtype=torch.int32, device=self.device)
        for over in self.kinds.values():
            heads = (over.n_q, over.n_kv, over.size, KV_BLOCK)
            if decodes:
                some = slice(prompts, prompts + decodes)
                pages = list_pages(tables[some], lengths[some])
                wrapper = self._wrapper("decodes", over, rows)
                wrapper.plan(*pages.tensors(), *heads, **_kind(over))
                step.shared["decodes", over.window] = wrapper
            if prompts:
                pages = list_pages(tables[:prompts], lengths[:prompts])
                starts = torch.from_numpy(host["seq_starts"][: prompts + 1].astype(np.int32))
                wrapper = self._wrapper("prompts", over, 0)
                wrapper.plan(starts, *pages.tensors(), *heads, causal=True, **_kind(over))

    def _wrapper(self, phase: str, over: Attended, rows: int) -> Any:
        """Return what attends; rows: of a recorded step, whose addresses never change, else 0."""
        key = phase, over.window, rows
        if key not in self._wrappers:
            self._wrappers[key] = self._make(phase, over, rows)
        return self._wrappers[key]

    def _make(self, phase: str, over: Attended, rows: int) -> Any:
        if phase == "prompts":
            return self._library.BatchPrefillWithPagedKVCacheWrapper(self._space, LAYOUT)
        more: dict[str, Any] = {"use_tensor_cores": over.group >= TENSOR_CORES}
        if rows:
            indptr, last = (
                torch.zeros(n, dtype=torch.int32, device=self.device) for n in (rows + 1, rows)
            )
            more |= {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": indptr,
                "paged_kv_indices_buffer": self._indices,
                "paged_kv_last_page_len_buffer": last,
            }
        return self._library.BatchDecodeWithPagedKVCacheWrapper(self._space, LAYOUT, **more)

    def decodes(self, step: Step, q: torch.Tensor, out: torch.Tensor, over: Attended) -> None:
        """See PagedAttention."""
        first = step.counts["decode_row"]
        rows = slice(first, first + step.counts["n_decode"])
        _run(step.shared["decodes", over.window], q[rows], out[rows], over)

    def prompts(self, step: Step, q: torch.Tensor, out: torch.Tensor, over: Attended) -> None:
        """See PagedAttention."""
        rows = slice(0, int(step.host["seq_starts"][step.counts["n_prefill"]]))
        _run(self._wrapper("prompts", over, 0), q[rows], out[rows], over)


def _kind(over: Attended) -> dict[str, Any]:
    """Return what a plan is told of scores; a window counts the keys before the query's own."""
    return {
        "window_left": over.window - 1 if over.window else -1,
        "sm_scale": over.scale,
        "q_data_type": over.k.dtype,
        "kv_data_type": over.k.dtype,
    }


def _run(wrapper: Any, q: torch.Tensor, out: torch.Tensor, over: Attended) -> None:
    heads = q.reshape(len(q), over.n_q, over.size).contiguous()
    out.copy_(wrapper.run(heads, (over.k, over.v)).view(len(q), -1))
