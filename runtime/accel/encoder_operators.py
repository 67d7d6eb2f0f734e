"""What an encoder's tape does on a torch device: operator to work for tensors.

In: an entry and its operands. Out: what runs it. Products, gathers and their like are those of
decoders (`operators.py`); norms, rotations and means are computed in float32.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from dovetail.ir.encoder import EncoderSpec
from dovetail.ir.tape import Entry
from dovetail.runtime.accel.operators import (
    ACTIVATIONS,
    Activation,
    bind_embed,
    bind_gated,
    bind_gather,
    bind_layernorm,
    bind_linear,
    bind_rmsnorm,
    bind_rmsnorm_add,
    bind_rope_rows,
    bind_rows,
)
from dovetail.runtime.accel.packed_attention import Heads, attend_groups, attend_varlen, find_varlen
from dovetail.runtime.accel.step import Step
from dovetail.runtime.accel.tape import Bind, TorchTape, Work, array, integer, number

LEAST_LENGTH = 1e-12
"""What rows are divided by at least, as the CPU's kernel has it."""


def encoder_operators(spec: EncoderSpec) -> dict[str, Bind]:
    """Return what an encoder's tape is made of; products end with its activations."""
    end = ACTIVATIONS[spec.activation]
    head = None if spec.head == "tanh" else ACTIVATIONS[spec.head]  # else an entry of its own
    return {
        "embed": bind_embed,
        "embed_sum": bind_embed_sum,
        "layernorm": bind_layernorm,
        "rmsnorm": bind_rmsnorm,
        "rmsnorm_add": bind_rmsnorm_add,
        "qkv": bind_linear,
        "rope_rows": bind_rope_rows,
        "packed_attention": bind_attention,
        "gather_rows": bind_gather,
        "o": bind_linear,
        "gate_up": partial(bind_gated, end=end),
        "up": partial(bind_linear, end=end),
        "down": bind_linear,
        "mean_rows": bind_mean,
        "unit_rows": partial(bind_each, end=unit_rows),
        "pooler": partial(bind_linear, end=head),
        "activate_rows": partial(bind_each, end=torch.tanh),
        "classifier": bind_linear,
        "dense": bind_linear,
    }


def bind_embed_sum(tape: TorchTape, entry: Entry) -> Work:
    """Add rows of the tables of words, positions and segments that there are; norm the sum."""
    _, hidden, *pairs, scale, bias, eps, out, _ = entry.slots
    columns = integer(hidden)
    tables = [
        (array(ids), held)
        for ids, table in zip(pairs[::2], pairs[1::2], strict=True)
        if (held := tape.weight(table)) is not None
    ]
    w, b, small = tape.weight(scale), tape.weight(bias), number(eps)
    rows = tape.rows(out, columns, entry.m)

    def run(step: Step) -> None:
        count = step.counts[entry.m]
        name, table = tables[0]
        total = F.embedding(step.arrays[name][:count], table).float()
        for name, table in tables[1:]:
            total += F.embedding(step.arrays[name][:count], table)
        rows(step).copy_(total if w is None else F.layer_norm(total, (columns,), w, b, small))

    return run


def bind_attention(tape: TorchTape, entry: Entry) -> Work:
    """Attention of each text within itself, by the best kernel that takes it."""
    _, count, keys, size, scale, reach, causal, bias, _, qkv, _, _, out, _ = entry.slots
    heads = Heads(
        count=integer(count),
        keys=integer(keys),
        size=integer(size),
        scale=number(scale),
        reach=integer(reach),
        causal=integer(causal) > 0,
        bias=tape.weight(bias),
    )
    sizes = ((qkv, heads.columns), (out, heads.count * heads.size))
    source, target = (tape.rows(slot, columns, "n_tokens") for slot, columns in sizes)
    varlen = find_varlen(tape.model.device.device, tape.model.dtype, heads)

    def run(step: Step) -> None:
        if varlen is None:
            attend_groups(step, source(step), target(step), heads)
        else:
            attend_varlen(step, source(step), target(step), heads, varlen)

    return run


def bind_mean(tape: TorchTape, entry: Entry) -> Work:
    """Take the mean of each text's rows: a product with the shares that rows have in them."""
    _, hidden, starts, x, _, out, _ = entry.slots
    columns, name = integer(hidden), array(starts)
    source = tape.rows(x, columns, "n_tokens")
    target = tape.rows(out, columns, entry.m)

    def run(step: Step) -> None:
        rows = source(step)
        begins = step.arrays[name][: step.counts[entry.m] + 1]
        places = torch.arange(len(rows), device=rows.device)
        inside = (places >= begins[:-1, None]) & (places < begins[1:, None])
        shares = inside.float() / (begins[1:] - begins[:-1])[:, None]
        target(step).copy_(shares @ rows.float())

    return run


def bind_each(tape: TorchTape, entry: Entry, end: Activation) -> Work:
    """Apply `end` to rows."""
    _, hidden, x, _, out, _ = entry.slots
    return bind_rows(tape, entry, (hidden, x, out), end)


def unit_rows(x: torch.Tensor) -> torch.Tensor:
    """Divide rows by their lengths."""
    return F.normalize(x.float(), dim=1, eps=LEAST_LENGTH)
