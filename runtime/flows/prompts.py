"""What calls ask, as text or vector; which parts of a prompt were retrieved, and how many fit.

In: a call of a node; a tokenizer, a context. Out: a `FilledPrompt`; its token ids, with fewer
documents where all are too many, and a note that says so. Of messages the chat template makes a
text first: marks stand for the documents in it, which are put in afterwards. The prompts that would
follow a partial result: no function or choice of the user runs on what is only a guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dovetail.ir.errors import LengthError, WorkflowError, describe_error
from dovetail.ir.workflow import (
    Embedding,
    Generation,
    Node,
    PromptMessage,
    Rerank,
    Retrieval,
    State,
    Workflow,
    fill,
)
from dovetail.runtime.flows.workflow_run import Call, WorkflowRun
from dovetail.runtime.index.documents import Document
from dovetail.runtime.text.tokenizer import BYTES_PER_TOKEN, Tokenizer

TRIES = 4
"""Cuts before documents are given up: tokens at the places of cuts cannot be known before."""
Pieces: TypeAlias = tuple[tuple[str, bool], ...]
"""Parts of a text in order, with whether each is a document."""
MARK = "\ue000{}\ue001"
"""What stands for a document: letters of nobody, which no template changes."""
_MARKS = re.compile("\ue000([0-9]{1,9})\ue001")


def text_of(call: Call) -> str:
    """Return the prompt, the query or the text of a call's node.

    Raises WorkflowError where a value of the state cannot be turned into text.
    """
    with naming(call.node):
        return read_text(call)


def read_text(call: Call) -> str:
    """As `text_of`, but raise whatever goes wrong."""
    return _TEXTS[type(call.node)](call.node, call.state)


def query_of(call: Call) -> str | bytes:
    """Return what a search asks: a text, or the float32 values of a vector; raises as `text_of`."""
    assert isinstance(call.node, Retrieval)
    with naming(call.node):
        vector = read_vector(call.state[call.node.query])
    return text_of(call) if vector is None else pack_vector(vector)


def read_vector(query: Any) -> NDArray[np.float32] | None:
    """Return a query that is a vector: an array, a tensor or a list of numbers; None of a text."""
    if isinstance(query, list | tuple):
        given = bool(query) and all(isinstance(value, Real) for value in query)
    else:
        given = hasattr(query, "__array__") and not isinstance(query, np.generic)
    return np.ascontiguousarray(query, np.float32) if given else None


def pack_vector(vector: Any) -> bytes:
    """Return a vector as the bytes of its float32 values."""
    return np.ascontiguousarray(vector, np.float32).tobytes()


@contextmanager
def naming(node: Node) -> Iterator[None]:
    """Raise a WorkflowError that names the node for whatever goes wrong."""
    try:
        yield
    except Exception as error:
        raise WorkflowError(f"node {node.name!r} failed: {describe_error(error)}") from error


def prompts_after(run: WorkflowRun, call: Call, value: object) -> list[tuple[Call, str]]:
    """Return the generations that become ready if `call` ends with `value`, and their prompts.

    None where a function chooses what follows: it may see only what is true.
    """
    if call.node.name not in run.workflow.straight:
        return []
    fork = run.fork()
    try:
        fork.finish(call, value)
        ready = (call for call in fork.ready() if isinstance(call.node, Generation))
        return [(call, text_of(call)) for call in ready]
    except WorkflowError:  # it will be raised when it is true
        return []


class FilledPrompt(str):
    """A prompt as text, with its parts. Of messages it is what tells them from others."""

    pieces: Pieces = ()
    messages: tuple[tuple[str, Pieces], ...] = ()  # roles and parts
    special = True  # whether the tokenizer adds tokens: a chat template has done so
    plain: FilledPrompt | None = None  # the one with documents nearest first, if this has not
    state: State | None = None  # that it was filled in from

    @classmethod
    def of(cls, prompt: str | tuple[PromptMessage, ...], state: State) -> FilledPrompt:
        """Return a prompt with its placeholders filled in, as `render` does."""
        if isinstance(prompt, str):
            made = cls.joined(_pieces(prompt, state))
            made.state = state
            return made
        messages = tuple((one.role, _pieces(one.content, state)) for one in prompt)
        made = cls("".join(f"{role}: {_text(pieces)}\n" for role, pieces in messages))
        made.messages, made.state = messages, state
        return made

    @classmethod
    def joined(cls, pieces: Pieces) -> FilledPrompt:
        """Return the text of parts."""
        made = cls(_text(pieces))
        made.pieces = pieces
        return made

    @property
    def beside(self) -> list[str]:
        """The documents that its request has found by now and that it does not show."""
        lists = (value for value in (self.state or {}).values() if isinstance(value, list | tuple))
        texts = (str(item) for items in lists for item in items if isinstance(item, Document))
        return [text for text in dict.fromkeys(texts) if text not in self]

    def mark(self) -> list[dict[str, str]]:
        """Return the messages with marks for the documents in them."""
        found, number = [], 0
        for role, pieces in self.messages:
            texts = []
            for text, retrieved in pieces:
                texts.append(MARK.format(number) if retrieved else text)
                number += retrieved
            found.append({"role": role, "content": "".join(texts)})
        return found

    def place(self, rendered: str) -> FilledPrompt:
        """Return what the chat template made of `mark`, with the documents in their places."""
        documents = [text for _, pieces in self.messages for text, retrieved in pieces if retrieved]
        pieces: list[tuple[str, bool]] = []
        for place, part in enumerate(_MARKS.split(rendered)):
            if place % 2 == 0:
                pieces.append((part, False))
            elif int(part) < len(documents):
                pieces.append((documents[int(part)], True))
            else:  # a user has written that
                pieces.append((MARK.format(part), False))
        made = FilledPrompt.joined(tuple(pieces))
        made.special, made.state = False, self.state
        made.plain = self.plain and self.plain.place(rendered)
        return made


def check_inputs(workflow: Workflow, inputs: Mapping[str, object], context: int) -> None:
    """Raise a LengthError where a prompt reads an input that no prompt of the context can hold."""
    most = context * BYTES_PER_TOKEN
    prompts = (node for node in workflow.nodes.values() if isinstance(node, Generation))
    for name in dict.fromkeys(name for node in prompts for name in node.reads):
        value = inputs.get(name)
        if isinstance(value, str) and len(value) > most:
            raise LengthError(
                f"workflow {workflow.name!r}: the input {name!r} has {len(value)} letters; the "
                f"context holds {context} tokens, {most} bytes at most; shorten it",
                f"inputs.{name}",
            )


class Fitted(NamedTuple):
    """A prompt as an engine takes it. Where documents were cut: a note, what the prompt says now.

    cut: what was left out of documents.
    """

    ids: list[int]
    note: str | None = None
    prompt: str | None = None
    cut: tuple[str, ...] = ()


def fit(
    prompt: str,
    tokenizer: Tokenizer,
    context: int,
    max_tokens: int,
    documents_tokens: int | None = None,
) -> Fitted:
    """Return the token ids of a prompt, with fewer documents where they are too many.

    The nearest documents stay. An answer of `max_tokens` is left room as in a chat: no more than a
    quarter of the context. documents_tokens: of all documents, at most.

    Raises LengthError where the prompt is too long without any document.
    """
    pieces: Pieces = ()
    special = True
    if isinstance(prompt, FilledPrompt):
        pieces, special = prompt.pieces, prompt.special
    documents = [text for text, retrieved in pieces if retrieved]
    if not documents:
        return Fitted(tokenizer.encode(prompt, special=special, most=context))
    room = context - min(max_tokens, max(context // 4, 1))
    kept, every = documents, "".join(documents)
    most = room if documents_tokens is None else min(documents_tokens, room)
    if documents_tokens is not None:
        letters = len(tokenizer.cut(every, most))
        kept = documents if letters == len(every) else _keep(documents, letters)
    text = _join(pieces, kept)
    try:
        ids = tokenizer.encode(text, special=special, most=room)
    except LengthError:
        pass
    else:
        if kept is documents:
            return Fitted(ids)
        return _tell(ids, documents, kept, text, f"documents_tokens is {documents_tokens}")
    full = f"the prompt has outgrown {context} tokens of context"
    rest = "".join(text for text, retrieved in pieces if not retrieved)
    budget = room - len(tokenizer.encode(rest, special=special, most=context))
    budget = min(budget, most)
    for _ in range(TRIES):
        if budget <= 0:
            break
        kept = _keep(documents, len(tokenizer.cut(every, budget)))
        text = _join(pieces, kept)
        ids = tokenizer.encode(text, special=special)
        if len(ids) <= room:
            return _tell(ids, documents, kept, text, full)
        budget -= len(ids) - room
    none = [""] * len(documents)
    text = _join(pieces, none)
    ids = tokenizer.encode(text, special=special, most=context)
    return _tell(ids, documents, none, text, full)


def _pieces(template: str, state: State) -> Pieces:
    return tuple((text, isinstance(of, Document)) for text, of in fill(template, state))


def _text(pieces: Pieces) -> str:
    return "".join(text for text, _ in pieces)


def _keep(documents: list[str], letters: int) -> list[str]:
    """Return documents cut to so many letters in all, the first ones whole."""
    kept = []
    for text in documents:
        part = text[:letters]
        letters -= len(part)
        kept.append(part if part.strip("\n -") else "")
    return kept


def _join(pieces: Pieces, kept: list[str]) -> str:
    left: Iterator[str] = iter(kept)
    return "".join(next(left) if retrieved else text for text, retrieved in pieces)


def _tell(ids: list[int], documents: list[str], kept: list[str], text: str, why: str) -> Fitted:
    pairs = list(zip(documents, kept, strict=True))
    gone, part = kept.count(""), sum(0 < len(left) < len(text) for text, left in pairs)
    what = [f"{gone} left out"] if gone else []
    what += [f"{part} cut"] if part else []
    note = f"of {len(documents)} retrieved documents {' and '.join(what)}: {why}"
    return Fitted(ids, note, text, tuple(text[len(left) :] for text, left in pairs if left != text))


_TEXTS: dict[type, Callable[[Any, State], str]] = {
    Generation: lambda node, state: FilledPrompt.of(node.prompt, state),
    Retrieval: lambda node, state: str(state[node.query]),
    Embedding: lambda node, state: str(state[node.text]),
    Rerank: lambda node, state: str(state[node.query]),
}
