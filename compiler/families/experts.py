"""Mixtures of experts in checkpoints: one tensor for each matrix of each expert.

In: tensors as families and GGUF files have them. Out: tensors by one set of names,
`mlp.gate.weight`, `mlp.experts.<i>.gate_proj.weight` and `mlp.shared_experts.gate_proj.weight`;
others pass unchanged.
In gpt-oss gates and ups are rows in turns, of matrices that are turned, or in blocks of MXFP4.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.compiler.families.mixtures import MOST_EXPERTS
from dovetail.compiler.files.checkpoint import Checkpoint, TensorInfo, map_tensor
from dovetail.compiler.files.gguf_blocks import FORM_OF_KIND, MX_BYTES, MXFP4, scale_codes
from dovetail.ir.block_format import Blocks
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.errors import SpecError

CHOICE = "gate.e_score_correction_bias"
"""Of a router, what is added to scores to choose by."""
GATE = "shared_expert_gate.weight"
"""The row that gates the MLP beside experts."""
_NAMES = {
    "shared_mlp.input_linear.weight": "gate_up_proj.weight",
    "shared_mlp.output_linear.weight": "down_proj.weight",
    "block_sparse_moe.gate.weight": "gate.weight",
    "block_sparse_moe.router.layer.weight": "gate.weight",
    "mlp.router.weight": "gate.weight",
    "router.proj.weight": "gate.weight",
    "mlp.router.bias": "gate.bias",
    "mlp.gate.wg.weight": "gate.weight",
    "mlp.moe_statics.e_score_correction_bias": CHOICE,
    "mlp.gate.moe_statics.e_score_correction_bias": CHOICE,
}
"""Name in a layer to ours in its MLP, of routers and of the MLP that all tokens of Granite take."""
_SHARED = re.compile(r"mlp\.shared_(?:experts?|mlp)\.(.+)")
_STACKED: Mapping[str, tuple[str, ...]] = {
    "block_sparse_moe.input_linear.weight": ("gate_proj", "up_proj"),
    "block_sparse_moe.output_linear.weight": ("down_proj",),
    "mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),
    "experts.gate_up_proj": ("gate_proj", "up_proj"),
    "experts.down_proj": ("down_proj",),
    "mlp.experts.gate_up_proj.weight": ("gate_proj", "up_proj"),
    "mlp.experts.down_proj": ("down_proj",),
    "mlp.experts.up_proj": ("up_proj",),
    **{
        f"mlp.experts.{part}_proj.{kind}": (f"{part}_proj",)
        for part in ("gate", "up", "down")
        for kind in ("weight", "bias")
    },
}
"""Name in a layer to what the rows of each expert are, equal parts: of matrices, or of biases."""
_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)")
_EXPERT = re.compile(r"block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight")
_OSS = re.compile(r"mlp\.experts\.(gate_up|down)_proj(_bias|_blocks|_scales|)")
_OSS_MARK = "mlp.experts.gate_up_proj_bias"
"""A tensor in each layer of gpt-oss, and of nothing else that has experts."""
_OSS_SHAPES = {"": 3, "_bias": 2, "_blocks": 4}


def expert_tensors(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with a tensor for each matrix of each expert, by one set of names."""
    known = checkpoint.tensors
    tensors = [own for info in known.values() for own in _translate(info, known)]
    return replace(checkpoint, tensors={info.name: info for info in tensors})


def module_name(name: str) -> str:
    """Return our name of a router or of the MLP that all tokens of Granite take."""
    layer = _LAYER.fullmatch(name)
    own = _NAMES.get(layer[2]) if layer else None
    return f"{layer[1]}mlp.{own}" if layer and own else name


def _translate(info: TensorInfo, known: Mapping[str, TensorInfo]) -> Iterator[TensorInfo]:
    layer = _LAYER.fullmatch(info.name)
    if layer is None:
        yield info
    elif expert := _EXPERT.fullmatch(layer[2]):
        yield replace(info, name=f"{layer[1]}mlp.experts.{expert[1]}.{_MIXTRAL[expert[2]]}.weight")
    elif (own := _OSS.fullmatch(layer[2])) and layer[1] + _OSS_MARK in known:
        parts = ("gate_proj", "up_proj") if own[1] == "gate_up" else ("down_proj",)
        yield from _pick_rows(info, f"{layer[1]}mlp.experts", parts, own[2], known)
    elif layer[2] in _NAMES:
        yield _flat(replace(info, name=module_name(info.name)))
    elif shared := _SHARED.fullmatch(layer[2]):
        yield replace(info, name=f"{layer[1]}mlp.shared_experts.{shared[1]}")
    elif layer[2] == f"mlp.{GATE}" and len(info.shape) == 1:  # of GGUF files
        yield replace(info, shape=(1, *info.shape))
    elif len(info.shape) == (2 if layer[2].endswith(".bias") else 3) and layer[2] in _STACKED:
        yield from _split(info, f"{layer[1]}mlp.experts", _STACKED[layer[2]])
    else:
        yield info


def _flat(info: TensorInfo) -> TensorInfo:
    """Return a vector that is stored as a matrix of one row as it is."""
    row = info.name.endswith(CHOICE) and len(info.shape) == 2 and info.shape[0] == 1
    return replace(info, shape=info.shape[1:]) if row else info


def _split(info: TensorInfo, name: str, parts: tuple[str, ...]) -> Iterator[TensorInfo]:
    """Yield the matrices of a tensor [experts][rows of all parts][k], or its biases."""
    experts, rows, *k = info.shape
    kind = "weight" if k else "bias"
    _check_experts(info, parts)
    count = experts * len(parts)
    size = (info.end - info.start) // count
    for place in range(count):
        expert, part = divmod(place, len(parts))
        yield replace(
            info,
            name=f"{name}.{expert}.{parts[part]}.{kind}",
            shape=(rows // len(parts), *k),
            start=info.start + place * size,
            end=info.start + (place + 1) * size,
        )


def _check_experts(info: TensorInfo, parts: tuple[str, ...]) -> None:
    experts, rows = info.shape[:2]
    if not 1 <= experts <= MOST_EXPERTS or rows % len(parts):  # a header may claim any number
        raise SpecError(
            f"{info.path}: tensor {info.name} of shape {list(info.shape)} is no experts"
        )


# ---- gpt-oss ----


@dataclass(frozen=True, slots=True)
class PickedRows:
    """Each `step`-th row, from `first` on, of one expert's part of a tensor.

    turned: the part is stored with its rows as columns.
    """

    info: TensorInfo
    expert: int
    first: int
    step: int
    turned: bool = False

    def values(self, first: int, last: int) -> npt.NDArray[Any]:
        """Return rows [first, last) as they are stored."""
        part = map_tensor(self.info)[self.expert]
        rows: npt.NDArray[Any] = (part.T if self.turned else part)[self.first :: self.step]
        return rows[first:last]


@dataclass(frozen=True, slots=True)
class MxRows:
    """Rows of MXFP4: pairs of codes in bytes [groups][16], and an exponent for each group."""

    pairs: PickedRows
    exponents: PickedRows

    def blocks(self, first: int, last: int) -> Blocks:
        """Return rows [first, last) as codes and scales."""
        pairs = self.pairs.values(first, last)
        codes = np.stack((pairs & 15, pairs >> 4), -1).reshape(last - first, -1)
        return scale_codes(codes, self.exponents.values(first, last))

    def values(self, first: int, last: int) -> npt.NDArray[Any]:
        """Return the same rows as float32."""
        return FORM_OF_KIND[MXFP4].values(self.blocks(first, last))


def _pick_rows(
    info: TensorInfo,
    name: str,
    parts: tuple[str, ...],
    kind: str,
    known: Mapping[str, TensorInfo],
) -> Iterator[TensorInfo]:
    """Yield each matrix or bias of gpt-oss's experts; `kind`: what the tensor's name ends in."""
    if kind == "_scales":
        return  # they are read with their blocks
    turned, blocks = kind == "", kind == "_blocks"
    if len(info.shape) != _OSS_SHAPES[kind]:
        raise SpecError(f"{info.path}: tensor {info.name} has a shape of {list(info.shape)}")
    experts, *shape = info.shape
    rows, *k = shape[::-1] if turned else shape
    _check_experts(replace(info, shape=(experts, rows)), parts)
    scales = _find_scales(info, known) if blocks else info
    own = replace(info, dtype=DTYPES["f32"], kind=MXFP4) if blocks else info
    size = (info.end - info.start) // (experts * len(parts))
    for place in range(experts * len(parts)):
        expert, part = divmod(place, len(parts))
        where = expert, part, len(parts), turned
        picked = PickedRows(info, *where)
        yield replace(
            own,
            name=f"{name}.{expert}.{parts[part]}.{'bias' if kind == '_bias' else 'weight'}",
            shape=(rows // len(parts), *((2 * k[0] * k[1],) if blocks else k)),
            start=info.start + place * size,
            end=info.start + (place + 1) * size,
            packed=MxRows(picked, PickedRows(scales, *where)) if blocks else picked,
        )


def _find_scales(info: TensorInfo, known: Mapping[str, TensorInfo]) -> TensorInfo:
    """Return the tensor of exponents beside one of blocks."""
    name = info.name.removesuffix("_blocks") + "_scales"
    found = known.get(name)
    if (
        found is None
        or found.shape != info.shape[:3]
        or info.shape[3] != MX_BYTES
        or {info.dtype.name, found.dtype.name} != {"u8"}
    ):
        raise SpecError(f"{info.path}: tensors {info.name} and {name} are no blocks of MXFP4")
    return found
