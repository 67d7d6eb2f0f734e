"""Which part of each weight a rank needs: rows and columns of the unpacked matrices.

In: a model's whole forward tape and a `Shard`. Out: `WeightShare`s by name, for a device that holds
a copy of its rank's weights (Megatron's scheme, as `shard.py` cuts the tape).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dovetail.ir.model import ModelSpec
from dovetail.ir.tape import Entry, IntConst, Slot, Tape, WeightRef
from dovetail.runtime.native.shard import Shard, Slots, head_columns

Places: TypeAlias = npt.NDArray[np.int64]
ALL = slice(None)


class WeightShare(NamedTuple):
    """Which rows [n] and columns [k] of a weight, unpacked, a rank has; those of its bias too."""

    rows: slice | Places = ALL
    columns: slice = ALL


def weight_shares(
    tape: Tape, spec: ModelSpec, slots: Slots, shard: Shard
) -> dict[str, WeightShare]:
    """Return what a rank needs of each weight by name, of those that it needs in part.

    Unpacked weights have gate before up (`accel/weights.py`).
    """
    found: dict[str, WeightShare] = {}
    for entry in tape.entries:
        if (find := _SHARES.get(entry.op)) is None:
            continue
        operands = dict(zip(slots(entry.op), entry.slots, strict=True))
        share = find(_Product(spec, shard, entry, operands))
        rows = WeightShare(share.rows)
        for name, part in (("B", share), ("bias", rows), ("sinks", rows)):
            ref = operands.get(name)
            if isinstance(ref, WeightRef) and ref.name is not None:
                found[ref.name] = part
    return found


class _Product(NamedTuple):
    """An entry that reads a weight, and the rank's part of the model."""

    spec: ModelSpec
    shard: Shard
    entry: Entry
    operands: Mapping[str, Slot]

    def inner(self, name: str) -> tuple[int, range]:
        """Return the inner columns of the whole, as the operand `name` says, and of the rank."""
        columns = self.operands[name]
        assert isinstance(columns, IntConst)
        return columns.value, self.shard.inner(columns.value)


def _share_qkv(product: _Product) -> WeightShare:
    spec, shard = product.spec, product.shard
    starts = (0, spec.n_heads, spec.n_heads + spec.n_kv_heads)
    parts = (shard.heads, shard.kv_heads, shard.kv_heads)
    heads = [base + np.array(part) for base, part in zip(starts, parts, strict=True)]
    rows = np.concatenate(heads)[:, None] * spec.head_dim + np.arange(spec.head_dim)
    return WeightShare(rows.reshape(-1))


def _share_gate_up(product: _Product) -> WeightShare:
    size, inner = product.inner("N")
    matrices = product.entry.groups.count if product.entry.groups else 1
    gate = (np.arange(matrices)[:, None] * size + np.array(inner)).reshape(-1)
    return WeightShare(np.concatenate([gate, gate + matrices * size]))


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)


_SHARES: dict[str, Callable[[_Product], WeightShare]] = {
    "decode_attention": lambda product: WeightShare(_slice(product.shard.heads)),
    "qkv": _share_qkv,
    "o": lambda product: WeightShare(columns=_slice(head_columns(product.spec, product.shard))),
    **dict.fromkeys(("gate_up", "dense_gate_up"), _share_gate_up),
    **dict.fromkeys(
        ("down", "dense_down"),
        lambda product: WeightShare(columns=_slice(product.inner("K")[1])),
    ),
    "head": lambda product: WeightShare(_slice(product.shard.vocab)),
}
