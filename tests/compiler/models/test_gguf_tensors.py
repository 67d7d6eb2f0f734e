"""Tensors of GGUF files: Hugging Face names, values and rows, for every type that is read."""

import gguf
import numpy as np
import pytest

from dovetail.compiler.files.gguf_blocks import FORM_OF_KIND
from dovetail.compiler.files.gguf_kinds import dequantise
from dovetail.compiler.models.gguf_tensors import translate
from dovetail.compiler.models.source import open_model
from dovetail.compiler.models.spec import read_model_spec
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.errors import SpecError
from tests.gguf_files import (
    is_offset,
    pair_rows,
    read_own_state,
    read_state,
    reference_state,
    save_gguf,
    smollm2,
)
from tests.models import EXPERTS, FAMILIES, UNGATED, save_model

WIDE = {"hidden_size": 256, "intermediate_size": 512}


@pytest.mark.parametrize("family", [*FAMILIES, *UNGATED, *EXPERTS])
@pytest.mark.parametrize("tied", [False, True])
def test_values_and_names_are_the_models(family, tied, tmp_path):
    tied = tied or family in ("cohere", "cohere2", "gemma2")  # whose files have no place for a head
    folder = save_model(tmp_path / "m", family, tie_word_embeddings=tied)
    source = open_model(save_gguf(tmp_path / "m.gguf", folder))
    wanted = {n: v for n, v in read_own_state(folder).items() if not n.endswith("act_fn.eps")}
    checkpoint = source.checkpoint()
    known = open_model(folder).checkpoint().tensors
    for name, values in wanted.items():  # of experts, those of the directory have these names, too
        if family.startswith("granite") and name not in known:  # gates and ups are one tensor there
            continue
        np.testing.assert_array_equal(open_model(folder).checkpoint().load(name), values)
    assert set(checkpoint.tensors) == set(wanted)
    for name, values in wanted.items():
        stored = values + 1 if is_offset(family, name) else values  # as the file multiplies
        np.testing.assert_array_equal(checkpoint.load(name), stored)
        assert checkpoint.info(name).kind == "F32"
    assert read_model_spec(source).tied_head == tied


def test_biases_of_llama_are_reordered_as_its_rows(tmp_path):
    folder = save_model(tmp_path / "m", "llama", attention_bias=True, mlp_bias=True)
    source = open_model(save_gguf(tmp_path / "m.gguf", folder))
    spec, checkpoint = read_model_spec(source), source.checkpoint()
    assert spec.attention_bias and spec.output_bias and spec.mlp_bias
    for name, values in read_state(folder).items():
        np.testing.assert_array_equal(checkpoint.load(name), values)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_rows_of_every_type(kind, family, tmp_path):
    """Only rows are reordered, so that the blocks of a row are those of the row as it was."""
    folder = save_model(tmp_path / "m", family, **WIDE)
    checkpoint = open_model(save_gguf(tmp_path / "m.gguf", folder, kind)).checkpoint()
    number = gguf.GGMLQuantizationType[kind]
    for name, values in read_state(folder).items():
        info = checkpoint.info(name)
        if values.ndim == 1:
            np.testing.assert_array_equal(checkpoint.load(name), values)
            continue
        stored = gguf.quants.quantize(values, number)
        wanted = gguf.quants.dequantize(stored, number)
        first, last = 5, min(41, len(values))
        assert info.kind == kind and info.quantised == (kind in FORM_OF_KIND)
        blocks = checkpoint.blocks(name, first, last)
        assert blocks.dtype == np.uint8 and blocks.shape == (last - first, info.row_bytes)
        np.testing.assert_array_equal(blocks, stored.view(np.uint8)[first:last])
        for got, rows in (
            (checkpoint.load(name), wanted),
            (checkpoint.rows(name, first, last), wanted[first:last]),
        ):
            np.testing.assert_array_equal(info.dtype.widen(got), rows)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q3_K"])
def test_k_quants(kind, tmp_path):
    folder = save_model(tmp_path / "m", "llama", **WIDE)
    number = gguf.GGMLQuantizationType[kind]
    values, size = gguf.GGML_QUANT_SIZES[number]
    blocks = np.random.default_rng(0).integers(0, 256, (256, 256 // values * size), np.uint8)

    def change(writer):
        tensors = writer.tensors[0]
        tensors.pop("blk.1.attn_q.weight")
        stored = pair_rows(blocks, 4)
        writer.add_tensor("blk.1.attn_q.weight", stored, raw_dtype=number)

    checkpoint = open_model(save_gguf(tmp_path / "m.gguf", folder, change=change)).checkpoint()
    name = "model.layers.1.self_attn.q_proj.weight"
    np.testing.assert_array_equal(checkpoint.blocks(name, 3, 130), blocks[3:130])
    wanted = dequantise(kind, blocks)
    np.testing.assert_array_equal(checkpoint.load(name), wanted)
    assert checkpoint.info(name).dtype is DTYPES["f32"]


def test_tensors_of_a_split_model(tmp_path):
    folder = save_model(tmp_path / "m", "qwen3")
    save_gguf(tmp_path / "m.gguf", folder, split=7)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    checkpoint = open_model(parts[0]).checkpoint()
    for name, values in read_state(folder).items():
        np.testing.assert_array_equal(checkpoint.load(name), values)
    with pytest.raises(SpecError, match=f"begins elsewhere; give {parts[0]}"):
        open_model(parts[1])
    parts[1].unlink()
    with pytest.raises(SpecError, match=r"00002-of-0000.* is missing"):
        open_model(parts[0])


def test_experts_stand_one_by_one_or_gate_and_up_in_one_tensor(tmp_path):
    folder = save_model(tmp_path / "m", "mixtral")

    def part(writer):
        (tensors,) = writer.tensors
        for name in [name for name in tensors if "_exps" in name]:
            for number, matrix in enumerate(tensors.pop(name).tensor):
                writer.add_tensor(name.replace("_exps", f".{number}"), matrix)

    def fuse(writer):
        (tensors,) = writer.tensors
        for name in [name for name in tensors if "ffn_gate_exps" in name]:
            up = tensors.pop(name.replace("gate", "up")).tensor
            both = np.concatenate((tensors.pop(name).tensor, up), axis=1)
            writer.add_tensor(name.replace("gate", "gate_up"), both)

    usual, *others = (
        open_model(save_gguf(tmp_path / f"{i}.gguf", folder, change=change)).checkpoint()
        for i, change in enumerate((None, part, fuse))
    )
    for other in others:
        assert set(other.tensors) == set(usual.tensors)
        for name in usual.tensors:
            np.testing.assert_array_equal(other.load(name), usual.load(name))


def test_tensors_of_other_models_are_found(tmp_path):
    folder = save_model(tmp_path / "m", "llama")

    def change(writer):
        writer.add_tensor("blk.0.ffn_norm_exps.weight", np.zeros((4, 64), np.float32))

    path = save_gguf(tmp_path / "m.gguf", folder, change=change)
    with pytest.raises(SpecError, match=r"ffn_norm_exps\.weight is not part of this architecture"):
        read_model_spec(path)


@pytest.mark.parametrize(
    ("arch", "name", "wanted"),
    [
        ("llama", "token_embd.weight", "model.embed_tokens.weight"),
        ("llama", "blk.12.attn_k.bias", "model.layers.12.self_attn.k_proj.bias"),
        ("llama", "blk.0.what.weight", "blk.0.what.weight"),
        ("llama", "what", "what"),
        ("phi3", "blk.1.ffn_up.weight", "model.layers.1.mlp.gate_up_proj.weight"),
        ("gemma3", "blk.1.ffn_norm.weight", "model.layers.1.pre_feedforward_layernorm.weight"),
    ],
)
def test_names(arch, name, wanted):
    assert translate(name, arch) == wanted


def test_a_real_file_has_the_values_that_the_package_reads():
    path = smollm2()
    checkpoint = open_model(path).checkpoint()
    wanted = reference_state(path)
    assert set(checkpoint.tensors) == set(wanted) and len(wanted) == 272
    for name, values in wanted.items():
        np.testing.assert_array_equal(checkpoint.load(name), values)
