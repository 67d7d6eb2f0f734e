"""A workflow as a value: nodes, edges and limits, with what follows from them.

In: what a `RAGraph` collected, checked. Out: a frozen `Workflow` that runners read: which nodes
there are, where edges may lead, and what a node has to wait for.
"""

from __future__ import annotations

import asyncio
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, TypeAlias

import msgspec

from dovetail.ir.errors import WorkflowError
from dovetail.ir.graph import EMBEDDING, FUNCTION, GENERATION, RETRIEVAL, ExecutionGraph

State: TypeAlias = Mapping[str, Any]
"""What the nodes before have written, and the inputs."""

Name: TypeAlias = int | str


class Terminal(Enum):
    """The two ends of every workflow; neither does anything."""

    START = "START"
    END = "END"

    def __repr__(self) -> str:
        return self.value


START, END = Terminal.START, Terminal.END
ANY_ORDER = "any"
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
        texts = [self.prompt] if isinstance(self.prompt, str) else [m.content for m in self.prompt]
        return tuple(dict.fromkeys(name for text in texts for name in placeholders(text)))


class Retrieval(StoredNode, tag=RETRIEVAL, frozen=True):
    """Finds the `topk` documents of an index nearest to a text or vector.

    filters: metadata field -> the value, or the values, of which documents must have one. order: in
    which prompts show them; `any` lets one show them as it shares most with prompts before it.
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
        return (self.query,)


class Embedding(StoredNode, tag=EMBEDDING, frozen=True):
    """Turns a text into a vector, which a retrieval can take as its query."""

    text: str
    output: str
    model: str | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """What it takes from the state."""
        return (self.text,)


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
        """Return what it writes; an `async def` runs in an event loop of its own."""
        value = self.function(state)
        return asyncio.run(value) if asyncio.iscoroutine(value) else value


Node: TypeAlias = Generation | Retrieval | Embedding | Function


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
        chosen = self.choose(state)
        if isinstance(chosen, Iterable) and not isinstance(chosen, str):
            return tuple(dict.fromkeys(chosen))
        return (chosen,)


@dataclass(frozen=True, slots=True)
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


def label(node: Name) -> str:
    """Return the name of a node in an execution graph; a text of digits is no number."""
    number = isinstance(node, str) and node.removeprefix("-").isdigit()
    return repr(node) if number else str(node)


def placeholders(template: str) -> tuple[str, ...]:
    """Return the names in a prompt, each once; `{{` and `}}` are braces.

    Raises WorkflowError where braces do not match, or hold more than a name.
    """
    try:
        fields = [parts[1:] for parts in string.Formatter().parse(template)]
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
    for text, name, _, _ in string.Formatter().parse(template):
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
