"""Attention over latent vectors (DeepSeek V2, "MLA"): what config.json says of it, and its tensors.

In: a config.json, a checkpoint, or a ModelSpec. Out: a `LatentSpec`, tensors as ours are, and rows
of the table of tensors. The product that gives K and V of all heads is two here: of each head the
matrix that takes its K into its query, and the one that makes its V of what it attended to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.compiler.families.rope import score_scale
from dovetail.compiler.families.sources import WeightSource
from dovetail.compiler.files.checkpoint import Checkpoint, Rearranged, TensorInfo, map_tensor
from dovetail.compiler.files.config import Config
from dovetail.ir.errors import SpecError
from dovetail.ir.model import PANEL, LatentSpec, ModelSpec, RopeSpec, latent_shapes

INTERLEAVED = "rope_interleave"
"""Whether the rope turns neighbours."""
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
"""Key of a GGUF file: a tenth of mscale_all_dim."""
_LAYER = re.compile(r"(model\.layers\.\d+\.self_attn\.)(\w+)\.weight")
_BOTH, _KEYS, _VALUES = "kv_b_proj", "k_b_proj", "v_b_proj"
"""What gives K and V of all heads, in checkpoints and in GGUF files: there K's are turned."""
_SIGMOIDS = 2
"""Of expert_gating_func in a GGUF file."""
_NEWER = "take a newer file of this model, which has them apart"
_MODULES = {
    "query_in": "q_a_proj",
    "latent": "kv_a_proj_with_mqa",
    "keys": _KEYS,
    "values": _VALUES,
    "o": "o_proj",
}


def read_latent(config: Config) -> tuple[LatentSpec, int]:
    """Return what a layer attends over, and the values of a head that the rope turns."""
    sizes = {
        key: config.integer(key, PANEL, 1 << 14)
        for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    }
    for key, size in sizes.items():
        if size % PANEL:
            raise config.fail(key, f"but must be a multiple of {PANEL}")
    rank, plain, turned, values = sizes.values()
    queries = config.integer("q_lora_rank", 1, 1 << 16) if config.has("q_lora_rank") else 0
    return LatentSpec(rank=rank, plain=plain, values=values, queries=queries), turned


def latent_scale(config: Config, latent: LatentSpec, rope: RopeSpec) -> float:
    """Return what scores are multiplied by: YaRN raises it with the context."""
    usual: float = (latent.plain + rope.rotary_dim) ** -0.5
    return usual * score_scale(config, rope)


def gguf_latent(metadata: Config, rope: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the keys of latent attention; files say deepseek2 of several families.

    names: of tensors. The first files of GLM-4.7 Flash do not tell that scores are sigmoids.
    """
    if not metadata.has("attention.key_length_mla"):
        raise SpecError(f"{metadata.name}: K and V of all heads are one tensor; {_NEWER}")
    turned = metadata.integer("rope.dimension_count", 2, 1 << 14)
    queries = metadata.integer("attention.q_lora_rank", 0, 1 << 16, 0)
    length = metadata.integer("attention.key_length_mla", turned + 1, 1 << 14)
    scale = 10 * metadata.number(LOG_MULTIPLIER, 0.0, 1e6, 0.0)
    keys = "expert_group_count", "expert_group_used_count"
    groups, used = (metadata.integer(key, 0, 1 << 16, 0) for key in keys)
    family = "DeepseekV2ForCausalLM"
    if not metadata.integer("expert_count", 0, 1 << 16, 0):
        family = "YoutuForCausalLM"
    elif metadata.integer("expert_gating_func", 0, 2, 0) == _SIGMOIDS or any(
        name.endswith(".exp_probs_b.bias") for name in names
    ):
        family = "DeepseekV3ForCausalLM"
    return {
        "architectures": [family],
        "kv_lora_rank": metadata.values.get("attention.kv_lora_rank"),
        "q_lora_rank": queries or None,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": length - turned,
        "v_head_dim": metadata.values.get("attention.value_length_mla"),
        "topk_method": "group_limited_greedy",
        "n_group": groups or 1,
        "topk_group": used or 1,
        "rope_parameters": rope | ({"mscale": scale, "mscale_all_dim": scale} if scale else {}),
    }


# ---- tensors ----


@dataclass(frozen=True, slots=True)
class HeadPart(Rearranged):
    """`count` rows from `first` on of the `each` that a tensor has of each head.

    turned: of each head they are columns.
    """

    info: TensorInfo
    each: int
    first: int
    count: int
    turned: bool

    def values(self, first: int, last: int) -> npt.NDArray[Any]:
        """Return rows [first, last)."""
        heads = map_tensor(self.info).reshape(-1, self.each, self.info.shape[1])
        part = heads[:, self.first : self.first + self.count]
        part = part.transpose(0, 2, 1) if self.turned else part
        head, row = np.divmod(np.arange(first, last), part.shape[1])
        rows: npt.NDArray[Any] = part[head, row]
        return rows


def latent_tensors(checkpoint: Checkpoint, config: Config) -> Checkpoint:
    """Return tensors with K's and V's matrices apart, and turned rows as halves."""
    if not config.has("kv_lora_rank"):
        return checkpoint
    latent, turned = read_latent(config)
    heads = config.integer("num_attention_heads", 1, 4096)
    paired = config.flag(INTERLEAVED, True)
    found: dict[str, TensorInfo] = {}
    for info in checkpoint.tensors.values():
        for own in _translate(info, latent, turned if paired else 0, heads):
            found[own.name] = own
    return replace(checkpoint, tensors=found)


def _translate(
    info: TensorInfo, latent: LatentSpec, turned: int, heads: int
) -> Iterator[TensorInfo]:
    """Yield what a tensor is; turned: values of a head that are rotated neighbours."""
    layer = _LAYER.fullmatch(info.name)
    part = layer[2] if layer else ""
    if layer and part == _BOTH:
        yield from _apart(info, layer[1], latent, heads)
    elif part in (_KEYS, _VALUES) and len(info.shape) == 3:  # of GGUF files, [head][rows][columns]
        yield replace(info, shape=(info.shape[0] * info.shape[1], info.shape[2]))
    elif turned and part in ("q_proj", "q_b_proj"):
        _check_rows(info, heads * (latent.plain + turned))
        yield replace(info, heads=heads, turned=turned, skipped=latent.plain)
    elif turned and part == "kv_a_proj_with_mqa":
        _check_rows(info, latent.rank + turned)
        yield replace(info, heads=1, turned=turned, skipped=latent.rank)
    else:
        yield info


def _check_rows(info: TensorInfo, rows: int) -> None:
    if info.packed is not None:
        raise SpecError(f"{info.path}: quantised checkpoints of this family are not supported")
    if len(info.shape) != 2 or info.height != rows:
        raise SpecError(
            f"{info.path}: tensor {info.name} has shape {list(info.shape)}, its configuration "
            f"asks for {rows} rows"
        )


def _apart(info: TensorInfo, layer: str, latent: LatentSpec, heads: int) -> Iterator[TensorInfo]:
    each, rank = latent.plain + latent.values, latent.rank
    if info.quantised and info.packed is None:
        raise SpecError(f"{info.path}: {info.name} has K and V of all heads in blocks; {_NEWER}")
    _check_rows(info, heads * each)
    for name, first, count, turned in (
        (_KEYS, 0, latent.plain, True),
        (_VALUES, latent.plain, latent.values, False),
    ):
        rows, columns = (rank, count) if turned else (count, rank)
        yield replace(
            info,
            name=f"{layer}{name}.weight",
            shape=(heads * rows, columns),
            end=info.start + heads * rows * columns * info.dtype.size,
            packed=HeadPart(info, each, first, count, turned),
        )


def latent_sources(spec: ModelSpec, latent: LatentSpec, layer: int) -> Iterator[WeightSource]:
    """Yield what a layer has in place of q, k, v and o."""
    here, there = f"layers.{layer}", f"model.layers.{layer}.self_attn"
    query = {"query": "q_b_proj" if latent.queries else "q_proj"}
    for name, (n, k) in latent_shapes(spec, latent).items():
        tensor = f"{there}.{(_MODULES | query)[name]}.weight"
        yield WeightSource(f"{here}.{name}", "packed", n, k, (tensor,), (n,))
    norms = {"latent_norm": ("kv_a_layernorm", latent.rank)}
    if latent.queries:
        norms["query_norm"] = ("q_a_layernorm", latent.queries)
    for name, (module, n) in norms.items():
        tensor = f"{there}.{module}.weight"
        yield WeightSource(f"{here}.{name}", "vector", n, 1, (tensor,), (n,))
