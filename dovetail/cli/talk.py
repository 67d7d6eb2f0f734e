"""Answers as they come, and a talk on a terminal.

In: pieces of an answer, or lines that are typed. Out: text on stdout; on stderr what there is to
note about each answer, and its pace.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import msgspec
import typer

from dovetail.cli.report import NOT_DONE, show_count, tell
from dovetail.errors import DovetailError
from dovetail.runtime.app import App
from dovetail.runtime.hosting.generator import Prompt
from dovetail.runtime.schedule.request import Completion
from dovetail.runtime.text.chat import AnswerReader, ChatCompletion, Delta
from dovetail.runtime.text.chat_template import Message


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """One completion as `dovetail run --json` prints it; times in seconds, notes as sentences."""

    prompt: str | Sequence[int]
    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: str
    first_token_seconds: float | None
    decode_tokens_per_second: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Asker:
    """How prompts are asked: texts as conversations if `chats`, else to be continued as they are.

    system: what the model is told first. options: as of `App.chat`.
    """

    app: App
    chats: bool
    system: str | None
    options: Mapping[str, Any]

    def ask(self, prompt: Prompt, earlier: Sequence[Message] = ()) -> Generator[Delta, None, None]:
        """Yield the answer to a prompt that follows `earlier` messages."""
        if self.chats and isinstance(prompt, str):
            return self.app.chat_stream(self._messages(prompt, earlier), **self.options)
        return self._continue(prompt)

    def ask_all(self, prompts: Sequence[Prompt]) -> list[RunResult]:
        """Return the answers to all prompts, `n` to each, which run as a batch."""
        made = [self._prepare(prompt) for prompt in prompts]
        completions = self.app.generate([prompt for prompt, _ in made], **self.options)
        each = self.options["n"]
        return [
            self._result(prompts[i // each], found, made[i // each][1])
            for i, found in enumerate(completions)
        ]

    def _prepare(self, prompt: Prompt) -> tuple[Prompt, tuple[str, ...]]:
        """Return a prompt as `App.generate` takes it, and notes about it."""
        if self.chats and isinstance(prompt, str):
            most = self.options["max_tokens"]
            made = self.app.chat_prompts.fit(self._messages(prompt), most)
            return made.ids, made.notes
        return prompt, ()

    def _messages(self, prompt: str, earlier: Sequence[Message] = ()) -> list[Message]:
        first = [] if self.system is None else [Message(role="system", content=self.system)]
        return [*first, *earlier, Message(role="user", content=prompt)]

    def _continue(self, prompt: Prompt) -> Generator[Delta, None, None]:
        reader = AnswerReader(self.app.end_tokens)
        for chunk in self.app.stream(prompt, **self.options):
            ids = show_ids(chunk.token_ids) + " "
            yield reader.read(chunk if self.app.tokenizer else replace(chunk, text=ids))

    def _result(self, prompt: Prompt, completion: Completion, notes: tuple[str, ...]) -> RunResult:
        found = ChatCompletion.of(completion, notes, self.app.end_tokens)
        return RunResult(
            prompt=prompt,
            text=found.text,
            token_ids=found.token_ids,
            finish_reason=found.finish_reason,
            first_token_seconds=found.metrics.ttft,
            decode_tokens_per_second=found.decode_rate,
            notes=found.notes,
        )


def show_ids(token_ids: Sequence[int]) -> str:
    """Return ids as text, for artifacts that have no tokenizer."""
    return " ".join(map(str, token_ids))


HINT = "Ctrl-C stops an answer, Ctrl-D ends"


@dataclass
class TokenRate:
    """Tokens of an answer by the wall clock, in seconds."""

    start: float
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    at_first: int = 0

    def count(self, tokens: int, now: float) -> None:
        """Take in tokens that have come."""
        self.tokens += tokens
        self.last = now
        if self.first is None and tokens:
            self.first, self.at_first = now, tokens

    def __str__(self) -> str:
        """Say how many tokens came, how fast after the first ones, and when these did."""
        if self.first is None:
            return "0 tokens"
        later, seconds = self.tokens - self.at_first, self.last - self.first
        if not later or seconds <= 0:  # all came at once
            later, seconds = self.tokens, max(self.last - self.start, 1e-9)
        count, wait = show_count(self.tokens, "token"), self.first - self.start
        return f"{count}, {later / seconds:.1f} tokens/s, the first after {wait:.2f} s"


def show(pieces: Generator[Delta, None, None], *, stoppable: bool = False) -> str:
    """Print an answer as it comes and return its text; notes and its pace go to stderr.

    Ctrl-C ends the answer; stoppable: and is no error.
    """
    pace, text, notes, stopped = TokenRate(perf_counter()), "", list[str](), False
    try:
        with closing(pieces):
            for piece in pieces:
                pace.count(len(piece.token_ids), perf_counter())
                notes += piece.notes
                text += piece.content
                print(piece.content, end="", flush=True)
    except KeyboardInterrupt:
        stopped = True
        notes.append("the answer was stopped")
    if text:
        print(flush=True)
    for line in (*notes, str(pace)):
        tell(line)
    if stopped and not stoppable:
        raise typer.Exit(NOT_DONE)
    return text


def talk(asker: Asker) -> None:
    """Answer line after line from the terminal until its end; earlier ones count in a chat."""
    with suppress(ImportError):
        import readline  # noqa: F401 - `input` edits lines by it
    tell(HINT)
    earlier: list[Message] = []
    while True:
        try:
            line = input("> ")
            if line.strip():
                earlier += _answer(asker, line, earlier)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # with no answer under way
            print()
            tell(HINT)
        except UnicodeDecodeError:
            tell("the line is not valid UTF-8")


def _answer(asker: Asker, line: str, earlier: Sequence[Message]) -> list[Message]:
    """Show the answer to a line; return the messages that the talk grows by."""
    try:
        text = show(asker.ask(line, earlier), stoppable=True)
    except DovetailError as error:
        tell(str(error))
        return []
    if not text:
        return []
    return [Message(role="user", content=line), Message(role="assistant", content=text)]
