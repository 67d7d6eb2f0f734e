"""Which decoders rank, how their texts are put, and what is refused of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dovetail.compiler.families.ranking_decoders import INSTRUCTION, QWEN3
from dovetail.compiler.models.encoder_folder import is_encoder
from dovetail.compiler.models.encoder_spec import read_encoder_spec
from dovetail.ir.errors import SpecError
from tests.rerankers import ROLES, save_classifier, save_reranker, write_scores

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"


def tell(folder: Path, name: str, **changes: Any) -> None:
    """Change a JSON file, or write it."""
    file = folder / name
    before = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(before | changes))


def test_a_name_tells_what_files_do_not(tmp_path: Path) -> None:
    save_reranker(tmp_path / "m")
    assert not is_encoder(tmp_path / "m")
    named = tmp_path / "models--Qwen--Qwen3-Reranker-4B/snapshots/1234"
    named.parent.mkdir(parents=True)
    (tmp_path / "m").rename(named)
    assert is_encoder(named)
    spec = read_encoder_spec(named)
    assert (spec.labels, spec.pooling, spec.sigmoid, spec.template) == (1, "last", True, QWEN3)
    assert spec.prompts[spec.default_prompt or ""] == INSTRUCTION


def test_a_template_of_conversations_is_not_one_of_pairs(tmp_path: Path) -> None:
    folder = tmp_path / "qwen3-reranker"
    save_reranker(folder)
    for template in (CHAT.replace("m.content", "m.role"), "{{ raise_exception('no') }}"):
        (folder / "chat_template.jinja").write_text(template)
        assert read_encoder_spec(folder).template == QWEN3
    (folder / "chat_template.jinja").write_text(ROLES)
    spec = read_encoder_spec(folder)
    assert spec.template == "<|im_start|>{instruction}\nquery: {query}\ndocument: {document}\n"
    assert spec.prompts == {"instruction": "Find it"}


def test_prompts_of_the_files_are_instructions(tmp_path: Path) -> None:
    save_reranker(tmp_path / "m")
    write_scores(tmp_path / "m", true_token_id=5, false_token_id=6)
    told = {"prompts": {"query": "Look"}, "default_prompt_name": "query"}
    activation = "torch.nn.modules.linear.Identity"
    tell(tmp_path / "m", "config_sentence_transformers.json", **told, activation_fn=activation)
    spec = read_encoder_spec(tmp_path / "m")
    assert (spec.prompts, spec.default_prompt, spec.sigmoid) == (told["prompts"], "query", False)


def test_classifiers_may_have_several_labels(tmp_path: Path) -> None:
    save_classifier(tmp_path / "m", labels=3)
    assert is_encoder(tmp_path / "m")
    spec = read_encoder_spec(tmp_path / "m")
    assert (spec.dim, spec.template) == (3, "")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"classifier_from_token": ["yes"]}, "must be two"),
        ({"classifier_from_token": ["yes", "Nein"]}, "no tokens yes and Nein"),
    ],
)
def test_answers_that_are_no_tokens_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    save_reranker(tmp_path / "m")
    tell(tmp_path / "m", "config.json", **changes)
    with pytest.raises(SpecError, match=words):
        read_encoder_spec(tmp_path / "m")


def test_scores_that_are_not_computed_are_refused(tmp_path: Path) -> None:
    save_reranker(tmp_path / "m")
    write_scores(tmp_path / "m", true_token_id=5, false_token_id=9999)
    with pytest.raises(SpecError, match="has no row 9999"):
        read_encoder_spec(tmp_path / "m")
    (tmp_path / "m/1_LogitScore/config.json").write_text("{}")
    with pytest.raises(SpecError, match="true_token_id"):
        read_encoder_spec(tmp_path / "m")
    listed = json.loads((tmp_path / "m/modules.json").read_text())
    listed.insert(1, {**listed[0], "type": "sentence_transformers.models.Pooling"})
    (tmp_path / "m/modules.json").write_text(json.dumps(listed))
    with pytest.raises(SpecError, match="Transformer, Pooling, LogitScore are not supported"):
        is_encoder(tmp_path / "m")
