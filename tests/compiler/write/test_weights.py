"""Packed weights hold the checkpoint's numbers, where the index says, hashed as stated."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.compiler.families.rope import rope_tables
from dovetail.compiler.files.checkpoint import open_checkpoint
from dovetail.compiler.models.source import open_model
from dovetail.compiler.models.spec import read_model_spec
from dovetail.compiler.write import weights as module
from dovetail.compiler.write.weights import convert, pack_weights
from dovetail.ir.dtypes import widen_bf16
from dovetail.ir.errors import SpecError
from dovetail.ir.formats import FORMATS
from dovetail.ir.model import weight_shapes
from tests.gguf_files import our_rows, parts_of_mlp
from tests.models import FAMILIES, make_model, save_model


def read_packed(path, entry):
    """Return a stored weight as float32: [n][k], a pair as (gate, up)."""
    dtype = FORMATS[entry.dtype].dtype
    raw = np.fromfile(path, dtype.numpy, entry.bytes // dtype.size, offset=entry.offset)
    values = widen_bf16(raw) if entry.dtype == "bf16" else raw
    form = FORMATS[entry.dtype]
    if entry.layout == "packed":
        return form.unpack(values, entry.n, entry.k)
    if entry.layout == "packed_pair":
        panels = values.reshape(-1, 2, form.panel_elements(entry.k))
        return [form.unpack(panels[:, side], entry.n // 2, entry.k) for side in (0, 1)]
    return values.reshape(entry.n, entry.k)


def pack(path, target, **options):
    spec = read_model_spec(path, **options)
    entries, chunks = pack_weights(spec, open_model(path).checkpoint(), target)
    return spec, {e.name: e for e in entries}, chunks


PLAIN = (("input_norm", "input_layernorm", 1), ("post_norm", "post_attention_layernorm", 1))
LAST = (
    ("attention_norm", "post_attention_layernorm", 1),
    ("mlp_norm", "post_feedforward_layernorm", 1),
)
ROWS = tuple((f"{part}_rows_norm", f"self_attn.{part}_norm", 1) for part in "qk")
TURNED = (("q_norm", "self_attn.query_layernorm", 1), ("k_norm", "self_attn.key_layernorm", 1))
GEMMA = (
    ("input_norm", "input_layernorm", 1),
    ("attention_norm", "post_attention_layernorm", 1 / 8),  # a stream of 64 values
    ("post_norm", "pre_feedforward_layernorm", 1),
    ("mlp_norm", "post_feedforward_layernorm", 1 / 8),
)
NORMS = {
    **dict.fromkeys(("olmo2", "olmo3"), (*LAST, *ROWS)),
    **dict.fromkeys(("cohere", "cohere2"), PLAIN[:1]),
    "exaone4": LAST,
    "hunyuan": (*PLAIN, *TURNED),
    "glm4": (
        *PLAIN,
        ("attention_norm", "post_self_attn_layernorm", 1),
        ("mlp_norm", "post_mlp_layernorm", 1),
    ),
    **dict.fromkeys(("gemma2", "gemma3"), GEMMA),
}
"""(ours, theirs, scale), and those of models with norms of branches."""


def parts_apart(state):
    """Yield tensors, those of several parts in one (Phi-3) cut into them."""
    for name, values in state.items():
        if "qkv_proj" in name:
            for part, rows in zip("qkv", np.split(values, [128, 192]), strict=True):
                yield name.replace("qkv", part), rows
        elif "gate_up" in name:
            for part, rows in zip(("gate", "up"), np.split(values, 2), strict=True):
                yield name.replace("gate_up", part), rows
        else:
            yield name, values


@pytest.mark.parametrize("chunk_bytes", [4 << 20, 10_000])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_weights_are_the_checkpoints(family, chunk_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    options = {"head_dim": 32, "tie_word_embeddings": False}
    if family == "llama":
        options |= {"attention_bias": True, "mlp_bias": True}
    path = save_model(tmp_path / "m", family, **options)
    spec, entries, _ = pack(path, tmp_path / "w")
    model = make_model(family, **options).state_dict()
    state = our_rows(path, {name: value.numpy() for name, value in model.items()})
    state = dict(parts_apart(dict(parts_of_mlp(state))))
    got = {name: read_packed(tmp_path / "w", entry) for name, entry in entries.items()}

    def stacked(pattern, parts, kind="weight"):
        return np.concatenate([state[f"model.layers.1.{pattern.format(p)}.{kind}"] for p in parts])

    described = weight_shapes(spec)
    assert {name: (entries[name].n, entries[name].k) for name in described} == described
    extra = {name.rsplit(".", 1)[1] for name in entries.keys() - described.keys()}
    assert all(name.endswith("_bias") or name[:2] in ("q_", "k_") for name in extra)
    np.testing.assert_array_equal(got["embed"], state["model.embed_tokens.weight"])
    np.testing.assert_array_equal(got["head"], state["lm_head.weight"])
    plus = 1 if family in ("gemma2", "gemma3") else 0
    np.testing.assert_array_equal(
        got["final_norm"][:, 0], (state["model.norm.weight"] + plus) * spec.logits_scale
    )
    np.testing.assert_array_equal(got["layers.1.qkv"], stacked("self_attn.{}_proj", "qkv"))
    np.testing.assert_array_equal(got["layers.1.o"], stacked("self_attn.{}_proj", "o"))
    np.testing.assert_array_equal(got["layers.1.down"], stacked("mlp.{}_proj", ["down"]))
    for side, name in enumerate(("gate", "up")):
        pair = got["layers.1.gate_up"][side]
        np.testing.assert_array_equal(pair, stacked("mlp.{}_proj", [name]))
    for name, source, times in NORMS.get(family, PLAIN):
        norm = (stacked(source, [""]) + plus) * np.float32(times)
        np.testing.assert_array_equal(got[f"layers.1.{name}"][:, 0], norm)
    assert ("layers.1.qkv_bias" in got) == (family in ("llama", "qwen2", "glm4", "seed_oss"))
    if "layers.1.qkv_bias" in got:
        bias = stacked("self_attn.{}_proj", "qkv", "bias")
        np.testing.assert_array_equal(got["layers.1.qkv_bias"][:, 0], bias)
    assert ("layers.1.q_norm" in got) == (family in ("qwen3", "gemma3", "exaone4", "hunyuan"))
    if family == "llama":
        panels = got["layers.1.gate_up_bias"].reshape(-1, 2, 16)
        for side, name in enumerate(("gate", "up")):
            flat = panels[:, side].ravel()
            np.testing.assert_array_equal(flat[:120], stacked("mlp.{}_proj", [name], "bias"))
            assert not flat[120:].any()
        np.testing.assert_array_equal(
            got["layers.1.down_bias"][:, 0], stacked("mlp.{}_proj", ["down"], "bias")
        )
        assert {"layers.0.o_bias", "layers.0.down_bias"} <= got.keys()
    for table, want in zip(("rope_cos", "rope_sin"), rope_tables(spec.rope, 512), strict=True):
        np.testing.assert_array_equal(got[table], want)


def test_tied_head_is_stored_once(tmp_path):
    path = save_model(tmp_path / "m", "llama", tie_word_embeddings=True)
    _, entries, _ = pack(path, tmp_path / "w")
    assert "embed" not in entries
    want = make_model("llama", tie_word_embeddings=True).state_dict()["lm_head.weight"]
    np.testing.assert_array_equal(read_packed(tmp_path / "w", entries["head"]), want.numpy())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("weight_dtype", [None, "f32", "bf16"])
def test_dtypes(dtype, weight_dtype, tmp_path):
    torch = pytest.importorskip("torch")

    path = save_model(tmp_path / "m", "llama", dtype=dtype)
    spec, entries, _ = pack(path, tmp_path / "w", weight_dtype=weight_dtype)
    want = make_model("llama", dtype=dtype).state_dict()
    head = want["lm_head.weight"]
    if spec.weight_dtype == "bf16":
        head = head.to(torch.bfloat16)
    assert entries["head"].dtype == spec.weight_dtype
    np.testing.assert_array_equal(
        read_packed(tmp_path / "w", entries["head"]), head.float().numpy()
    )
    assert entries["final_norm"].dtype == "f32"
    norm = read_packed(tmp_path / "w", entries["final_norm"])[:, 0]
    np.testing.assert_array_equal(norm, want["model.norm.weight"].float().numpy())


def test_offsets_and_hashes(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 50_000)
    seen = []
    path = save_model(tmp_path / "m", "llama")
    spec = read_model_spec(path)
    entries, chunks = pack_weights(
        spec, open_checkpoint(path), tmp_path / "w", lambda done, total: seen.append((done, total))
    )
    data = (tmp_path / "w").read_bytes()
    assert chunks.total_bytes == len(data) == module.total_bytes(entries)
    assert len(data) % 4096 == 0
    pieces = [data[i : i + 50_000] for i in range(0, len(data), 50_000)]
    assert chunks.sha256 == tuple(hashlib.sha256(piece).hexdigest() for piece in pieces)
    end = 0
    for entry in entries:
        assert entry.offset % 4096 == 0
        assert entry.offset >= end
        assert not any(data[end : entry.offset])
        end = entry.offset + entry.bytes
    assert seen == sorted(seen)
    assert seen[-1] == (len(data), len(data))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_conversions(values):
    torch = pytest.importorskip("torch")

    wide = np.array(values, np.float32)
    torch_bits = torch.from_numpy(wide.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
    bits = convert(wide, "f32", "bf16")
    np.testing.assert_array_equal(bits, torch_bits)
    np.testing.assert_array_equal(convert(bits, "bf16", "f32"), widen_bf16(bits))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(dtype, value, tmp_path):
    torch = pytest.importorskip("torch")

    model = make_model("llama", dtype=dtype)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[7, 3] = value
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(SpecError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has NaN"):
        pack(tmp_path / "m", tmp_path / "w")
