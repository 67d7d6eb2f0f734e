"""Queries and keys whose rope turns neighbours, read in the order in which ours turns halves.

In: a checkpoint with the rows of each head as rotated pairs, (0, 1), (2, 3), ... Out: the same
with `TensorInfo.heads` set, so that rows come as (0, 2, ..., 1, 3, ...).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from dovetail.compiler.families.decoders import FAMILIES
from dovetail.compiler.families.rope import turned_share
from dovetail.compiler.files.checkpoint import Checkpoint, TensorInfo
from dovetail.compiler.files.config import Config
from dovetail.ir.errors import SpecError

_HEADS = {"q": "num_attention_heads", "k": "num_key_value_heads"}
_ROTATED = re.compile(r"model\.layers\.\d+\.self_attn\.([qk])_proj\.(?:weight|bias)")


def halves(checkpoint: Checkpoint, config: Config) -> Checkpoint:
    """Return the tensors of a directory as ours are; most families have them so."""
    found = [FAMILIES[name] for name in config.texts("architectures") if name in FAMILIES]
    if not found or not found[0].neighbours:
        return checkpoint
    share = turned_share(config, found[0].partial)
    return replace(checkpoint, tensors=pair_heads(checkpoint.tensors, config, share))


def pair_heads(
    tensors: Mapping[str, TensorInfo], config: Config, share: float = 1.0
) -> dict[str, TensorInfo]:
    """Return the tensors with those of queries and keys marked; share: of a head that is pairs.

    Raises SpecError for rows that cannot be cut into heads of pairs.
    """
    return {name: _mark(info, config, share) for name, info in tensors.items()}


def _mark(info: TensorInfo, config: Config, share: float) -> TensorInfo:
    rotated = _ROTATED.fullmatch(info.name)
    if rotated is None:
        return info
    heads = config.integer(_HEADS[rotated[1]], 1, 4096)
    if info.packed is not None:
        raise SpecError(f"{info.path}: quantised checkpoints of this family are not supported")
    if info.height % (2 * heads):
        raise SpecError(
            f"{info.path}: the rows of tensor {info.name} are no {heads} heads of pairs"
        )
    return replace(info, heads=heads, turned=int(info.height // heads * share + 1e-6))
