"""Checkpoints of GPTQ, AWQ, compressed-tensors and FP8: their values, and what is refused."""

import json

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from safetensors.torch import load_file, save_file

from dovetail.compiler.model_source import open_model
from dovetail.compiler.model_spec import read_model_spec
from dovetail.compiler.pipeline import compile_model
from dovetail.ir.dtypes import F8
from dovetail.ir.errors import SpecError
from dovetail.runtime.app import load
from dovetail.runtime.schedule.request import SamplingParams
from tests.models import make_model, save_model
from tests.packed_files import CONFIGS, save_packed
from tests.test_fidelity import reference_logits

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 300,
}
FORMATS = {
    "gptq-8": "q8_32",
    "int8": "q8_32",
    "packed-8": "q8_32",
    **dict.fromkeys(("gptq-zeros", "awq", "awq-128", "packed-zeros"), "q4_32m"),
    **dict.fromkeys(("fp8-rows", "fp8-whole", "fp8-blocks"), "bf16"),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("plain") / "m", "qwen2", **SHAPE)


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_are_those_that_its_library_means(name, plain, tmp_path):
    exact = save_packed(plain, tmp_path / "q", name)
    checkpoint = open_model(tmp_path / "q").checkpoint()
    assert set(checkpoint.tensors) == set(exact)
    for key, wanted in exact.items():
        info = checkpoint.info(key)
        found = info.dtype.widen(checkpoint.load(key))
        assert found.shape == wanted.shape
        # float16 of scale times zero, and bfloat16 of FP8 times its scale, round once
        bound = 2.0**-8 if info.dtype.name == "bf16" else 2.0**-10 if "m" in info.kind else 1e-7
        np.testing.assert_allclose(found, wanted, rtol=bound, atol=bound * np.abs(wanted).max())
        if wanted.ndim == 2:  # any range of rows
            part = info.dtype.widen(checkpoint.rows(key, 5, 23))
            np.testing.assert_array_equal(part, found[5:23])


@pytest.mark.parametrize("name", CONFIGS)
def test_every_value_of_integers_is_kept(name, plain, tmp_path):
    save_packed(plain, tmp_path / "q", name)
    spec = read_model_spec(tmp_path / "q")
    wanted = FORMATS.get(name, "q4_32")
    assert spec.weight_format("layers.0.gate_up") == wanted
    assert spec.weight_format("layers.1.qkv") == wanted
    assert spec.weight_format("head") == "bf16"


@pytest.mark.parametrize("name", ["gptq", "awq", "awq-128", "int8", "fp8-blocks"])
def test_a_model_gives_the_logits_of_its_dequantised_weights(name, plain, tmp_path):
    exact = save_packed(plain, tmp_path / "q", name)
    made = make_model("qwen2", **SHAPE)
    checkpoint = open_model(tmp_path / "q").checkpoint()
    state = {}
    for key in exact:  # as they are kept: bfloat16 where the file has float16
        info = checkpoint.info(key)
        values = torch.tensor(np.array(info.dtype.widen(checkpoint.load(key))))
        state[key] = values.bfloat16().float() if "embed" in key or "head" in key else values
    made.load_state_dict(state)
    report = compile_model(
        tmp_path / "q", output=tmp_path / "a.dove", effort="none", kv_dtype="f32"
    )
    prompt = list(range(3, 14))  # fewer rows than are rounded to bfloat16
    wanted = reference_logits(made.double(), prompt)[-1]
    with load(report.path, activations="float") as app:
        app.engine.submit(prompt, SamplingParams(max_tokens=1))
        app.engine.step()
        got = np.array(app.engine.executor.buffers.logits(0), np.float64)
    assert np.abs(got - wanted).max() <= 2e-5 * np.abs(wanted).max()


def change(folder, key, edit):
    tensors = load_file(folder / "model.safetensors")
    values = edit(tensors[key].numpy() if key in tensors else None)
    tensors[key] = torch.from_numpy(np.ascontiguousarray(values))
    save_file(tensors, folder / "model.safetensors")


Q = "model.layers.0.mlp.down_proj"
DAMAGES = {
    "act-order": ("gptq", f"{Q}.g_idx", lambda v: v[::-1].copy(), "another order"),
    "scales": ("gptq", f"{Q}.scales", lambda v: v[:, :7].copy(), "scales of shape"),
    "no groups": ("gptq", f"{Q}.scales", lambda v: v[:0].copy(), "another order"),
    "words": ("awq", f"{Q}.qweight", lambda v: v.astype(np.float32), "type f32, not i32"),
    "dimensions": ("awq", f"{Q}.qzeros", lambda v: v[0].copy(), "of shape"),
    "shape": ("packed", f"{Q}.weight_shape", lambda v: v + 40, "not of 4 or 8 bits"),
    "zeros of 8": ("gptq-8", f"{Q}.qzeros", lambda v: v + 1, "zeros other than 128"),
    "scales of rows": ("int8", f"{Q}.weight_scale", lambda v: v[:5].copy(), "scales of shape"),
    "zero points": (
        "int8",
        f"{Q}.weight_zero_point",
        lambda v: np.ones((256, 6), np.int8),
        "bytes and zero points",
    ),
    "blocks": ("fp8-blocks", f"{Q}.weight_scale_inv", lambda v: v[:1].repeat(3, 0), "of shape"),
    "type": ("int8", f"{Q}.weight", lambda v: v.astype(np.int32), "values of type i32"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_does_not_fit_is_refused(damage, plain, tmp_path):
    name, key, edit, message = DAMAGES[damage]
    save_packed(plain, tmp_path / "q", name)
    change(tmp_path / "q", key, edit)
    with pytest.raises(SpecError, match=message):
        read_model_spec(tmp_path / "q")


SAYINGS = [
    ({"quant_method": "bitsandbytes"}, "'bitsandbytes', which is not supported; supported: gptq"),
    ({"quant_method": "gptq", "bits": 3}, "bits is 3, but only 4 and 8"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "only gemm"),
    ({}, "says '', which is not supported"),
]


@pytest.mark.parametrize(("section", "message"), SAYINGS)
def test_other_quantisations_are_refused(section, message, plain, tmp_path):
    save_packed(plain, tmp_path / "q", "gptq")
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    config["quantization_config"] = section
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecError, match=message):
        read_model_spec(tmp_path / "q")


def test_a_missing_part_is_named(plain, tmp_path):
    save_packed(plain, tmp_path / "q", "awq")
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    del tensors[f"{Q}.qzeros"]
    save_file(tensors, tmp_path / "q" / "model.safetensors")
    with pytest.raises(SpecError, match=r"down_proj has no tensor qzeros"):
        read_model_spec(tmp_path / "q")


def test_values_of_float8():
    codes = np.arange(256, dtype=np.uint8)
    wanted = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(F8.widen(codes), wanted)
    assert F8.all_finite(codes[:0x7F]) and not F8.all_finite(codes[0x7F:])
