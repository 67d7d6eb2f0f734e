"""Checkpoints of GPTQ, AWQ, compressed-tensors and FP8: their values, and what is refused."""

import json
import shutil

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from dovetail.codegen.targets import get_target
from dovetail.compiler.formats.weight_formats import matrices, with_formats
from dovetail.compiler.models.source import open_model
from dovetail.compiler.models.spec import read_dimensions, read_model_spec
from dovetail.compiler.pipeline import compile_model
from dovetail.compiler.request import CompileRequest, read_inputs
from dovetail.compiler.write.memory_check import check_fits
from dovetail.compiler.write.weights import pack_weights
from dovetail.ir.dtypes import F8
from dovetail.ir.errors import CapacityError, SpecError
from dovetail.ir.model import order_name
from dovetail.runtime.app import load
from dovetail.runtime.schedule.request import SamplingParams
from dovetail.topology.configuration import allows_processes
from dovetail.topology.hardware import read_hardware
from tests.compiler.write.test_weights import read_packed
from tests.models import make_model, save_model
from tests.packed_files import CONFIGS, save_packed
from tests.test_fidelity import reference_logits

SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 300,
}
FORMATS = {
    "gptq-8": "q8_32",
    "gptq8-order": "q8_32",
    "int8": "q8_32",
    "packed-8": "q8_32",
    "bytes": "q8_32",
    "nf4": "nf4_32",
    "fp4": "fp4_32",
    **dict.fromkeys(("gptq-zeros", "gptq-order", "awq", "packed-zeros"), "q4_32m"),
    **dict.fromkeys(("fp8-rows", "fp8-whole", "fp8-blocks"), "bf16"),
}

ROUNDED = ("q4_32m", "nf4_32", "fp4_32")


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
        rounded = info.kind in ROUNDED or name == "bytes"
        bound = 2.0**-8 if info.dtype.name == "bf16" else 2.0**-10 if rounded else 1e-7
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
    assert spec.weight_format(spec.qkv_parts(1)[0]) == wanted
    assert spec.weight_format("head") == "bf16"


def test_plans_are_made_for_the_weights_as_they_are_stored(plain, tmp_path):
    save_packed(plain, tmp_path / "q", "gptq")
    assert read_dimensions(tmp_path / "q").weight_format("layers.0.gate_up") == "q4_32"
    assert read_dimensions(tmp_path / "q" / "config.json").weight_format("head") == "f32"


def test_float16_beside_fp8_counts_as_bfloat16_on_any_target(plain, tmp_path):
    save_packed(plain, tmp_path / "q", "fp8-blocks")
    file = tmp_path / "q" / "model.safetensors"
    half = {k: v.half() if v.dtype == torch.bfloat16 else v for k, v in load_file(file).items()}
    save_file(half, file, metadata={"format": "pt"})
    spec = read_model_spec(tmp_path / "q", target=get_target("generic"))
    assert spec.checkpoint_dtype == spec.weight_dtype == "bf16"


@pytest.mark.parametrize("name", ["gptq", "gptq-order", "int8", "nf4", "fp8-blocks"])
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
    prompt = list(range(3, 10))  # fewer rows than are rounded to bfloat16
    wanted = reference_logits(made.double(), prompt)[-1]
    for activations, bound in (("float", 2e-5), ("integer", 0.08)):
        got = last_logits(report.path, prompt, activations)
        assert np.abs(got - wanted).max() <= bound * np.abs(wanted).max()
    if name == "gptq-order":
        with load(report.path, device="torch:cpu") as app:
            assert app.generate([prompt], max_tokens=1)[0].token_ids == (wanted.argmax(),)


def test_columns_that_are_put_in_order_stay_in_one_process(plain, tmp_path):
    save_packed(plain, tmp_path / "q", "packed-order")
    spec = read_model_spec(tmp_path / "q")
    assert spec.ordered[:4] == tuple(f"layers.0.{part}" for part in ("qkv", "o", "gate_up", "down"))
    assert spec.ordered[4:7] == tuple(f"layers.1.{part}" for part in "qkv")  # q has its own
    assert not allows_processes(spec, 2)
    assert read_model_spec(tmp_path / "q", weight_dtype="int8").ordered == ()


def read_and_pack(folder, target, **options):
    """Return the spec that a compile has, and the largest relative error of a weight."""
    inputs = read_inputs(CompileRequest(model=folder, output="x", effort="none", **options))
    checkpoint, spec = inputs.source.checkpoint(), inputs.spec
    entries = {entry.name: entry for entry in pack_weights(spec, checkpoint, target)[0]}
    errors = []
    for source in matrices(spec):
        if source.layout != "packed":
            continue
        rows, parts = read_packed(target, entries[source.name]), []
        if source.name in spec.ordered:
            order = read_packed(target, entries[order_name(source.name)]).astype(int)
            rows = rows[:, np.argsort(order.reshape(-1))]
        for name, start, count in source.parts:
            values = checkpoint.rows(name, start, start + count)
            parts.append(checkpoint.info(name).dtype.widen(values))
        wanted = np.concatenate(parts)
        errors.append(np.linalg.norm(rows - wanted) / np.linalg.norm(wanted))
    return spec, max(errors)


@pytest.mark.parametrize("name", ["packed-order", "gptq8-order"])
def test_what_is_quantised_anew_has_its_columns_as_activations_have(name, plain, tmp_path):
    wide = shutil.copytree(plain, tmp_path / "wide")
    tensors = load_file(wide / "model.safetensors")
    for key, values in tensors.items():
        if "o_proj" in key or "down_proj" in key:
            values[:, ::32] *= 9
    save_file(tensors, wide / "model.safetensors", metadata={"format": "pt"})
    save_packed(wide, tmp_path / "q", name)
    spec, error = read_and_pack(tmp_path / "q", tmp_path / "w", weight_dtype="int4")
    assert error < 0.13
    if name == "packed-order":  # whose codes stay: none of it is lost, so none of it is wider
        assert spec.weight_format("layers.0.down") == "q4_32"
        assert spec.ordered[4:7] == tuple(f"layers.1.{part}" for part in "qkv")
    else:
        assert spec.weight_format("layers.0.down") == "q8_32" and not spec.ordered


def test_a_finer_format_ends_an_order_of_columns(plain, tmp_path):
    save_packed(plain, tmp_path / "q", "packed-order")
    spec = read_model_spec(tmp_path / "q", weight_dtype="int4")
    finer = {source.name: spec.weight_format(source.name) for source in matrices(spec)}
    found = with_formats(spec, finer | {"layers.0.o": "q8_32"})
    assert found.ordered == tuple(name for name in spec.ordered if name != "layers.0.o")


def test_what_would_fit_is_told_of_columns_in_orders_too(plain, tmp_path):
    save_packed(plain, tmp_path / "q", "packed-order")
    spec = read_model_spec(tmp_path / "q")
    hardware = replace(read_hardware(), memory_bytes=1 << 20, memory_limit=1 << 20)
    with pytest.raises(CapacityError, match="does not fit into memory"):
        check_fits("q", spec, hardware, (512, 64))


@pytest.mark.parametrize("name", ["gptq-order", "gptq8-order"])
def test_experts_whose_columns_have_an_order_are_quantised_anew(name, tmp_path):
    plain = save_model(tmp_path / "m", "mixtral", intermediate_size=128, num_hidden_layers=1)
    save_packed(plain, tmp_path / "q", name)
    with pytest.raises(SpecError, match=r"act-order is not supported for layers.0.down"):
        read_model_spec(tmp_path / "q")
    spec, error = read_and_pack(tmp_path / "q", tmp_path / "w", weight_dtype="int8")
    assert error < 0.01 and "layers.0.down" not in spec.ordered


def change(folder, key, edit):
    tensors = load_file(folder / "model.safetensors")
    tensor = tensors.get(key)
    small = tensor is not None and tensor.dtype == torch.float8_e4m3fn
    values = edit(
        None if tensor is None else (tensor.view(torch.uint8) if small else tensor).numpy()
    )
    tensors[key] = torch.from_numpy(np.array(values))
    if small:
        tensors[key] = tensors[key].view(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")


Q = "model.layers.0.mlp.down_proj"
GATE = "model.layers.0.mlp.gate_proj"
STATE = f"{Q}.weight.quant_state.bitsandbytes__nf4"
DAMAGES = {
    "act-order": (
        "gptq",
        f"{Q}.g_idx",
        lambda v: v * 0,
        "g_idx that does not divide K into 5 groups of equal size",
    ),
    "scales": ("gptq", f"{Q}.scales", lambda v: v[:, :7].copy(), "7 codes in 24 words"),
    "turned scales": ("gptq", f"{Q}.scales", lambda v: v.T.copy(), "5 codes in 24 words"),
    "no groups": ("gptq", f"{Q}.scales", lambda v: v[:0].copy(), "scales of shape"),
    "type of scales": ("gptq", f"{Q}.scales", lambda v: v.astype(np.int32), "scales of type i32"),
    "groups of zeros": ("gptq-zeros", f"{Q}.qzeros", lambda v: v[:1].copy(), "zero points of"),
    "rows of zeros": (
        "packed-zeros",
        f"{Q}.weight_zero_point",
        lambda v: v[:4].copy(),
        r"zero points of shape \[4, 5\]",
    ),
    "words": ("awq", f"{Q}.qweight", lambda v: v.astype(np.float32), "type f32, not i32"),
    "dimensions": ("awq", f"{Q}.qzeros", lambda v: v[0].copy(), "of shape"),
    "shape": (
        "packed",
        f"{Q}.weight_shape",
        lambda v: v + np.array([0, 40]),
        "360 codes in 40 words",
    ),
    "negative": ("packed", f"{Q}.weight_shape", lambda v: -v, r"is \[-192, -320\]"),
    "no shape": ("packed", f"{Q}.weight_shape", lambda v: v[0], "is 192 in words"),
    "zeros of 8": ("gptq-8", f"{Q}.qzeros", lambda v: v + 1, "8 bits and zero points"),
    "no columns": ("fp8-rows", f"{GATE}.weight", lambda v: v[:, :0].copy(), r"\[320, 0\]"),
    "scales of rows": ("int8", f"{Q}.weight_scale", lambda v: v[:5].copy(), "scales of shape"),
    "zero points": (
        "int8",
        f"{Q}.weight_zero_point",
        lambda v: np.ones((192, 5), np.int8),
        "bytes and zero points",
    ),
    "blocks": ("fp8-blocks", f"{Q}.weight_scale_inv", lambda v: v[:1].repeat(3, 0), "of shape"),
    "book": ("nf4", f"{Q}.weight.quant_map", lambda v: -v, "other values than those of nf4"),
    "blocks of a book": (
        "fp4",
        f"{Q}.weight.quant_state.bitsandbytes__fp4",
        lambda v: np.frombuffer(v.tobytes().replace(b"64", b"96"), np.uint8),
        "rows of 320 values, which its blocks of 96 do not divide; take the float model",
    ),
    "scales of a book": (
        "nf4",
        f"{Q}.weight.absmax",
        lambda v: v[:9].copy(),
        "9 values in absmax, not 960",
    ),
    "no offset": (
        "nf4",
        STATE,
        lambda v: np.frombuffer(v.tobytes().replace(b"nested_offset", b"nested_often"), np.uint8),
        "has no nested_offset, which is needed",
    ),
    "negative shape of a book": (
        "nf4",
        STATE,
        lambda v: np.frombuffer(v.tobytes().replace(b"[192, 320]", b"[-192, -320]"), np.uint8),
        "two positive integers",
    ),
    "order of bytes": (
        "bytes",
        f"{Q}.weight_format",
        lambda v: v + 1,
        "save it again with row-major",
    ),
    "type": (
        "int8",
        f"{Q}.weight",
        lambda v: v.astype(np.int32),
        "weight of type i32, not i8 or f8",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_does_not_fit_is_refused(damage, plain, tmp_path):
    name, key, edit, message = DAMAGES[damage]
    save_packed(plain, tmp_path / "q", name)
    change(tmp_path / "q", key, edit)
    with pytest.raises(SpecError, match=message):
        read_model_spec(tmp_path / "q")


@pytest.mark.parametrize("part", ["nested_absmax", "nested_quant_map"])
def test_any_shape_of_scales_is_read(part, plain, tmp_path):
    save_packed(plain, tmp_path / "q", "nf4")
    wanted = open_model(tmp_path / "q").checkpoint().load(f"{Q}.weight")
    change(tmp_path / "q", f"{Q}.weight.{part}", lambda v: v.reshape(-1, 4 if len(v) > 15 else 1))
    found = open_model(tmp_path / "q").checkpoint().load(f"{Q}.weight")
    np.testing.assert_array_equal(found, wanted)


SAYINGS = [
    ({"quant_method": "hqq"}, "'hqq', which is not supported; supported: gptq"),
    ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "only pack-quant"),
    ({"quant_method": "gptq", "format": "gptq_v3"}, "only gptq, gptq_v2"),
    ({"quant_method": "compressed-tensors", "transform_config": {"a": 1}}, "rotated weights"),
    ([1], "quantization_config is .1., but must be an object"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "of awq only gemm"),
    (None, "quantization_config is null, but tensors are quantised"),
    ({}, "says '', which is not supported"),
]


def say(folder, section):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = section
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("section", "message"), SAYINGS)
def test_other_quantisations_are_refused(section, message, plain, tmp_path):
    save_packed(plain, tmp_path / "q", "gptq")
    say(tmp_path / "q", section)
    with pytest.raises(SpecError, match=message):
        read_model_spec(tmp_path / "q")


@pytest.mark.parametrize("block", ["128", [128], [128, True], [128, 1.5], {"a": 1}])
def test_blocks_that_are_none_are_refused(block, plain, tmp_path):
    save_packed(plain, tmp_path / "q", "fp8-blocks")
    say(tmp_path / "q", {"quant_method": "fp8", "weight_block_size": block})
    with pytest.raises(SpecError, match=r"weight_block_size is .* but two integers are needed"):
        read_model_spec(tmp_path / "q")


def test_compressed_tensors_tell_the_blocks_of_a_group(plain, tmp_path):
    save_packed(plain, tmp_path / "q", "fp8-blocks")
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    scales = torch.arange(1.0, 16.0).reshape(5, 3)  # 320 x 192 in blocks of 64
    renamed = {k.replace("weight_scale_inv", "weight_scale"): v for k, v in tensors.items()}
    wanted = scales.repeat_interleave(64, 0).repeat_interleave(64, 1)
    kept = {k: v for k, v in renamed.items() if k.startswith(GATE)}
    kept[f"{GATE}.weight_scale"] = scales
    save_file(kept, tmp_path / "q" / "model.safetensors")
    weights = {"num_bits": 8, "type": "float", "block_structure": [64, 64]}
    groups = {"attention": {"weights": None}, "group_0": {"weights": weights}}
    say(
        tmp_path / "q",
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": groups,
        },
    )
    checkpoint = open_model(tmp_path / "q").checkpoint()
    info = checkpoint.info(f"{GATE}.weight")
    found = torch.from_numpy(np.array(info.dtype.widen(checkpoint.load(info.name))))
    assert torch.equal(found, (kept[f"{GATE}.weight"].float() * wanted).bfloat16().float())


def test_matrices_may_have_other_bits_than_config_json_says(plain, tmp_path):
    save_packed(plain, tmp_path / "q", "gptq-8")
    say(tmp_path / "q", CONFIGS["gptq"])
    assert read_model_spec(tmp_path / "q").weight_format("layers.0.down") == "q8_32"


def test_zeros_times_scales_beyond_float16_are_refused(plain, tmp_path):
    save_packed(plain, tmp_path / "q", "awq")
    change(tmp_path / "q", f"{Q}.scales", lambda v: np.full_like(v, 60000))
    with pytest.raises(SpecError, match=r"down_proj.weight has NaN or infinite values"):
        compile_model(tmp_path / "q", output=tmp_path / "a.dove", effort="none")


def test_what_changes_nothing_is_passed_over(plain, tmp_path):
    save_packed(plain, tmp_path / "q", "gptq")
    change(tmp_path / "q", "model.layers.0.self_attn.k_scale", lambda _: np.float32(2))
    change(tmp_path / "q", f"{Q}.bias", lambda _: np.zeros(192, np.float16))
    assert read_model_spec(tmp_path / "q").n_layers == 2
    change(tmp_path / "q", f"{Q}.bias", lambda v: v + np.float16(1))
    with pytest.raises(SpecError, match=r"down_proj.bias is not part of this architecture"):
        read_model_spec(tmp_path / "q")


def test_routers_keep_their_values(tmp_path):
    save_packed(
        save_model(tmp_path / "m", "mixtral", intermediate_size=128), tmp_path / "q", "gptq"
    )
    spec = read_model_spec(tmp_path / "q")
    assert spec.weight_format("layers.1.router") == "f32"
    assert spec.weight_format("head") == "bf16"


def last_logits(path, prompt, activations="float"):
    """Return the logits after a prompt."""
    with load(path, activations=activations) as app:
        app.engine.submit(prompt, SamplingParams(max_tokens=1))
        app.engine.step()
        return np.array(app.engine.executor.buffers.logits(0), np.float64)


@pytest.mark.parametrize(("family", "name"), [("mixtral", "nf4"), ("phi3", "awq")])
def test_experts_and_fused_tensors(family, name, tmp_path):
    plain = save_model(tmp_path / "m", family, intermediate_size=128)
    save_packed(plain, tmp_path / "q", name)
    checkpoint = open_model(tmp_path / "q").checkpoint()
    state = {}
    for key, info in checkpoint.tensors.items():  # as they are kept, as in the model above
        values = torch.tensor(np.array(info.dtype.widen(checkpoint.load(key))))
        state[key] = values.bfloat16().float() if "embed" in key or "head" in key else values
    save_file(state, plain / "model.safetensors")
    found = []
    for folder, form in (("m", "f32"), ("q", None)):
        report = compile_model(
            tmp_path / folder,
            output=tmp_path / f"{folder}.dove",
            effort="none",
            kv_dtype="f32",
            weight_dtype=form,
        )
        found.append(last_logits(report.path, list(range(3, 14))))
    assert np.abs(found[0] - found[1]).max() <= 2e-5 * np.abs(found[0]).max()


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
