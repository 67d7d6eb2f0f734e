"""The documents of lessons: a world goes in, statements or passages that go together come out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.tiny_world.questions import state
from dovetail.tiny_world.relations import OF_KIND
from dovetail.tiny_world.world import Fact, Passage, World, capitalize

SPLIT = "train"
PASSAGES = (1, 2, 3, 4, 5, 5)
"""How many passages a shelf holds."""
CROWD_SAMPLE = 60
"""Facts that a crowd is chosen from."""


@dataclass(frozen=True, slots=True)
class Shelf:
    """The documents of a lesson: their lines, and the sentence that tells each fact."""

    lines: tuple[str, ...]
    told: dict[tuple[str, str], str]
    facts: tuple[Fact, ...]


def fill_shelf(
    rng: random.Random, world: World, statements: Sequence[int], *, crowded: float
) -> Shelf:
    """Return a shelf of one of `statements` many statements, or of passages where that is empty.

    crowded: the share of shelves whose documents look alike.
    """
    is_crowd = rng.random() < crowded
    if statements:
        return _statements(rng, world, rng.choice(statements), crowded=is_crowd)
    chosen: dict[str, Passage] = {}
    wanted = rng.choice(PASSAGES)
    while len(chosen) < wanted:
        fact = rng.choice(world.by_split[SPLIT])
        near = crowd(rng, world, fact) if is_crowd else [fact, *_neighbours(rng, world, fact)]
        for other in near[: wanted - len(chosen)]:
            passage = world.source[other.subject.name, other.relation.name]
            chosen[passage.id] = passage
    held = tuple(fact for passage in chosen.values() for fact in passage.facts)
    told = tuple(sentence for passage in chosen.values() for sentence in passage.told)
    return _shelf(tuple(passage.document for passage in chosen.values()), held, told)


def _statements(rng: random.Random, world: World, wanted: int, *, crowded: bool) -> Shelf:
    """Return a shelf of `wanted` single statements: a crowd's, or those of any facts."""
    fact = rng.choice(world.by_split[SPLIT])
    held = crowd(rng, world, fact) if crowded else rng.sample(world.by_split[SPLIT], wanted)
    held = held[:wanted]
    told = tuple(state(f.relation, f.subject.name, f.object) for f in held)
    titles = (capitalize(f.subject.name) for f in held)
    lines = tuple(f"{title}: {text}" for title, text in zip(titles, told, strict=True))
    return _shelf(lines, tuple(held), told)


def _shelf(lines: tuple[str, ...], facts: tuple[Fact, ...], told: tuple[str, ...]) -> Shelf:
    keys = [(fact.subject.name, fact.relation.name) for fact in facts]
    return Shelf(lines, dict(zip(keys, told, strict=True)), facts)


def crowd(rng: random.Random, world: World, fact: Fact) -> list[Fact]:
    """Return the fact and others of its relation, the likest names first, as a search would."""
    wanted = _letter_pairs(fact.subject.name)
    pool = world.by_relation(SPLIT, fact.relation)
    sample = rng.sample(pool, min(len(pool), CROWD_SAMPLE))
    sample.sort(key=lambda f: len(wanted & _letter_pairs(f.subject.name)), reverse=True)
    return [fact, *(other for other in sample if other != fact)]


def _letter_pairs(name: str) -> set[str]:
    return {name[i : i + 2] for i in range(len(name) - 1)}


def _neighbours(rng: random.Random, world: World, fact: Fact) -> list[Fact]:
    """Return a fact about the object, one with the same relation and one about a like name."""
    found = []
    bridge = world.entities.get(fact.object)
    if bridge is not None:
        own = [f for r in OF_KIND[bridge.kind] if (f := world.facts.get((bridge.name, r.name)))]
        found += [rng.choice(own)] if own else []
    pool = world.by_relation(SPLIT, fact.relation)
    found.append(rng.choice(pool))
    found.append(rng.choice(world.like_named(SPLIT, fact.subject.name)))
    rng.shuffle(found)
    return found
