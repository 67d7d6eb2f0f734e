"""Formats by measured errors, the table of them, calibration, encoders, and what is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file

from dovetail.cli.inspection import describe_inspection, inspect_artifact
from dovetail.compiler import input_powers
from dovetail.compiler.files.checkpoint import open_checkpoint
from dovetail.compiler.formats.quantise import quantise_rows, squared_error
from dovetail.compiler.formats.quantising import Calibration, Quantised, choose_formats, sample_rows
from dovetail.compiler.formats.weight_formats import matrices
from dovetail.compiler.models.source import open_model
from dovetail.compiler.models.spec import read_model_spec
from dovetail.compiler.pipeline import compile_artifact, compile_model
from dovetail.compiler.request import CompileRequest, read_inputs
from dovetail.compiler.tune.model import tune_model
from dovetail.ir.block_format import BlockFormat
from dovetail.ir.errors import ArtifactError, SpecError
from dovetail.ir.formats import FORMATS
from dovetail.ir.model import ModelSpec
from dovetail.runtime.app import load
from dovetail.tiny_world import ENCODER, LLAMA, corpus
from tests.encoders import cosines
from tests.models import save_model

PASSAGES = [passage.text for passage in corpus.passages()]
SIZE = {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "passages.txt"
    path.write_text("\n".join(PASSAGES[:60]))
    return path


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    path = tmp_path_factory.mktemp("app") / "app.dove"
    compile_model(LLAMA, output=path, effort="none", weight_dtype="int4", calibrate=text)
    return path


def read(model: Path, **options: Any) -> Any:
    return read_inputs(CompileRequest(model=model, output="x", effort="none", **options))


def choose(model: Path, powers: dict[str, Any], **options: Any) -> tuple[ModelSpec, Quantised]:
    spec = read_model_spec(model, **options)
    found = Calibration(Path("text"), 1000, powers)
    sources = matrices(spec)
    return spec, choose_formats(sources, open_checkpoint(model), spec, found, lambda *_: None)


def test_normal_weights_are_as_asked_and_the_head_is_finer(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama", **SIZE)
    found = read(model, weight_dtype="int4")
    forms = {weight.name: weight.format for weight in found.quantised.file.weights}
    assert forms.pop("head") == "q8_32"
    assert set(forms.values()) == {"q4_32"} and not found.quantised.file.kept
    assert all(found.spec.weight_format(name) == form for name, form in forms.items())
    wide = save_model(tmp_path / "wide", "llama", hidden_size=256, num_hidden_layers=1)
    found = read(wide, weight_dtype="int4")
    assert found.spec.weight_format("head") == "q6_16k"
    assert found.spec.weight_format("layers.0.down") == "f32"  # 120 values are no whole blocks
    assert read(wide, weight_dtype="int8").spec.weight_format("head") == "q8_32"


def test_what_loses_too_much_has_eight_bits_or_is_float(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama", **SIZE)
    tensors = load_file(model / "model.safetensors")
    for name, far in (("0.mlp.down_proj", 10), ("1.mlp.down_proj", 100)):
        tensors[f"model.layers.{name}.weight"][:, ::32] *= far
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    power = np.ones(96, np.float32)
    power[::32] = 1e-8  # so that the small ones alone count, which have no codes of 8 bits left
    found = choose(model, {"layers.1.down": power}, weight_dtype="int4")[1]
    assert found.formats["layers.0.down"] == "q8_32" and found.formats["layers.1.down"] == "f32"
    assert {weight.name for weight in found.file.kept} == {"layers.0.down", "layers.1.down"}
    assert "layers.0.down, layers.1.down" in found.notes[0]
    for weight in found.file.weights:
        assert weight.error <= found.file.bounds.get(weight.format, 0)
    blind = choose(model, {}, weight_dtype="int4")[1]
    assert blind.formats["layers.1.down"] != "f32" == found.formats["layers.1.down"]


def test_an_artifact_tells_its_errors_and_runs(calibrated: Path, text: Path) -> None:
    (model,) = inspect_artifact(calibrated).models
    table = model.quantisation
    assert table is not None and table.calibration == str(text)
    assert table.calibration_tokens > 1000
    stored = {weight.name: weight.dtype for weight in model.file.weights}
    assert all(stored[weight.name] == weight.format for weight in table.weights)
    assert {weight.name for weight in table.weights} == {
        name for name, dtype in stored.items() if dtype.startswith("q")
    }
    out = io.StringIO()
    Console(file=out, width=160).print(*describe_inspection(inspect_artifact(calibrated)))
    assert "gate_up" in out.getvalue() and "worst error" in out.getvalue()
    with load(calibrated) as app:
        assert app.generate(["The"], max_tokens=4)[0].token_ids


def test_an_artifact_compiled_anew_keeps_the_table(calibrated: Path, tmp_path: Path) -> None:
    again = compile_model(calibrated, output=tmp_path / "again.dove", effort="none")
    old, new = (inspect_artifact(Path(path)).models[0] for path in (calibrated, again.path))
    assert old.quantisation == new.quantisation is not None
    assert old.file.weights == new.file.weights


def test_calibration_knows_the_inputs_of_products(text: Path) -> None:
    source, spec = open_model(LLAMA), read_model_spec(LLAMA, weight_dtype="int4")
    request = CompileRequest(model=LLAMA, output="x", weight_dtype="int4", calibrate=text)
    seen: list[tuple[int, int]] = []
    told = (lambda *at: seen.append(at), compile_artifact)
    found = input_powers.calibrate(request, spec, source, *told)
    assert seen and [done for done, _ in seen] == list(range(seen[0][1]))
    wanted = reference_powers(input_powers.read_windows(text, source, spec, 512))
    assert found.powers.keys() == wanted.keys()
    for name, power in wanted.items():  # products of the float model may be in bfloat16
        np.testing.assert_allclose(found.powers[name], power, rtol=0.1, atol=0.01 * power.mean())


def reference_powers(windows: list[list[int]]) -> dict[str, Any]:
    """Return the mean squares of what transformers' products read."""
    torch = pytest.importorskip("torch")
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float64).eval()
    modules = {"head": model.lm_head}
    names = {"qkv": "self_attn.q_proj", "o": "self_attn.o_proj"}
    names |= {"gate_up": "mlp.up_proj", "down": "mlp.down_proj"}
    for number, layer in enumerate(model.model.layers):
        for ours, theirs in names.items():
            modules[f"layers.{number}.{ours}"] = layer.get_submodule(theirs)
    rows: dict[str, list[Any]] = {name: [] for name in modules}
    for name, module in modules.items():
        module.register_forward_pre_hook(lambda _, given, name=name: rows[name].append(given[0][0]))
    with torch.no_grad():
        for window in windows:
            model(torch.tensor([window]))
    found = {name: torch.cat(parts).square().mean(0).numpy() for name, parts in rows.items()}
    last = [part[:-1] for part in rows["head"]]  # no token follows the last one of a window
    return found | {"head": torch.cat(last).square().mean(0).numpy()}


@pytest.mark.parametrize("context", [1024, 2048])
def test_calibration_runs_the_divisors_that_are_compiled(
    context: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 32,
        "long_factor": [2.0] * 32,
    }
    shape = {"max_position_embeddings": 2048, "original_max_position_embeddings": 1024}
    model = save_model(tmp_path / "m", "phi3", hidden_size=256, rope_parameters=rope, **shape)
    request = CompileRequest(model=model, output="x", max_context=context, calibrate="text")
    spec, asked = read_model_spec(model, max_context=context), list[CompileRequest]()
    monkeypatch.setattr(input_powers, "read_windows", lambda *_: [[1]])
    monkeypatch.setattr(input_powers, "run_windows", lambda *_: {})
    source = open_model(model)
    input_powers.calibrate(request, spec, source, lambda *_: None, asked.append)
    float_spec = read_model_spec(model, max_context=asked[0].max_context)
    assert float_spec.rope == spec.rope


def test_calibrated_weights_lose_less_on_their_text(text: Path) -> None:
    source, spec = open_model(LLAMA), read_model_spec(LLAMA, weight_dtype="int4")
    request = CompileRequest(model=LLAMA, output="x", weight_dtype="int4", calibrate=text)
    powers = input_powers.calibrate(request, spec, source, lambda *_: None, compile_artifact).powers
    checkpoint, form = open_checkpoint(LLAMA), FORMATS["q4_32"]
    assert isinstance(form, BlockFormat)
    total = blind = 0.0
    for source_ in matrices(spec):
        rows, power = sample_rows(source_, checkpoint), powers[source_.name]
        lost, whole = squared_error(rows, form, power)
        off = form.values(quantise_rows(rows, form)) - rows
        assert lost / whole <= float((off * off * power).sum()) / whole * (1 + 1e-6)
        total, blind = total + lost / whole, blind + float((off * off * power).sum()) / whole
    assert total < 0.98 * blind


def test_encoders_take_eight_bits(tmp_path: Path) -> None:
    found = {}
    for dtype in ("f32", "int8"):
        path = tmp_path / f"{dtype}.dove"
        report = compile_model(ENCODER, output=path, effort="none", weight_dtype=dtype)
        with load(report.path) as app:
            found[dtype] = np.asarray(app.embed(PASSAGES[:40]))
    assert cosines(found["f32"], found["int8"]).min() >= 0.999
    (encoder,) = inspect_artifact(tmp_path / "int8.dove").encoders
    stored = {weight.name: weight.dtype for weight in encoder.file.weights}
    assert stored["words"] == "bf16" and stored["layers.0.down"] == "q8_32"
    assert encoder.quantisation is not None and not encoder.quantisation.kept


@pytest.mark.parametrize("dtype", ["auto", "bf16", None])
def test_a_text_without_quantising_is_refused(dtype: str | None, text: Path) -> None:
    with pytest.raises(SpecError, match="--calibrate needs --weight-dtype int8 or int4"):
        read(LLAMA, weight_dtype=dtype, calibrate=text)
    with pytest.raises(SpecError, match="--calibrate needs --weight-dtype int8 or int4"):
        tune_model(LLAMA, weight_dtype=dtype, calibrate=text)


def test_texts_that_do_not_calibrate_are_refused(tmp_path: Path, text: Path) -> None:
    short, bytes_ = tmp_path / "short.txt", tmp_path / "bytes.txt"
    short.write_text("a few words")
    bytes_.write_bytes(b"\xff\xfe" * 400)
    bare = save_model(tmp_path / "bare", "llama", **SIZE)
    for model, file, sentence in (
        (LLAMA, tmp_path / "none.txt", "cannot read .*none.txt: No such file"),
        (LLAMA, bytes_, "is not UTF-8 text"),
        (LLAMA, short, "tokens; give a text of 128 or more"),
        (bare, text, "has no tokenizer.json, so a text cannot calibrate it"),
        (ENCODER, text, "is a text encoder, which cannot be calibrated"),
    ):
        with pytest.raises(SpecError, match=sentence):
            compile_model(
                model, output=tmp_path / "x", effort="none", weight_dtype="int4", calibrate=file
            )
    assert not (tmp_path / "x").exists()


def test_an_interrupt_while_it_measures_leaves_nothing(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"

    def stop(step: str, done: int, total: int) -> None:
        if step == "read" and total > 1 and done:
            raise KeyboardInterrupt

    options = {"weight_dtype": "int4", "calibrate": text, "effort": "none", "cache": cache}
    with pytest.raises(ArtifactError, match="interrupted; nothing was written to"):
        compile_model(LLAMA, output=tmp_path / "x.dove", progress=stop, **options)
    assert not (tmp_path / "x.dove").exists() and not list(cache.glob("calibrate-*"))
