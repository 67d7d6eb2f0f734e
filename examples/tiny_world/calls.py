"""Lessons of tool calls: a world goes in, conversations with tools come out.

One tool looks passages up, another adds numbers; both have many names, as those of users have. The
model calls them in the form of `prompts.call`, reads the results, and answers as from documents.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dovetail.tiny_world import prompts
from dovetail.tiny_world.questions import (
    COMPARISON,
    SINGLE,
    TWO_HOP,
    UNANSWERABLE,
    Question,
    deny,
    draw_question,
    single_hop,
)
from dovetail.tiny_world.relations import RELATIONS
from dovetail.tiny_world.shelves import SPLIT, crowd
from dovetail.tiny_world.world import Fact, World

Segment = tuple[str, bool]
"""Text, and whether it is a reply."""
Parameters = tuple[str, ...]

LOOK_UPS = ("look_up", "lookup", "search", "find", "retrieve", "search_documents")
QUERIES = ("query", "question", "text", "q")
ADDERS = ("add", "sum", "plus", "add_numbers", "calculate_sum")
ADDENDS = (("a", "b"), ("x", "y"), ("first", "second"))
OTHERS: tuple[tuple[str, Parameters], ...] = (
    ("get_weather", ("city",)),
    ("send_mail", ("to", "text")),
    ("translate", ("text", "language")),
    ("current_time", ()),
)
"""Tools that no question needs."""
LETTERS = 2600
"""Of a lesson: what fits into the context."""
SUM_QUESTIONS = (
    "What is {a} plus {b}?",
    "What is the sum of {a} and {b}?",
    "How much is {a} and {b}?",
    "Add {a} and {b}.",
)
SUM_ANSWER = "The sum of {a} and {b} is {n}."
TOTAL_QUESTIONS = (
    "How long are {a} and {b} together?",
    "How many kilometers are {a} and {b} together?",
    "What is the length of {a} and {b} together?",
    "What is the total length of {a} and {b}?",
)
TOTAL_ANSWER = "The length of {a} and {b} together in kilometers is {n}."
(LENGTH,) = (relation for relation in RELATIONS if relation.name == "length")


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a conversation; None where there is none of the kind."""

    look_up: tuple[str, str] | None
    adder: tuple[str, Parameters] | None
    others: tuple[tuple[str, Parameters], ...]

    def offer(self, rng: random.Random) -> str:
        """Return the turn that lists them, in any order."""
        listed = list(self.others)
        if self.look_up is not None:
            listed.append((self.look_up[0], (self.look_up[1],)))
        if self.adder is not None:
            listed.append(self.adder)
        rng.shuffle(listed)
        return prompts.offer(listed)

    def find(self, query: str) -> str:
        """Return the call that looks a question up."""
        assert self.look_up is not None
        name, parameter = self.look_up
        return prompts.call(name, {parameter: query})

    def add(self, one: int, two: int) -> str:
        """Return the call that adds two numbers."""
        assert self.adder is not None
        name, parameters = self.adder
        return prompts.call(name, dict(zip(parameters, (one, two), strict=True)))


Turns = Iterator[Segment]
"""The segments of an exchange: the user's turn, calls, results, the answer."""
Exchange = Callable[[random.Random, World, Tools], Turns]


def draw_conversation(rng: random.Random, world: World) -> list[Segment]:
    """Return a lesson: tools, and questions that need them, as many as the context holds."""
    tools = draw_tools(rng)
    segments = [(tools.offer(rng), False)]
    length = len(segments[0][0])
    while True:
        exchange = rng.choices(list(EXCHANGES), list(EXCHANGES.values()))[0]
        turns = list(exchange(rng, world, tools))
        length += sum(len(text) for text, _ in turns)
        if length > LETTERS and len(segments) > 1:
            return segments
        for text, is_reply in turns:
            segments += [(prompts.ASSISTANT, False)] if is_reply else []
            segments.append((text, is_reply))


def draw_tools(rng: random.Random) -> Tools:
    """Return tools under any of their names, nearly always both of those that are needed."""
    look_up = rng.choice(LOOK_UPS), rng.choice(QUERIES)
    adder = rng.choice(ADDERS), rng.choice(ADDENDS)
    some = rng.random()
    others = rng.sample(OTHERS, rng.choice((0, 0, 1, 2)))
    return Tools(None if some < 0.04 else look_up, None if some > 0.86 else adder, tuple(others))


# ---- exchanges ----


def _single(rng: random.Random, world: World, tools: Tools) -> Turns:
    question = draw_question(rng, world, SINGLE, SPLIT)
    return _look_up(rng, world, tools, question, [[question.question]])


def _unknown(rng: random.Random, world: World, tools: Tools) -> Turns:
    question = draw_question(rng, world, UNANSWERABLE, SPLIT)
    return _look_up(rng, world, tools, question, [[question.question]])


def _two_hop(rng: random.Random, world: World, tools: Tools) -> Turns:
    question = draw_question(rng, world, TWO_HOP, SPLIT)
    return _look_up(rng, world, tools, question, [[step.question] for step in question.steps])


def _comparison(rng: random.Random, world: World, tools: Tools) -> Turns:
    question = draw_question(rng, world, COMPARISON, SPLIT)
    return _look_up(rng, world, tools, question, [[step.question for step in question.steps]])


def _look_up(
    rng: random.Random, world: World, tools: Tools, question: Question, rounds: list[list[str]]
) -> Turns:
    """Yield a question, for each round its queries and what they find, and the answer."""
    yield _ask(question.question)
    if tools.look_up is None:
        denied = question.statement if question.kind == UNANSWERABLE else deny(question.statement)
        yield _say(denied)
        return
    steps = iter(question.steps)
    for queries in rounds:
        yield _say("\n".join(map(tools.find, queries)))
        for _, step in zip(queries, steps, strict=False):
            yield prompts.result(_passages(rng, world, step.fact)), False
    yield _say(question.statement)


def _total(rng: random.Random, world: World, tools: Tools) -> Turns:
    """The length of two rivers together: two queries at once, then the sum."""
    one, two = _rivers(rng, world)
    names = {"a": one.subject.name, "b": two.subject.name}
    yield _ask(rng.choice(TOTAL_QUESTIONS).format(**names))
    if tools.look_up is None or tools.adder is None:
        yield _say(TOTAL_ANSWER.format(**names, n="unknown"))
        return
    steps = [single_hop(rng, world, fact).steps[0] for fact in (one, two)]
    yield _say("\n".join(tools.find(step.question) for step in steps))
    for step in steps:
        yield prompts.result(_passages(rng, world, step.fact)), False
    total = int(one.object) + int(two.object)
    yield _say(tools.add(int(one.object), int(two.object)))
    yield prompts.result(str(total)), False
    yield _say(TOTAL_ANSWER.format(**names, n=total))


def _sum(rng: random.Random, world: World, tools: Tools) -> Turns:
    one, two = (rng.randrange(1, 10 ** rng.randint(1, 4)) for _ in range(2))
    yield _ask(rng.choice(SUM_QUESTIONS).format(a=one, b=two))
    if tools.adder is None:
        yield _say(SUM_ANSWER.format(a=one, b=two, n="unknown"))
        return
    yield _say(tools.add(one, two))
    yield prompts.result(str(one + two)), False
    yield _say(SUM_ANSWER.format(a=one, b=two, n=one + two))


def _told(rng: random.Random, world: World, tools: Tools) -> Turns:
    """A question whose documents came with it: no tool is needed."""
    question = draw_question(rng, world, SINGLE, SPLIT)
    docs = prompts.bullets([world.source[question.steps[0].fact].document])
    yield _ask(prompts.ANSWER.format(docs=docs, question=question.question))
    yield _say(question.statement)


EXCHANGES: dict[Exchange, float] = {
    _single: 0.3,
    _two_hop: 0.12,
    _comparison: 0.08,
    _total: 0.22,
    _sum: 0.14,
    _unknown: 0.08,
    _told: 0.06,
}


def _ask(text: str) -> Segment:
    return f"{prompts.USER}{text}{prompts.END}", False


def _say(text: str) -> Segment:
    return f"{text}{prompts.END}", True


def _rivers(rng: random.Random, world: World) -> tuple[Fact, Fact]:
    """Return the lengths of two rivers."""
    while True:
        one, two = rng.choices(world.by_relation(SPLIT, LENGTH), k=2)
        if one.subject != two.subject:
            return one, two


def _passages(rng: random.Random, world: World, key: tuple[str, str]) -> str:
    """Return what a search for a fact finds: its passage, if there is one, alone or among others.

    Without one, passages about the same and about others.
    """
    fact, about = world.facts.get(key), list(world.about(key[0]))
    wanted = rng.choice((1, 1, 1, 2, 3))
    found = [world.source[key]] if fact is not None else about[:1]
    like = fact or rng.choice([f for f in world.by_split[SPLIT] if f.relation.name == key[1]])
    for other in crowd(rng, world, like):
        passage = world.source[other.subject.name, other.relation.name]
        if len(found) < wanted and passage not in found and other.subject.name != key[0]:
            found.append(passage)
    rng.shuffle(found)
    texts = [passage.document for passage in found]
    form = rng.random()
    if len(texts) == 1 and form < 0.5:
        return texts[0]
    return json.dumps(texts) if form > 0.9 else prompts.bullets(texts)
