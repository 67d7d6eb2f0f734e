"""What the bundled models can do on unseen entities: exact match with and without documents.

Run `python benchmarks/tiny_world.py --json F`. The Llama answers through Dovetail, its
bfloat16 weights widened to float32 (bfloat16 products round prompts); transformers then reads every
prompt with our reply and must want each of its tokens. The encoder finds passages among all of the
corpus.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common import Report
from dovetail import workflows
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import Embedding, Generation, Retrieval
from dovetail.runtime.flows.services import perform
from dovetail.runtime.flows.workflow_run import run_in_order
from dovetail.runtime.index.documents import Document
from dovetail.tiny_world import ENCODER, LLAMA, corpus, prompts
from dovetail.tiny_world.index import Embeds, PassageIndex
from dovetail.tiny_world.questions import (
    COMPARISON,
    SINGLE,
    TWO_HOP,
    UNANSWERABLE,
    Question,
    deny,
    short_answer,
)
from dovetail.tiny_world.scoring import exact_match

TIE = 1e-4
"""A step whose two best float logits are closer than this share of max|logit| counts as a tie."""
CHUNK = 16
"""Prompts generated together."""


class Reader:
    """Replies of the compiled model; keeps every prompt with the tokens of its reply."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.said: dict[str, tuple[int, ...]] = {}
        self._text: dict[str, str] = {}

    def __call__(self, asked: Sequence[str]) -> list[str]:
        """Return the replies to prompts; a prompt met before is not generated again."""
        fresh = [prompt for prompt in dict.fromkeys(asked) if prompt not in self.said]
        for start in range(0, len(fresh), CHUNK):
            part = fresh[start : start + CHUNK]
            found = self._app.generate(part, max_tokens=prompts.MAX_TOKENS)
            for prompt, completion in zip(part, found, strict=True):
                self.said[prompt] = completion.token_ids
                self._text[prompt] = completion.text
        return [self._text[prompt] for prompt in asked]


Search = Callable[[str, int], Sequence[str]]
"""A query and a number -> that many passages."""


@dataclass(frozen=True, slots=True)
class Services:
    """What workflows call, one call at a time; see `dovetail.runtime.flows.services`."""

    reader: Reader
    search: Search

    def generate(self, prompt: str, node: Generation) -> str:
        """Return the reply to a prompt."""
        return self.reader([prompt])[0]

    def retrieve(self, query: str | NDArray[np.float32], node: Retrieval) -> list[Document]:
        """Return the passages of a text."""
        found = self.search(str(query).strip(), node.topk)
        return [Document(id=i, text=text) for i, text in enumerate(found)]

    def embed(self, text: str, node: Embedding) -> NDArray[np.float32]:
        """No workflow here embeds."""
        raise NotImplementedError


def share(replies: Sequence[str], questions: Sequence[Question]) -> float:
    """Return the share of replies that end with the right short answer."""
    pairs = zip(replies, questions, strict=True)
    return sum(exact_match(short_answer(r), q.answer) for r, q in pairs) / len(questions)


def gold_texts(question: Question) -> list[str]:
    """Return the texts of a question's gold passages."""
    texts = {p.id: p.document for p in corpus.passages()}
    return [texts[i] for i in question.gold]


def answer_all(
    graph: RAGraph,
    reader: Reader,
    questions: Sequence[Question],
    search: Callable[[Question], Search],
) -> float:
    """Return exact match of a workflow; `search(question)` gives what it searches with."""
    workflow, replies = graph.workflow(), []
    for question in questions:
        services = Services(reader, search(question))
        state = run_in_order(
            workflow, {"input": question.question}, lambda call, s=services: perform(call, s)
        )
        replies.append(state["answer"])
    return share(replies, questions)


# ---- the other skills ----


def next_questions(reader: Reader, questions: Sequence[Question]) -> float:
    """Return the share of right next sub-questions after 0, 1, ... known steps."""
    asked, wanted = [], []
    for q in questions:
        for done in range(len(q.steps) + 1):
            known = prompts.bullets(step.statement for step in q.steps[:done])
            asked.append(prompts.NEXT_QUESTION.format(question=q.question, known=known))
            wanted.append(q.steps[done].question if done < len(q.steps) else prompts.NONE)
    return _same(reader(asked), wanted)


def compressions(reader: Reader, questions: Sequence[Question]) -> float:
    """Return the share of questions whose gold passages come down to the telling sentences."""
    told = {
        (fact.subject.name, fact.relation.name): sentence
        for passage in corpus.passages()
        for fact, sentence in zip(passage.facts, passage.told, strict=True)
    }
    asked = [
        prompts.COMPRESS.format(docs=prompts.bullets(gold_texts(q)), question=q.question)
        for q in questions
    ]
    return _same(reader(asked), [prompts.bullets(told[s.fact] for s in q.steps) for q in questions])


def refinements(reader: Reader, questions: Sequence[Question]) -> float:
    """Return the share of unknown or wrong drafts that become the right answer."""
    asked, wanted = [], []
    for q, other in zip(questions, [*questions[1:], questions[0]], strict=True):
        for draft in (deny(q.statement), other.statement):
            docs = prompts.bullets(gold_texts(q))
            asked.append(prompts.REFINE.format(docs=docs, question=q.question, draft=draft))
            wanted.append(q.statement)
    return _same(reader(asked), wanted)


def hypotheses(reader: Reader, questions: Sequence[Question]) -> float:
    """Return the share of hypothetical passages that restate the question: all but its answer."""
    asked = [prompts.HYPOTHETICAL.format(question=q.question) for q in questions]
    starts = [q.statement[: q.statement.index(q.answer)] for q in questions]
    replies = [reply.strip() for reply in reader(asked)]
    return sum(r.startswith(s) for r, s in zip(replies, starts, strict=True)) / len(starts)


def _same(replies: Sequence[str], wanted: Sequence[str]) -> float:
    pairs = zip(replies, wanted, strict=True)
    return sum(reply.strip() == text for reply, text in pairs) / len(wanted)


# ---- the reference ----


def compare_tokens(said: dict[str, tuple[int, ...]]) -> tuple[int, int, int]:
    """Return (replies, replies with a token transformers would not say, ties passed over)."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(str(LLAMA / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32).eval()
    different = ties = 0
    for prompt, reply in said.items():
        ids = tokenizer.encode(prompt).ids
        with torch.inference_mode():
            logits = model(torch.tensor([[*ids, *reply]])).logits[0, len(ids) - 1 : -1]
        best, second = logits.topk(2).values.T
        close = best - second < TIE * logits.abs().amax(-1)
        wrong = logits.argmax(-1) != torch.tensor(reply)
        first = int(wrong.nonzero()[0]) if wrong.any() else None
        if first is not None and close[first]:
            ties += 1
        elif first is not None:
            different += 1
    return len(said), different, ties


def measure(reader: Reader, encoder: Embeds) -> dict[str, float]:
    """Return every figure but the comparison of tokens."""
    of_kind = {
        kind: [q for q in corpus.questions("test") if q.kind == kind]
        for kind in (SINGLE, TWO_HOP, COMPARISON, UNANSWERABLE)
    }
    single, two_hop = of_kind[SINGLE], of_kind[TWO_HOP]
    index = PassageIndex(encoder, [p.document for p in corpus.passages()])
    ids = [p.id for p in corpus.passages()]
    found = index.find([q.question for q in single], 5)
    hits = [q.gold[0] in {ids[i] for i in row} for q, row in zip(single, found, strict=True)]
    closed = reader([prompts.CLOSED_BOOK.format(question=q.question) for q in single])
    steps = workflows.multistep(chat=False)
    at_once = {
        kind: (workflows.one_shot(chat=False), reader, asked) for kind, asked in of_kind.items()
    }

    def gold(question: Question) -> Search:
        texts = gold_texts(question)
        return lambda _text, _topk: texts

    return {
        "em_gold_1hop": answer_all(*at_once[SINGLE], gold),
        "em_gold_2hop": answer_all(steps, reader, two_hop, gold),
        "em_gold_comparison": answer_all(*at_once[COMPARISON], gold),
        "em_closed": share(closed, single),
        "em_rag_1hop": answer_all(*at_once[SINGLE], lambda _q: index.search),
        "em_rag_2hop": answer_all(steps, reader, two_hop, lambda _q: index.search),
        "recall_at_5": sum(hits) / len(hits),
        "unknown_accuracy": answer_all(*at_once[UNANSWERABLE], gold),
        "next_question": next_questions(reader, [*single, *two_hop, *of_kind[COMPARISON]]),
        "compress": compressions(reader, [*single, *two_hop]),
        "refine": refinements(reader, single),
        "hypothetical": hypotheses(reader, single),
    }


def main() -> None:
    """Compile, measure, compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from dovetail.compiler.pipeline import compile_model
    from dovetail.runtime.app import load

    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(folder) / "app.dove"
        embedder = Path(folder) / "embedder.dove"
        compile_model(LLAMA, output=artifact, effort="none", weight_dtype="f32")
        compile_model(ENCODER, output=embedder, effort="none")
        with load(artifact) as app, load(embedder) as encoder:
            reader = Reader(app)
            figures = measure(reader, encoder)
    replies, different, ties = compare_tokens(reader.said)
    counts = {kind: n for kind, n in corpus.COUNTS["test"].items()}
    report = Report("tiny_world", {"questions": counts, "passages": len(corpus.passages())})
    report.rows = [{"figure": name, "value": value} for name, value in figures.items()]
    report.summary = {
        **figures,
        "replies": replies,
        "replies_unlike_transformers": different,
        "ties": ties,
    }
    report.print()
    report.write(options.json)


if __name__ == "__main__":
    main()
