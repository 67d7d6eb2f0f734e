"""Attention over paged KV in plain torch, on any device: blocks are gathered, torch attends.

In: a step and its block tables. Out: rows of attention. What is gathered and masked at once is
bounded, so that neither many long sequences nor a long chunked prompt take memory without end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dovetail.ir.model import KV_BLOCK
from dovetail.runtime.accel.step import Attended, PagedAttention, Step, moment_bytes

SUB_BATCHES = 2
"""Each keeps the memory that it gathers into."""
MASK_BYTES = 1 + 4
"""Of a value: what says whether a key is seen, and what torch's kernels may make of it."""
SCORE_BYTES = 3 * 4
"""Of a score, what it is made of, and its weight: where torch's kernels do not hold them."""
MASK_PART = 4
"""A mask takes one part in so many of `moment_bytes`; K and V take it each."""


@dataclass(frozen=True, slots=True)
class _Alike:
    """Decodes of about as many keys: their rows, rows of blocks, and which keys each may see.

    rows [n]; blocks [n x n_kv x width] of the pool as [block x kv_head]; mask [n][1][1][keys].
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A chunk of a prompt: its rows, its blocks as in `_Alike`, and all its keys."""

    rows: slice
    blocks: torch.Tensor
    keys: int


class PlainAttention(PagedAttention):
    """Gathers, and `scaled_dot_product_attention`."""

    name = "plain torch"

    @classmethod
    def workspace(cls, device: torch.device, kv_row: int, context: int, widened: float) -> int:
        """See PagedAttention; a single sequence is gathered whole."""
        moment = moment_bytes(device)
        gathered = max(2 * moment, kv_row * (context + KV_BLOCK))
        return int(gathered * (SUB_BATCHES + widened)) + moment // MASK_PART

    def begin(self, step: Step) -> None:
        """See PagedAttention."""
        for window, over in self.kinds.items():
            if step.counts["n_decode"]:
                step.shared["decodes", window] = _group_decodes(step, over)
            if step.counts["n_prefill"]:
                step.shared["prompts", window] = _list_prompts(step, over.n_kv)

    def decodes(self, step: Step, q: torch.Tensor, out: torch.Tensor, over: Attended) -> None:
        """Sequences of alike length go together: each is padded to at most twice its blocks."""
        for alike in step.shared["decodes", over.window]:
            count = len(alike.rows)
            queries = q.index_select(0, alike.rows).view(count, over.n_kv, over.group, -1)
            keys, values = _gather(step, over, alike.blocks, count, queries.dtype)
            sinks = None if over.sinks is None else over.sinks.view(over.n_kv, over.group, 1)
            found = _attend(queries, keys, values, alike.mask, over, sinks)
            out.index_copy_(0, alike.rows, found.reshape(count, -1))

    def prompts(self, step: Step, q: torch.Tensor, out: torch.Tensor, over: Attended) -> None:
        """Keys and values stand once for all heads that share them."""
        for prompt in step.shared["prompts", over.window]:
            rows = q[prompt.rows]
            count, keys = len(rows), prompt.keys
            heads = rows.view(count, over.n_kv, over.group, -1).permute(1, 2, 0, 3)
            k, v = (
                part[0, :, None, :keys].expand(-1, over.group, -1, -1)
                for part in _gather(step, over, prompt.blocks, 1, rows.dtype)
            )
            sinks = None if over.sinks is None else over.sinks.view(over.n_kv, over.group, 1, 1)
            scored = over.n_q if over.cap or sinks is not None else 0
            for part, mask in _masks(count, keys, over.window, rows.device, scored):
                found = _attend(heads[:, :, part], k, v, mask, over, sinks)
                out[prompt.rows][part] = found.permute(2, 0, 1, 3).reshape(
                    part.stop - part.start, -1
                )


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    over: Attended,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return rows of attention; sinks: of each row. A mask is beside them, and beside caps.

    Torch's kernels know neither.
    """
    if sinks is None and not over.cap:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=over.scale
        )
    assert mask is not None
    scores = torch.matmul(q, k.mT).float() * over.scale
    if over.cap:
        scores.div_(over.cap).tanh_().mul_(over.cap)
    scores.masked_fill_(~mask, -torch.inf)
    sums = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        sums = torch.logaddexp(sums, sinks)
    return torch.matmul((scores - sums).exp_().to(v.dtype), v)


def _gather(
    step: Step, over: Attended, blocks: torch.Tensor, count: int, dtype: torch.dtype
) -> Iterator[torch.Tensor]:
    """Yield K and V as [count][n_kv][keys][head_dim], each in one copy.

    Into memory that the next layer's attention takes anew: fresh pages cost more than the copy.
    """
    columns = KV_BLOCK * over.size
    for name, pool in (("k", over.k), ("v", over.v)):
        taken = step.scratch(name, (len(blocks), columns), pool)
        torch.index_select(pool.view(-1, columns), 0, blocks, out=taken)
        yield taken.view(count, over.n_kv, -1, over.size).to(dtype)


def _group_decodes(step: Step, over: Attended) -> list[_Alike]:
    first, count = step.counts["n_prefill"], step.counts["n_decode"]
    host = step.host["seq_lengths"][first : first + count].tolist()
    tables, lengths = step.arrays["block_tables"], step.arrays["seq_lengths"]
    unread, found = len(over.k) - 1, []
    for members in _alike_lengths(host, over):
        width = -(-max(host[i] for i in members) // KV_BLOCK)
        at = torch.tensor(members, device=tables.device)
        blocks = tables[first + at, :width].long()
        each = lengths[first + at, None]
        # past its length a sequence has no blocks of its own
        blocks = blocks.where(torch.arange(width, device=at.device) * KV_BLOCK < each, unread)
        places = torch.arange(width * KV_BLOCK, device=at.device)
        mask = places < each
        if over.window:
            mask &= places >= each - over.window
        rows = step.counts["decode_row"] + at
        found.append(_Alike(rows, _rows_of(blocks, over.n_kv), mask[:, None, None]))
    return found


def _alike_lengths(lengths: Sequence[int], over: Attended) -> Iterator[list[int]]:
    """Yield the sequences of about as many blocks, no more at once than may be gathered."""
    groups: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        groups.setdefault((-(-length // KV_BLOCK) - 1).bit_length(), []).append(i)
    block = over.n_kv * KV_BLOCK * over.size * over.k.element_size()
    for bits, members in groups.items():
        most = max(1, moment_bytes(over.k.device) // (block << bits))
        yield from (members[i : i + most] for i in range(0, len(members), most))


def _rows_of(blocks: torch.Tensor, n_kv: int) -> torch.Tensor:
    """Return blocks [n][width] of sequences as rows [n x n_kv x width] of a pool."""
    heads = torch.arange(n_kv, device=blocks.device)
    return (blocks[:, None] * n_kv + heads[:, None]).reshape(-1)


def _list_prompts(step: Step, n_kv: int) -> list[_Prompt]:
    count = step.counts["n_prefill"]
    starts = step.host["seq_starts"][: count + 1].tolist()
    lengths = step.host["seq_lengths"][:count].tolist()
    tables, found = step.arrays["block_tables"], []
    for i, keys in enumerate(lengths):
        blocks = _rows_of(tables[i, None, : -(-keys // KV_BLOCK)].long(), n_kv)
        found.append(_Prompt(slice(starts[i], starts[i + 1]), blocks, keys))
    return found


def _masks(
    queries: int, keys: int, window: int, device: torch.device, scored: int = 0
) -> Iterator[tuple[slice, torch.Tensor | None]]:
    """Yield stretches of the last `queries` positions, and which keys each of these may see.

    None, of all at once, where each sees itself and all before, from the first token on; never
    where scores of so many heads, `scored`, are held beside.
    """
    if not scored and queries == keys and (not window or keys <= window):
        yield slice(0, queries), None
        return
    each = MASK_BYTES + SCORE_BYTES * scored
    places = torch.arange(keys, device=device)
    stretch = max(1, moment_bytes(device) // (MASK_PART * each * keys))
    for first in range(0, queries, stretch):
        part = slice(first, min(first + stretch, queries))
        positions = torch.arange(part.start, part.stop, device=device)[:, None] + keys - queries
        mask = places <= positions
        if window:
            mask &= places > positions - window
        yield part, mask
