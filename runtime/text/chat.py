"""Conversations: messages, the prompt that a context holds of them, and answers with notes.

In: messages, a model's template and tokenizer. Out: token ids; answers and their pieces, with a
note where turns were left out or where an answer is empty.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import msgspec

from dovetail.ir.errors import LengthError, RequestError
from dovetail.runtime.schedule.request import Chunk, Completion
from dovetail.runtime.text.chat_template import ChatTemplate, Message
from dovetail.runtime.text.tokenizer import BYTES_PER_TOKEN, Tokenizer

STAYING = ("system", "developer")
"""Roles whose messages no conversation may lose."""


@dataclass(frozen=True, slots=True)
class ChatCompletion(Completion):
    """An answer. `notes` say, a sentence each, what went otherwise than was asked."""

    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, found: Completion, notes: tuple[str, ...], ends: Container[int]) -> ChatCompletion:
        """Return a completion as an answer, also told of if it is empty; see `explain_empty`."""
        empty = explain_empty(found.text, found.token_ids, found.finish_reason, ends)
        same = {field.name: getattr(found, field.name) for field in fields(found)}
        return cls(**same, notes=notes + empty)

    @property
    def message(self) -> Message:
        """The answer as a message, to go on with."""
        return Message(role="assistant", content=self.text or "")


@dataclass(frozen=True, slots=True)
class Delta(Chunk):
    """A piece of a streamed answer; `notes` as those of a ChatCompletion, each told once."""

    notes: tuple[str, ...] = ()

    @property
    def content(self) -> str:
        """The text that the message grows by."""
        return self.text


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The token ids of a conversation, and what was to be said about them."""

    ids: list[int]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChatPrompts:
    """What makes prompts of conversations: a template, a tokenizer, a context in tokens."""

    template: ChatTemplate
    tokenizer: Tokenizer
    context: int

    def fit(
        self,
        messages: Sequence[Any],
        max_tokens: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """Return the prompt of a conversation, without its oldest turns where it is too long.

        Messages of the system, the user's last one and what follows it always stay. An answer of
        `max_tokens` is left room, yet no more than a quarter of the context.

        Raises RequestError where messages are wrong, or the template does not take them, or those
        that stay leave no token for an answer.
        """
        read = read_messages(messages)
        turns = old_turns(read)
        room = min(max_tokens or self.context, max(self.context // 4, 1))

        @cache
        def prompt(dropped: int) -> list[int] | None:
            gone = {place for turn in turns[:dropped] for place in turn}
            return self._encode([m for i, m in enumerate(read) if i not in gone], options)

        def fits(dropped: int) -> bool:
            found = prompt(dropped)
            return found is not None and len(found) + room <= self.context

        dropped = 0 if fits(0) else bisect_left(range(len(turns)), True, key=fits)
        ids = prompt(dropped)
        if ids is None or len(ids) >= self.context:
            size = f"more than {self.context}" if ids is None else str(len(ids))
            raise RequestError(
                f"the context holds {self.context} tokens, one of them for the answer; the last "
                f"message, with those of the system, has {size}; shorten it"
            )
        if not ids:
            raise RequestError("the model's chat template makes an empty prompt of these messages")
        return ChatPrompt(ids, (_tell_dropped(dropped, self.context),) if dropped else ())

    def surely_too_long(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Tell whether the messages surely do not fit into the context, without a look at them."""
        if len(messages) > self.context:
            return True
        return sum(map(_letters, messages)) > self.context * BYTES_PER_TOKEN

    def _encode(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None
    ) -> list[int] | None:
        """Return token ids, None where the messages are too long to be read at all."""
        if self.surely_too_long(messages):
            return None
        text = self.template.render(messages, options=options)
        try:
            return self.tokenizer.encode(text, special=False, most=self.context)
        except LengthError:
            return None


class AnswerReader:
    """Turns the chunks of one answer into deltas with notes."""

    def __init__(self, ends: Container[int], notes: Sequence[str] = ()) -> None:
        """`ends`: the model's end tokens. `notes` go with the first delta."""
        self._ends, self._notes = ends, tuple(notes)
        self._text = ""
        self._tokens: list[int] = []

    def read(self, chunk: Chunk) -> Delta:
        """Return the delta of the next chunk."""
        self._text += chunk.text
        self._tokens += chunk.token_ids
        notes, self._notes = self._notes, ()
        if chunk.finish_reason is not None:
            notes += explain_empty(self._text, self._tokens, chunk.finish_reason, self._ends)
        return Delta(chunk.text, chunk.token_ids, chunk.finish_reason, chunk.logprobs, notes)


def read_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages (objects with `role` and `content`) as plain data.

    Raises RequestError where one is wrong.
    """
    if isinstance(messages, str | bytes | Mapping):
        raise RequestError('messages must be a list, such as [{"role": "user", "content": "..."}]')
    try:
        plain = msgspec.to_builtins(list(messages))
        found = msgspec.convert(plain, list[Message])
    except (TypeError, msgspec.ValidationError, RecursionError) as error:
        raise RequestError(f"messages are invalid: {error}") from None
    if not found:
        raise RequestError("there is no message; give at least one")
    return [dict(message) for message in plain]


def old_turns(messages: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the places of the messages of each turn that may be left out, the oldest first.

    A turn begins with a message of the user; the last one stays.
    """
    turns: list[list[int]] = []
    for place, message in enumerate(messages):
        if message["role"] in STAYING:
            continue
        if message["role"] == "user" or not turns:
            turns.append([])
        turns[-1].append(place)
    return turns[:-1]


def explain_empty(
    text: str | None, token_ids: Sequence[int], reason: str, ends: Container[int]
) -> tuple[str, ...]:
    """Return a sentence that says why an answer has no text, none where it has some.

    text: None without a tokenizer. reason: as of a Completion. ends: the model's end tokens.
    """
    if text is None or text.strip():
        return ()
    count = len(token_ids)
    if reason == "abort":
        why = "it was cancelled"
    elif reason == "length":
        why = f"all the tokens that it may have ({count}) are special or white space"
    elif not token_ids or token_ids[-1] not in ends:
        why = "it began with a text or token to stop at"
    elif count == 1:
        why = "the model ended it at once"
    else:
        wrote = "1 token that is" if count == 2 else f"{count - 1} tokens that are"
        why = f"the model wrote {wrote} special or white space, and ended it"
    return (f"the answer is empty: {why}",)


def _tell_dropped(turns: int, context: int) -> str:
    what = "turn was" if turns == 1 else f"{turns} turns were"
    return f"the oldest {what} left out: the conversation has outgrown {context} tokens of context"


def _letters(message: Mapping[str, Any]) -> int:
    content = message.get("content") or ""
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)
