"""What a decoder's tape does on a torch device: operator to work for tensors.

In: an entry and its operands. Out: what runs it. Norms, rotations and the choice of tokens are
computed in float32 whatever activations are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.ir.model import KV_BLOCK
from dovetail.ir.tape import Entry, Slot, WeightRef
from dovetail.runtime.abi import ALL_GATHER, ALL_REDUCE
from dovetail.runtime.accelerator.attention import attend_decodes, attend_prompts
from dovetail.runtime.accelerator.tape import Bind, Binder, Step, Work, array, integer, number

Activation: TypeAlias = Callable[[Tensor], Tensor]


def bind_embed(binder: Binder, entry: Entry) -> Work:
    """Gather out[t] = table[ids[t]]."""
    _, hidden, ids, table, out, _ = entry.slots
    name, values = array(ids), binder.need(table)
    rows = binder.rows(out, integer(hidden), entry.m)

    def run(step: Step) -> None:
        rows(step).copy_(F.embedding(step.arrays[name][: step.counts[entry.m]], values))

    return run


def bind_rmsnorm(binder: Binder, entry: Entry) -> Work:
    """Norm rows: out = x / sqrt(mean(x**2) + eps) * w."""
    _, hidden, x, _, weight, eps, out, _ = entry.slots
    columns, w, small = integer(hidden), binder.need(weight), number(eps)
    source, target = (binder.rows(slot, columns, entry.m) for slot in (x, out))

    def run(step: Step) -> None:
        target(step).copy_(F.rms_norm(source(step).float(), (columns,), w, small))

    return run


def bind_linear(binder: Binder, entry: Entry, end: Activation | None = None) -> Work:
    """Multiply: out = end(a W^T + bias) + residual."""
    _, n, k, a, _, weight, _, bias, r, _, c, _ = entry.slots[:12]
    multiply = bind_product(binder, weight, bias, integer(n))
    source, target = binder.rows(a, integer(k), entry.m), binder.rows(c, integer(n), entry.m)
    residual = None if r == WeightRef(name=None) else binder.rows(r, integer(n), entry.m)

    def run(step: Step) -> None:
        product = multiply(source(step))
        product = product if end is None else end(product)
        if residual is None:
            target(step).copy_(product)
        else:
            torch.add(product, residual(step), out=target(step))

    return run


def bind_product(binder: Binder, weight: Slot, bias: Slot, n: int) -> Callable[[Tensor], Tensor]:
    """Return the product of rows with a weight [n][k], and a bias where there is one.

    Of few rows it is a generated one where that was measured to be faster.
    """
    assert isinstance(weight, WeightRef) and weight.name is not None
    name, w, b = weight.name, binder.need(weight).t(), binder.weight(bias)
    added = None if b is None else b[:n].to(binder.dtype)
    generated = binder.products

    def multiply(rows: Tensor) -> Tensor:
        own = generated.product(name, len(rows)) if generated is not None else None
        if own is not None:
            return own(rows, added)
        return torch.mm(rows, w) if added is None else torch.addmm(added, rows, w)

    return multiply


def bind_gated(binder: Binder, entry: Entry, end: Activation = F.silu) -> Work:
    """Multiply by both halves of a weight: out = end(a G^T) * (a U^T)."""
    _, n, k, a, _, weight, _, bias, c, _ = entry.slots[:10]
    half = integer(n)
    multiply = bind_product(binder, weight, bias, 2 * half)
    source, target = binder.rows(a, integer(k), entry.m), binder.rows(c, half, entry.m)

    def run(step: Step) -> None:
        both = multiply(source(step))
        torch.mul(end(both[:, :half]), both[:, half:], out=target(step))

    return run


def bind_rope(binder: Binder, entry: Entry) -> Work:
    """Norm and rotate q and k in place, pairs (c, c + rot/2), and store k and v of own sequences.

    Rows from `n_stored` on are the CPU's decodes: their k and v are stored there.
    """
    _, qkv, _, *dims, _, cos, sin, q_norm, k_norm, eps, _, kpool, vpool = entry.slots
    n_q, n_kv, size, turned = map(integer, dims)
    rows = binder.rows(qkv, (n_q + 2 * n_kv) * size, entry.m)
    tables = binder.need(cos), binder.need(sin)
    norms = [(binder.weight(q_norm), 0, n_q), (binder.weight(k_norm), n_q, n_q + n_kv)]
    small, half = number(eps), turned // 2
    pools = (binder.layer(kpool), n_q + n_kv), (binder.layer(vpool), n_q + 2 * n_kv)

    def run(step: Step) -> None:
        heads = rows(step).view(-1, n_q + 2 * n_kv, size)
        for weight, first, last in norms:
            if weight is not None:
                part = heads[:, first:last]
                part.copy_(F.rms_norm(part.float(), (size,), weight, small))
        cosine, sine = _rotations(step, tables, entry.m)
        turn = heads[:, : n_q + n_kv].float()
        left, right = turn[..., :half], turn[..., half:turned]
        turned_left = left * cosine - right * sine
        turned_right = right * cosine + left * sine
        heads[:, : n_q + n_kv, :half] = turned_left
        heads[:, : n_q + n_kv, half:turned] = turned_right
        if stored := step.counts["n_stored"]:
            blocks, places, begun = _slots(step, stored)
            for pool, last in pools:
                if len(begun):
                    pool.index_fill_(0, begun, 0)
                pool[blocks, :, places] = heads[:stored, last - n_kv : last].to(pool.dtype)

    return run


def _rotations(
    step: Step, tables: tuple[torch.Tensor, torch.Tensor], count: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines [T][1][rot/2] of a step's positions, once for all layers."""
    if "rotations" not in step.shared:
        positions = step.arrays["positions"][: step.counts[count]]
        step.shared["rotations"] = [F.embedding(positions, t)[:, None] for t in tables]
    cosine, sine = step.shared["rotations"]
    return cosine, sine


def _slots(step: Step, stored: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return block and place of the rows that are stored, and the blocks that these begin.

    What a block held before is cleared: hidden keys count as nothing only where they are numbers.
    """
    if "slots" not in step.shared:
        slots = step.arrays["kv_slots"][:stored]
        held = step.host["kv_slots"][:stored]
        begun = torch.from_numpy(held[held % KV_BLOCK == 0] // KV_BLOCK).to(slots.device)
        step.shared["slots"] = slots // KV_BLOCK, slots % KV_BLOCK, begun
    blocks, places, begun = step.shared["slots"]
    return blocks, places, begun


def bind_prefill(binder: Binder, entry: Entry) -> Work:
    """Attention of prompts over the KV on the device."""
    n_q, n_kv, size, scale, window, qkv, _, *_, kpool, vpool, out, _ = entry.slots[1:]
    heads, width = (integer(n_q), integer(n_kv)), integer(size)
    source = binder.rows(qkv, heads[0] * width, "n_tokens")
    target = binder.rows(out, heads[0] * width, "n_tokens")
    pools, given = (binder.layer(kpool), binder.layer(vpool)), (number(scale), integer(window))

    def run(step: Step) -> None:
        attend_prompts(step, source(step), target(step), heads, pools, *given)

    return run


def bind_decode(binder: Binder, entry: Entry) -> Work:
    """Attention of the decodes whose KV is on the device."""
    n_q, n_kv, size, scale, window, _, qkv, _, *_, kpool, vpool, _, out, _ = entry.slots[2:]
    heads, width = (integer(n_q), integer(n_kv)), integer(size)
    source = binder.rows(qkv, heads[0] * width, "n_tokens")
    target = binder.rows(out, heads[0] * width, "n_tokens")
    pools, given = (binder.layer(kpool), binder.layer(vpool)), (number(scale), integer(window))

    def run(step: Step) -> None:
        attend_decodes(step, source(step), target(step), heads, pools, *given)

    return run


def bind_gather(binder: Binder, entry: Entry) -> Work:
    """Gather out[r] = x[rows[r]]."""
    _, hidden, picked, x, _, out, _ = entry.slots
    name, columns = array(picked), integer(hidden)
    source = binder.rows(x, columns, "n_tokens")
    target = binder.rows(out, columns, entry.m)

    def run(step: Step) -> None:
        chosen = step.arrays[name][: step.counts[entry.m]]
        target(step).copy_(source(step).index_select(0, chosen))

    return run


def bind_head(binder: Binder, entry: Entry) -> Work:
    """Multiply: logits = a W^T, in float32."""
    _, n, k, a, _, weight, _, bias, *_ = entry.slots
    multiply = bind_product(binder, weight, bias, integer(n))
    source = binder.rows(a, integer(k), entry.m)
    target = binder.rows(entry.slots[10], integer(n), entry.m)

    def run(step: Step) -> None:
        target(step).copy_(multiply(source(step)))

    return run


def bind_sum(binder: Binder, entry: Entry) -> Work:
    """Replace x by its sum over all ranks, made in float32."""
    _, _, columns, x, _ = entry.slots
    rows = binder.rows(x, integer(columns), entry.m)

    def run(step: Step) -> None:
        part = rows(step)
        whole = part.float()
        binder.group().all_reduce(whole)
        part.copy_(whole)

    return run


def bind_gather_columns(binder: Binder, entry: Entry) -> Work:
    """Give every rank all columns of x, dealt in units of so many columns."""
    _, _, columns, x, _, units, size = entry.slots
    rows, parts = binder.rows(x, integer(columns), entry.m), (integer(units), integer(size))

    def run(step: Step) -> None:
        part = rows(step)
        whole = part.float()
        binder.group().all_gather(whole, *parts)
        part.copy_(whole)

    return run


DECODER: Mapping[str, Bind] = {
    "embed": bind_embed,
    "rmsnorm": bind_rmsnorm,
    "qkv": bind_linear,
    "rope_store": bind_rope,
    "prefill_attention": bind_prefill,
    "decode_attention": bind_decode,
    "o": bind_linear,
    "gate_up": bind_gated,
    "down": bind_linear,
    "gather_rows": bind_gather,
    "head": bind_head,
    ALL_REDUCE: bind_sum,
    ALL_GATHER: bind_gather_columns,
}
"""What every decoder's forward tape is made of."""
