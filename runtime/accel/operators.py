"""What a decoder's tape does on a torch device: operator to work for tensors.

In: an entry and its operands. Out: what runs it. Norms, rotations and the choice of tokens are
computed in float32 whatever activations are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.ir.model import DENSE, KV_BLOCK, ModelSpec
from dovetail.ir.tape import Entry, Slot, WeightRef
from dovetail.runtime.accel.experts import expert_operators
from dovetail.runtime.accel.step import Attended, Step
from dovetail.runtime.accel.tape import Bind, Rows, TorchTape, Work, array, integer, number
from dovetail.runtime.machine.abi import ALL_GATHER, ALL_REDUCE

Activation: TypeAlias = Callable[[Tensor], Tensor]


class Slots(NamedTuple):
    """Where rows are stored: their blocks, the places in these, and the blocks that begin."""

    blocks: Tensor
    places: Tensor
    begun: Tensor


def bind_embed(tape: TorchTape, entry: Entry) -> Work:
    """Gather out[t] = table[ids[t]]."""
    _, hidden, ids, table, out, _ = entry.slots
    name, values = array(ids), tape.need(table)
    rows = tape.rows(out, integer(hidden), entry.m)

    def run(step: Step) -> None:
        rows(step).copy_(F.embedding(step.arrays[name][: step.counts[entry.m]], values))

    return run


def bind_rmsnorm(tape: TorchTape, entry: Entry) -> Work:
    """Norm rows: out = x / sqrt(mean(x**2) + eps) * w."""
    _, hidden, x, _, weight, eps, out, _ = entry.slots
    given = (integer(hidden),), tape.need(weight), number(eps)
    return bind_rows(tape, entry, (hidden, x, out), lambda x: F.rms_norm(x.float(), *given))


def bind_layernorm(tape: TorchTape, entry: Entry) -> Work:
    """Norm rows: out = (x - mean) / sqrt(variance + eps) * w + b."""
    _, hidden, x, _, scale, bias, eps, out, _ = entry.slots
    given = (integer(hidden),), tape.need(scale), tape.weight(bias), number(eps)
    return bind_rows(tape, entry, (hidden, x, out), lambda x: F.layer_norm(x.float(), *given))


def bind_rmsnorm_add(tape: TorchTape, entry: Entry) -> Work:
    """Norm rows as `bind_rmsnorm` does, and add them to others, which may then be scaled."""
    _, hidden, x, _, weight, eps, scale, out, _ = entry.slots
    size, norm, factor = (integer(hidden),), tape.need(weight), tape.weight(scale)
    source, target = (tape.rows(slot, size[0], entry.m) for slot in (x, out))

    def run(step: Step) -> None:
        rows = target(step)
        normed = F.rms_norm(source(step).float(), size, norm, number(eps))
        if factor is None:
            rows.add_(normed)
        else:
            rows.copy_(normed.add_(rows).mul_(factor))

    return run


def bind_rmsnorm_parts(tape: TorchTape, entry: Entry) -> Work:
    """Norm each of the equal parts of rows, and add them to others."""
    _, n, hidden, x, _, weight, eps, out, _ = entry.slots
    count, width, norm = integer(n), integer(hidden), tape.need(weight)
    source, target = (tape.rows(slot, count * width, entry.m) for slot in (x, out))

    def run(step: Step) -> None:
        parts = source(step).unflatten(-1, (count, width)).float()
        target(step).add_(F.rms_norm(parts, (width,), norm, number(eps)).flatten(-2))

    return run


def bind_gate(tape: TorchTape, entry: Entry, end: Activation) -> Work:
    """Replace x by end(x * scale) * y."""
    _, hidden, x, _, scale, y, _ = entry.slots
    rows, other = (tape.rows(slot, integer(hidden), entry.m) for slot in (x, y))

    def run(step: Step) -> None:
        at = rows(step)
        at.copy_(end(at.float() * number(scale)) * other(step))

    return run


def bind_cap(tape: TorchTape, entry: Entry) -> Work:
    """Replace x by cap * tanh(x / cap)."""
    _, columns, cap, x, _ = entry.slots
    rows = tape.rows(x, integer(columns), entry.m)
    return lambda step: rows(step).div_(number(cap)).tanh_().mul_(number(cap))


def bind_xielu(tape: TorchTape, entry: Entry) -> Work:
    """Replace x by xIELU of it; see the kernel."""
    _, columns, x, _, weight = entry.slots
    rows, numbers = tape.rows(x, integer(columns), entry.m), tape.need(weight)

    def run(step: Step) -> None:
        at = rows(step)
        y, (p, n), b = at.float(), F.softplus(numbers[:2]), numbers[2]
        at.copy_(torch.where(y > 0, p * y * y, (n + b) * (y.expm1() - y)) + b * y)

    return run


def bind_norm_rows(tape: TorchTape, entry: Entry) -> Work:
    """Norm rows in place."""
    _, hidden, x, _, weight, eps = entry.slots
    given = (integer(hidden),), tape.need(weight), number(eps)
    return bind_rows(tape, entry, (hidden, x, x), lambda x: F.rms_norm(x.float(), *given))


def bind_scaled_add(tape: TorchTape, entry: Entry) -> Work:
    """Add rows times a number to others."""
    _, hidden, x, _, scale, out, _ = entry.slots
    source, target = (tape.rows(slot, integer(hidden), entry.m) for slot in (x, out))
    return lambda step: target(step).add_(source(step), alpha=number(scale))


def bind_rows(
    tape: TorchTape, entry: Entry, rows: tuple[Slot, Slot, Slot], end: Activation
) -> Work:
    """Apply `end` to rows; rows: their columns, where they are, where they go to."""
    columns, x, out = rows
    source, target = (tape.rows(slot, integer(columns), entry.m) for slot in (x, out))

    def run(step: Step) -> None:
        target(step).copy_(end(source(step)))

    return run


def bind_linear(tape: TorchTape, entry: Entry, end: Activation | None = None) -> Work:
    """Multiply: out = end(a W^T + bias) + residual; logits come out as float32."""
    _, n, k, a, _, weight, _, bias, r, _, c, _ = entry.slots[:12]
    multiply = bind_product(tape, weight, bias, integer(n))
    source, target = tape.rows(a, integer(k), entry.m), tape.rows(c, integer(n), entry.m)
    residual = None if r == WeightRef(name=None) else tape.rows(r, integer(n), entry.m)

    def run(step: Step) -> None:
        product = multiply(source(step))
        product = product if end is None else end(product)
        if residual is None:
            target(step).copy_(product)
        else:
            torch.add(product, residual(step), out=target(step))

    return run


def bind_product(tape: TorchTape, weight: Slot, bias: Slot, n: int) -> Callable[[Tensor], Tensor]:
    """Return the product of rows with a weight [n][k], and a bias where there is one.

    Of few rows it is a generated one where that was measured to be faster.
    """
    assert isinstance(weight, WeightRef) and weight.name is not None
    name, w, b = weight.name, tape.need(weight).t(), tape.weight(bias)
    added = None if b is None else b[:n].to(tape.model.dtype)
    generated = tape.model.products

    def multiply(rows: Tensor) -> Tensor:
        own = generated.product(name, len(rows)) if generated is not None else None
        if own is not None:
            return own(rows, added)
        return torch.mm(rows, w) if added is None else torch.addmm(added, rows, w)

    return multiply


def bind_gated(tape: TorchTape, entry: Entry, end: Activation) -> Work:
    """Multiply by both halves of a weight: out = end(a G^T) * (a U^T)."""
    _, n, k, a, _, weight, _, bias, c, _ = entry.slots[:10]
    half = integer(n)
    multiply = bind_product(tape, weight, bias, 2 * half)
    source, target = tape.rows(a, integer(k), entry.m), tape.rows(c, half, entry.m)

    def run(step: Step) -> None:
        both = multiply(source(step))
        torch.mul(end(both[:, :half]), both[:, half:], out=target(step))

    return run


def bind_rope(tape: TorchTape, entry: Entry) -> Work:
    """Norm and rotate q and k in place, pairs (c, c + rot/2), and store k and v of own sequences.

    Rows from `n_stored` on are the CPU's decodes: their k and v are stored there.
    """
    *first, v_norm, _, kpool, vpool = entry.slots
    _, qkv, _, *dims, positions, cos, sin, q_norm, k_norm, eps = first
    n_q, n_kv, size, turned, span = map(integer, dims)
    rows = tape.rows(qkv, (n_q + 2 * n_kv) * size, entry.m)
    turns = bind_turns(tape, entry, positions, (cos, sin)) if turned else None
    norm = bind_head_norms(tape, (q_norm, k_norm, eps), n_q, n_kv)
    plain = ((size,), None, number(eps)) if integer(v_norm) else None
    pools = (tape.layer(kpool), n_q + n_kv), (tape.layer(vpool), n_q + 2 * n_kv)
    slots = _share_slots(tape)

    def run(step: Step) -> None:
        heads = rows(step).view(-1, n_q + 2 * n_kv, size)
        norm(heads)
        if turns is not None:
            turn_pairs(heads[:, : n_q + n_kv], span // 2, *turns(step))
        if plain is not None:
            values = heads[:, n_q + n_kv :]
            values.copy_(F.rms_norm(values.float(), *plain))
        if (stored := step.counts["n_stored"]) and n_kv:
            blocks, places, begun = slots(step)
            for pool, last in pools:
                if len(begun):
                    pool.index_fill_(0, begun, 0)
                pool[blocks, :, places] = heads[:stored, last - n_kv : last].to(pool.dtype)

    return run


def bind_rope_rows(tape: TorchTape, entry: Entry) -> Work:
    """Norm q and k where that is told, and rotate them in place, pairs (c, c + size / 2)."""
    _, qkv, _, *dims, positions, cos, sin, q_norm, k_norm, eps = entry.slots
    n_q, n_kv, size = map(integer, dims)
    rows = tape.rows(qkv, (n_q + n_kv) * size, entry.m)
    turns = bind_turns(tape, entry, positions, (cos, sin))
    norm = bind_head_norms(tape, (q_norm, k_norm, eps), n_q, n_kv)

    def run(step: Step) -> None:
        heads = rows(step).unflatten(1, (n_q + n_kv, size))
        norm(heads)
        turn_pairs(heads, size // 2, *turns(step))

    return run


def bind_head_norms(
    tape: TorchTape, given: tuple[Slot, Slot, Slot], n_q: int, n_kv: int
) -> Callable[[Tensor], None]:
    """Return what norms heads of q and k in place; given: weights, where there are, and epsilon."""
    q_norm, k_norm, eps = given
    small = number(eps)
    parts = (tape.weight(q_norm), 0, n_q), (tape.weight(k_norm), n_q, n_q + n_kv)
    norms = [(weight, first, last) for weight, first, last in parts if weight is not None]

    def norm(heads: Tensor) -> None:
        for weight, first, last in norms:
            part = heads[:, first:last]
            part.copy_(F.rms_norm(part.float(), part.shape[-1:], weight, small))

    return norm


def bind_turns(
    tape: TorchTape, entry: Entry, positions: Slot, pair: tuple[Slot, Slot]
) -> Callable[[Step], list[Tensor]]:
    """Return what gives cosines and sines [T][1][rot/2] of a step, once for layers of one table."""
    name, tables = array(positions), [tape.need(slot) for slot in pair]

    def make() -> tuple[Work, list[Tensor]]:
        device, most = tape.model.device, tape.model.sizes[0]
        held = [device.zeros((most, 1, table.shape[1]), table.dtype) for table in tables]

        def look_up(step: Step) -> None:
            places = step.arrays[name][: step.counts[entry.m]]
            for table, rows in zip(tables, held, strict=True):
                torch.index_select(table, 0, places, out=rows[: len(places), 0])

        return look_up, held

    turns = [Rows(rows, entry.m) for rows in tape.share(("turns", tables[0].data_ptr()), make)]
    return lambda step: [rows(step) for rows in turns]


def turn_pairs(heads: Tensor, apart: int, cosine: Tensor, sine: Tensor) -> None:
    """Rotate heads [T][n][size] in place, pairs (c, c + apart)."""
    half = cosine.shape[-1]
    parts = heads[..., :half], heads[..., apart : apart + half]
    left, right = (part.float() for part in parts)
    first, last = left * cosine - right * sine, right * cosine + left * sine
    parts[0].copy_(first)
    parts[1].copy_(last)


def _share_slots(tape: TorchTape) -> Callable[[Step], Slots]:
    """Return what gives block and place of each row that is stored, and the blocks that begin.

    What a block held before is cleared: hidden keys count as nothing only where they are numbers.
    """
    device, most, pools = tape.model.device, tape.model.sizes[0], tape.model.pools
    assert pools is not None

    def make() -> tuple[Work, list[Slots]]:
        held = [device.zeros((most,), torch.int64) for _ in Slots._fields]
        found: list[Slots] = []

        def divide(step: Step) -> None:
            stored = step.counts["n_stored"]
            slots = step.arrays["kv_slots"][:stored]
            blocks, places, begun = (part[:stored] for part in held)
            torch.div(slots, KV_BLOCK, rounding_mode="floor", out=blocks)
            torch.remainder(slots, KV_BLOCK, out=places)
            if step.recorded:
                begun.copy_(torch.where(places == 0, blocks, pools.unread))
            else:
                rows = step.host["kv_slots"][:stored]
                first = torch.from_numpy(rows[rows % KV_BLOCK == 0] // KV_BLOCK)
                begun = begun[: len(first)]
                begun.copy_(first)
            found[:] = [Slots(blocks, places, begun)]

        return divide, found

    shared = tape.share("slots", make)
    return lambda step: shared[0]


def bind_prefill(tape: TorchTape, entry: Entry, cap: int = 0) -> Work:
    """Attention of prompts over the KV on the device. cap: of scores."""
    s = entry.slots
    assert tape.attention is not None
    return _bind_attention(tape, tape.attention.prompts, s[1:7], (s[7], s[-2]), s[-4:-2], cap)


def bind_decode(tape: TorchTape, entry: Entry, cap: int = 0) -> Work:
    """Attention of the decodes whose KV is on the device. cap: of scores."""
    s = entry.slots
    assert tape.attention is not None
    return _bind_attention(tape, tape.attention.decodes, s[2:8], (s[9], s[-2]), s[-5:-3], cap)


def _bind_attention(
    tape: TorchTape,
    attend: Callable[[Step, Tensor, Tensor, Attended], None],
    given: Sequence[Slot],
    buffers: Sequence[Slot],
    pools: Sequence[Slot],
    cap: int,
) -> Work:
    n_q, n_kv, size, scale, window, sinks = given
    k, v = map(tape.layer, pools)
    heads = integer(n_q), integer(n_kv)
    seen = number(scale), integer(window), k, v, tape.weight(sinks)
    over = Attended(*heads, *seen, cap)
    assert tape.attention is not None
    tape.attention.add(over)
    width = over.n_q * integer(size)
    source, target = (tape.rows(slot, width, "n_tokens") for slot in buffers)

    def run(step: Step) -> None:
        attend(step, source(step), target(step), over)

    return run


def bind_gather(tape: TorchTape, entry: Entry) -> Work:
    """Gather out[r] = x[rows[r]]."""
    _, hidden, picked, x, _, out, _ = entry.slots
    name, columns = array(picked), integer(hidden)
    source = tape.rows(x, columns, "n_tokens")
    target = tape.rows(out, columns, entry.m)

    def run(step: Step) -> None:
        chosen = step.arrays[name][: step.counts[entry.m]]
        target(step).copy_(source(step).index_select(0, chosen))

    return run


def bind_sum(tape: TorchTape, entry: Entry) -> Work:
    """Replace x by its sum over all ranks, made in float32."""
    _, _, columns, x, _ = entry.slots
    rows = tape.rows(x, integer(columns), entry.m)
    return _bind_collective(tape, rows, lambda group, whole: group.all_reduce(whole))


def bind_gather_columns(tape: TorchTape, entry: Entry) -> Work:
    """Give every rank all columns of x, dealt in units of so many columns."""
    _, _, columns, x, _, units, size = entry.slots
    rows, parts = tape.rows(x, integer(columns), entry.m), (integer(units), integer(size))
    return _bind_collective(tape, rows, lambda group, whole: group.all_gather(whole, *parts))


def _bind_collective(
    tape: TorchTape, rows: Callable[[Step], Tensor], share: Callable[[Any, Tensor], object]
) -> Work:
    def run(step: Step) -> None:
        part = rows(step)
        whole = part.float()
        share(tape.collective, whole)
        part.copy_(whole)

    return run


ACTIVATIONS: Mapping[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "tanh": torch.tanh,
}


def _clamp_pair(gate: Tensor, up: Tensor) -> Tensor:
    low = gate.clamp(max=7.0)
    return low * torch.sigmoid(1.702 * low) * (up.clamp(-7.0, 7.0) + 1)


def decoder_operators(spec: ModelSpec) -> dict[str, Bind]:
    """Return what a decoder's forward tape is made of."""
    if spec.activation == "clamped":  # has no MLP without experts
        return {**_DECODER, **expert_operators(_clamp_pair)}
    end = ACTIVATIONS.get(spec.activation, F.silu)  # those of single ups are entries of their own
    gated = dict.fromkeys(("gate_up", DENSE + "gate_up"), partial(bind_gated, end=end))
    experts = expert_operators(lambda gate, up: end(gate) * up) if spec.experts else {}
    attention = {
        "prefill_attention": partial(bind_prefill, cap=spec.attention_cap),
        "decode_attention": partial(bind_decode, cap=spec.attention_cap),
    }
    gate = {"gate_rows": partial(bind_gate, end=end)}
    return {**_DECODER, **attention, **gate, **gated, **experts}


_DECODER: Mapping[str, Bind] = {
    "embed": bind_embed,
    "embed_layers": bind_embed,
    "rmsnorm": bind_rmsnorm,
    "rmsnorm_add": bind_rmsnorm_add,
    "rmsnorm_parts": bind_rmsnorm_parts,
    "scaled_add": bind_scaled_add,
    "layer_inputs": bind_linear,
    "input_gate": bind_linear,
    "input_out": bind_linear,
    "cap_rows": bind_cap,
    "up": bind_linear,
    "xielu_rows": bind_xielu,
    "qkv": bind_linear,
    "layernorm": bind_layernorm,
    "norm_rows": bind_norm_rows,
    "rope_rows": bind_rope_rows,
    "rope_store": bind_rope,
    "prefill_attention": bind_prefill,
    "decode_attention": bind_decode,
    "o": bind_linear,
    "router": bind_linear,
    "down": bind_linear,
    "dense_down": bind_linear,
    "gather_rows": bind_gather,
    "head": bind_linear,
    ALL_REDUCE: bind_sum,
    ALL_GATHER: bind_gather_columns,
}
