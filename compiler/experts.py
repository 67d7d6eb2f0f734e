"""Mixtures of experts in checkpoints: their figures, and one tensor for each matrix of each expert.

In: config.json and tensors as families and GGUF files have them. Out: an `ExpertSpec`, and tensors
by Qwen's names, `mlp.gate.weight` and `mlp.experts.<i>.gate_proj.weight`; others pass unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from dovetail.compiler.checkpoint import Checkpoint, TensorInfo
from dovetail.compiler.config import Config
from dovetail.ir.errors import SpecError
from dovetail.ir.model import PANEL, ExpertSpec

MOST_EXPERTS = 1024
"""Those that the kernel `route` has room for."""
_COUNTS = ("num_experts", "num_local_experts")
"""Keys of the number of experts, by family and version of transformers."""
_NAMES: Mapping[str, tuple[str, ...]] = {
    "block_sparse_moe.gate.weight": ("gate.weight",),
    "block_sparse_moe.router.layer.weight": ("gate.weight",),
    "block_sparse_moe.input_linear.weight": ("gate_proj", "up_proj"),
    "block_sparse_moe.output_linear.weight": ("down_proj",),
    "mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.experts.gate_up_proj.weight": ("gate_proj", "up_proj"),
    "mlp.experts.down_proj": ("down_proj",),
    **{f"mlp.experts.{part}_proj.weight": (f"{part}_proj",) for part in ("gate", "up", "down")},
}
"""Name in a layer to ours; of three dimensions, what the rows of each expert are, equal parts."""
_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)")
_EXPERT = re.compile(r"block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight")


def read_experts(config: Config, *, shared: bool, hidden: int, inner: int) -> ExpertSpec:
    """Return the experts of a configuration.

    shared: the weights of a token's experts sum to 1 unless the configuration says otherwise.
    Raises SpecError for layers without experts among others, and for widths that are no panels.
    """
    key = next((key for key in _COUNTS if config.has(key)), _COUNTS[0])
    count = config.integer(key, 1, MOST_EXPERTS)
    for key, every in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if config.has(key) and config.values[key] != every:
            raise config.fail(key, "but only experts in every layer are supported")
    if hidden % PANEL or inner % PANEL:
        raise SpecError(
            f"{config.name}: experts of {hidden} x {inner} values are not supported, only "
            f"multiples of {PANEL}"
        )
    return ExpertSpec(
        count=count,
        used=config.integer("num_experts_per_tok", 1, count),
        share=config.flag("norm_topk_prob", shared),
    )


def expert_tensors(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with a tensor for each matrix of each expert, by one set of names."""
    tensors = [own for info in checkpoint.tensors.values() for own in _translate(info)]
    return replace(checkpoint, tensors={info.name: info for info in tensors})


def _translate(info: TensorInfo) -> Iterator[TensorInfo]:
    layer = _LAYER.fullmatch(info.name)
    if layer is None:
        yield info
    elif expert := _EXPERT.fullmatch(layer[2]):
        yield replace(info, name=f"{layer[1]}mlp.experts.{expert[1]}.{_MIXTRAL[expert[2]]}.weight")
    elif len(parts := _NAMES.get(layer[2], ())) and len(info.shape) == 3:
        yield from _split(info, f"{layer[1]}mlp.experts", parts)
    elif len(parts) == 1 and len(info.shape) == 2:
        yield replace(info, name=f"{layer[1]}mlp.{parts[0]}")
    else:
        yield info


def _split(info: TensorInfo, name: str, parts: tuple[str, ...]) -> Iterator[TensorInfo]:
    """Yield the matrices of a tensor [experts][rows of all parts][k]."""
    experts, rows, k = info.shape
    count = experts * len(parts)
    if not 1 <= experts <= MOST_EXPERTS or rows % len(parts):  # a header may claim any number
        raise SpecError(
            f"{info.path}: tensor {info.name} of shape {list(info.shape)} is no experts"
        )
    size = (info.end - info.start) // count
    for place in range(count):
        expert, part = divmod(place, len(parts))
        yield replace(
            info,
            name=f"{name}.{expert}.{parts[part]}.weight",
            shape=(rows // len(parts), k),
            start=info.start + place * size,
            end=info.start + (place + 1) * size,
        )
