"""Adapters that are packed beside a model: their rows against numpy, and what is refused."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from dovetail.compiler.formats.quantising import Calibration
from dovetail.compiler.models.adapters import RANKS, A, B, Stacked, adapter_sources, read_adapters
from dovetail.compiler.models.source import open_model
from dovetail.compiler.models.spec import read_model_spec
from dovetail.compiler.request import CompileRequest, read_inputs
from dovetail.compiler.write.memory_check import memory_need
from dovetail.errors import CapacityError, SpecError
from dovetail.ir.model import ModelSpec
from dovetail.topology.hardware import dump_hardware, read_hardware
from tests.adapters import save_adapter
from tests.encoders import save_encoder
from tests.models import save_model

MODULE = "model.layers.1.self_attn.k_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base") / "model", "llama")


def plan(base: Path, **adapters: Path) -> dict[str, Stacked]:
    return read_adapters(adapters, open_model(base), spec_of(base))


def read(base: Path, **adapters: Path) -> dict[str, np.ndarray]:
    return {name: rows[0 : rows.n] for name, rows in plan(base, **adapters).items()}


def spec_of(base: Path) -> ModelSpec:
    return read_model_spec(base, weight_dtype="f32")


def rows(found: dict[str, np.ndarray], weight: str, part: int, adapter: int) -> np.ndarray:
    """Return the whole sum that an adapter adds to a part, of at most 16 k columns."""
    a, b, ranks = (found[f"{weight}.{side}{part}"] for side in (A, B, RANKS))
    count, rank = len(ranks), int(ranks[adapter, 0])
    room = len(a) // count
    first = a.reshape(count, room, -1)[adapter]
    second = b.reshape(count, -1, room, 16)[adapter].transpose(0, 2, 1).reshape(-1, room)
    assert not first[rank:].any() and not second[:, rank:].any()
    return second @ first


def exact(folder: Path, module: str, scale: float) -> np.ndarray:
    tensors = load_file(folder / "adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.{module}.lora_{part}.weight"] for part in "AB")
    return scale * (b @ a)


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True, "lora_alpha": 3}, 3 / np.sqrt(3)),
        ({"alpha_pattern": {"k_proj": 9.0, "q_proj": 1.0}}, 3.0),
        ({"rank_pattern": {"k_proj": 3}, "r": 64}, 2.0),
    ],
)
def test_pairs_of_several_ranks(
    base: Path, tmp_path: Path, options: dict[str, Any], scale: float
) -> None:
    one = save_adapter(tmp_path / "one", base, 3, **options)
    two = save_adapter(tmp_path / "two", base, 5, takes=lambda name: name == MODULE)
    found = read(base, one=one, two=two)
    k = found[f"layers.1.qkv.{RANKS}1"]
    assert k.ravel().tolist() == [3, 5]
    np.testing.assert_allclose(
        rows(found, "layers.1.qkv", 1, 0)[:32], exact(one, MODULE, scale), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(rows(found, "layers.1.qkv", 1, 1)[:32], exact(two, MODULE, 2.0))
    assert not rows(found, "layers.0.down", 0, 1).any(), "the other changes nothing there"


def test_weights_that_no_adapter_changes_have_none(base: Path, tmp_path: Path) -> None:
    found = read(base, a=save_adapter(tmp_path / "a", base, 2, takes=lambda n: n == MODULE))
    assert [*found] == [f"layers.1.qkv.{side}1" for side in (A, B, RANKS)]


def test_the_halves_of_a_fused_pair_have_pairs_of_their_own(tmp_path: Path) -> None:
    base = save_model(tmp_path / "model", "phi3")
    folder = save_adapter(tmp_path / "a", base, 2)
    found = read(base, a=folder)
    whole = exact(folder, "model.layers.0.mlp.gate_up_proj", 2.0)
    for part, half in enumerate(np.split(whole, 2)):
        np.testing.assert_allclose(rows(found, "layers.0.gate_up", part, 0)[:120], half)


def spoil(folder: Path, **tensors: np.ndarray) -> Path:
    """Add tensors, or leave one out, of an adapter."""
    path = folder / "adapter_model.safetensors"
    found = load_file(path) | {f"base_model.model.{n}": v for n, v in tensors.items()}
    save_file({n: v for n, v in found.items() if v.size}, path)
    return folder


ONES = np.ones((64, 4), np.float32)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({f"{MODULE}.lora_magnitude_vector": ONES[0]}, "no low-rank sum.* compile this adapter al"),
        ({"model.norm.weight": ONES[:, 0].copy()}, "no low-rank sum for a product"),
        ({"model.embed_tokens.lora_embedding_A": ONES}, "no low-rank sum for a product"),
        ({"lm_head.lora_A.weight": ONES.T.copy()}, "dovetail compile .*/a$"),
        ({"model.layers.9.mlp.up_proj.lora_A.weight": ONES}, "which .* does not have"),
        ({f"{MODULE}.lora_A.weight": np.zeros(0, np.float32)}, "do not fit together"),
        ({f"{MODULE}.lora_A.weight": np.full((4, 64), np.nan, np.float32)}, "NaN or infinite"),
        ({f"{MODULE}.lora_A.weight": np.ones((4, 63), np.float32)}, r"has shape \[32, 63\]"),
    ],
)
def test_other_kinds_are_compiled_alone(
    base: Path, tmp_path: Path, tensors: dict[str, np.ndarray], said: str
) -> None:
    folder = spoil(save_adapter(tmp_path / "a", base, 4), **tensors)
    with pytest.raises(SpecError, match=said):
        read(base, a=folder)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5", "lfm2"])
def test_layers_of_other_kinds_are_refused(family: str, tmp_path: Path) -> None:
    base = save_model(tmp_path / "model", family)
    with pytest.raises(SpecError, match="need a dense model with attention in all layers"):
        read(base, a=save_adapter(tmp_path / "a", base, 2))


def test_names_and_folders_are_checked(base: Path, tmp_path: Path) -> None:
    import dovetail

    with pytest.raises(SpecError, match="is no folder of an adapter"):
        read(base, a=tmp_path)
    folder = save_adapter(tmp_path / "a", base, 2)
    with pytest.raises(SpecError, match="cannot be called 'a b'"):
        read(base, **{"a b": folder})
    save_encoder(tmp_path / "encoder", "bert")
    with pytest.raises(SpecError, match="adapters serve models that generate"):
        dovetail.compile(
            tmp_path / "encoder", output=tmp_path / "x.dove", adapters={"a": folder}, effort="none"
        )


def test_the_cache_knows_adapters(base: Path, tmp_path: Path) -> None:
    from dovetail.cli.model_cache import _key

    folder = save_adapter(tmp_path / "a", base, 2)
    options = {"adapter": (f"x={folder}",)}
    before = _key(base, options)
    assert before not in (_key(base, {}), _key(base, {"adapter": (f"y={folder}",)}))
    (folder / "adapter_config.json").write_text(
        json.dumps(json.loads((folder / "adapter_config.json").read_text()) | {"lora_alpha": 99})
    )
    assert _key(base, options) != before


def test_an_adapter_without_tensors_is_refused(base: Path, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "none", base, 4)
    save_file({}, folder / "adapter_model.safetensors")
    with pytest.raises(SpecError, match="the adapter changes nothing"):
        read(base, none=folder)


def test_names_in_the_text_part_of_a_model_of_pictures_are_known(
    base: Path, tmp_path: Path
) -> None:
    folder = save_adapter(tmp_path / "law", base, 4)
    wanted, path = read(base, law=folder), folder / "adapter_model.safetensors"
    before, after = "model.model.", "model.model.language_model."
    save_file({k.replace(before, after): v for k, v in load_file(path).items()}, path)
    found = read(base, law=folder)
    assert found.keys() == wanted.keys()
    assert all((found[name] == rows).all() for name, rows in wanted.items())


def test_pairs_are_read_adapter_by_adapter_while_they_are_packed(tmp_path: Path) -> None:
    base = save_model(tmp_path / "model", "llama", num_hidden_layers=8)
    given = {f"a{i}": save_adapter(tmp_path / f"a{i}", base, 64, seed=i) for i in range(8)}
    tracemalloc.start()
    try:
        found = plan(base, **given)
        largest = max((rows for rows in found.values()), key=lambda rows: rows.n * rows.k)
        part = largest[7 : largest.n - 7]
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    every = sum(4 * rows.n * rows.k for rows in found.values())
    assert most < every / 4
    np.testing.assert_array_equal(part, largest[0 : largest.n][7:-7])


def test_the_check_of_memory_counts_adapters(base: Path, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "law", base, 64)
    bare, step = spec_of(base), (64, 8)
    spec = replace(bare, adapters=("law",))
    beside = [*adapter_sources(plan(base, law=folder).values())]
    least, without = memory_need(spec, step, beside), memory_need(bare, step)
    stored = sum(4 * source.n * source.k for source in beside)
    assert least.weights >= without.weights + stored
    assert least.activations > without.activations
    hardware = replace(read_hardware(), memory_bytes=1 << 40, memory_limit=least.total - 1)
    (file := tmp_path / "machine.json").write_bytes(dump_hardware(hardware))
    given = {"model": base, "output": tmp_path / "a.dove", "effort": "none", "hardware": file}
    options = {"weight_dtype": "f32", "max_step_tokens": 64, "max_step_sequences": 8}
    read_inputs(CompileRequest(**given, **options))
    with pytest.raises(CapacityError, match=r"does not fit.* or fewer adapters"):
        read_inputs(CompileRequest(**given, **options, adapters={"law": folder}))


@pytest.mark.parametrize(
    ("takes", "said"),
    [
        ({"typo": "typo"}, "is no folder of an adapter"),
        ({"law": "other"}, "the sum for .* has shape"),
    ],
)
def test_a_wrong_adapter_is_told_before_the_model_is_measured(
    base: Path, tmp_path: Path, takes: dict[str, str], said: str
) -> None:
    other = save_model(tmp_path / "wider", "llama", hidden_size=128)
    save_adapter(tmp_path / "other", other, 4)
    (text := tmp_path / "text.txt").write_text("a text")
    request = CompileRequest(
        model=base,
        output=tmp_path / "a.dove",
        weight_dtype="int4",
        calibrate=text,
        adapters={name: str(tmp_path / folder) for name, folder in takes.items()},
    )

    def measure(*_: object) -> Calibration:
        pytest.fail("the model was measured first")

    with pytest.raises(SpecError, match=said):
        read_inputs(request, calibrate=measure)
