"""Small random decoders that rank, written as they are published, and what transformers scores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.tiny_world import LLAMA
from tests.models import make_model

BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
WEB = "Given a web search query, retrieve relevant passages that answer the query"
ROLES = (
    "{%- set told = namespace(text='Find it') -%}{%- for m in messages -%}"
    "{%- if m.role == 'system' -%}{%- set told.text = m.content -%}{%- endif -%}{%- endfor -%}"
    "<|im_start|>{{ told.text }}\n{% for m in messages if m.role != 'system' %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<|im_end|>{% endif %}"
)
"""A chat template of queries and documents, with an instruction of its own."""


def write_tokenizer(folder: Path) -> Any:
    """Write and return a tokenizer that has the tokens of Qwen's text."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(LLAMA / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def save_reranker(folder: Path, **options: Any) -> Any:
    """Write a decoder with a head, and a tokenizer; return the model."""
    model = make_model("qwen3", **{"vocab_size": 800, **options})
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def save_classifier(folder: Path, labels: int = 1) -> Any:
    """Write a decoder with a classifier, and a tokenizer; return the model."""
    torch = pytest.importorskip("torch")
    import transformers

    base = make_model("qwen3", vocab_size=800)
    base.config.num_labels, base.config.pad_token_id = labels, 0
    model = transformers.Qwen3ForSequenceClassification(base.config).eval()
    model.model.load_state_dict(base.model.state_dict())
    with torch.random.fork_rng():
        torch.manual_seed(1)
        torch.nn.init.normal_(model.score.weight, 0.0, 0.3)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def write_scores(folder: Path, template: str = ROLES, asks: bool = False, **answers: Any) -> None:
    """Write the files of sentence-transformers for a decoder that ranks."""
    where = "sentence_transformers.{}".format
    listed = [
        {"idx": 0, "name": "0", "path": "", "type": where("base.modules.transformer.Transformer")},
        {
            "idx": 1,
            "name": "1",
            "path": "1_LogitScore",
            "type": where("cross_encoder.modules.logit_score.LogitScore"),
        },
    ]
    (folder / "1_LogitScore").mkdir()
    settings = {"processing_kwargs": {"chat_template": {"add_generation_prompt": asks}}}
    for name, content in (
        ("modules.json", listed),
        ("1_LogitScore/config.json", answers),
        ("sentence_bert_config.json", settings if asks else {}),
    ):
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(template)


def qwen_ids(
    tokenizer: Any, query: str, document: str, most: int, instruction: str = WEB
) -> list[int]:
    """Return the token ids of a pair as Qwen's card makes them."""
    begin, end = (tokenizer.encode(t, add_special_tokens=False).ids for t in (BEGIN, END))
    text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return [*begin, *ids[: most - len(begin) - len(end)], *end]


def scores(model: Any, texts: Sequence[Sequence[int]], *answers: int) -> np.ndarray:
    """Return the probability of each text: of a classifier, or of a head's answers (yes, no)."""
    torch = pytest.importorskip("torch")

    found = []
    with torch.inference_mode():
        for ids in texts:
            logits = model(torch.tensor([list(ids)])).logits
            values = logits[0, -1, list(answers)] if answers else logits[0]
            yes = values[0] - (values[1] if len(values) > 1 else 0)
            found.append(float(yes.double().sigmoid()))
    return np.array(found)
