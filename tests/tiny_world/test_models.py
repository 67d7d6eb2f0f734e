"""The committed models are the trained ones: they load, and what they were taught they can do."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

pytest.importorskip("torch")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dovetail.compiler.pipeline import compile_model
from dovetail.runtime.app import App, load
from dovetail.tiny_world import ENCODER, LLAMA, corpus, prompts
from dovetail.tiny_world.encoder import Encoder
from dovetail.tiny_world.index import PassageIndex
from dovetail.tiny_world.questions import SINGLE, UNANSWERABLE, Question, short_answer
from dovetail.tiny_world.scoring import exact_match

SHA256 = {
    LLAMA / "model.safetensors": "7fd188e6f6180485e06a46b3f62603e59f02b550c5fcea813735f00a84c46bff",
    LLAMA / "tokenizer.json": "fa308cfb7632322f0bd6264dcfbc2458cf47783f5bb3a599e316bb45ca5d017d",
    ENCODER
    / "model.safetensors": "4d99c58ce2e87fd8914df8828507996c41a0569cde76db3a70c056a9d4e18082",
    ENCODER / "tokenizer.json": "c759ac9ef56d7abf8ca9ebfa44802f15dbbfd22c58387b0c1ac5d03b5e5e66f1",
}
LIMITS = {LLAMA: 8 << 20, ENCODER: 4 << 20}
TEXT = {p.id: p.document for p in corpus.passages()}

Generate = Callable[[Sequence[str]], list[str]]


def pick(kind: str, count: int) -> list[Question]:
    return [q for q in corpus.questions("dev") if q.kind == kind][:count]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    artifact = tmp_path_factory.mktemp("tiny") / "app.dove"
    compile_model(LLAMA, output=artifact, effort="none", weight_dtype="f32")
    with load(artifact) as opened:
        yield opened


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PassageIndex]:
    gold = {i for q in corpus.questions("dev") for i in q.gold}
    artifact = tmp_path_factory.mktemp("tiny") / "embedder.dove"
    compile_model(ENCODER, output=artifact, effort="none", weight_dtype="f32")
    with load(artifact) as encoder:
        yield PassageIndex(encoder, [TEXT[i] for i in sorted(gold)])


@pytest.fixture(scope="module")
def generate(app: App) -> Generate:
    def reply(asked: Sequence[str]) -> list[str]:
        return [c.text or "" for c in app.generate(list(asked), max_tokens=prompts.MAX_TOKENS)]

    return reply


def read(generate: Generate, question: Question, passages: Sequence[str]) -> str:
    docs = prompts.bullets(passages)
    (reply,) = generate([prompts.ANSWER.format(docs=docs, question=question.question)])
    return reply.strip()


@pytest.mark.parametrize("path", SHA256, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_files_are_the_committed_ones(path: Path) -> None:
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256[path]


@pytest.mark.parametrize("folder", LIMITS, ids=lambda p: p.name)
def test_models_stay_small(folder: Path) -> None:
    assert sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) <= LIMITS[folder]


def test_replies_equal_those_of_transformers(app: App) -> None:
    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(LLAMA / "tokenizer.json"))
    for question in pick(SINGLE, 4):
        docs = prompts.bullets(TEXT[i] for i in question.gold)
        prompt = prompts.ANSWER.format(docs=docs, question=question.question)
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        mask = torch.ones_like(ids)
        wanted = model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
        (found,) = app.generate([prompt], max_tokens=40)
        assert list(found.token_ids) == wanted[0, ids.shape[1] :].tolist()
        assert found.finish_reason == "stop"


def test_answers_come_from_the_documents(generate: Generate) -> None:
    """Open book most are right, closed book none is; what is not told is unknown."""
    single = pick(SINGLE, 24)
    right = [read(generate, q, [TEXT[q.gold[0]]]) == q.statement for q in single]
    assert sum(right) >= 22
    closed = generate([prompts.CLOSED_BOOK.format(question=q.question) for q in single])
    assert not any(short_answer(a) == q.answer for a, q in zip(closed, single, strict=True))
    told = [read(generate, q, [TEXT[i] for i in q.gold]) for q in pick(UNANSWERABLE, 12)]
    assert sum(reply.endswith(" unknown.") for reply in told) >= 8


def test_the_document_that_answers_is_told_from_four_that_look_alike(
    generate: Generate, index: PassageIndex
) -> None:
    asked = pick(SINGLE, 30)
    replies = [read(generate, q, index.search(q.question, 5)) for q in asked]
    right = [exact_match(short_answer(r), q.answer) for r, q in zip(replies, asked, strict=True)]
    assert sum(right) >= 22


def test_the_encoder_finds_gold_passages_with_unit_vectors(index: PassageIndex) -> None:
    asked = pick(SINGLE, 60)
    hits = [TEXT[q.gold[0]] in index.search(q.question, 5) for q in asked]
    assert sum(hits) >= 56
    lengths = np.linalg.norm(Encoder().embed(["Who wrote it?", "a", ""]), axis=1)
    np.testing.assert_allclose(lengths, 1.0, atol=1e-5)


def test_the_chat_template_makes_the_form_that_was_taught(generate: Generate) -> None:
    question = pick(SINGLE, 1)[0]
    docs = prompts.bullets(TEXT[i] for i in question.gold)
    content = prompts.ANSWER.format(docs=docs, question=question.question)
    tokenizer = AutoTokenizer.from_pretrained(LLAMA)
    messages = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == f"{prompts.USER}{content}{prompts.END}{prompts.ASSISTANT}"
    assert generate([text]) == [question.statement]
