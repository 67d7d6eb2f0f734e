"""Which part of each weight a rank needs: rows and columns of the unpacked matrices.

In: a model's whole forward tape and a `Shard`. Out: `WeightShare`s by name, for a device that holds
a copy of its rank's weights (Megatron's scheme, as `shard.py` cuts the tape).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dovetail.ir.model import ModelSpec
from dovetail.ir.tape import Tape, WeightRef
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
        share, operands = find(spec, shard), dict(zip(slots(entry.op), entry.slots, strict=True))
        rows = WeightShare(share.rows)
        for name, part in (("B", share), ("bias", rows), ("sinks", rows)):
            ref = operands.get(name)
            if isinstance(ref, WeightRef) and ref.name is not None:
                found[ref.name] = part
    return found


def _share_qkv(spec: ModelSpec, shard: Shard) -> WeightShare:
    starts = (0, spec.n_heads, spec.n_heads + spec.n_kv_heads)
    parts = (shard.heads, shard.kv_heads, shard.kv_heads)
    heads = [base + np.array(part) for base, part in zip(starts, parts, strict=True)]
    rows = np.concatenate(heads)[:, None] * spec.head_dim + np.arange(spec.head_dim)
    return WeightShare(rows.reshape(-1))


def _share_gate_up(spec: ModelSpec, shard: Shard) -> WeightShare:
    size, matrices = spec.intermediate_size, spec.experts.count if spec.experts else 1
    gate = (np.arange(matrices)[:, None] * size + np.array(shard.inner)).reshape(-1)
    return WeightShare(np.concatenate([gate, gate + matrices * size]))


def _share_columns(columns: range) -> WeightShare:
    return WeightShare(columns=slice(columns.start, columns.stop))


_SHARES: dict[str, Callable[[ModelSpec, Shard], WeightShare]] = {
    "decode_attention": lambda _, shard: WeightShare(slice(shard.heads.start, shard.heads.stop)),
    "qkv": _share_qkv,
    "o": lambda spec, shard: _share_columns(head_columns(spec, shard)),
    "gate_up": _share_gate_up,
    "down": lambda _, shard: _share_columns(shard.inner),
    "head": lambda _, shard: WeightShare(slice(shard.vocab.start, shard.vocab.stop)),
}
