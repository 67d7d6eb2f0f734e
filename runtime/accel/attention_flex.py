"""Attention over paged KV by torch's flex_attention: no gathers, blocks are named to the kernel.

In: a step's block tables. Out: rows of attention. A layer's pool is seen as one long row of keys,
a block of 16 for each head; a query's row of the mask names the blocks of its sequence and head.
On torch's CPU device nothing is compiled: there it is slow, and memory goes by the pool. For tests.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dovetail.ir.model import KV_BLOCK
from dovetail.runtime.accel.step import Attended, PagedAttention, Step

COMPILED = ("cuda", "xpu")
"""Devices whose kernels torch makes with Triton."""
QUERIES = 128
"""Rows of a mask that share a list of blocks."""
OPTIONS = {"BLOCK_N": KV_BLOCK}
LISTS = 256 << 20
"""Bytes of the places and lists of blocks of a step, of 256 sequences in a pool of 2^16 blocks."""
LEAST_SIZE = 16
"""Values of a head that tensor cores need."""

Mask = Callable[[Any, Any, Any, Any], Any]


@dataclass(frozen=True, slots=True)
class _Sequences:
    """Sequences of as many queries each: their first row, `queries`, and what they may see.

    places [n][blocks + 1]: at which place of a sequence each block of the pool is, -1 = nowhere.
    first [n]: the position of each one's first query. tables [n][width], used [n]: its blocks.
    """

    row: int
    queries: int
    places: torch.Tensor
    first: torch.Tensor
    tables: torch.Tensor
    used: torch.Tensor


class FlexAttention(PagedAttention):
    """All decodes in one call, each chunk of a prompt in another."""

    name = "torch's flex_attention"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        compiled = device.type in COMPILED
        self._attend: Any = (
            torch.compile(flex_attention, dynamic=True) if compiled else flex_attention
        )
        self._options: dict[str, Any] = {"kernel_options": OPTIONS} if compiled else {}

    @classmethod
    def workspace(cls, device: torch.device, kv_row: int, context: int, widened: float) -> int:
        """See PagedAttention."""
        return LISTS

    @staticmethod
    def fits(device: torch.device, dtype: torch.dtype, kv: torch.dtype, size: int) -> bool:
        """Tell whether torch may compile it for such a device, activations, KV and heads."""
        fits = device.type in COMPILED and dtype is kv and size >= LEAST_SIZE
        return fits and importlib.util.find_spec("triton") is not None

    def begin(self, step: Step) -> None:
        """See PagedAttention."""
        counts, starts = step.counts, step.host["seq_starts"]
        over = next(iter(self.kinds.values()))
        prompts, decodes = counts["n_prefill"], counts["n_decode"]
        if decodes:
            some = slice(prompts, prompts + decodes)
            step.shared["decodes"] = _find(step, over, some, counts["decode_row"], 1)
        step.shared["prompts"] = [
            _find(step, over, slice(i, i + 1), int(starts[i]), int(starts[i + 1] - starts[i]))
            for i in range(prompts)
        ]

    def decodes(self, step: Step, q: torch.Tensor, out: torch.Tensor, over: Attended) -> None:
        """See PagedAttention."""
        self._run(step.shared["decodes"], q, out, over)

    def prompts(self, step: Step, q: torch.Tensor, out: torch.Tensor, over: Attended) -> None:
        """See PagedAttention."""
        for sequence in step.shared["prompts"]:
            self._run(sequence, q, out, over)

    def _run(self, some: _Sequences, q: torch.Tensor, out: torch.Tensor, over: Attended) -> None:
        count, n_kv, group = len(some.first), over.n_kv, over.group
        rows = slice(some.row, some.row + count * some.queries)
        heads = q[rows].view(count, some.queries, n_kv, group, over.size).transpose(1, 2)
        heads = heads.reshape(count * n_kv, 1, some.queries * group, over.size)
        k, v = (part.view(1, 1, -1, over.size) for part in (over.k, over.v))
        mask = _block_mask(some, over, k.shape[2])
        found = self._attend(heads, k, v, block_mask=mask, scale=over.scale, **self._options)
        found = found.view(count, n_kv, some.queries, group * over.size).transpose(1, 2)
        out[rows] = found.reshape(count * some.queries, -1)


def _find(step: Step, over: Attended, some: slice, row: int, queries: int) -> _Sequences:
    width = -(-int(step.host["seq_lengths"][some].max()) // KV_BLOCK)
    lengths, tables = step.arrays["seq_lengths"][some], step.arrays["block_tables"][some, :width]
    used = (lengths + KV_BLOCK - 1) // KV_BLOCK
    at = torch.arange(width, dtype=torch.int32, device=tables.device)
    nowhere = len(over.k)
    places = at.new_full((len(tables), nowhere + 1), -1)
    blocks = tables.where(at < used[:, None], nowhere).long()
    places.scatter_(1, blocks, at.expand(len(tables), -1))
    places[:, nowhere] = -1
    return _Sequences(row, queries, places, lengths - queries, tables, used)


def _block_mask(some: _Sequences, over: Attended, keys: int) -> BlockMask:
    """Return which rows of the pool the queries of each sequence and head of keys may see."""
    n_kv, group, rows = over.n_kv, over.group, some.queries * over.group
    stretches = -(-rows // QUERIES)
    heads = torch.arange(n_kv, dtype=torch.int32, device=some.tables.device)
    blocks = some.tables[:, None] * n_kv + heads[:, None]
    blocks = blocks.reshape(-1, 1, 1, blocks.shape[-1]).expand(-1, -1, stretches, -1)
    counts = some.used.repeat_interleave(n_kv)[:, None, None].expand(-1, -1, stretches)
    return BlockMask.from_kv_blocks(
        counts.int().contiguous(),
        blocks.int().contiguous(),
        BLOCK_SIZE=(QUERIES, KV_BLOCK),
        mask_mod=_make_mask(some.places, some.first, n_kv, group, over.window),
        seq_lengths=(rows, keys),
        compute_q_blocks=False,  # only gradients need them
    )


def _make_mask(
    places: torch.Tensor, first: torch.Tensor, n_kv: int, group: int, window: int
) -> Mask:
    def seen(batch: Any, _: Any, query: Any, key: Any) -> Any:
        sequence, block = batch // n_kv, key // KV_BLOCK
        place = places[sequence, block // n_kv]
        position, at = first[sequence] + query // group, place * KV_BLOCK + key % KV_BLOCK
        own = (block % n_kv == batch % n_kv) & (place >= 0) & (at <= position)
        return own & (at > position - window) if window else own

    return seen
