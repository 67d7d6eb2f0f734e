"""Answers as they come, and a talk on a terminal.

In: pieces of an answer, or lines that are typed. Out: text on stdout; on stderr what there is to
note about each answer, and its pace.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from time import perf_counter

import typer

from dovetail.cli.asking import Asker
from dovetail.cli.report import NOT_DONE, show_count, tell
from dovetail.errors import DovetailError
from dovetail.runtime.text.chat import Delta
from dovetail.runtime.text.messages import Message

HINT = "Ctrl-C stops an answer, Ctrl-D ends"


@dataclass
class Pace:
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
    pace, text, notes, stopped = Pace(perf_counter()), "", list[str](), False
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
