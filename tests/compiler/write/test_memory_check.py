"""Models that do not fit into memory are refused with the sum, and told what would fit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from dovetail.codegen.targets import TARGETS
from dovetail.compiler import request
from dovetail.compiler.encoder_pipeline import read_encoder_inputs
from dovetail.compiler.models.spec import read_model_spec
from dovetail.compiler.pipeline import compile_model
from dovetail.compiler.write.memory_check import check_fits, memory_need
from dovetail.errors import CapacityError
from dovetail.ir.model import ModelSpec
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.hosting.open_engine import open_engine
from dovetail.tiny_world import ENCODER, LLAMA
from dovetail.topology.hardware import HardwareSpec, dump_hardware, read_hardware
from tests.compiler.search.test_user_kernels import KERNELS

GIB = 1 << 30
STEP = (512, 64)
SEVEN_B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "vocab_size": 32000,
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The headers of a 7B model in float32 in two files; the values are holes."""
    folder = tmp_path_factory.mktemp("7b")
    (folder / "config.json").write_text(json.dumps(SEVEN_B))
    wide, narrow, whole = [4096, 4096], [4096, 11008], [32000, 4096]
    layer = {f"self_attn.{p}_proj": wide for p in "qkvo"} | {"mlp.down_proj": narrow}
    layer |= {"mlp.gate_proj": narrow[::-1], "mlp.up_proj": narrow[::-1]}
    layer |= {"input_layernorm": [4096], "post_attention_layernorm": [4096]}
    layers = {f"model.layers.{i}.{n}.weight": s for i in range(32) for n, s in layer.items()}
    ends = {"model.embed_tokens.weight": whole, "lm_head.weight": whole}
    weight_map = {}
    for file, shapes in {"a": layers, "b": {**ends, "model.norm.weight": [4096]}}.items():
        header, end = {}, 0
        for name, shape in shapes.items():
            start, end = end, end + 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
        data = json.dumps(header).encode()
        with (folder / f"{file}.safetensors").open("wb") as out:
            out.write(len(data).to_bytes(8, "little") + data)
            out.truncate(8 + len(data) + end)
        weight_map |= dict.fromkeys(shapes, f"{file}.safetensors")
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


def machine(memory: int) -> HardwareSpec:
    """This machine, whose control group has so many bytes."""
    return replace(read_hardware(), memory_bytes=256 * GIB, memory_limit=memory)


def test_a_7b_model_in_float32_on_24_gib(large: Path, tmp_path: Path) -> None:
    hardware = tmp_path / "machine.json"
    hardware.write_bytes(dump_hardware(machine(24 * GIB)))
    asked = {"hardware": hardware, "weight_dtype": "f32", "output": tmp_path / "app.dove"}
    with pytest.raises(CapacityError) as failed:
        compile_model(large, **asked)
    said = str(failed.value)
    numbers = [float(text) for text in re.findall(r"(\d+\.\d\d)", said)]
    weights, kv, activations, total, there = numbers
    assert 25.0 < weights < 25.2 and kv == 4.0 and 0 < activations < 0.5 and there == 24.0
    assert total == pytest.approx(weights + kv + activations, abs=0.02)
    assert f"{large} does not fit" in said and said.endswith("use --weight-dtype bf16")
    assert not (tmp_path / "app.dove").exists()


def test_the_tape_of_a_users_own_gate_counts(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_model_spec(large, target=TARGETS["x86-64-avx2"])
    need = memory_need(spec, STEP, gated=True)
    assert need.total > memory_need(spec, STEP).total
    monkeypatch.setattr(request, "read_hardware", lambda _: machine(need.total - 1))
    file = tmp_path / "own.c"
    file.write_text(KERNELS["silu_mul"])
    usual = {"model": large, "output": tmp_path / "app.dove", "weight_dtype": "f32"}
    asked = request.CompileRequest(**usual, kernels=[f"silu_mul={file}"])
    with pytest.raises(CapacityError, match="does not fit into memory as f32"):
        request.read_inputs(asked)


def said_of(spec: ModelSpec, memory: int) -> str:
    try:
        check_fits("m", spec, machine(memory), STEP)
    except CapacityError as error:
        return str(error).partition("; use ")[2]
    return "fits"


def test_what_is_named_fits(large: Path) -> None:
    target = TARGETS["x86-64-avx2"]

    def stored(**options: object) -> ModelSpec:
        return read_model_spec(large, target=target, **options)  # type: ignore[arg-type]

    whole = stored()
    least = memory_need(whole, STEP).total
    assert said_of(whole, least) == "fits" != said_of(whole, least - 1)
    assert said_of(whole, 20 * GIB) == "--weight-dtype bf16"
    assert said_of(whole, 12 * GIB) == "--weight-dtype int8"
    assert said_of(whole, 10 * GIB) == "--weight-dtype int4"
    assert said_of(whole, 2 * GIB) == "a smaller model"
    for options in ({"weight_dtype": "int4"}, {}):
        memory = 5 * GIB if options else 28 * GIB
        spec = stored(**options)
        said = said_of(spec, memory)
        tokens = int(said.partition("--max-context ")[2].split()[0])
        assert said_of(stored(**options, max_context=tokens), memory) == "fits", said
        assert said_of(replace(spec, max_context=tokens + 17), memory) != "fits"
    said = said_of(whole, 6 * GIB)
    tokens = int(re.fullmatch(r"--weight-dtype int4 with --max-context (\d+) .*", said)[1])  # type: ignore[index]
    assert said_of(stored(weight_dtype="int4", max_context=tokens), 6 * GIB) == "fits"


def test_an_encoder_needs_what_the_compile_writes(tmp_path: Path) -> None:
    asked = {"model": ENCODER, "effort": "none", "threads": 1, "weight_dtype": "f32"}
    report = compile_model(**asked, output=tmp_path / "app.dove")
    (part,) = open_artifact(report.path, read_hardware()).encoders.values()
    need = part.weights.stat().st_size + part.tapes["encode"].arena_bytes
    hardware = tmp_path / "machine.json"
    asked |= {"output": "x", "hardware": hardware}
    hardware.write_bytes(dump_hardware(machine(need)))
    read_encoder_inputs(request.CompileRequest(**asked))
    hardware.write_bytes(dump_hardware(machine(need - 1)))
    with pytest.raises(
        CapacityError, match=r"as f32: [\d.]+ of weights \+ [\d.]+ of activations ="
    ):
        read_encoder_inputs(request.CompileRequest(**asked))


def test_the_need_is_what_the_compile_writes_and_the_load_asks_for(tmp_path: Path) -> None:
    report = compile_model(LLAMA, output=tmp_path / "app.dove", effort="none", threads=1)
    artifact = open_artifact(report.path, read_hardware())
    part = artifact.models["llm"]
    step = part.file.max_step_tokens, part.file.max_step_sequences
    need = memory_need(part.file.spec, step)
    assert need.weights == part.weights.stat().st_size == report.weight_bytes
    options = EngineOptions()
    with pytest.raises(CapacityError, match="the memory that is free") as failed:
        open_engine(artifact, machine(1), options)
    assert "narrower --weight-dtype" in str(failed.value)
    with pytest.raises(CapacityError, match="memory are free beside weights"):
        open_engine(artifact, machine(1), EngineOptions(kv_blocks=1))
    open_engine(artifact, read_hardware(), options).close()
