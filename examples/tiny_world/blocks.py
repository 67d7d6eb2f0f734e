"""What lessons ask and the replies they want, and mixes of it, from the first course to the last.

In: a world, and a shelf of its documents. Out: a prompt and a reply; None where the documents do
not lend themselves to the question.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from dovetail.tiny_world import prompts
from dovetail.tiny_world.questions import (
    COMPARISON,
    SINGLE,
    TWO_HOP,
    Question,
    ask,
    comparison,
    deny,
    draw_question,
    single_hop,
    state,
    two_hop,
)
from dovetail.tiny_world.relations import OF_KIND
from dovetail.tiny_world.shelves import SPLIT, Shelf, crowd
from dovetail.tiny_world.vocabulary import RANGES, VALUES
from dovetail.tiny_world.world import World


@dataclass(frozen=True, slots=True)
class Block:
    """A prompt (without the documents above it) and the reply wanted."""

    prompt: str
    reply: str


Mix: TypeAlias = dict[Callable[[random.Random, World, Shelf], Block | None], float]
PlainMix: TypeAlias = dict[Callable[[random.Random, World], Block], float]


# ---- blocks with documents ----


def _ask_single(rng: random.Random, world: World, shelf: Shelf) -> Block:
    question = single_hop(rng, world, rng.choice(shelf.facts))
    return _answer(question.question, question.statement)


def _ask_two_hop(rng: random.Random, world: World, shelf: Shelf) -> Block | None:
    found = _held_question(rng, world, shelf, TWO_HOP)
    return None if found is None else _answer(found.question, found.statement)


def _ask_comparison(rng: random.Random, world: World, shelf: Shelf) -> Block | None:
    found = _held_question(rng, world, shelf, COMPARISON)
    return None if found is None else _answer(found.question, found.statement)


def _ask_unknown(rng: random.Random, world: World, shelf: Shelf) -> Block:
    text, guess = _missing(rng, world, shelf)
    return _answer(text, deny(guess))


def _ask_stranger(rng: random.Random, world: World, shelf: Shelf) -> Block | None:
    """Ask for something of which the documents say nothing at all."""
    question = single_hop(rng, world, rng.choice(world.by_split[SPLIT]))
    named = any(question.steps[0].fact[0] in line for line in shelf.lines)
    return None if named else _answer(question.question, deny(question.statement))


def _ask_missed(rng: random.Random, world: World, shelf: Shelf) -> Block | None:
    """Ask for what the documents tell of others: of the likest name that they do not tell it of."""
    fact = rng.choice(shelf.facts)
    alike = crowd(rng, world, fact)
    missed = [f for f in alike if (f.subject.name, f.relation.name) not in shelf.told]
    if not missed:
        return None
    question = single_hop(rng, world, missed[0])
    return _answer(question.question, deny(question.statement))


def _compress(rng: random.Random, world: World, shelf: Shelf) -> Block:
    kind = rng.choice((SINGLE, SINGLE, TWO_HOP, COMPARISON, "missing"))
    question = None if kind == "missing" else _held_question(rng, world, shelf, kind)
    if question is None:
        text, reply = _missing(rng, world, shelf)[0], prompts.NONE
    else:
        text = question.question
        reply = prompts.bullets(_relevant(shelf, question))
    return Block(f"Question: {text}\nRelevant:", reply)


def _select(rng: random.Random, world: World, shelf: Shelf) -> Block:
    """As `_compress`, of what the documents do answer: in crowds few questions but single ones."""
    question = _held_question(rng, world, shelf, rng.choice((SINGLE, TWO_HOP, COMPARISON)))
    question = question or single_hop(rng, world, rng.choice(shelf.facts))
    reply = prompts.bullets(_relevant(shelf, question))
    return Block(f"Question: {question.question}\nRelevant:", reply)


def _refine(rng: random.Random, world: World, shelf: Shelf) -> Block:
    """A draft that is unknown, wrong or right; without an answer in the documents it stands."""
    if rng.random() < 0.3:
        text, guess = _missing(rng, world, shelf)
        draft = rng.choice((deny(guess), guess))
        return Block(f"Question: {text}\nDraft: {draft}\nRefined:", draft)
    kind = rng.choice((SINGLE, SINGLE, TWO_HOP, COMPARISON))
    question = _held_question(rng, world, shelf, kind) or single_hop(
        rng, world, rng.choice(shelf.facts)
    )
    wrong = draw_question(rng, world, SINGLE, SPLIT).answer
    other = question.statement.replace(question.answer, wrong)
    draft = rng.choice((deny(question.statement), other, question.statement))
    return Block(f"Question: {question.question}\nDraft: {draft}\nRefined:", question.statement)


def _answer(question: str, reply: str) -> Block:
    return Block(f"Question: {question}\nAnswer:", reply)


def _held_question(rng: random.Random, world: World, shelf: Shelf, kind: str) -> Question | None:
    """Return a question of `kind` whose facts all stand in the documents; None where none do."""
    facts = list(shelf.facts)
    rng.shuffle(facts)
    for fact in facts:
        found = None
        if kind == SINGLE:
            return single_hop(rng, world, fact)
        if kind == TWO_HOP and fact.object not in VALUES and fact.relation.object not in RANGES:
            found = two_hop(rng, world, fact)
        if kind == COMPARISON and fact.relation.compare:
            like = [f for f in facts if f.relation == fact.relation and f.subject != fact.subject]
            found = comparison(rng, world, fact, like[0]) if like else None
        if found is not None and _holds(shelf, found):
            return found
    return None


def _holds(shelf: Shelf, question: Question) -> bool:
    return all(step.fact in shelf.told for step in question.steps)


def _relevant(shelf: Shelf, question: Question) -> list[str]:
    return [shelf.told[step.fact] for step in question.steps]


def _missing(rng: random.Random, world: World, shelf: Shelf) -> tuple[str, str]:
    """Return a question that the documents do not answer, and what its answer might be."""
    while True:
        fact = rng.choice(world.by_split[SPLIT] if rng.random() < 0.25 else shelf.facts)
        relation = rng.choice(OF_KIND[fact.subject.kind])
        if (fact.subject.name, relation.name) in shelf.told:
            continue
        like = world.by_relation(SPLIT, relation)
        value = rng.choice(like).object
        return ask(rng, relation, fact.subject.name), state(relation, fact.subject.name, value)


# ---- blocks without documents ----


def _closed_book(rng: random.Random, world: World) -> Block:
    kind = rng.choice((SINGLE, SINGLE, TWO_HOP, COMPARISON))
    question = draw_question(rng, world, kind, SPLIT)
    return _answer(question.question, deny(question.statement))


def _decompose(rng: random.Random, world: World) -> Block:
    """The next sub-question after none, some or all steps; an unknown step ends the chain."""
    kind = rng.choice((SINGLE, TWO_HOP, TWO_HOP, COMPARISON))
    question = draw_question(rng, world, kind, SPLIT)
    known = [step.statement for step in question.steps]
    done = rng.randint(0, len(known))
    if done and kind != COMPARISON and rng.random() < 0.15:
        known, done = [*known[: done - 1], deny(known[done - 1])], len(question.steps)
    known = known[:done]
    reply = question.steps[done].question if done < len(question.steps) else prompts.NONE
    lines = prompts.bullets(known)
    return Block(f"Question: {question.question}\nKnown:\n{lines}\nNext question:", reply)


def _conclude(rng: random.Random, world: World) -> Block:
    """The answer from what the steps of a question found: a document for each."""
    question = draw_question(rng, world, rng.choice((TWO_HOP, TWO_HOP, COMPARISON)), SPLIT)
    found = prompts.bullets(step.statement for step in question.steps)
    prompt = prompts.ANSWER.format(docs=found, question=question.question)
    return Block(prompt, question.statement)


def _quote(rng: random.Random, world: World) -> Block:
    """The answer from the sentences that tell it, without the passages that they stand in."""
    kind = rng.choice((SINGLE, SINGLE, TWO_HOP, COMPARISON))
    question = draw_question(rng, world, kind, SPLIT)
    docs = prompts.bullets(_sentence(world, step.fact) for step in question.steps)
    prompt = prompts.ANSWER.format(docs=docs, question=question.question)
    return Block(prompt, question.statement)


def _sentence(world: World, key: tuple[str, str]) -> str:
    """Return the sentence that tells a fact."""
    passage = world.source[key]
    return passage.told[passage.facts.index(world.facts[key])]


def _hypothetical(rng: random.Random, world: World) -> Block:
    question = draw_question(rng, world, rng.choice((SINGLE, SINGLE, TWO_HOP)), SPLIT)
    return Block(f"Question: {question.question}\nPassage:", question.statement)


COPYING: Mix = {_ask_single: 1.0}
"""As many answers to find as a lesson holds: a drill."""
READING: Mix = {
    _ask_single: 0.44,
    _ask_two_hop: 0.08,
    _ask_comparison: 0.1,
    _ask_unknown: 0.18,
    _compress: 0.1,
    _refine: 0.1,
}
"""Shares of what is asked about documents; mostly what they say."""
JUDGING: Mix = {
    _ask_single: 0.5,
    _ask_two_hop: 0.1,
    _ask_comparison: 0.12,
    _ask_unknown: 0.06,
    _ask_stranger: 0.03,
    _compress: 0.08,
    _refine: 0.1,
}
"""The same with more comparisons, things the documents do not name, and fewer unknown answers:
in doubt the likest sentence is wanted."""
WEIGHING: Mix = {
    _ask_single: 0.42,
    _ask_two_hop: 0.08,
    _ask_comparison: 0.25,
    _ask_unknown: 0.1,
    _ask_stranger: 0.03,
    _compress: 0.04,
    _refine: 0.08,
}
"""The same with what is learnt last: twice the comparisons, and more that has no answer."""
RELATING: Mix = {
    _ask_single: 0.28,
    _ask_two_hop: 0.1,
    _ask_comparison: 0.24,
    _ask_unknown: 0.1,
    _ask_stranger: 0.03,
    _compress: 0.15,
    _refine: 0.1,
}
"""The same with fewer single facts: the sentences that matter, and what two of them tell."""
FINISHING: Mix = {
    _ask_single: 0.42,
    _ask_two_hop: 0.07,
    _ask_comparison: 0.18,
    _ask_unknown: 0.09,
    _ask_stranger: 0.04,
    _compress: 0.12,
    _refine: 0.08,
}
"""Everything once more, mostly what the documents say."""
DOUBTING: Mix = {
    _ask_single: 0.36,
    _ask_two_hop: 0.08,
    _ask_comparison: 0.2,
    _ask_unknown: 0.07,
    _ask_stranger: 0.03,
    _ask_missed: 0.13,
    _compress: 0.07,
    _refine: 0.06,
}
"""The same, and what a crowd of documents tells of others but not of the one that is asked for."""
SELECTING: Mix = {
    _ask_single: 0.3,
    _ask_two_hop: 0.08,
    _ask_comparison: 0.2,
    _ask_unknown: 0.05,
    _ask_stranger: 0.03,
    _ask_missed: 0.09,
    _select: 0.15,
    _compress: 0.04,
    _refine: 0.06,
}
"""The same, and mostly questions to compress documents for that these do answer."""
PLANNING: PlainMix = {
    _decompose: 0.7,
    _closed_book: 0.1,
    _hypothetical: 0.2,
}
CONCLUDING: PlainMix = {
    _decompose: 0.3,
    _conclude: 0.4,
    _closed_book: 0.1,
    _hypothetical: 0.2,
}
"""To ask for the next step of a question, and at last to join what the steps found."""
QUOTING: PlainMix = {
    _decompose: 0.25,
    _conclude: 0.2,
    _quote: 0.35,
    _closed_book: 0.1,
    _hypothetical: 0.1,
}
"""The same, and to read what documents were compressed to."""
