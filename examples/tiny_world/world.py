"""A synthetic world: a seed goes in, entities, facts and the passages that tell them come out."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from dovetail.tiny_world.names import NameMaker, Syllables
from dovetail.tiny_world.relations import INVERSE, OF_KIND, Relation
from dovetail.tiny_world.vocabulary import FILLERS, GENERIC, RANGES, VALUES

COUNTS: dict[str, int] = {
    "country": 290,
    "city": 900,
    "river": 290,
    "person": 1600,
    "company": 450,
    "book": 500,
}
"""Entities of each kind in the bundled world: about 5,000 passages."""
TOLD = 0.8
"""Share of an entity's facts that the passages tell; the rest make unanswerable questions."""
TWO_PASSAGES, FILLER, NAMED_AGAIN = 0.3, 0.3, 0.5


@dataclass(frozen=True, slots=True)
class Entity:
    """Something with a name; `split` is train, dev or test."""

    name: str
    kind: str
    split: str


@dataclass(frozen=True, slots=True)
class Fact:
    """(subject, relation, object): the object is the name of an entity or a value."""

    subject: Entity
    relation: Relation
    object: str


@dataclass(frozen=True, slots=True)
class Passage:
    """A text of one to five sentences about one entity; `told[i]` is the sentence of `facts[i]`."""

    id: str
    title: str
    text: str
    facts: tuple[Fact, ...] = ()
    told: tuple[str, ...] = ()

    @property
    def document(self) -> str:
        """The passage as a prompt shows it: what it is about comes first, whatever the wording."""
        return f"{self.title}: {self.text}"


@dataclass(slots=True)
class World:
    """Entities by name, their told facts by (subject, relation name), and passages in order."""

    entities: dict[str, Entity]
    facts: dict[tuple[str, str], Fact]
    passages: list[Passage]
    source: dict[tuple[str, str], Passage] = field(default_factory=dict)
    """The passage that tells a fact."""
    by_split: dict[str, list[Fact]] = field(default_factory=dict)
    alike: dict[tuple[str, str, str], list[Fact]] = field(default_factory=dict)
    """Facts by split, kind of subject and relation name."""
    namesakes: dict[tuple[str, str], list[Fact]] = field(default_factory=dict)
    """Facts by split and the first letters of the subject's name."""

    def by_relation(self, split: str, relation: Relation) -> list[Fact]:
        """Return the facts of a split with `relation`."""
        return self.alike[split, relation.subject, relation.name]

    def like_named(self, split: str, name: str) -> list[Fact]:
        """Return the facts of a split whose subject's name begins as `name` does."""
        return self.namesakes[split, _start(name)]

    def about(self, name: str) -> tuple[Passage, ...]:
        """Return the passages about an entity."""
        own = (self.source[key] for key in self.facts if key[0] == name)
        return tuple(dict.fromkeys(own))


def capitalize(text: str) -> str:
    """Return `text` with a capital first letter, the rest untouched."""
    return text[:1].upper() + text[1:]


def build_world(
    seed: int,
    counts: Mapping[str, int] = COUNTS,
    shares: Mapping[str, float] | None = None,
    taken: frozenset[str] = frozenset(),
    syllables: Syllables | None = None,
) -> World:
    """Return the world of `seed`: `counts` entities per kind, divided among splits by `shares`.

    Facts join entities of one split only, so splits share no entity. No name is one of `taken`.
    Names are made of `syllables`, all by default.
    """
    rng = random.Random(seed)
    names = NameMaker(rng, taken, syllables)
    entities: dict[str, Entity] = {}
    for split, share in (shares or {"train": 1.0}).items():
        for kind, count in counts.items():
            for _ in range(max(2, round(count * share))):
                name = names.make(kind)
                entities[name] = Entity(name, kind, split)
    pools: dict[tuple[str, str], list[str]] = {}
    for entity in entities.values():
        pools.setdefault((entity.split, entity.kind), []).append(entity.name)
    choose = _Chooser(rng, pools, names)
    world = World(entities, {}, [])
    for entity in entities.values():
        _tell(rng, world, entity, choose.facts(entity))
    for fact in world.facts.values():
        split, relation = fact.subject.split, fact.relation
        world.by_split.setdefault(split, []).append(fact)
        world.alike.setdefault((split, relation.subject, relation.name), []).append(fact)
        world.namesakes.setdefault((split, _start(fact.subject.name)), []).append(fact)
    rng.shuffle(world.passages)
    world.passages = [_numbered(world, i, passage) for i, passage in enumerate(world.passages)]
    return world


def _start(name: str) -> str:
    return name.removeprefix("The ")[:3]


class _Chooser:
    """Draws facts; what one fact settles about its object (a spouse's spouse) stays settled."""

    def __init__(
        self, rng: random.Random, pools: Mapping[tuple[str, str], list[str]], names: NameMaker
    ) -> None:
        self._rng, self._pools, self._names = rng, pools, names
        self._settled: dict[tuple[str, str], str] = {}

    def facts(self, entity: Entity) -> list[Fact]:
        """Return the facts of an entity that will be told: one at least, in random order."""
        relations = [r for r in OF_KIND[entity.kind] if self._rng.random() < TOLD]
        relations = relations or [self._rng.choice(OF_KIND[entity.kind])]
        self._rng.shuffle(relations)
        return [Fact(entity, r, self._object(entity, r)) for r in relations]

    def _object(self, entity: Entity, relation: Relation) -> str:
        if relation.object in VALUES:
            return self._rng.choice(VALUES[relation.object])
        if relation.object in RANGES:
            return str(self._rng.randint(*RANGES[relation.object]))
        if relation.object == "language":
            return self._names.make("language")
        return self._entity(entity, relation)

    def _entity(self, entity: Entity, relation: Relation) -> str:
        known = self._settled.get((entity.name, relation.name))
        if known is not None:
            return known
        inverse = INVERSE.get(relation.name)
        others = self._pools[entity.split, relation.object]
        while True:
            chosen = self._rng.choice(others)
            if chosen != entity.name and (
                inverse is None or (chosen, inverse) not in self._settled
            ):
                break
        if inverse is not None:
            self._settled[chosen, inverse] = entity.name
            self._settled[entity.name, relation.name] = chosen
        return chosen


def _tell(rng: random.Random, world: World, entity: Entity, facts: list[Fact]) -> None:
    """Write the passages of an entity: one, or two of which each tells a part of the facts."""
    cut = len(facts)
    if cut >= 2 and rng.random() < TWO_PASSAGES:
        cut = rng.randint(1, len(facts) - 1)
    for part in (facts[:cut], facts[cut:]):
        if part:
            passage = _write_passage(rng, entity, part)
            world.passages.append(passage)
            for fact in part:
                key = entity.name, fact.relation.name
                world.facts[key], world.source[key] = fact, passage


def _write_passage(rng: random.Random, entity: Entity, facts: list[Fact]) -> Passage:
    told = [write_sentence(rng, fact, first=i == 0) for i, fact in enumerate(facts)]
    lines = list(told)
    if rng.random() < FILLER:
        lines.insert(rng.randint(1, len(lines)), rng.choice(FILLERS[entity.kind]))
    return Passage("", capitalize(entity.name), " ".join(lines), tuple(facts), tuple(told))


def write_sentence(rng: random.Random, fact: Fact, *, first: bool) -> str:
    """Return a sentence that tells the fact; only a later one may name the subject in short."""
    name = fact.subject.name
    if not first and rng.random() >= NAMED_AGAIN:
        name = GENERIC.get(fact.subject.kind) or name.split()[-1]
    return capitalize(rng.choice(fact.relation.sentences).format(s=name, o=fact.object))


def _numbered(world: World, index: int, passage: Passage) -> Passage:
    """Return the passage with its final id, known as the source of its facts."""
    final = Passage(f"p{index:05}", passage.title, passage.text, passage.facts, passage.told)
    for fact in final.facts:
        world.source[fact.subject.name, fact.relation.name] = final
    return final
