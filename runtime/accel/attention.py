"""Attention on a torch device over paged KV: blocks are gathered, torch attends.

In: queries, K and V of a layer as [block][kv_head][16][head_dim], and a step's block tables. Out:
rows of attention. What depends on the step alone is worked out by the first layer for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from dovetail.ir.model import KV_BLOCK
from dovetail.runtime.accel.tape import Step


class Attended(NamedTuple):
    """What a layer's attention is over: heads of queries, and of keys and values; K and V.

    window: how many of the last keys are seen, 0 = all.
    """

    n_q: int
    n_kv: int
    scale: float
    window: int
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Alike:
    """Decodes of about as many keys: their rows, rows of blocks, and which keys each may see.

    rows [n]; blocks [n x n_kv x width] of the pool as [block x kv_head]; mask [n][1][1][keys].
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    mask: torch.Tensor


def attend_decodes(step: Step, q: torch.Tensor, out: torch.Tensor, over: Attended) -> None:
    """Attend for one query each of the device's decodes, the rows behind the prompts'.

    Sequences of alike length go together: each is padded to at most twice its blocks.
    """
    n_kv, key = over.n_kv, ("decodes", over.window)
    if key not in step.shared:
        step.shared[key] = _group_decodes(step, n_kv, over.window, len(over.k) - 1)
    for alike in step.shared[key]:
        count = len(alike.rows)
        queries = q.index_select(0, alike.rows).view(count, n_kv, over.n_q // n_kv, -1)
        keys, values = _gather(step, over, alike.blocks, count, queries.dtype)
        found = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=alike.mask, scale=over.scale
        )
        out.index_copy_(0, alike.rows, found.reshape(count, -1))


def _gather(
    step: Step, over: Attended, blocks: torch.Tensor, count: int, dtype: torch.dtype
) -> Iterator[torch.Tensor]:
    """Yield K and V as [count][n_kv][keys][head_dim], each in one copy.

    Into memory that the next layer's attention takes anew: fresh pages cost more than the copy.
    """
    for name, pool in (("k", over.k), ("v", over.v)):
        size = pool.shape[-1]
        columns = KV_BLOCK * size
        taken = step.scratch(name, (len(blocks), columns), pool)
        torch.index_select(pool.view(-1, columns), 0, blocks, out=taken)
        yield taken.view(count, over.n_kv, -1, size).to(dtype)


def _group_decodes(step: Step, n_kv: int, window: int, unread: int) -> list[_Alike]:
    first, count = step.counts["n_prefill"], step.counts["n_decode"]
    host = step.host["seq_lengths"][first : first + count].tolist()
    start = step.counts["n_tokens"] - step.counts["n_cpu"] - count
    groups: dict[int, list[int]] = {}
    for i, length in enumerate(host):
        groups.setdefault((-(-length // KV_BLOCK) - 1).bit_length(), []).append(i)
    tables, lengths = step.arrays["block_tables"], step.arrays["seq_lengths"]
    found = []
    for members in groups.values():
        width = -(-max(host[i] for i in members) // KV_BLOCK)
        at = torch.tensor(members, device=tables.device)
        blocks = tables[first + at, :width].long()
        each = lengths[first + at, None]
        # past its length a sequence has no blocks of its own
        blocks = blocks.where(torch.arange(width, device=at.device) * KV_BLOCK < each, unread)
        places = torch.arange(width * KV_BLOCK, device=at.device)
        mask = places < each
        if window:
            mask &= places >= each - window
        found.append(_Alike(start + at, _rows_of(blocks, n_kv), mask[:, None, None]))
    return found


def _rows_of(blocks: torch.Tensor, n_kv: int) -> torch.Tensor:
    """Return blocks [n][width] of sequences as rows [n x n_kv x width] of a pool."""
    heads = torch.arange(n_kv, device=blocks.device)
    return (blocks[:, None] * n_kv + heads[:, None]).reshape(-1)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A chunk of a prompt: its rows, its blocks as in `_Alike`, which keys each query may see.

    mask: [queries][keys]; None where each sees itself and all before, from the first token on.
    """

    rows: slice
    blocks: torch.Tensor
    keys: int
    mask: torch.Tensor | None


def attend_prompts(step: Step, q: torch.Tensor, out: torch.Tensor, over: Attended) -> None:
    """Attend for the queries of each chunk over what is stored of its prompt, itself included."""
    key = ("prompts", over.window)
    if key not in step.shared:
        step.shared[key] = _list_prompts(step, over.n_kv, over.window)
    for prompt in step.shared[key]:
        rows = q[prompt.rows]
        queries = rows.view(len(rows), over.n_q, -1).transpose(0, 1)[None]
        keys, values = (
            part[:, :, : prompt.keys].repeat_interleave(over.n_q // over.n_kv, 1)
            for part in _gather(step, over, prompt.blocks, 1, rows.dtype)
        )
        found = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=prompt.mask,
            is_causal=prompt.mask is None,
            scale=over.scale,
        )
        out[prompt.rows] = found[0].transpose(0, 1).reshape(len(rows), -1)


def _list_prompts(step: Step, n_kv: int, window: int) -> list[_Prompt]:
    count = step.counts["n_prefill"]
    starts = step.host["seq_starts"][: count + 1].tolist()
    lengths = step.host["seq_lengths"][:count].tolist()
    tables, found = step.arrays["block_tables"], []
    for i, keys in enumerate(lengths):
        rows = slice(starts[i], starts[i + 1])
        width, queries = -(-keys // KV_BLOCK), rows.stop - rows.start
        blocks = _rows_of(tables[i, None, :width].long(), n_kv)
        found.append(_Prompt(rows, blocks, keys, _mask(queries, keys, window, blocks)))
    return found


def _mask(queries: int, keys: int, window: int, like: torch.Tensor) -> torch.Tensor | None:
    """Return which keys the last `queries` positions may see; None where that is plainly causal."""
    if queries == keys and (not window or keys <= window):
        return None
    positions = torch.arange(keys - queries, keys, device=like.device)[:, None]
    places = torch.arange(keys, device=like.device)
    mask = places <= positions
    if window:
        mask &= places > positions - window
    return mask
