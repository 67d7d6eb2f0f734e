"""RAG workflows over any generator and any search: question in, answer with its trail out.

A generator maps prompts to replies; a search maps a text and a number to that many passages.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dovetail.tiny_world import prompts
from dovetail.tiny_world.questions import UNKNOWN, short_answer

Generate = Callable[[Sequence[str]], list[str]]
Search = Callable[[str, int], list[str]]
MAX_STEPS = 4
MAX_TOKENS = 96
"""Longer than any reply the model was taught."""


@dataclass(frozen=True, slots=True)
class Hop:
    """A question put to the corpus, the passages found and the reply read from them."""

    question: str
    passages: tuple[str, ...]
    reply: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The last reply, the short answer in it, and the hops that led there."""

    reply: str
    hops: tuple[Hop, ...]

    @property
    def short(self) -> str:
        """The name, number or word at the end of the reply."""
        return short_answer(self.reply)


def closed_book(generate: Generate, question: str) -> Answer:
    """Ask without documents."""
    (reply,) = generate([prompts.CLOSED_BOOK.format(question=question)])
    return Answer(reply.strip(), ())


def read(generate: Generate, question: str, passages: Sequence[str]) -> str:
    """Return the reply to `question` from `passages`."""
    prompt = prompts.ANSWER.format(docs=prompts.bullets(passages), question=question)
    (reply,) = generate([prompt])
    return reply.strip()


def one_shot(generate: Generate, search: Search, question: str, *, topk: int = 5) -> Answer:
    """Retrieve once, read once."""
    passages = search(question, topk)
    reply = read(generate, question, passages)
    return Answer(reply, (Hop(question, tuple(passages), reply),))


def multistep(generate: Generate, search: Search, question: str, *, topk: int = 5) -> Answer:
    """Ask for the next sub-question until there is none, answer each, then answer from the replies.

    A reply that ends in "unknown" is the answer of the chain.
    """
    hops: list[Hop] = []
    while len(hops) < MAX_STEPS:
        known = prompts.bullets(hop.reply for hop in hops)
        (step,) = generate([prompts.NEXT_QUESTION.format(question=question, known=known)])
        step = step.strip()
        if step == prompts.NONE:
            break
        passages = search(step, topk)
        hops.append(Hop(step, tuple(passages), read(generate, step, passages)))
    replies = [hop.reply for hop in hops]
    lost = [reply for reply in replies if short_answer(reply) == UNKNOWN]
    if lost or not replies:
        return Answer(lost[0] if lost else UNKNOWN, tuple(hops))
    return Answer(read(generate, question, replies), tuple(hops))


def normalize(answer: str) -> str:
    """Return an answer as exact match compares it: lower case, no punctuation, no articles."""
    words = answer.lower().translate(str.maketrans("", "", string.punctuation)).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def exact_match(answer: str, wanted: str) -> bool:
    """Tell whether two short answers are the same."""
    return normalize(answer) == normalize(wanted)
