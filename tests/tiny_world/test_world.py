from __future__ import annotations

import random

import pytest

from dovetail.tiny_world.names import MAKERS, Syllables
from dovetail.tiny_world.relations import KINDS, OF_KIND, RELATIONS
from dovetail.tiny_world.world import World, build_world

COUNTS = {"country": 20, "city": 40, "river": 20, "person": 60, "company": 20, "book": 20}
SHARES = {"train": 0.6, "dev": 0.2, "test": 0.2}


@pytest.fixture(scope="module")
def world() -> World:
    return build_world(5, COUNTS, SHARES)


def test_the_seed_alone_decides(world: World) -> None:
    again, other = build_world(5, COUNTS, SHARES), build_world(6, COUNTS, SHARES)
    assert again.passages == world.passages
    assert other.passages != world.passages


def test_every_passage_tells_its_facts_about_its_title(world: World) -> None:
    for passage in world.passages:
        assert passage.facts and len(passage.facts) == len(passage.told)
        assert passage.title.lower() in passage.text.lower()
        for fact, sentence in zip(passage.facts, passage.told, strict=True):
            assert fact.object in sentence and sentence in passage.text
            assert world.source[fact.subject.name, fact.relation.name] is passage
        sentences = passage.text.count(". ") + 1
        assert 1 <= sentences <= 5


def test_splits_share_no_entity(world: World) -> None:
    for fact in world.facts.values():
        if fact.object in world.entities:
            assert world.entities[fact.object].split == fact.subject.split


def test_what_a_fact_settles_about_its_object_holds(world: World) -> None:
    for (name, relation), fact in world.facts.items():
        back = {"capital": "country", "spouse": "spouse"}.get(relation)
        other = world.facts.get((fact.object, back or ""))
        assert other is None or other.object == name


def test_taken_names_are_not_given_again(world: World) -> None:
    taken = frozenset(world.entities)
    assert not taken & set(build_world(5, COUNTS, SHARES, taken).entities)


def test_names_of_few_syllables_look_alike() -> None:
    few = Syllables().few(random.Random(2), 14)
    alike = build_world(5, COUNTS, SHARES, syllables=few)
    starts = {name[:2] for name in alike.entities if not name.startswith("The ")}
    assert starts <= {syllable.capitalize()[:2] for syllable in few.open}
    assert len(starts) <= 14 < len({name[:2] for name in build_world(5, COUNTS).entities})


def test_the_tables_fit_together() -> None:
    assert set(OF_KIND) == set(KINDS) <= set(MAKERS)
    for relation in RELATIONS:
        assert relation.statement.endswith("{o}.") and "{s}" in relation.statement
        assert "{s}" in relation.phrase
        assert all("{s}" in text for text in relation.questions)
        assert all("{s}" in text and "{o}" in text for text in relation.sentences)
        assert bool(relation.compare) == bool(relation.winner)
