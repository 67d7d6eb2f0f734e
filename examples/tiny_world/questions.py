"""Questions with known answers: a world goes in, questions of four kinds come out.

Each has its gold passages and the steps that lead to its answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from dovetail.tiny_world.relations import OF_KIND, RELATIONS, Relation
from dovetail.tiny_world.world import Entity, Fact, World, capitalize

SINGLE, TWO_HOP, COMPARISON, UNANSWERABLE = "single_hop", "two_hop", "comparison", "unanswerable"
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Step:
    """One single-hop question of a chain, the sentence that answers it, and (subject, relation)."""

    question: str
    statement: str
    fact: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Question:
    """`answer` is the short answer, `statement` the full sentence; `gold` are passage ids.

    An unanswerable question has the answer "unknown", and as `gold` the passages about its subject.
    """

    id: str
    kind: str
    split: str
    question: str
    answer: str
    statement: str
    gold: tuple[str, ...]
    steps: tuple[Step, ...]


def short_answer(text: str) -> str:
    """Return the short answer at the end of a statement: a name, a number, or its last word."""
    words = text.strip().removesuffix(".").split()
    first = len(words)
    while first > 0 and (words[first - 1][0].isupper() or words[first - 1].isdigit()):
        first -= 1
    return " ".join(words[first:] or words[-1:])


def ask(rng: random.Random, relation: Relation, subject: str) -> str:
    """Return one of the wordings of the question after `relation` of `subject`."""
    return rng.choice(relation.questions).format(s=subject)


def state(relation: Relation, subject: str, value: str) -> str:
    """Return the sentence that answers the question."""
    return capitalize(relation.statement.format(s=subject, o=value))


def deny(statement: str) -> str:
    """Return the sentence that says the answer is unknown, in place of the one that gives it."""
    text = statement.rpartition(", so ")[2]
    return capitalize(text[: -len(short_answer(text)) - 1]) + UNKNOWN + "."


def single_hop(rng: random.Random, world: World, fact: Fact) -> Question:
    """Return a question after one told fact."""
    name, relation = fact.subject.name, fact.relation
    text, statement = ask(rng, relation, name), state(relation, name, fact.object)
    gold = (world.source[name, relation.name].id,)
    step = Step(relation.questions[0].format(s=name), statement, (name, relation.name))
    return _question(SINGLE, fact.subject, text, fact.object, statement, gold, (step,))


def two_hop(rng: random.Random, world: World, fact: Fact) -> Question | None:
    """Return a question after a fact about the object of `fact`; None where none is told."""
    bridge = world.entities.get(fact.object)
    if bridge is None:
        return None
    told = [f for r in OF_KIND[bridge.kind] if (f := world.facts.get((bridge.name, r.name)))]
    told = [f for f in told if f.object != fact.subject.name]
    if not told:
        return None
    outer, name = rng.choice(told), fact.subject.name
    phrase = fact.relation.phrase.format(s=name)
    first = single_hop(rng, world, fact)
    second = single_hop(rng, world, outer)
    text = ask(rng, outer.relation, phrase)
    statement = state(outer.relation, phrase, outer.object)
    gold = tuple(dict.fromkeys(first.gold + second.gold))
    steps = first.steps + second.steps
    return _question(TWO_HOP, fact.subject, text, outer.object, statement, gold, steps)


def comparison(rng: random.Random, world: World, one: Fact, two: Fact) -> Question | None:
    """Return a question which of two facts of the same relation wins; None on a draw."""
    relation = one.relation
    if one.object == two.object or one.subject == two.subject:
        return None
    names = one.subject.name, two.subject.name
    pair = sorted((one, two), key=lambda fact: int(fact.object), reverse=not relation.least)
    answer = pair[0].subject.name
    text = relation.compare.format(a=names[0], b=names[1])
    first, second = (single_hop(rng, world, fact) for fact in (one, two))
    statement = compare_statement(one, two)
    gold = tuple(dict.fromkeys(first.gold + second.gold))
    steps = first.steps + second.steps
    return _question(COMPARISON, one.subject, text, answer, statement, gold, steps)


def compare_statement(one: Fact, two: Fact) -> str:
    """Return the answer to a comparison: both values first, then the winner."""
    pair = sorted((one, two), key=lambda f: int(f.object), reverse=not one.relation.least)
    values = " and ".join(f"{fact.object} for {fact.subject.name}" for fact in (one, two))
    return f"It is {values}, so {one.relation.winner} is {pair[0].subject.name}."


def unanswerable(
    rng: random.Random, world: World, entity: Entity, relation: Relation
) -> Question | None:
    """Return a question after a fact that no passage tells; None where one does."""
    if (entity.name, relation.name) in world.facts:
        return None
    text = ask(rng, relation, entity.name)
    gold = tuple(p.id for p in world.about(entity.name))
    key = entity.name, relation.name
    statement = state(relation, entity.name, UNKNOWN)
    step = Step(relation.questions[0].format(s=entity.name), statement, key)
    return _question(UNANSWERABLE, entity, text, UNKNOWN, step.statement, gold, (step,))


def draw_question(rng: random.Random, world: World, kind: str, split: str) -> Question:
    """Return a random question of `kind` about entities of `split`."""
    while True:
        fact = rng.choice(world.by_split[split])
        found: Question | None
        if kind == SINGLE:
            return single_hop(rng, world, fact)
        if kind == TWO_HOP:
            found = two_hop(rng, world, fact)
        elif kind == UNANSWERABLE:
            entity = fact.subject
            found = unanswerable(rng, world, entity, rng.choice(OF_KIND[entity.kind]))
        else:
            found = _draw_comparison(rng, world, split)
        if found is not None:
            return found


def make_questions(seed: int, world: World, split: str, counts: dict[str, int]) -> list[Question]:
    """Return `counts[kind]` distinct questions of each kind, ids `<split>-<number>`."""
    rng = random.Random(f"{seed} {split}")
    found: dict[str, Question] = {}
    for kind, count in counts.items():
        wanted = len(found) + count
        while len(found) < wanted:
            question = draw_question(rng, world, kind, split)
            found.setdefault(question.question, question)
    return [_with_id(question, f"{split}-{i:04}") for i, question in enumerate(found.values())]


def _draw_comparison(rng: random.Random, world: World, split: str) -> Question | None:
    relation = rng.choice([r for r in RELATIONS if r.compare])
    one, two = rng.choices([f for f in world.by_split[split] if f.relation == relation], k=2)
    return comparison(rng, world, one, two)


def _question(
    kind: str,
    subject: Entity,
    text: str,
    answer: str,
    statement: str,
    gold: tuple[str, ...],
    steps: tuple[Step, ...],
) -> Question:
    return Question("", kind, subject.split, text, answer, statement, gold, steps)


def _with_id(question: Question, new: str) -> Question:
    return Question(
        new,
        question.kind,
        question.split,
        question.question,
        question.answer,
        question.statement,
        question.gold,
        question.steps,
    )
