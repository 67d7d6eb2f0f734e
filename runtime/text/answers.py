"""Answers of models in parts: reasoning, content, and calls of tools.

In: an answer's text in any pieces. Out: parts; put together they are the same however the text was
cut. What may yet turn out to be something else is held back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from dovetail.runtime.text.call_reader import SPACE, CallReader
from dovetail.runtime.text.tokenizer import longest_start


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model says to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """What it says to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A new call of a tool."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the last call's arguments, which are JSON in the end."""

    text: str


Part: TypeAlias = Reasoning | Content | CallBegin | CallArguments


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family of models writes calls of tools.

    begin: goes before them, "" where they have no mark. end: goes behind each. bare: whether an
    answer may begin with one that has no mark. named: whether a name may stand before its
    arguments, instead of in one object with them. arguments: their key. divider: between calls of
    a bare format.
    """

    begin: str = ""
    end: str = ""
    bare: bool = False
    named: bool = False
    arguments: str = "arguments"
    divider: str = ""


@dataclass(frozen=True, slots=True)
class Thinking:
    """What stands around a model's reasoning; answer: what goes before the answer to the user."""

    begin: str
    end: str
    answer: str = ""


FENCE = "```"
LONGEST_FENCE = 16
"""Letters of a line that opens a block of code."""
ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"
SEPARATORS = SPACE + ",;[]"


class ReasoningSplitter:
    """Reads reasoning off the beginning of an answer."""

    def __init__(self, thinking: Thinking | None, *, begun: bool) -> None:
        """`begun`: the prompt ended within reasoning."""
        self._thinking, self._inside = thinking, begun
        self._over = thinking is None
        self._held = ""
        self._told = self._after = False  # whether reasoning, or content, has said anything

    def feed(self, text: str) -> tuple[str, str]:
        """Return new reasoning, and new text behind it."""
        if self._over:
            return "", self._skip(text)
        assert self._thinking is not None
        self._held += text
        if not self._inside:
            begin, said = self._thinking.begin, self._held.lstrip(SPACE)
            if not said.startswith(begin):
                if begin.startswith(said):
                    return "", ""
                self._over = self._after = True
                found, self._held = self._held, ""
                return "", found
            self._inside, self._held = True, said[len(begin) :]
        at = self._held.find(self._thinking.end)
        if at >= 0:
            found, rest = self._held[:at], self._held[at + len(self._thinking.end) :]
            self._over, self._held = True, ""
            return self._trim(found.rstrip(SPACE)), self._skip(rest)
        keep = longest_start(self._held, (self._thinking.end,))
        found = self._held[: len(self._held) - keep].rstrip(SPACE)
        self._held = self._held[len(found) :]
        return self._trim(found), ""

    def close(self) -> tuple[str, str]:
        """Return what was held back."""
        held, self._held = self._held, ""
        if self._over or not self._inside:
            return "", held
        return self._trim(held.rstrip(SPACE)), ""

    def _trim(self, text: str) -> str:
        """Return reasoning without the white space that it begins with."""
        text = text if self._told else text.lstrip(SPACE)
        self._told |= bool(text)
        return text

    def _skip(self, text: str) -> str:
        """Return content without the white space that stands behind reasoning."""
        if self._inside and not self._after:
            text = text.lstrip(SPACE)
            self._after = bool(text)
        return text


TEXT, CALLS, OBJECT, NAMED = range(4)


class CallSplitter:
    """Reads calls of tools out of a text."""

    def __init__(self, form: CallFormat | None) -> None:
        """`form` None: there are none."""
        self._form = form
        self._state = TEXT
        self._held = ""  # not read yet
        self._raw = ""  # read as part of a call that may yet turn out to be text
        self._called = False  # whether a call has ended since the last mark
        self._begun = form is None or not form.bare  # whether a bare call can no longer begin
        self._call: CallReader | None = None
        self.calls = 0

    def feed(self, text: str) -> Iterator[Part]:
        """Yield the new parts."""
        if self._form is None:
            yield Content(text)
            return
        self._held += text
        yield from self._read(last=False)

    def close(self) -> Iterator[Part]:
        """Yield what was held back."""
        if self._form is None:
            return
        yield from self._read(last=True)
        if self._state != TEXT and not self._opened:
            yield Content(self._raw + self._held)
        self._held = self._raw = ""

    @property
    def _opened(self) -> bool:
        return self._call is not None and self._call.name is not None

    def _read(self, *, last: bool) -> Iterator[Part]:
        while True:
            before = len(self._held), self._state
            yield from _READ[self._state](self, last)
            if not self._held or before == (len(self._held), self._state):
                return

    # ---- states: each reads what it can of what is held ----

    def _read_text(self, last: bool) -> Iterator[Part]:
        assert self._form is not None
        if not self._begun and not self._try_bare(last=last):
            return
        if self._state != TEXT:
            return
        begin = self._form.begin
        at = self._held.find(begin) if begin else -1
        if at >= 0:
            found = self._held[:at].rstrip(SPACE)
            self._raw = self._held[len(found) : at + len(begin)]
            self._held, self._state = self._held[at + len(begin) :], CALLS
            self._called = False
        else:
            keep = 0 if last or not begin else longest_start(self._held, (begin,))
            found = self._held[: len(self._held) - keep]
            found = found if last or not begin else found.rstrip(SPACE)
            self._held = self._held[len(found) :]
            if last and self.calls and not found.strip(SPACE):
                found = ""
        yield Content(found)

    def _try_bare(self, *, last: bool) -> bool:
        """See whether a call begins the text; False where that is not known yet."""
        said = self._held.lstrip(SPACE)
        if not said and not last:
            return False
        skipped = len(self._held) - len(said)
        if said[:1] in ("{", "["):
            self._raw, self._held, self._state = self._held[:skipped], said, CALLS
        elif FENCE.startswith(said[:3]) and said:
            line, _, rest = said.partition("\n")
            if "\n" not in said and len(said) <= LONGEST_FENCE and not last:
                return False
            if "\n" in said and len(line) <= LONGEST_FENCE:
                self._raw = self._held[:skipped] + line + "\n"
                self._held, self._state = rest, CALLS
        self._begun = True
        return True

    def _read_calls(self, last: bool) -> Iterator[Part]:
        """Skip to the next call, or to text."""
        assert self._form is not None
        while self._held:
            letter = self._held[0]
            marks = [mark for mark in (self._form.end, self._form.begin) if mark]
            marks += [FENCE] if self._form.bare else []
            if mark := next((one for one in marks if self._held.startswith(one)), None):
                if mark == self._form.begin:
                    self._called, self._raw = False, self._raw if not self._called else ""
                self._skip(len(mark))
            elif not last and any(mark.startswith(self._held) for mark in marks):
                return
            elif letter in SEPARATORS:
                self._skip(1)
            elif letter == "{":
                self._called = False
                self._skip(1)
                self._call, self._state = CallReader(strict=self._form.bare), OBJECT
                return
            elif self._form.named and (letter.isalnum() or letter == "_"):
                self._state = NAMED
                return
            else:
                yield from self._leave()
                return

    def _read_object(self, _last: bool) -> Iterator[Part]:
        call = self._call
        assert call is not None
        read = 0
        for letter in self._held:
            opened = call.name is not None
            call.read(letter)
            read += 1
            if call.name is not None and not opened:
                yield CallBegin(call.name)
                self.calls += 1
            if call.done or call.failed:
                break
        self._raw += self._held[:read]
        self._held = self._held[read:]
        if arguments := call.take():
            yield CallArguments(arguments)
        if self._opened:
            self._raw = ""
        if call.done or call.failed:
            if not self._opened:
                yield from self._leave()
            else:
                self._call, self._state, self._called = None, CALLS, True

    def _read_named(self, _last: bool) -> Iterator[Part]:
        """Read `name[ARGS]{...}`."""
        at = self._held.find("{")
        if at < 0:
            return
        name = self._held[:at].partition(ARGS)[0].partition(CALL_ID)[0].strip(SPACE)
        if not name.replace("_", "a").replace("-", "a").replace(".", "a").isalnum():
            yield from self._leave()
            return
        self._skip(at)
        self._call, self._state = CallReader(name), OBJECT

    def _skip(self, letters: int) -> None:
        """Read what is no text behind a call, and may be some elsewhere."""
        self._raw += "" if self._called else self._held[:letters]
        self._held = self._held[letters:]

    def _leave(self) -> Iterator[Part]:
        """Go on with text; what looked like calls and was none is part of it."""
        raw, self._raw = self._raw, ""
        self._call, self._state = None, TEXT
        yield Content(raw)


_READ = {
    TEXT: CallSplitter._read_text,
    CALLS: CallSplitter._read_calls,
    OBJECT: CallSplitter._read_object,
    NAMED: CallSplitter._read_named,
}


class AnswerParser:
    """The parts of one answer."""

    def __init__(
        self,
        calls: CallFormat | None = None,
        thinking: Thinking | None = None,
        *,
        begun: bool = False,
        most: int | None = None,
    ) -> None:
        """`calls` None: none are looked for. `begun`: the prompt ended within reasoning.

        most: calls that are told of; more are left out.
        """
        self._reasoning = ReasoningSplitter(thinking, begun=begun)
        self._splitter, self._most = CallSplitter(calls), most
        self.calls = 0
        """Calls that have begun."""

    def feed(self, text: str) -> list[Part]:
        """Return the new parts."""
        reasoning, rest = self._reasoning.feed(text)
        return list(self._told([Reasoning(reasoning), *self._splitter.feed(rest)]))

    def close(self) -> list[Part]:
        """Return what was held back; nothing more will come."""
        reasoning, rest = self._reasoning.close()
        parts = [Reasoning(reasoning), *self._splitter.feed(rest), *self._splitter.close()]
        return list(self._told(parts))

    def _told(self, parts: Iterable[Part]) -> Iterator[Part]:
        """Yield the parts that say something, but for calls beyond `most`."""
        for part in parts:
            self.calls += isinstance(part, CallBegin)
            if isinstance(part, Reasoning | Content):
                if part.text:
                    yield part
            elif self._most is None or self.calls <= self._most:
                yield part


@dataclass(slots=True)
class CalledTool:
    """A call that was read: the tool's name, and arguments as the model wrote them."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """The parts of an answer put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[CalledTool] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> Answer:
        """Take parts in; return this."""
        for part in parts:
            match part:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallBegin(name):
                    self.calls.append(CalledTool(name))
                case CallArguments(text):
                    self.calls[-1].arguments += text
        return self
