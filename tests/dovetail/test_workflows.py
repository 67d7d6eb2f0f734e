"""The five workflows of the paper, on the tiny world and on questions of HotpotQA."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("torch")

from dovetail.compiler.pipeline import compile_model
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import Embedding, Generation, Retrieval
from dovetail.runtime.app import App, load
from dovetail.runtime.flows.services import perform
from dovetail.runtime.flows.workflow_run import Call, run_in_order
from dovetail.runtime.index.documents import Document
from dovetail.tiny_world import LLAMA, corpus, prompts
from dovetail.tiny_world.encoder import Encoder
from dovetail.tiny_world.index import PassageIndex
from dovetail.tiny_world.questions import SINGLE, TWO_HOP, Question, short_answer
from dovetail.tiny_world.scoring import exact_match
from dovetail.workflows import hyde, irg, multistep, one_shot, recomp

TEXT = {p.id: p.document for p in corpus.passages()}
GRAPHS: dict[str, Callable[..., RAGraph]] = {
    "one-shot": one_shot,
    "hyde": hyde,
    "recomp": recomp,
    "irg": irg,
}


class Tiny:
    """The bundled Llama and encoder as services; remembers what was searched for."""

    def __init__(self, app: App, index: PassageIndex) -> None:
        self.app, self.index = app, index

    def generate(self, prompt: str, node: Generation) -> str:
        (reply,) = self.app.generate([prompt], **dict(node.options))
        return reply.text or ""

    def retrieve(self, query: str | NDArray[np.float32], node: Retrieval) -> Sequence[Document]:
        found = self.index.find([str(query)], node.topk)[0]
        return [Document(id=int(i), text=self.index.texts[i]) for i in found]

    def embed(self, text: str, node: Embedding) -> NDArray[np.float32]:
        raise NotImplementedError


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    artifact = tmp_path_factory.mktemp("tiny") / "app.dove"
    compile_model(LLAMA, output=artifact, effort="none", weight_dtype="f32")
    gold = {i for q in corpus.questions("dev") for i in q.gold}
    with load(artifact) as app:
        yield Tiny(app, PassageIndex(Encoder(), [TEXT[i] for i in sorted(gold)]))


def pick(kind: str, count: int) -> list[Question]:
    return [q for q in corpus.questions("dev") if q.kind == kind][:count]


def count_right(replies: Sequence[str], asked: Sequence[Question]) -> int:
    pairs = zip(replies, asked, strict=True)
    return sum(exact_match(short_answer(r), q.answer) for r, q in pairs)


def run(graph: RAGraph, services: Any, text: str) -> dict[str, Any]:
    return run_in_order(graph.workflow(), {"input": text}, lambda call: perform(call, services))


@pytest.mark.parametrize("name", GRAPHS)
def test_most_single_hop_answers_are_right(name: str, services: Tiny) -> None:
    graph = GRAPHS[name](max_tokens=prompts.MAX_TOKENS)
    asked = pick(SINGLE, 10)
    replies = [run(graph, services, q.question)["answer"] for q in asked]
    assert count_right(replies, asked) >= 5


def test_multistep_answers_what_takes_two_hops(services: Tiny) -> None:
    graph, asked = multistep(max_tokens=prompts.MAX_TOKENS), pick(TWO_HOP, 10)
    states = [run(graph, services, q.question) for q in asked]
    assert count_right([state["answer"] for state in states], asked) >= 5
    for state, question in zip(states, asked, strict=True):
        assert state["step"].strip() == prompts.NONE or len(state["known"]) == 4
        wanted = [step.statement for step in question.steps]
        assert state["known"] != wanted or state["answer"].strip() == question.statement


def test_prompts_are_those_that_the_model_was_taught() -> None:
    graph = multistep().workflow()
    node = graph.nodes["next"]
    assert isinstance(node, Generation)
    assert node.prompt.replace("{input}", "{question}") == prompts.NEXT_QUESTION


class Hotpot:
    """HotpotQA's passages behind TF-IDF; replies with the first passage shown."""

    def __init__(self, folder: Path) -> None:
        passages = json.loads((folder / "rag_hotpotqa_train_corpus.json").read_text())
        self.titles = list(passages)
        self.texts = [" ".join(passages[title]) for title in self.titles]
        from sklearn.feature_extraction.text import TfidfVectorizer

        self._tfidf = TfidfVectorizer(sublinear_tf=True, stop_words="english")
        self._rows = self._tfidf.fit_transform(
            f"{title} {text}" for title, text in zip(self.titles, self.texts, strict=True)
        )
        self.found: list[list[str]] = []

    def generate(self, prompt: str, node: Generation) -> str:
        lines = [line for line in prompt.splitlines() if line.startswith("- ")]
        return lines[0].removeprefix("- ") if lines else "none"

    def retrieve(self, query: str | NDArray[np.float32], node: Retrieval) -> Sequence[Document]:
        scores = (self._rows @ self._tfidf.transform([str(query)]).T).toarray()[:, 0]
        best = np.argsort(-scores, kind="stable")[: node.topk]
        self.found.append([self.titles[i] for i in best])
        return [Document(id=int(i), text=self.texts[i], title=self.titles[i]) for i in best]

    def embed(self, text: str, node: Embedding) -> NDArray[np.float32]:
        raise NotImplementedError


@pytest.fixture(scope="module")
def hotpot() -> Hotpot:
    folder = Path(os.environ.get("DOVETAIL_CORPUS", "../shared")) / "traces"
    if not (folder / "rag_hotpotqa_train_corpus.json").exists():
        pytest.skip(f"HotpotQA's questions are not in {folder}")
    return Hotpot(folder)


@pytest.mark.parametrize(
    ("name", "searches"), [("one-shot", 1), ("hyde", 1), ("recomp", 1), ("irg", 3)]
)
def test_hotpot_questions_run_through(name: str, searches: int, hotpot: Hotpot) -> None:
    folder = Path(os.environ.get("DOVETAIL_CORPUS", "../shared")) / "traces"
    questions = json.loads((folder / "rag_hotpotqa_train.json").read_text())[:20]
    graph = GRAPHS[name](topk=4)
    first, last = [], []
    for asked in questions:
        hotpot.found.clear()
        state = run(graph, hotpot, asked["question"])
        assert len(hotpot.found) == searches and all(len(f) == 4 for f in hotpot.found)
        wanted = {title for title, _ in asked["supporting_facts"]}
        first.append(len(wanted & set(hotpot.found[0])))
        last.append(len(wanted & {t for found in hotpot.found for t in found}))
        assert state["answer"].partition(":")[0] in hotpot.titles or name == "recomp"
    if searches > 1:
        assert sum(last) > sum(first), "searching again with a draft finds what the question hides"
    elif name == "one-shot":
        assert sum(first) >= 20, "of two supporting passages each"


def test_multistep_ends_at_its_limit_of_rounds(hotpot: Hotpot) -> None:
    asked: list[str] = []

    def do(call: Call) -> object:
        asked.append(str(call.node.name))
        return "another?" if call.node.name == "next" else perform(call, hotpot)

    run_in_order(multistep(rounds=2, topk=1).workflow(), {"input": "?"}, do)
    assert asked == ["recall", "next", "search", "read"] * 2 + ["recall", "next", "answer"]
