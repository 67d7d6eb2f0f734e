"""Quantised weights in a whole model: float activations are exact, integer ones near."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.compiler.formats.weight_formats import matrices
from dovetail.compiler.pipeline import compile_model
from dovetail.errors import RequestError
from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.runtime.app import App, load
from dovetail.runtime.schedule.request import SamplingParams
from tests.gguf_files import reference_state, save_gguf
from tests.models import make_model
from tests.test_fidelity import reference_logits

PROMPT = list(range(3, 45))
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 300,
}
MIXED = {
    "q_proj": "Q4_K",
    "k_proj": "Q4_K",
    "v_proj": "Q6_K",
    "o_proj": "Q4_0",
    "gate_proj": "Q2_K",
    "up_proj": "Q2_K",
    "down_proj": "IQ4_XS",
    "embed_tokens": "Q8_0",
    "lm_head": "Q8_0",
}


def mixed(name: str) -> str:
    """As files of llama.cpp are: of several types, v in another than q and k in one layer only."""
    kind = MIXED[name.split(".")[-2]]
    return "Q4_K" if "layers.1" in name and "v_proj" in name else kind


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A GGUF file of many formats, and transformers' model of its dequantised weights."""
    torch = pytest.importorskip("torch")

    folder = tmp_path_factory.mktemp("mixed")
    made = make_model("llama", tie_word_embeddings=False, **SHAPE)
    made.save_pretrained(folder / "model")
    path = save_gguf(folder / "m.gguf", folder / "model", mixed)
    state = {name: torch.tensor(values) for name, values in reference_state(path).items()}
    made.load_state_dict(state, strict=False)
    compile_model(path, output=folder / "app.dove", effort="none", kv_dtype="f32")
    return folder / "app.dove", made.double()


def logits(app: App, prompt: list[int] = PROMPT) -> np.ndarray:
    app.engine.submit(prompt, SamplingParams(max_tokens=1))
    app.engine.step()
    return np.array(app.engine.executor.buffers.logits(0), np.float64)


def test_a_file_keeps_its_formats(model: Any) -> None:
    with load(model[0]) as app:
        spec = app.engine.spec
        assert len(spec.qkv_parts(0)) == 3 and len(spec.qkv_parts(1)) == 1
        assert spec.weight_format("layers.0.v") == "q6_16k"
        assert spec.weight_format("layers.1.qkv") == "q4_32km"
        formats = {spec.weight_format(source.name) for source in matrices(spec)}
        assert {"q4_32", "q4_16km", "iq4_32k"} < formats and "f32" not in formats


@pytest.mark.parametrize("deterministic", [False, True])
def test_float_activations_give_the_logits_of_the_dequantised_weights(
    model: Any, deterministic: bool
) -> None:
    path, exact = model
    wanted = reference_logits(exact, PROMPT)[-1]
    with load(path, activations="float", deterministic=deterministic) as app:
        assert np.abs(logits(app) - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_integer_activations_are_near_and_other_than_float(model: Any) -> None:
    path, exact = model
    wanted = reference_logits(exact, PROMPT)[-1]
    with load(path) as app:
        got = logits(app)
    error = np.abs(got - wanted).max() / np.abs(wanted).max()
    assert 1e-5 < error < 0.05
    assert np.corrcoef(got, wanted)[0, 1] > 0.999


def plans() -> Iterator[ServicePlan]:
    phase = PhasePlan(threads=1, cpus=())
    for processes in (1, 2):
        yield ServicePlan(processes=processes, prefill=phase, decode=phase)


def test_processes_share_blocks_and_keep_the_tokens(model: Any) -> None:
    answers = []
    for plan in plans():
        with load(model[0], plan=plan, activations="float") as app:
            answers.append(app.generate([PROMPT], max_tokens=12)[0].token_ids)
    assert answers[0] == answers[1]


def test_deterministic_loads_keep_their_bits(model: Any) -> None:
    found = []
    for threads in (1, 2):
        with load(model[0], deterministic=True, threads=threads) as app:
            alone = logits(app)
            app.engine.submit(PROMPT, SamplingParams(max_tokens=1))
            app.engine.submit(PROMPT[:9], SamplingParams(max_tokens=1))
            app.engine.step()
            beside = [
                np.array(app.engine.executor.buffers.logits(row), np.float64) for row in range(2)
            ]
            found.append(alone)
            assert any(np.array_equal(alone, row) for row in beside)
    assert np.array_equal(*found)


@pytest.mark.parametrize(
    ("name", "form", "bound"), [("int8", "q8_32", 0.05), ("int4", "q4_32", 0.4)]
)
def test_a_float_checkpoint_is_quantised_where_asked(
    name: str, form: str, bound: float, tmp_path: Path
) -> None:
    made = make_model("qwen3", **SHAPE | {"num_attention_heads": 3, "num_key_value_heads": 1})
    made.save_pretrained(tmp_path / "model")
    report = compile_model(
        tmp_path / "model", output=tmp_path / "app.dove", effort="none", weight_dtype=name
    )
    assert report.weight_dtype == form
    wanted = reference_logits(made.double(), PROMPT)[-1]
    with load(report.path, activations="float") as app:
        error = np.abs(logits(app) - wanted).max() / np.abs(wanted).max()
        assert 1e-5 < error < bound


def test_what_activations_may_be(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="integer or float, not 'int3'"):
        load(tmp_path, activations="int3")
