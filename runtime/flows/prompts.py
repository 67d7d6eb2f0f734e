"""Prompts of workflows: which parts were retrieved, and how much of them a context holds.

In: a node's template and the state; a tokenizer, a context. Out: a `FilledPrompt`; its token ids,
with fewer documents where all are too many, and a note that says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.ir.errors import LengthError
from dovetail.ir.workflow import State, fill
from dovetail.runtime.index.documents import Document
from dovetail.runtime.text.tokenizer import Tokenizer

TRIES = 4
"""Cuts before documents are given up: tokens at the places of cuts cannot be known before."""


class FilledPrompt(str):
    """A prompt as text; `pieces` are its parts in order, with whether each is a document."""

    pieces: tuple[tuple[str, bool], ...] = ()

    @classmethod
    def of(cls, template: str, state: State) -> FilledPrompt:
        """Return a template with its placeholders filled in, as `render` does."""
        pieces = tuple((text, isinstance(of, Document)) for text, of in fill(template, state))
        made = cls("".join(text for text, _ in pieces))
        made.pieces = pieces
        return made


def fit(
    prompt: str, tokenizer: Tokenizer, context: int, max_tokens: int
) -> tuple[list[int], str | None]:
    """Return the token ids of a prompt, and a note where documents had to be cut for them.

    The nearest documents stay. An answer of `max_tokens` is left room as in a chat: no more than a
    quarter of the context.

    Raises LengthError where the prompt is too long without any document.
    """
    pieces = prompt.pieces if isinstance(prompt, FilledPrompt) else ()
    documents = [text for text, retrieved in pieces if retrieved]
    if not documents:
        return tokenizer.encode(prompt, most=context), None
    room = context - min(max_tokens, max(context // 4, 1))
    try:
        return tokenizer.encode(prompt, most=room), None
    except LengthError:
        pass
    rest = "".join(text for text, retrieved in pieces if not retrieved)
    budget = room - len(tokenizer.encode(rest, most=context))
    for _ in range(TRIES):
        if budget <= 0:
            break
        kept = _keep(documents, len(tokenizer.cut("".join(documents), budget)))
        ids = tokenizer.encode(_join(pieces, kept))
        if len(ids) <= room:
            return ids, _tell(documents, kept, context)
        budget -= len(ids) - room
    none = [""] * len(documents)
    return tokenizer.encode(_join(pieces, none), most=context), _tell(documents, none, context)


def _keep(documents: list[str], letters: int) -> list[str]:
    """Return documents cut to so many letters in all, the first ones whole."""
    kept = []
    for text in documents:
        part = text[:letters]
        letters -= len(part)
        kept.append(part if part.strip("\n -") else "")
    return kept


def _join(pieces: tuple[tuple[str, bool], ...], kept: list[str]) -> str:
    left: Iterator[str] = iter(kept)
    return "".join(next(left) if retrieved else text for text, retrieved in pieces)


def _tell(documents: list[str], kept: list[str], context: int) -> str:
    gone = kept.count("")
    cut = sum(0 < len(part) < len(text) for text, part in zip(documents, kept, strict=True))
    what = [f"{gone} left out"] if gone else []
    what += [f"{cut} cut"] if cut else []
    return (
        f"of {len(documents)} retrieved documents {' and '.join(what)}: the prompt has outgrown "
        f"{context} tokens of context"
    )
