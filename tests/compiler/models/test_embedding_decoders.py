"""Decoders that embed: how their texts end, and weights that libraries have quantised."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing

from dovetail.compiler.models.embedding_decoders import EMBEDDING_DECODERS, read_ending_tokenizer
from dovetail.compiler.models.encoder_spec import read_encoder_spec
from dovetail.compiler.models.source import ModelDirectory
from dovetail.tiny_world import LLAMA
from tests.encoders import (
    compiled,
    cosines,
    last_rows,
    load_encoder,
    random_texts,
    write_modules,
)
from tests.models import make_model
from tests.packed_files import save_packed

END, FIRST = "<|end|>", "<|user|>"
BEGUN = {"single": f"{FIRST} $A", "pair": f"{FIRST} $A {FIRST} $B", "special_tokens": [(FIRST, 2)]}
ENDED = {"single": f"$A {END}", "special_tokens": [(END, 1)]}


def read(folder: Path, steps: object, settings: dict[str, object]) -> list[str]:
    """Return the tokens of a text that is cut, by what becomes of a tokenizer."""
    tokenizer = tokenizers.Tokenizer.from_file(str(LLAMA / "tokenizer.json"))
    if steps is not None:
        tokenizer.post_processor = steps
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    data = read_ending_tokenizer(ModelDirectory(folder))
    assert data is not None
    found = tokenizers.Tokenizer.from_str(data.decode())
    found.enable_truncation(5)
    return list(found.encode("Who is it? Who is it?").tokens)


@pytest.mark.parametrize(
    ("steps", "begun"),
    [
        (None, False),
        (ByteLevel(trim_offsets=False), False),
        (TemplateProcessing(**ENDED), False),
        (TemplateProcessing(**BEGUN), True),
        (Sequence([ByteLevel(trim_offsets=False), TemplateProcessing(**BEGUN)]), True),
    ],
    ids=["nothing", "bytes", "ended", "begun", "both"],
)
@pytest.mark.parametrize("end", [END, {"content": END}])
def test_texts_end_as_the_settings_say(
    tmp_path: Path, steps: object, begun: bool, end: object
) -> None:
    tokens = read(tmp_path, steps, {"add_eos_token": True, "eos_token": end})
    assert len(tokens) == 5 and tokens[-1] == END and tokens.count(END) == 1
    assert (tokens[0] == FIRST) == begun


def test_texts_end_plainly_where_nothing_is_said(tmp_path: Path) -> None:
    for settings in ({}, {"eos_token": END}, {"add_eos_token": True, "eos_token": "<none>"}):
        assert END not in read(tmp_path, None, settings)
    (tmp_path / "tokenizer.json").unlink()
    assert read_ending_tokenizer(ModelDirectory(tmp_path)) is None


@pytest.mark.parametrize(
    ("name", "form"), [("gptq", "q4_32"), ("gptq-order", "bf16"), ("nf4", "nf4_32")]
)
def test_quantised_weights_of_safetensors_are_kept(tmp_path: Path, name: str, form: str) -> None:
    """Vectors are those of the floats that they stand for; with act-order as bfloat16."""
    torch = pytest.importorskip("torch")
    shape = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 64, "vocab_size": 300}
    model = make_model("qwen3", **shape)
    model.save_pretrained(tmp_path / "plain")
    exact = save_packed(tmp_path / "plain", tmp_path / "m", name)
    write_modules(tmp_path / "m", {"pooling_mode_lasttoken": True})
    spec = read_encoder_spec(tmp_path / "m")
    assert spec.weight_format("layers.0.gate_up") == form
    assert spec.decoder is not None and spec.decoder.weight_format("embed") == "bf16"
    model.load_state_dict({key: torch.tensor(value) for key, value in exact.items()})
    texts = random_texts([3, 40])
    path = compiled(tmp_path / "m", tmp_path / "m.dove", weight_dtype="auto")
    wanted = np.array([rows[-1] for rows in last_rows(model.model.double(), texts)])
    assert cosines(load_encoder(path).embed_tokens(texts), wanted).min() > 0.998


def test_base_models_and_those_with_heads_are_known() -> None:
    assert {"Qwen3Model", "Qwen3ForCausalLM", "Gemma3TextModel"} <= EMBEDDING_DECODERS.keys()
