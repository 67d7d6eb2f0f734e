"""GGUF files from end to end: greedy tokens equal transformers' on the dequantised weights."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dovetail.cli.model_cache import find_artifact, find_artifacts
from dovetail.compiler.pipeline import compile_model
from dovetail.errors import SpecError
from dovetail.runtime.app import App, load
from dovetail.tiny_world import corpus
from tests.gguf_files import add_tokenizer, reference_state, save_gguf, smollm2
from tests.repository import ROOT
from tests.test_fidelity import count_agreement

TINY = ROOT / "examples" / "tiny_world" / "models" / "llama"
QUESTION = (
    "<|user|>Documents:\n- Melkar is the capital of Zorvia. Its people speak Zorvish.\n"
    "Question: What language is spoken in Zorvia?\nAnswer:<|end|><|assistant|>"
)
SMOLLM2_CONFIG = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
}


def references(path: Path, config: Any, wide: str = "float64") -> tuple[Any, Any]:
    """Return transformers' model of a file's dequantised weights, in `wide` and in float32."""
    torch = pytest.importorskip("torch")
    import transformers

    state = {name: torch.tensor(values) for name, values in reference_state(path).items()}
    made = []
    for dtype in dict.fromkeys((getattr(torch, wide), torch.float32)):
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config)
        model = model.to_empty(device="cpu").to(dtype)
        model.model.rotary_emb = type(model.model.rotary_emb)(config)  # float32, as it is loaded
        model.tie_weights()
        missing = model.load_state_dict(state, strict=False).missing_keys
        assert set(missing) <= {"lm_head.weight"}
        made.append(model.eval())
    return made[0], made[-1]


def compiled(path: Path, folder: Path) -> App:
    report = compile_model(path, output=folder / "app.dove", effort="none", weight_dtype="f32")
    return load(report.path)


def check_tokens(
    app: App, prompts: Sequence[list[int]], references: tuple[Any, Any], tokens: int
) -> None:
    """Require greedy tokens as the references have them; near ties end a comparison."""
    answers = app.generate(prompts, max_tokens=tokens, ignore_eos=True)
    compared, ties = 0, 0
    for prompt, answer in zip(prompts, answers, strict=True):
        steps, tie = count_agreement(*references, prompt, answer.token_ids)
        compared, ties = compared + steps, ties + tie
    assert ties <= 1 + compared // 50


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_greedy_tokens_of_the_tiny_world(kind: str, tmp_path: Path) -> None:
    import transformers

    path = save_gguf(tmp_path / "m.gguf", TINY, kind, tokenizer=add_tokenizer(TINY))
    with compiled(path, tmp_path) as app:
        assert app.tokenizer is not None
        ids = app.tokenizer.encode(QUESTION, special=False)
        prompts = [ids, ids[:7], ids[3:40], [5]]
        config = transformers.LlamaConfig.from_pretrained(TINY)
        check_tokens(app, prompts, references(path, config), 24)
        (answer,) = app.generate([ids], max_tokens=24)
    if kind in ("F32", "BF16"):  # which hold the checkpoint's bfloat16 as it is
        with compiled(TINY, tmp_path) as app:
            (wanted,) = app.generate([ids], max_tokens=24)
        assert answer.token_ids == wanted.token_ids and answer.text == wanted.text
        assert answer.text == "The language of Zorvia is Zorvish."
        assert answer.finish_reason == "stop"


def test_a_real_file_answers_as_transformers_does(tmp_path: Path) -> None:
    check_smollm2(tmp_path, 3, 8, "float32")


@pytest.mark.long
def test_a_real_file_answers_many_prompts_as_transformers_does(tmp_path: Path) -> None:
    check_smollm2(tmp_path, 200, 32, "float64")


def check_smollm2(folder: Path, prompts: int, tokens: int, wide: str) -> None:
    import transformers

    path = smollm2()
    words = " ".join(passage.document for passage in corpus.passages()).split()
    draw = random.Random(0)
    with compiled(path, folder) as app:
        assert app.tokenizer is not None
        texts = []
        for _ in range(prompts):
            start, length = draw.randrange(len(words) - 100), draw.randint(1, 60)
            texts.append(" ".join(words[start : start + length]))
        ids = [app.tokenizer.encode(text) for text in ["The capital of France is", *texts[1:]]]
        config = transformers.LlamaConfig(**SMOLLM2_CONFIG)
        check_tokens(app, ids, references(path, config, wide), tokens)
        (answer,) = app.generate(["The capital of France is"], max_tokens=2)
        assert answer.text == " Paris."


def test_a_file_is_served_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dovetail.cli.model_cache._folder", lambda: tmp_path)
    path = save_gguf(tmp_path / "tiny.gguf", TINY, "BF16", tokenizer=add_tokenizer(TINY))
    found = find_artifacts([str(path)], ["tiny"], {})
    assert list(found) == ["tiny"] and found["tiny"].is_dir()
    assert "compiling" in capfd.readouterr().err
    assert find_artifact(path, {}) == found["tiny"]
    assert "compiling" not in capfd.readouterr().err
    save_gguf(path, TINY, "F16", tokenizer=add_tokenizer(TINY))
    assert find_artifact(path, {}) != found["tiny"]


def test_what_is_neither_is_not_served(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is no file or directory"):
        find_artifact(tmp_path / "none", {})


def test_a_damaged_file_leaves_nothing(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "m.gguf", TINY, "BF16")
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(SpecError, match="truncated or damaged"):
        compile_model(path, output=tmp_path / "app.dove", effort="none")
    assert not (tmp_path / "app.dove").exists()
