"""Falcon-H1: attention and a scan side by side in each layer, and what multiplies them.

In: config.json and tensors. Out: specs, and tensors by the names of most families, those that a
product reads or gives multiplied already, as GGUF files have them; others pass unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace as replace_struct

from dovetail.compiler.families.gemma4 import Fields
from dovetail.compiler.families.recurrent import read_scan
from dovetail.compiler.files.checkpoint import Checkpoint, Coded, Rearranged, TensorInfo, map_tensor
from dovetail.compiler.files.config import Config
from dovetail.ir.errors import SpecError
from dovetail.ir.model import RecurrentSpec

FALCON = "FalconH1ForCausalLM"
_MATRIX = re.compile(r"model\.layers\.\d+\.(.+)\.weight")
_NAMES = {
    "feed_forward": "mlp",
    "pre_ff_layernorm": "post_attention_layernorm",
    "final_layernorm": "norm",
}
"""Parts of names to those of most families."""


def read_beside(config: Config, n_layers: int) -> RecurrentSpec:
    """Return the scans, one beside each attention."""
    found = read_scan(config, (True,) * n_layers)
    normed = config.flag("mamba_rms_norm")
    return replace_struct(
        found,
        beside=True,
        norm_groups=found.norm_groups if normed else 0,
        norm_first=config.flag("mamba_norm_before_gate", True),
    )


def read_multipliers(
    config: Config, _kv_heads: int, head_dim: int, _windows: Sequence[bool]
) -> Fields:
    """Return what multiplies scores, the stream and logits."""
    scores = _factor(config, "key") * _factor(config, "attention_in") ** 2
    return {
        "attention_scale": scores * head_dim**-0.5,
        "stream_scale": _factor(config, "embedding"),
        "logits_scale": _factor(config, "lm_head"),
    }


def falcon_tensors(checkpoint: Checkpoint, config: Config) -> Checkpoint:
    """Return the tensors of Falcon-H1, multiplied, by the names of most families."""
    if FALCON not in config.texts("architectures"):
        return checkpoint
    factors, found = _factors(config), {}
    for name, info in checkpoint.tensors.items():
        own = ".".join(_NAMES.get(part, part) for part in name.split("."))
        found[own] = replace(info, name=own)
        module = _MATRIX.fullmatch(own)
        factor = factors.get(module[1]) if module else None
        if factor is not None and factor.shape in ((), info.shape[:1]):  # else its shape is wrong
            if isinstance(info.packed, Coded):
                raise SpecError(
                    f"{info.path}: quantised checkpoints of Falcon-H1 are not supported but for "
                    "FP8; take a GGUF file, or quantise the float model by --weight-dtype"
                )
            scaled = Scaled(info, np.broadcast_to(factor, info.shape[:1]))
            found[own] = replace(found[own], kind=info.dtype.safetensors, packed=scaled)
    return replace(checkpoint, tensors=found)


@dataclass(frozen=True, slots=True)
class Scaled(Rearranged):
    """Rows of a tensor, each times a factor, rounded as the tensor is."""

    info: TensorInfo
    factors: npt.NDArray[np.float32]

    def values(self, first: int, last: int) -> npt.NDArray[Any]:
        """Return rows [first, last) as their tensor's dtype stores them."""
        info = self.info
        rows = info.packed.values(first, last) if info.packed else map_tensor(info)[first:last]
        return info.dtype.narrow(info.dtype.widen(rows) * self.factors[first:last, None])


def _factors(config: Config) -> Mapping[str, npt.NDArray[np.float32] | np.float32]:
    """Return what the rows of matrices are multiplied by.

    What is added to the stream is divided by what this is kept smaller by.
    """
    stream, inward = (_factor(config, name) for name in ("embedding", "ssm_in"))
    gate, down = _list(config, "mlp_multipliers", 2)
    scan = read_beside(config, 1)
    keys = scan.key_heads * scan.key_dim
    parts = np.repeat(
        _list(config, "ssm_multipliers", 5), (scan.width, scan.width, keys, keys, scan.value_heads)
    )
    attention = _factor(config, "attention_in") * _factor(config, "attention_out")
    return {
        "mamba.in_proj": np.float32(inward) * parts.astype(np.float32),
        "mamba.out_proj": np.float32(_factor(config, "ssm_out") / stream),
        "self_attn.o_proj": np.float32(attention / stream),
        "mlp.gate_proj": np.float32(gate),
        "mlp.down_proj": np.float32(down / stream),
    }


def _list(config: Config, key: str, count: int) -> list[float]:
    """Return so many multipliers."""
    listed = config.values.get(key) or [1.0] * count
    if not isinstance(listed, list) or len(listed) != count:
        raise config.fail(key, f"but must be {count} numbers")
    named = Config(config.name, {f"{key}[{i}]": value for i, value in enumerate(listed)})
    return [named.number(each, -1e6, 1e6) for each in named.values]


def _factor(config: Config, name: str) -> float:
    return config.number(f"{name}_multiplier", 1e-6, 1e6, 1.0)
