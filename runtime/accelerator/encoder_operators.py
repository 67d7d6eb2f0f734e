"""What an encoder's tape does on a torch device: operator to work for tensors.

In: an entry and its operands. Out: what runs it. Products, gathers and their like are those of
decoders (`operators.py`); norms, rotations and means are computed in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F

from dovetail.ir.encoder import EncoderSpec
from dovetail.ir.tape import Entry
from dovetail.runtime.accelerator.operators import (
    Activation,
    bind_gated,
    bind_gather,
    bind_linear,
)
from dovetail.runtime.accelerator.packed_attention import (
    Heads,
    attend_groups,
    attend_varlen,
    find_varlen,
)
from dovetail.runtime.accelerator.tape import Bind, Binder, Step, Work, array, integer, number

LEAST_LENGTH = 1e-12
"""What rows are divided by at least, as the CPU's kernel has it."""

ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "tanh": torch.tanh,
}


def encoder_operators(spec: EncoderSpec) -> dict[str, Bind]:
    """Return what an encoder's tape is made of; products end with its activations."""
    end = ACTIVATIONS[spec.activation]
    head = None if spec.head == "tanh" else ACTIVATIONS[spec.head]  # else an entry of its own
    return {
        "embed_sum": bind_embed_sum,
        "layernorm": bind_layernorm,
        "qkv": bind_linear,
        "rope_rows": bind_rope_rows,
        "packed_attention": bind_attention,
        "gather_rows": bind_gather,
        "o": bind_linear,
        "gate_up": partial(bind_gated, end=end),
        "up": partial(bind_linear, end=end),
        "down": bind_linear,
        "mean_rows": bind_mean,
        "unit_rows": bind_unit,
        "pooler": partial(bind_linear, end=head),
        "activate_rows": bind_tanh,
        "classifier": bind_linear,
    }


def bind_embed_sum(binder: Binder, entry: Entry) -> Work:
    """Add rows of the tables of words, positions and segments that there are; norm the sum."""
    _, hidden, *pairs, scale, bias, eps, out, _ = entry.slots
    columns = integer(hidden)
    tables = [
        (array(ids), held)
        for ids, table in zip(pairs[::2], pairs[1::2], strict=True)
        if (held := binder.weight(table)) is not None
    ]
    w, b, small = binder.weight(scale), binder.weight(bias), number(eps)
    rows = binder.rows(out, columns, entry.m)

    def run(step: Step) -> None:
        count = step.counts[entry.m]
        name, table = tables[0]
        total = F.embedding(step.arrays[name][:count], table).float()
        for name, table in tables[1:]:
            total += F.embedding(step.arrays[name][:count], table)
        rows(step).copy_(total if w is None else F.layer_norm(total, (columns,), w, b, small))

    return run


def bind_layernorm(binder: Binder, entry: Entry) -> Work:
    """Norm rows: out = (x - mean) / sqrt(variance + eps) * w + b."""
    _, hidden, x, _, scale, bias, eps, out, _ = entry.slots
    columns, w, b, small = integer(hidden), binder.need(scale), binder.weight(bias), number(eps)
    source, target = (binder.rows(slot, columns, entry.m) for slot in (x, out))

    def run(step: Step) -> None:
        target(step).copy_(F.layer_norm(source(step).float(), (columns,), w, b, small))

    return run


def bind_rope_rows(binder: Binder, entry: Entry) -> Work:
    """Rotate q and k in place, pairs (c, c + size / 2)."""
    _, qkv, _, heads, size, positions, cos, sin = entry.slots
    count, width, name = integer(heads), integer(size), array(positions)
    rows, half = binder.rows(qkv, count * width, entry.m), integer(size) // 2
    tables = binder.need(cos), binder.need(sin)
    key = ("rotations", tables[0].data_ptr())

    def run(step: Step) -> None:
        if key not in step.shared:  # a table serves several layers
            places = step.arrays[name][: step.counts[entry.m]]
            step.shared[key] = [F.embedding(places, table)[:, None] for table in tables]
        cosine, sine = step.shared[key]
        turned = rows(step).unflatten(1, (count, width))
        left, right = turned[..., :half].float(), turned[..., half:].float()
        first, last = left * cosine - right * sine, right * cosine + left * sine
        turned[..., :half], turned[..., half:] = first, last

    return run


def bind_attention(binder: Binder, entry: Entry) -> Work:
    """Attention of each text within itself, by the best kernel that takes it."""
    _, count, size, scale, reach, slopes, qkv, _, _, out, _ = entry.slots
    heads = Heads(
        integer(count), integer(size), number(scale), integer(reach), binder.weight(slopes)
    )
    width = heads.count * heads.size
    source, target = (
        binder.rows(slot, columns, "n_tokens") for slot, columns in ((qkv, 3 * width), (out, width))
    )
    varlen = find_varlen(binder.device.device, binder.dtype, heads)

    def run(step: Step) -> None:
        if varlen is None:
            attend_groups(step, source(step), target(step), heads)
        else:
            attend_varlen(step, source(step), target(step), heads, varlen)

    return run


def bind_mean(binder: Binder, entry: Entry) -> Work:
    """Take the mean of each text's rows: a product with the shares that rows have in them."""
    _, hidden, starts, x, _, out, _ = entry.slots
    columns, name = integer(hidden), array(starts)
    source = binder.rows(x, columns, "n_tokens")
    target = binder.rows(out, columns, entry.m)

    def run(step: Step) -> None:
        rows = source(step)
        begins = step.arrays[name][: step.counts[entry.m] + 1]
        places = torch.arange(len(rows), device=rows.device)
        inside = (places >= begins[:-1, None]) & (places < begins[1:, None])
        shares = inside.float() / (begins[1:] - begins[:-1])[:, None]
        target(step).copy_(shares @ rows.float())

    return run


def bind_unit(binder: Binder, entry: Entry) -> Work:
    """Divide rows by their lengths."""
    _, hidden, x, _, out, _ = entry.slots
    source, target = (binder.rows(slot, integer(hidden), entry.m) for slot in (x, out))

    def run(step: Step) -> None:
        target(step).copy_(F.normalize(source(step).float(), dim=1, eps=LEAST_LENGTH))

    return run


def bind_tanh(binder: Binder, entry: Entry) -> Work:
    """Take the hyperbolic tangent of rows."""
    _, hidden, x, _, out, _ = entry.slots
    source, target = (binder.rows(slot, integer(hidden), entry.m) for slot in (x, out))

    def run(step: Step) -> None:
        target(step).copy_(torch.tanh(source(step)))

    return run
