"""Mixtures of experts in whole models: quantised, from GGUF files, deterministic, calibrated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.compiler.input_powers import run_windows
from dovetail.compiler.pipeline import compile_model
from dovetail.errors import SpecError
from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.runtime.app import App, load
from dovetail.runtime.schedule.request import SamplingParams
from tests.gguf_files import read_own_state, read_state, save_gguf
from tests.models import EXPERTS, make_model, save_model
from tests.packed_files import save_mxfp4
from tests.tapes import verify_tapes
from tests.test_fidelity import load_exact, reference_logits

PROMPT = list(range(3, 45))
SHAPE = {
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 300,
}


def logits(app: App, *prompts: list[int]) -> list[np.ndarray]:
    for prompt in prompts:
        app.engine.submit(prompt, SamplingParams(max_tokens=1))
    app.engine.step()
    buffers = app.engine.executor.buffers
    return [np.array(buffers.logits(row), np.float64) for row in range(len(prompts))]


def compiled(source: Path, folder: Path, name: str = "app", **options: Any) -> Path:
    report = compile_model(source, output=folder / f"{name}.dove", effort="none", **options)
    verify_tapes(report.path)
    return report.path


@pytest.mark.parametrize("family", EXPERTS)
def test_a_file_gives_the_tokens_of_the_directory(family: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", family)
    answers = []
    for name, source in (("a", folder), ("b", save_gguf(tmp_path / "m.gguf", folder))):
        with load(compiled(source, tmp_path, name, weight_dtype="f32")) as app:
            answers.append(logits(app, PROMPT)[0])
    assert (answers[0] == answers[1]).all() and len(set(answers[0])) > 50


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A GGUF file of two types, and transformers' model of its dequantised experts."""
    torch = pytest.importorskip("torch")
    import gguf

    folder = tmp_path_factory.mktemp("experts")
    made = make_model("qwen3_moe", **SHAPE)
    made.save_pretrained(folder / "model")
    kinds = {"gate_proj": "Q4_0", "up_proj": "Q4_0", "down_proj": "Q8_0"}

    def kind_of(name: str) -> str:
        return kinds.get(name.split(".")[-2], "F32")

    path = save_gguf(folder / "m.gguf", folder / "model", kind_of)
    state = made.state_dict()
    for name, values in read_own_state(folder / "model").items():
        if ".experts." not in name:
            continue
        layer, _, rest = name.partition(".experts.")
        expert, part, _ = rest.split(".")
        form = gguf.GGMLQuantizationType[kind_of(name)]
        exact = torch.tensor(gguf.quants.dequantize(gguf.quants.quantize(values, form), form))
        if part == "down_proj":
            state[f"{layer}.experts.down_proj"][int(expert)] = exact
        else:
            half = slice(0, 256) if part == "gate_proj" else slice(256, 512)
            state[f"{layer}.experts.gate_up_proj"][int(expert), half] = exact
    made.load_state_dict(state)
    return compiled(path, folder, kv_dtype="f32"), made.double()


@pytest.mark.parametrize("deterministic", [False, True])
def test_quantised_experts_keep_their_blocks(
    quantised: tuple[Path, Any], deterministic: bool
) -> None:
    path, exact = quantised
    wanted = reference_logits(exact, PROMPT)[-1]
    with load(path, activations="float", deterministic=deterministic) as app:
        assert app.engine.spec.weight_format("layers.1.gate_up") == "q4_32"
        (got,) = logits(app, PROMPT)
    assert np.abs(got - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_deterministic_loads_give_a_prompt_its_bits_in_any_batch(
    quantised: tuple[Path, Any],
) -> None:
    with load(quantised[0], deterministic=True) as app:
        (alone,) = logits(app, PROMPT)
        beside = logits(app, PROMPT, PROMPT[:9])
    assert any(np.array_equal(alone, row) for row in beside)


def test_deterministic_experts_need_one_process(quantised: tuple[Path, Any]) -> None:
    phase = PhasePlan(threads=1, cpus=())
    plan = ServicePlan(processes=2, prefill=phase, decode=phase)
    with pytest.raises(SpecError, match="one process"):
        load(quantised[0], plan=plan, deterministic=True)


def test_quantising_leaves_the_router_as_it_is(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "qwen3_moe", **SHAPE)
    with load(compiled(folder, tmp_path, weight_dtype="int4")) as app:
        formats = {
            name: app.engine.spec.weight_format(f"layers.0.{name}")
            for name in ("router", "gate_up", "down")
        }
        assert formats == {"router": "f32", "gate_up": "q4_32", "down": "q4_32"}
        assert app.generate([PROMPT], max_tokens=4)[0].token_ids


def test_calibration_knows_the_rows_of_all_experts(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    folder = save_model(tmp_path / "model", "qwen3_moe", **SHAPE)
    powers = run_windows(compiled(folder, tmp_path, weight_dtype="f32"), [PROMPT], lambda *_: None)
    exact, seen = load_exact(folder), list[Any]()
    mlp = exact.model.layers[0].mlp
    mlp.register_forward_pre_hook(lambda _, given: seen.append(given[0][0]))
    with torch.no_grad():
        exact(torch.tensor([PROMPT]))
        rows, inner = seen[0], []
        for row, chosen in zip(rows, (rows @ mlp.gate.weight.T).topk(3).indices, strict=True):
            for expert in chosen:
                gate, up = (mlp.experts.gate_up_proj[expert] @ row).chunk(2)
                inner.append(torch.nn.functional.silu(gate) * up)
    for name, read in {"router": rows, "gate_up": rows, "down": torch.stack(inner)}.items():
        wanted = read.square().mean(0).numpy()
        np.testing.assert_allclose(powers[f"layers.0.{name}"], wanted, rtol=1e-3)


OSS = {"hidden_size": 128, "intermediate_size": 64, "sliding_window": 4}
FEW = PROMPT[:7]
"""Fewer rows than are rounded to bfloat16, more than the window."""


def check_mxfp4(source: Path, folder: Path, state: dict[str, np.ndarray]) -> App:
    """Compare a model with transformers' of these values; the app is open."""
    torch = pytest.importorskip("torch")
    made = make_model("gpt_oss", **OSS)
    made.load_state_dict({name: torch.tensor(values) for name, values in state.items()})
    wanted = reference_logits(made.double(), FEW)[-1]
    path, most = compiled(source, folder, kv_dtype="f32"), np.abs(wanted).max()
    with load(path) as app:
        (near,) = logits(app, FEW)
    app = load(path, activations="float")
    (got,) = logits(app, FEW)
    assert np.abs(got - wanted).max() <= 2e-5 * most < np.abs(near - wanted).max() <= 0.05 * most
    formats = {app.engine.spec.weight_format(f"layers.1.{w}") for w in ("gate_up", "down")}
    assert formats == {"mx4_32"}
    return app


def test_mxfp4_of_safetensors_keeps_its_values(tmp_path: Path) -> None:
    state = save_mxfp4(save_model(tmp_path / "m", "gpt_oss", **OSS), tmp_path / "q")
    with check_mxfp4(tmp_path / "q", tmp_path, state) as app:
        assert app.engine.spec.weight_format("layers.1.router") == "bf16"


def test_mxfp4_of_a_file_keeps_its_values(tmp_path: Path) -> None:
    import gguf

    folder = save_model(tmp_path / "m", "gpt_oss", **OSS)
    form, state = gguf.GGMLQuantizationType.MXFP4, read_state(folder)

    def kind_of(name: str) -> str:
        return "MXFP4" if ".experts." in name else "F32"

    path = save_gguf(tmp_path / "m.gguf", folder, kind_of)
    for name, values in state.items():
        if name.endswith("_proj"):
            rows = np.ascontiguousarray(values.swapaxes(1, 2))
            exact = gguf.quants.dequantize(gguf.quants.quantize(rows, form), form)
            state[name] = np.ascontiguousarray(exact.swapaxes(1, 2))
    check_mxfp4(path, tmp_path, state).close()
