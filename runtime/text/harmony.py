"""Answers of gpt-oss in parts: each is a header with a channel, `<|message|>`, a text, and an end.

In: an answer's text in any pieces, with the special tokens in it. Out: parts as of `answers.py`:
`analysis` is reasoning, what goes to a function is a call, all else is content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from dovetail.runtime.text.answers import (
    AnswerParser,
    CallArguments,
    CallBegin,
    Content,
    Part,
    Reasoning,
    Thinking,
)
from dovetail.runtime.text.call_formats import NAMED, CallFormat
from dovetail.runtime.text.call_reader import SPACE
from dovetail.runtime.text.tokenizer import longest_start

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKS = (*ENDS, START, CHANNEL)
"""What may follow a text: an end, or a header without one before it."""
HEADS = (START, CHANNEL, MESSAGE, "to=")
"""What a header begins with, behind the prompt's `<|start|>assistant`."""
CALLEE = re.compile(r"\bto=functions\.([\w.-]+)")
ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")

HARMONY = Thinking(
    f"{CHANNEL}analysis{MESSAGE}", f"<|end|>{START}assistant", f"{CHANNEL}final{MESSAGE}"
)
HARMONY_CALLS = CallFormat(
    f"{CHANNEL}commentary to=functions.", kind=NAMED, named=f" <|constrain|>json{MESSAGE}"
)


class HarmonyParser(AnswerParser):
    """The parts of one answer of gpt-oss."""

    def __init__(self, *, offered: bool, begun: bool, most: int | None = None) -> None:
        """`offered`: calls are looked for. `begun`: the prompt ended within reasoning."""
        super().__init__(most=most)
        self._offered, self._held = offered, ""
        self._says: Callable[[str], Part] | None = Reasoning if begun else None
        """What the text that comes is; None: it is a header."""

    def feed(self, text: str) -> list[Part]:
        """Return the new parts."""
        self._held += text
        return list(self._noted(self._read(last=False)))

    def close(self) -> list[Part]:
        """Return what was held back; nothing more will come."""
        return list(self._noted(self._read(last=True)))

    def _read(self, *, last: bool) -> Iterator[Part]:
        while self._held:
            before = self._held, self._says
            yield from self._read_head(last=last) if self._says is None else self._read_text(last)
            if before == (self._held, self._says):
                return

    def _read_head(self, *, last: bool) -> Iterator[Part]:
        head, found, rest = self._held.partition(MESSAGE)
        if found:
            self._held, callee = rest, CALLEE.search(head) if self._offered else None
            self._says = Reasoning if ANALYSIS.search(head) else Content
            if callee is not None:
                self._says = CallArguments
                yield CallBegin(callee[1])
            return
        said = head.lstrip(SPACE)
        if not any(said.startswith(mark) or mark.startswith(said) for mark in HEADS):
            self._says = Content  # a model that goes without
        elif last:
            self._held = ""  # it was cut

    def _read_text(self, last: bool) -> Iterator[Part]:
        assert self._says is not None
        places = [(at, mark) for mark in MARKS if (at := self._held.find(mark)) >= 0]
        at, mark = min(places, default=(len(self._held), ""))
        keep = 0 if last or mark else longest_start(self._held, MARKS)
        found = self._held[: at - keep]
        self._held = self._held[at + len(mark) * (mark in ENDS) - keep :]
        if found:
            yield self._says(found)
        if mark:
            self._says = None
