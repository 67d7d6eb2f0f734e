"""Random LoRA adapters of saved models, as PEFT writes them, and the models that they make."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from dovetail.compiler.files.checkpoint import open_checkpoint

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "gate_up_proj")


def save_adapter(
    folder: Path,
    base: Path,
    rank: int,
    *,
    seed: int = 0,
    takes: Callable[[str], bool] = lambda _: True,
    **config: Any,
) -> Path:
    """Write an adapter for the linear layers of a model that `takes` names; small eighths."""
    rng = np.random.default_rng([rank, seed])
    tensors = {}
    for name, weight in sorted(open_checkpoint(base).tensors.items()):
        module = name.removesuffix(".weight")
        if module.endswith((*MODULES, *FUSED)) and takes(module):
            for part, shape in (("A", (rank, weight.shape[1])), ("B", (weight.height, rank))):
                values = rng.integers(-8, 9, shape).astype(np.float32) / 32
                tensors[f"base_model.model.{module}.lora_{part}.weight"] = values
    folder.mkdir()
    given = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, **config}
    given["base_model_name_or_path"] = str(base)
    (folder / "adapter_config.json").write_text(json.dumps(given))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def save_merged(folder: Path, base: Path, adapter: Path, scale: float = 2.0) -> Path:
    """Write the model that an adapter makes of its base, as numpy sums it."""
    shutil.copytree(base, folder)
    weights = load_file(base / "model.safetensors")
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in tensors:
        if name.endswith("lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            up = tensors[name.replace("lora_A", "lora_B")].astype(np.float64)
            weight = weights[f"{module}.weight"]
            weights[f"{module}.weight"] = (weight + scale * (up @ tensors[name])).astype(np.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
