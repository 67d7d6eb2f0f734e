"""Quantised checkpoints for tests, written value by value as their libraries lay them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gguf_files import read_state

GROUP = 64
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False},
    "gptq-order": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
    "gptq-8": {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "sym": True},
    "gptq8-order": {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": True},
    "gptq-zeros": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False},
    "gptq-v2": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    "autoround": {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "bits": 4,
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
    "packed": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "packed-order": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "packed-8": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "packed-zeros": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "int8": {"quant_method": "compressed-tensors", "format": "int-quantized"},
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "fp4": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "bytes": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "fp8-rows": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "fp8-whole": {"quant_method": "fp8", "activation_scheme": "static"},
    "fp8-blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
"""A name to what config.json says of such a checkpoint."""
ZEROS = ("gptq-zeros", "gptq-order", "awq", "packed-zeros")


def pack_words(codes: np.ndarray, bits: int, order: list[int] | None = None) -> np.ndarray:
    """Return int32 words of neighbours along the last axis, padded with 0, the first lowest."""
    share = 32 // bits
    rows = np.pad(codes, ((0, 0), (0, -codes.shape[1] % share)))
    words = np.zeros((len(rows), rows.shape[1] // share), np.uint32)
    for i in range(share):
        column = order[i] if order else i
        words |= rows[:, column::share].astype(np.uint32) << np.uint32(bits * i)
    return words.view(np.int32)


def quantised(values: np.ndarray, bits: int, zeros: bool) -> tuple[np.ndarray, ...]:
    """Return codes [n][k], float16 scales [n][groups] and zeros [n][groups] by rounding."""
    n, k = values.shape
    groups = values.reshape(n, -1, GROUP).astype(np.float64)
    most, half = (1 << bits) - 1, 1 << (bits - 1)
    if zeros:
        low, high = groups.min(2), groups.max(2)
        scales = ((high - low) / most).astype(np.float16)
        middle = np.clip(np.round(-low / scales), 0, most)
        middle[::3] = 0  # as where no value is negative
    else:
        scales = (np.abs(groups).max(2) / (half - 1)).astype(np.float16)
        middle = np.full(scales.shape, half)
    codes = np.clip(np.round(groups / scales[..., None]) + middle[..., None], 0, most)
    return codes.reshape(n, k).astype(np.uint8), scales, middle.astype(np.uint8)


def save_packed(source: Path, target: Path, name: str) -> dict[str, np.ndarray]:
    """Write a saved model quantised; return the float values that its file then has."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = CONFIGS[name]
    (target / "config.json").write_text(json.dumps(config))
    tensors: dict[str, Any] = {}
    exact: dict[str, np.ndarray] = {}
    for key, values in read_state(source).items():
        stem = key.removesuffix(".weight")
        kept = not any(part in stem for part in ("_proj", ".experts."))
        if values.ndim == 1 or kept or key.endswith(".bias"):
            half = torch.tensor(values).to(torch.bfloat16 if "fp8" in name else torch.float16)
            tensors[key], exact[key] = half, half.float().numpy()
        elif name.startswith("fp8"):
            exact[key] = _fp8(tensors, stem, values, name)
        elif name == "bytes":
            exact[key] = _bytes(tensors, stem, values)
        elif name in BOOKS:
            exact[key] = _book(tensors, stem, values, name)
        else:
            exact[key] = _coded(tensors, stem, values, name)
    stored = {
        key: torch.from_numpy(np.ascontiguousarray(value))
        if isinstance(value, np.ndarray)
        else value
        for key, value in tensors.items()
    }
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    return exact


NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FP4 = (0.0, 0.0052083335, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25)
BOOKS = {"nf4": np.array(NF4), "fp4": np.array([*FP4, *(-v for v in FP4)])}


def _book(tensors: dict[str, Any], stem: str, values: np.ndarray, name: str) -> np.ndarray:
    """nf4 with scales that are bytes themselves, fp4 with floats."""
    book, blocks = BOOKS[name], values.reshape(-1, GROUP)
    scales = np.abs(blocks).max(1).astype(np.float32)
    state = {"quant_type": name, "blocksize": GROUP, "dtype": "bfloat16", "shape": values.shape}
    part = f"{stem}.weight"
    if name == "nf4":
        table, offset = np.linspace(-1, 1, 256, dtype=np.float32) ** 3, np.float32(scales.mean())
        apart = np.pad(scales - offset, (0, -len(scales) % 256)).reshape(-1, 256)
        outer = np.abs(apart).max(1)
        near = np.abs((apart / outer[:, None]).reshape(-1, 1) - table).argmin(1)[: len(scales)]
        tensors |= {f"{part}.absmax": near.astype(np.uint8), f"{part}.nested_quant_map": table}
        tensors[f"{part}.nested_absmax"] = outer
        state |= {
            "nested_blocksize": 256,
            "nested_dtype": "float32",
            "nested_offset": float(offset),
        }
        scales = table[near] * outer.repeat(256)[: len(scales)] + offset
    else:
        tensors[f"{part}.absmax"] = scales
    codes = np.abs((blocks / scales[:, None])[..., None] - book).argmin(-1)
    flat = codes.reshape(-1, 1).astype(np.uint8)
    tensors[part] = flat[::2] << 4 | flat[1::2]
    tensors[f"{part}.quant_map"] = book.astype(np.float32)
    data = np.array([*json.dumps(state).encode()], np.uint8)
    tensors[f"{part}.quant_state.bitsandbytes__{name}"] = data
    return (book[codes] * scales.astype(np.float64)[:, None]).reshape(values.shape)


def _coded(tensors: dict[str, Any], stem: str, values: np.ndarray, name: str) -> np.ndarray:
    bits = 8 if name in ("gptq-8", "gptq8-order", "packed-8", "int8") else 4
    groups = np.arange(values.shape[1]) // GROUP
    if name.endswith("-order"):
        groups = _order(stem, groups)
    by_group = np.argsort(groups, kind="stable")
    codes, scales, zeros = quantised(values[:, by_group], bits, name in ZEROS)
    codes = codes[:, np.argsort(by_group)]
    if name.startswith(("gptq", "autoround")):
        below = 0 if name == "gptq-v2" else (1 << 32) // ((1 << bits) - 1)
        tensors[f"{stem}.qweight"] = pack_words(codes, bits).T
        tensors[f"{stem}.qzeros"] = (
            pack_words(zeros.T, bits).view(np.uint32) - np.uint32(below)
        ).view(np.int32)
        tensors[f"{stem}.scales"] = scales.T
        tensors[f"{stem}.g_idx"] = groups.astype(np.int32)
    elif name == "awq":
        tensors[f"{stem}.qweight"] = pack_words(codes.T, bits, AWQ_ORDER)
        tensors[f"{stem}.qzeros"] = pack_words(zeros.T, bits, AWQ_ORDER)
        tensors[f"{stem}.scales"] = scales.T
    elif name == "int8":
        tensors[f"{stem}.weight"] = (codes.astype(np.int16) - 128).astype(np.int8)
        tensors[f"{stem}.weight_scale"] = scales
    else:
        tensors[f"{stem}.weight_packed"] = pack_words(codes, bits)
        tensors[f"{stem}.weight_scale"] = scales
        tensors[f"{stem}.weight_shape"] = np.array(codes.shape, np.int64)
        if name == "packed-order":
            tensors[f"{stem}.weight_g_idx"] = groups.astype(np.int32)
        if name == "packed-zeros":
            tensors[f"{stem}.weight_zero_point"] = pack_words(zeros.T, bits).T
    return (codes - zeros.astype(np.float64)[:, groups]) * scales.astype(np.float64)[:, groups]


def _order(stem: str, groups: np.ndarray) -> np.ndarray:
    """Draw to which group each value of K belongs: alike for what reads the same, but for a q."""
    layer, module = stem.removeprefix("model.layers.").split(".", 1)
    alike = {"o_proj": 1, "gate_proj": 2, "up_proj": 2, "down_proj": 3}
    place = alike.get(module.rpartition(".")[2], 4 if stem.endswith("1.self_attn.q_proj") else 0)
    return np.random.default_rng((int(layer), place)).permutation(groups)


def _bytes(tensors: dict[str, Any], stem: str, values: np.ndarray) -> np.ndarray:
    most = np.abs(values).max(1).astype(np.float32)
    near = np.rint(values / most[:, None] * 127)
    tensors[f"{stem}.weight"], tensors[f"{stem}.SCB"] = near.astype(np.int8), most
    tensors[f"{stem}.weight_format"] = np.array(0, np.uint8)
    return near * (most / 127)[:, None].astype(np.float64)


def _fp8(tensors: dict[str, Any], stem: str, values: np.ndarray, name: str) -> np.ndarray:
    import torch

    n, k = values.shape
    if name == "fp8-rows":
        scales = np.abs(values).max(1, keepdims=True) / 448
        own = scales
    elif name == "fp8-whole":
        scales = np.array(np.abs(values).max() / 448)
        own = scales
    else:
        high, wide = -(-n // 128), -(-k // 128)
        padded = np.pad(np.abs(values), ((0, high * 128 - n), (0, wide * 128 - k)))
        scales = padded.reshape(high, 128, wide, 128).max((1, 3)) / 448
        own = scales.repeat(128, 0).repeat(128, 1)[:n, :k]
    scales = np.asarray(scales, np.float32)
    small = torch.tensor(values / np.asarray(own, np.float32)).to(torch.float8_e4m3fn)
    tensors[f"{stem}.weight"] = small
    part = "weight_scale_inv" if name == "fp8-blocks" else "weight_scale"
    tensors[f"{stem}.{part}"] = scales
    tensors[f"{stem}.input_scale"] = np.ones(1, np.float32)
    return small.float().numpy() * np.asarray(own, np.float32)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the codes of MXFP4 stand for; 8 more are the same with a sign."""


def save_mxfp4(source: Path, target: Path) -> dict[str, np.ndarray]:
    """Write a saved gpt-oss with drawn experts in MXFP4, else bfloat16; return its float values."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (target / "config.json").write_text(json.dumps(config))
    rng, values_of = np.random.default_rng(0), np.array([*E2M1, *(-v for v in E2M1)])
    tensors: dict[str, Any] = {}
    exact: dict[str, np.ndarray] = {}
    for key, values in read_state(source).items():
        if ".experts." not in key or key.endswith("_bias"):
            half = torch.tensor(values).to(torch.bfloat16)
            tensors[key], exact[key] = half, half.float().numpy()
            continue
        experts, k, n = values.shape
        codes = rng.integers(0, 16, (experts, n, k // 32, 32), dtype=np.uint8)
        scales = rng.integers(119, 124, (experts, n, k // 32), dtype=np.uint8)
        tensors[f"{key}_blocks"] = torch.from_numpy(codes[..., ::2] | codes[..., 1::2] << 4)
        tensors[f"{key}_scales"] = torch.from_numpy(scales)
        wide = values_of[codes] * 2.0 ** (scales.astype(int) - 127)[..., None]
        exact[key] = wide.reshape(experts, n, k).swapaxes(1, 2).astype(np.float32)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return exact
