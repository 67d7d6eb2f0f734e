"""A workflow as a value: nodes, edges and limits, with what follows from them.

In: what a `RAGraph` collected, checked. Out: a frozen `Workflow` that runners read: which nodes
there are, where edges may lead, and what a node has to wait for.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any, Literal, TypeAlias

import msgspec

from dovetail.ir.errors import WorkflowError
from dovetail.ir.graph import EMBEDDING, FUNCTION, GENERATION, RERANK, RETRIEVAL, ExecutionGraph

State: TypeAlias = Mapping[str, Any]
"""What the nodes before have written, and the inputs."""

Name: TypeAlias = int | str


class Terminal(Enum):
    """The two ends of every workflow; neither does anything."""

    START = "START"
    END = "END"

    __hash__ = object.__hash__  # an enum's own is slow, and these are asked for in every step

    def __repr__(self) -> str:
        return self.value


START, END = Terminal.START, Terminal.END
ANY_ORDER = "any"
TEMPLATES = 1024
"""Prompts that are remembered in their parts: each of a workflow's is filled in once a request."""
_NAMED = re.compile(r"\{([^\W\d]\w*)\}")
Place: TypeAlias = Name | Terminal
Choice: TypeAlias = "Place | Iterable[Place]"


class StoredNode(
    msgspec.Struct, frozen=True, tag_field="kind", omit_defaults=True, forbid_unknown_fields=True
):
    """A node that a workflow's file holds as it is, under its kind."""

    name: Name

    @property
    def kind(self) -> str:
        """What it does; a node of execution graphs is of the same kind."""
        return str(self.__struct_config__.tag)


class PromptMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message of a prompt; `{name}` in its content stands for what was written there."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str


class Generation(StoredNode, tag=GENERATION, frozen=True):
    """Has the language model reply to a prompt; `{name}` in it stands for what was written there.

    prompt: a text, or messages for the model's chat template. options: sampling parameters of
    `App.generate`. model: None where there is one. documents_tokens: of retrieved text in the
    prompt, at most; None: as many as the context has room for.
    """

    prompt: str | tuple[PromptMessage, ...]
    output: str = "answer"
    options: Mapping[str, object] = {}
    model: str | None = None
    documents_tokens: int | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """What it takes from the state."""
        if isinstance(self.prompt, str):
            return placeholders(self.prompt)
        found = (name for message in self.prompt for name in placeholders(message.content))
        return tuple(dict.fromkeys(found))


class Retrieval(StoredNode, tag=RETRIEVAL, frozen=True):
    """Finds the `topk` documents of an index nearest to a text or vector.

    filters: metadata field -> the value, or the values, of which documents must have one; `{name}`
    alone stands for what was written there. order: in which prompts show them; `any` lets one show
    them as it shares most with prompts before it.
    """

    query: str
    output: str
    topk: int = 5
    filters: Mapping[str, object] = {}
    index: str | None = None
    order: Literal["nearest", "any"] = "nearest"

    @property
    def reads(self) -> tuple[str, ...]:
        """What it takes from the state."""
        named = filter(None, map(_name_in, self.filters.values()))
        return tuple(dict.fromkeys((self.query, *named)))

    def filled(self, state: State) -> Retrieval:
        """Return it with what its filters name; one that names what is not there falls away."""
        names = {field: _name_in(value) for field, value in self.filters.items()}
        if not any(names.values()):
            return self
        filters = {
            field: value if (name := names[field]) is None else state[name]
            for field, value in self.filters.items()
            if names[field] is None or names[field] in state
        }
        return msgspec.structs.replace(self, filters=filters)


class Embedding(StoredNode, tag=EMBEDDING, frozen=True):
    """Turns a text into a vector, which a retrieval can take as its query."""

    text: str
    output: str
    model: str | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """What it takes from the state."""
        return (self.text,)


class Rerank(StoredNode, tag=RERANK, frozen=True):
    """Keeps the `topk` of some documents that a cross-encoder scores highest for a text.

    instruction: what makes a document a good one, for models that are told.
    """

    query: str
    documents: str
    output: str
    topk: int = 5
    model: str | None = None
    instruction: str | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """What it takes from the state."""
        return (self.query, self.documents)


def _name_in(value: object) -> str | None:
    """Return the name in a filter's value `{name}`, None for any other value."""
    found = _NAMED.fullmatch(value) if isinstance(value, str) else None
    return found[1] if found else None


def _call(function: Callable[[State], Any], state: State) -> Any:
    """Return what a function of users does; an `async def` runs in an event loop of its own."""
    value = function(state)
    if not inspect.iscoroutine(value):
        return value
    with ThreadPoolExecutor(1) as alone:  # this thread may run a loop already, as in a notebook
        return alone.submit(asyncio.run, value).result()


@dataclass(frozen=True, slots=True)
class Function:
    """Calls Python with the state and writes what it returns."""

    name: Name
    function: Callable[[State], object]
    output: str
    kind = FUNCTION

    @property
    def reads(self) -> tuple[str, ...]:
        """Nothing by name: it gets all there is."""
        return ()

    def call(self, state: State) -> object:
        """Return what it writes."""
        return _call(self.function, state)


Node: TypeAlias = Generation | Retrieval | Embedding | Rerank | Function


@dataclass(frozen=True, slots=True)
class Join:
    """A function that can be written to a file: the texts at `names`, with a space between."""

    names: tuple[str, ...]

    def __call__(self, state: State) -> str:
        """Join."""
        return " ".join(str(state[name]).strip() for name in self.names)


@dataclass(frozen=True, slots=True)
class Collect:
    """A function that can be written to a file: the list at `into`, and the text at `name` behind.

    `into` is what its node writes; nothing is added before `name` was written.
    """

    name: str
    into: str

    def __call__(self, state: State) -> list[str]:
        """Collect."""
        before = list(state.get(self.into, ()))
        return [*before, str(state[self.name]).strip()] if self.name in state else before


@dataclass(frozen=True, slots=True)
class Branch:
    """A choice that can be written to a file: `then` if the state has a true value at `key`.

    Texts of `empty` are no true values, in either case and with a full stop or not. `most`: lists
    of the state, and how long they get: at a full one it is `otherwise`, too.
    """

    key: str
    then: Place
    otherwise: Place = END
    empty: tuple[str, ...] = ()
    most: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, state: State) -> Place:
        """Choose."""
        value = state.get(self.key)
        text = str(value).strip().removesuffix(".").lower()
        full = any(len(state.get(name, ())) >= most for name, most in self.most.items())
        return self.then if value and text not in self.empty and not full else self.otherwise


@dataclass(frozen=True, slots=True)
class Edge:
    """From a node to another, or to what `choose` says; one of the two is set.

    targets: where `choose` may lead, None = anywhere.
    """

    source: Place
    target: Place | None = None
    choose: Callable[[State], Choice] | None = None
    targets: tuple[Place, ...] | None = None

    def next(self, state: State) -> tuple[Place, ...]:
        """Return where this edge leads after its source has run."""
        if self.choose is None:
            assert self.target is not None
            return (self.target,)
        chosen = _call(self.choose, state)
        if isinstance(chosen, Iterable) and not isinstance(chosen, str):
            return tuple(dict.fromkeys(chosen))
        return (chosen,)


@dataclass(frozen=True)
class Workflow:
    """A checked workflow. max_steps: how often one node may run for one request.

    order: names so that each comes after those that lead to it but for loops. away[a][b]: the
    fewest loops to go through from `a` to `b` (0 = straight on); absent where no way leads.
    template: of the graphs of its requests (`ir/template.py`).
    """

    name: str
    nodes: Mapping[Name, Node]
    edges: Mapping[Place, tuple[Edge, ...]]
    inputs: tuple[str, ...]
    max_steps: int
    order: Mapping[Place, int]
    away: Mapping[Place, Mapping[Place, int]]
    template: ExecutionGraph

    @cached_property
    def writers(self) -> Mapping[str, Name]:
        """Which node writes each output."""
        return {node.output: node.name for node in self.nodes.values()}

    @cached_property
    def unordered(self) -> frozenset[str]:
        """Outputs that are documents in any order."""
        searches = (node for node in self.nodes.values() if isinstance(node, Retrieval))
        return frozenset(node.output for node in searches if node.order == ANY_ORDER)

    @cached_property
    def straight(self) -> Mapping[Place, tuple[Place, ...]]:
        """What follows each place behind which nothing is chosen."""
        found = {place: tuple(e.target for e in edges) for place, edges in self.edges.items()}
        return {place: ways for place, ways in found.items() if None not in ways}  # type: ignore

    @cached_property
    def prompting(self) -> frozenset[Place]:
        """Places straight behind which generations come: these may begin on a part of a search."""
        prompts = {name for name, node in self.nodes.items() if isinstance(node, Generation)}
        return frozenset(place for place, ways in self.straight.items() if prompts & {*ways})

    @cached_property
    def asking(self) -> frozenset[Place]:
        """Places behind which functions of users choose what follows."""
        return frozenset(
            place
            for place, edges in self.edges.items()
            if any(e.choose is not None and not isinstance(e.choose, Branch) for e in edges)
        )

    @cached_property
    def searches(self) -> Mapping[Name, Retrieval | None]:
        """By node, the search that comes next, through all that is no generation.

        None where none does, or a generation comes first on all ways. Edges that may lead anywhere
        say nothing.
        """
        return {name: self._search_after(name) for name in self.nodes}

    def _search_after(self, name: Name) -> Retrieval | None:
        places: list[Place] = [name]
        for place in places:  # it grows meanwhile
            node = None if isinstance(place, Terminal) else self.nodes[place]
            if isinstance(node, Retrieval) and place != name:
                return node
            if isinstance(node, Function | Embedding | Rerank) or place == name:
                ways = (to for edge in self.edges[place] for to in targets(edge, ()))
                places += [to for to in ways if to not in places]
        return None


def label(node: Name) -> str:
    """Return the name of a node in an execution graph; a text of digits is no number."""
    number = isinstance(node, str) and node.removeprefix("-").isdigit()
    return repr(node) if number else str(node)


@lru_cache(maxsize=TEMPLATES)
def _parse(template: str) -> tuple[tuple[str, str | None, str | None, str | None], ...]:
    return tuple(string.Formatter().parse(template))


@lru_cache(maxsize=TEMPLATES)
def placeholders(template: str) -> tuple[str, ...]:
    """Return the names in a prompt, each once; `{{` and `}}` are braces.

    Raises WorkflowError where braces do not match, or hold more than a name.
    """
    try:
        fields = [parts[1:] for parts in _parse(template)]
    except ValueError as error:
        raise WorkflowError(f"prompt {template!r}: {error}; write {{{{ for a brace") from None
    names = []
    for name, spec, conversion in fields:
        if name is None:
            continue
        if not name.isidentifier() or spec or conversion:
            raise WorkflowError(
                f"prompt {template!r}: {{{name}}} must hold a plain name; write {{{{ for a brace"
            )
        names.append(name)
    return tuple(dict.fromkeys(names))


def render(template: str, state: State) -> str:
    """Return a prompt with its placeholders filled in; lists become lines with a dash."""
    return "".join(text for text, _ in fill(template, state))


def fill(template: str, state: State) -> Iterator[tuple[str, object]]:
    """Yield the pieces of a prompt in order, each with the item of a list that it shows."""
    for text, name, _, _ in _parse(template):
        yield text, None
        if name is None:
            continue
        value = state[name]
        if isinstance(value, list | tuple) and value:
            for number, item in enumerate(value):
                yield "\n" * (number > 0) + f"- {item}", item
        else:
            yield "- nothing" if isinstance(value, list | tuple) else str(value), None


def targets(edge: Edge, names: Iterable[Name]) -> Iterator[Place]:
    """Yield all places that an edge may lead to."""
    if edge.target is not None:
        yield edge.target
    elif edge.targets is not None:
        yield from edge.targets
    else:
        yield from names
        yield END


def leads_anywhere(edge: Edge) -> bool:
    """Tell whether it may lead to all nodes and END."""
    return edge.choose is not None and edge.targets is None
