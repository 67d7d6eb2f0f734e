"""LoRA adapters: sums in weights against numpy, and what cannot be summed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dovetail
from dovetail.cli.model_cache import find_artifact
from dovetail.compiler.models.merged_adapter import base_name, find_base
from dovetail.compiler.models.source import open_model
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.errors import SpecError
from dovetail.runtime.artifact import open_artifact
from dovetail.topology.hardware import read_hardware
from tests.gguf_files import our_rows
from tests.models import save_model
from tests.packed_files import save_packed

Weights = dict[str, np.ndarray]
Q, UP, EMBED = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.up_proj", "model.embed_tokens"
HEAD = "lm_head"
SHAPES = {Q: (64, 64), UP: (120, 64), EMBED: (100, 64), HEAD: (100, 64)}
RANK, ALPHA = 4, 6.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base") / "model", "llama")


def factors(*modules: str) -> Weights:
    """Return lora_A and lora_B of modules."""
    rng = np.random.default_rng(3)
    found = {}
    for name in modules:
        n, k = SHAPES[name]
        for part, shape in (("A", (RANK, k)), ("B", (n, RANK))):
            key = f"base_model.model.{name}.lora_{part}.weight"
            found[key] = rng.standard_normal(shape, np.float32) / 8
    return found


def save_adapter(folder: Path, base: Path | str, tensors: Weights, **config: Any) -> Path:
    folder.mkdir()
    given = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "init_lora_weights": True}
    given |= {"base_model_name_or_path": str(base), "fan_in_fan_out": False, **config}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def read(folder: Path, name: str) -> np.ndarray:
    checkpoint = open_model(folder).checkpoint()
    return checkpoint.info(name).dtype.widen(checkpoint.load(name))


def product(tensors: Weights, module: str) -> np.ndarray:
    a, b = (tensors[f"base_model.model.{module}.lora_{part}.weight"] for part in "AB")
    return b @ a


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({}, ALPHA / RANK),
        ({"use_rslora": True}, ALPHA / 2),
        ({"alpha_pattern": {"q_proj": 2.0, "up_proj": 99.0}}, 2.0 / RANK),
        ({"alpha_pattern": {"1.self_attn.q_proj": 3}}, 3.0 / RANK),
        ({"alpha_pattern": {"j_proj": 3, "proj": 5}}, ALPHA / RANK),
        ({"alpha_pattern": {"layers...self_attn.q_proj": 3, "q_proj": 5}}, 3.0 / RANK),
        ({"alpha_pattern": {"q.proj": 5, "q_proj": 3}}, 5.0 / RANK),
    ],
)
def test_sums_of_linear_layers(
    model: Path, tmp_path: Path, options: dict[str, Any], scale: float
) -> None:
    tensors = factors(Q, UP)
    adapter = save_adapter(tmp_path / "a", model, tensors, **options)
    before = load_file(model / "model.safetensors")
    wanted = before[f"{Q}.weight"] + scale * product(tensors, Q)
    assert np.allclose(read(adapter, f"{Q}.weight"), wanted, atol=1e-6)
    other = "model.layers.0.self_attn.q_proj.weight"
    assert np.array_equal(read(adapter, other), before[other])


def test_rows_that_are_read_in_another_order(tmp_path: Path) -> None:
    base = save_model(tmp_path / "model", "ernie4_5")  # whose ropes turn neighbours
    tensors = factors(Q)
    weights = load_file(base / "model.safetensors")
    summed = weights[f"{Q}.weight"] + ALPHA / RANK * product(tensors, Q)
    wanted = our_rows(base, {f"{Q}.weight": summed})[f"{Q}.weight"]
    assert not np.array_equal(wanted, summed)
    found = read(save_adapter(tmp_path / "a", base, tensors), f"{Q}.weight")
    assert np.allclose(found, wanted, atol=1e-6)


def test_any_rows_are_those_of_the_whole(model: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "a", model, factors(UP))
    checkpoint = open_model(adapter).checkpoint()
    whole = checkpoint.load(f"{UP}.weight")
    for first, last in ((0, 1), (5, 23), (119, 120), (7, 7)):
        rows = checkpoint.rows(f"{UP}.weight", first, last)
        assert np.allclose(rows, whole[first:last], rtol=1e-6)


def test_lengths_of_rows_are_those_that_dora_learnt(model: Path, tmp_path: Path) -> None:
    lengths = np.linspace(0.5, 2.0, 64, dtype=np.float32)
    tensors = factors(Q) | {f"base_model.model.{Q}.lora_magnitude_vector": lengths}
    rows = read(save_adapter(tmp_path / "a", model, tensors, use_dora=True), f"{Q}.weight")
    summed = load_file(model / "model.safetensors")[f"{Q}.weight"]
    summed = summed + ALPHA / RANK * product(tensors, Q)
    wanted = summed / np.linalg.norm(summed, axis=1, keepdims=True) * lengths[:, None]
    assert np.allclose(rows, wanted, atol=1e-6)


def test_tables_and_whole_weights(model: Path, tmp_path: Path) -> None:
    pair = factors(EMBED)
    a, b = (pair[f"base_model.model.{EMBED}.lora_{part}.weight"] for part in "AB")
    norm = np.full(64, 7, np.float32)
    tensors = {
        f"base_model.model.{EMBED}.lora_embedding_A": np.ascontiguousarray(b.T),
        f"base_model.model.{EMBED}.lora_embedding_B": np.ascontiguousarray(a.T),
        "base_model.model.model.norm.weight": norm,
    }
    adapter = save_adapter(tmp_path / "a", model, tensors)
    before = load_file(model / "model.safetensors")[f"{EMBED}.weight"]
    wanted = before + ALPHA / RANK * (b @ a)
    assert np.allclose(read(adapter, f"{EMBED}.weight"), wanted, atol=1e-6)
    assert np.array_equal(read(adapter, "model.norm.weight"), norm)


def test_sums_are_rounded_as_the_weights_are(tmp_path: Path) -> None:
    base = save_model(tmp_path / "model", "llama", dtype="bfloat16")
    tensors = factors(Q)
    checkpoint = open_model(save_adapter(tmp_path / "a", base, tensors)).checkpoint()
    bf16 = DTYPES["bf16"]
    assert checkpoint.info(f"{Q}.weight").dtype is bf16
    plain = open_model(base).checkpoint().load(f"{Q}.weight")
    wanted = bf16.widen(plain) + np.float32(ALPHA / RANK) * product(tensors, Q)
    found = bf16.widen(checkpoint.load(f"{Q}.weight"))
    assert np.allclose(found, wanted, rtol=2**-8)
    assert not np.array_equal(found, bf16.widen(plain))


@pytest.mark.parametrize("weight_dtype", ["f32", "int4"])
def test_the_artifact_is_that_of_the_merged_model(
    model: Path, tmp_path: Path, weight_dtype: str
) -> None:
    rng = np.random.default_rng(5)  # sums of few bits: any order of adding them gives the same
    tensors = {name: rng.integers(-8, 9, value.shape) for name, value in factors(Q, UP).items()}
    tensors = {name: (value / 64).astype(np.float32) for name, value in tensors.items()}
    adapter = save_adapter(tmp_path / "a", model, tensors, lora_alpha=8)
    merged = tmp_path / "merged"
    merged.mkdir()
    weights = load_file(model / "model.safetensors")
    for module in (Q, UP):
        weights[f"{module}.weight"] = weights[f"{module}.weight"] + 2 * product(tensors, module)
    save_file(weights, merged / "model.safetensors")
    (merged / "config.json").write_bytes((model / "config.json").read_bytes())
    made = []
    for source in (model, adapter, merged):
        output = tmp_path / f"{source.name}.dove"
        dovetail.compile(source, output=output, effort="none", weight_dtype=weight_dtype)
        made.append(open_artifact(output, read_hardware()).manifest.model_fingerprint)
    assert made[0] != made[1] == made[2]


def test_a_model_beside_its_adapters_files_is_that_model(model: Path, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "a", tmp_path / "nowhere", factors(Q))
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    before = load_file(model / "model.safetensors")[f"{Q}.weight"]
    assert np.array_equal(read(folder, f"{Q}.weight"), before)


@pytest.mark.parametrize(
    ("options", "tensors", "said"),
    [
        ({"peft_type": "IA3"}, factors(Q), "peft_type is .IA3., but only 'LORA'"),
        ({"init_lora_weights": "pissa"}, factors(Q), "init_lora_weights"),
        ({"alpha_pattern": {"(q|k)_proj": 3}}, factors(Q), "more than the end of a name"),
        ({"alpha_pattern": {"q_proj": "x"}}, factors(Q), "a number is needed"),
        ({}, {"base_model.model.model.layers.7.x.lora_A.weight": np.ones((2, 2))}, "layers.7.x"),
        ({}, dict([*factors(Q).items()][:1]), "do not fit together"),
        ({}, {}, "the adapter changes nothing"),
        (
            {},
            factors(Q) | {f"base_model.model.{Q}.lora_B.weight": np.ones((63, RANK))},
            r"\[63, 64\], the weight in .* has \[64, 64\]",
        ),
        (
            {},
            factors(Q) | {f"base_model.model.{Q}.lora_magnitude_vector": np.ones(3)},
            "one length",
        ),
    ],
)
def test_what_does_not_fit_is_told(
    model: Path, tmp_path: Path, options: dict[str, Any], tensors: Weights, said: str
) -> None:
    tensors = {name: value.astype(np.float32) for name, value in tensors.items()}
    adapter = save_adapter(tmp_path / "a", model, tensors, **options)
    with pytest.raises(SpecError, match=said):
        open_model(adapter).checkpoint()


@pytest.mark.parametrize("stored", [False, True])
def test_a_head_that_is_the_embedding_is_not_changed(stored: bool, tmp_path: Path) -> None:
    base = save_model(tmp_path / "model", "llama", tie_word_embeddings=True)
    if stored:
        weights = load_file(file := base / "model.safetensors")
        file.unlink()  # it is linked
        save_file(weights | {"lm_head.weight": weights[f"{EMBED}.weight"].copy()}, file)
    adapter = save_adapter(tmp_path / "a", base, factors(EMBED))
    with pytest.raises(SpecError, match="is the head, too"):
        open_model(adapter).checkpoint()


def test_a_head_that_is_another_is_changed_whatever_is_said_of_it(tmp_path: Path) -> None:
    base = save_model(tmp_path / "model", "llama")
    config = json.loads((base / "config.json").read_text()) | {"tie_word_embeddings": True}
    (base / "config.json").write_text(json.dumps(config))
    tensors = factors(HEAD)
    adapter = save_adapter(tmp_path / "a", base, tensors)
    before = load_file(base / "model.safetensors")
    wanted = before[f"{HEAD}.weight"] + ALPHA / RANK * product(tensors, HEAD)
    assert np.allclose(read(adapter, f"{HEAD}.weight"), wanted, atol=1e-6)
    assert np.array_equal(read(adapter, f"{EMBED}.weight"), before[f"{EMBED}.weight"])


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("org/llama-bnb-4bit", "org/llama"),
        ("org/llama-unsloth-bnb-4bit", "org/llama"),
        ("org/llama", "org/llama@v2"),
    ],
)
def test_of_rounded_models_the_float_one_is_taken(name: str, wanted: str, tmp_path: Path) -> None:
    assert base_name(save_adapter(tmp_path / "a", name, factors(Q), revision="v2")) == wanted


@pytest.mark.parametrize("revision", [None, "main"])
def test_a_folder_is_a_model_whatever_its_name(revision: str | None, tmp_path: Path) -> None:
    (base := tmp_path / "me@host" / "llama-bnb-4bit").mkdir(parents=True)
    adapter = save_adapter(tmp_path / "a", base, factors(Q), revision=revision)
    assert find_base(adapter) == base
    assert base_name(adapter) == str(base)


def test_of_pictures_nothing_is_read(model: Path, tmp_path: Path) -> None:
    tensors = factors(Q)
    seen = "base_model.model.model.vision_tower.layers.0.q_proj.lora_{}.weight"
    sees = {seen.format(part): np.ones((4, 4), np.float32) for part in "AB"}
    whole = read(save_adapter(tmp_path / "a", model, tensors | sees), f"{Q}.weight")
    assert np.array_equal(whole, read(save_adapter(tmp_path / "b", model, tensors), f"{Q}.weight"))


def test_its_own_template_goes_first_wherever_it_lies(tmp_path: Path) -> None:
    (base := tmp_path / "model").mkdir()
    (base / "chat_template.jinja").write_text("the model's")
    adapter = save_adapter(tmp_path / "a", base, factors(Q))
    assert open_model(adapter).file("chat_template.jinja") == b"the model's"
    (adapter / "tokenizer_config.json").write_text('{"chat_template": "its own"}')
    assert open_model(adapter).file("chat_template.jinja") is None


def test_an_adapter_of_itself_is_no_model(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "a", tmp_path / "a", factors(Q))
    with pytest.raises(SpecError, match=r"config\.json is missing"):
        dovetail.compile(adapter, output=tmp_path / "x.dove", effort="none")


def test_the_model_of_an_adapter_is_looked_for(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "a", "/no/such/model", factors(Q))
    with pytest.raises(SpecError, match=r"base_model_name_or_path into its adapter_config.json"):
        open_model(adapter)


def test_quantised_weights_are_not_changed(tmp_path: Path) -> None:
    base = save_model(tmp_path / "model", "llama", hidden_size=128, intermediate_size=192)
    save_packed(base, tmp_path / "q", "gptq")
    tensors = factors(Q) | {f"base_model.model.{Q}.lora_A.weight": np.ones((4, 128), np.float32)}
    adapter = save_adapter(tmp_path / "a", tmp_path / "q", tensors)
    with pytest.raises(SpecError, match="quantised, and adapters are added to float weights"):
        open_model(adapter).checkpoint()


def test_the_cache_knows_the_model_of_an_adapter(tmp_path: Path) -> None:
    base = save_model(tmp_path / "model", "llama")
    adapter = save_adapter(tmp_path / "a", base, factors(Q))
    first = find_artifact(adapter, {})
    assert find_artifact(adapter, {}) == first
    save_model(base, "llama", seed=1)
    assert find_artifact(adapter, {}) != first
