"""Answers of models in parts: reasoning, content, and calls of tools.

In: an answer's text in any pieces. Out: parts; put together they are the same however the text was
cut. What may yet turn out to be something else is held back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from dovetail.runtime.text.call_formats import FENCE, LITERAL, TAGS, CallFormat
from dovetail.runtime.text.call_literals import LiteralReader
from dovetail.runtime.text.call_reader import SPACE, CallReader
from dovetail.runtime.text.call_tags import TagReader
from dovetail.runtime.text.tokenizer import longest_start
from dovetail.runtime.text.tool_schema import Kinds


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
class Thinking:
    """What stands around a model's reasoning; answer: what goes before the answer to the user.

    around: marks that may stand around that answer.
    """

    begin: str
    end: str
    answer: str = ""
    around: tuple[str, ...] = ()


LONGEST_FENCE = 16
"""Letters of a line that opens a block of code."""
SEPARATORS = SPACE + ",;[]"
Tools: TypeAlias = Mapping[str, Mapping[str, Kinds]]
"""By its name, what the arguments of a tool may be."""


class ReasoningSplitter:
    """Reads reasoning off the beginning of an answer."""

    def __init__(self, thinking: Thinking | None, *, begun: bool) -> None:
        """`begun`: the prompt ended within reasoning."""
        self._thinking, self._inside = thinking, begun
        self._over = thinking is None
        self._held = ""
        self._begun = self._after = False  # whether reasoning, or content, has said anything

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
        text = text if self._begun else text.lstrip(SPACE)
        self._begun |= bool(text)
        return text

    def _skip(self, text: str) -> str:
        """Return content without the white space that stands behind reasoning."""
        if self._inside and not self._after:
            text = text.lstrip(SPACE)
            self._after = bool(text)
        return text


class Unwrapper:
    """Takes marks off content, with the white space beside them."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        self._marks, self._held = marks, ""
        self._behind = False  # whether a mark was the last thing to come

    def feed(self, text: str, *, last: bool = False) -> str:
        """Return what is sure to be content."""
        self._held, found = self._held + text, ""
        while self._held:
            self._held = self._held.lstrip(SPACE) if self._behind else self._held
            places = [(at, one) for one in self._marks if (at := self._held.find(one)) >= 0]
            at, mark = min(places, default=(len(self._held), ""))
            keep = 0 if mark or last else longest_start(self._held, self._marks)
            said = self._held[: at - keep]
            said = said if last and not mark else said.rstrip(SPACE)
            found, self._held = found + said, self._held[at + len(mark) if mark else len(said) :]
            self._behind = bool(mark) or (self._behind and not said)
            if not mark:
                break
        return found


TEXT, CALLS, CALL = range(3)


class CallSplitter:
    """Reads calls of tools out of a text."""

    def __init__(self, form: CallFormat | None, tools: Tools) -> None:
        """`form` None: there are none."""
        self._form, self._tools = form, tools
        self._state = TEXT
        self._held = ""  # not read yet
        self._raw = ""  # read as part of a call that may yet turn out to be text
        self._called = False  # whether a call has ended since the last mark
        self._begun = form is None or not form.bare  # whether a bare call can no longer begin
        self._call: CallReader | LiteralReader | TagReader | None = None
        self._opened = False  # whether the call under way is known to be one
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
        starts = self._form.starts
        places = [(at, start) for start in starts if (at := self._held.find(start)) >= 0]
        at, start = min(places, default=(-1, ""))
        if at >= 0:
            found, skipped = self._held[:at].rstrip(SPACE), len(start) * (start == self._form.begin)
            self._raw = self._held[len(found) : at + skipped]
            self._held, self._state = self._held[at + skipped :], CALLS
            self._called = False
        else:
            keep = 0 if last else longest_start(self._held, starts)
            found = self._held[: len(self._held) - keep]
            found = found if last or not starts else found.rstrip(SPACE)
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
        form = self._form
        assert form is not None
        while self._held:
            letter = self._held[0]
            if mark := next((one for one in form.ends if self._held.startswith(one)), None):
                if mark == form.begin:
                    self._called, self._raw = False, self._raw if not self._called else ""
                self._skip(len(mark))
            elif not last and any(mark.startswith(self._held) for mark in form.ends):
                return
            elif letter in SEPARATORS:
                self._skip(1)
            elif letter == "{":
                self._begin(1, CallReader(strict=form.bare))
                return
            elif form.head is not None and (found := form.head.find(self._held)) is not None:
                self._begin(found[1], self._make_reader(form, found[0]))
                return
            elif not last and form.head is not None and form.head.may_come(self._held):
                return
            else:
                if form.open and self._held.startswith(form.open):  # which begins no call after all
                    self._raw, self._held = self._raw + self._held[0], self._held[1:]
                yield from self._leave()
                return

    def _begin(self, letters: int, call: CallReader | LiteralReader | TagReader) -> None:
        """Begin a call, whose head has so many letters."""
        self._called = False
        self._skip(letters)
        self._call, self._state, self._opened = call, CALL, False

    def _make_reader(self, form: CallFormat, name: str) -> CallReader | LiteralReader | TagReader:
        """Return what reads the arguments of a tool, behind its name."""
        if form.kind == TAGS:
            return TagReader(form, name, self._tools.get(name, {}))
        if form.kind == LITERAL:
            return LiteralReader(name, form.close, form.quote, strict=form.bare)
        return CallReader(name)

    def _read_call(self, _last: bool) -> Iterator[Part]:
        call = self._call
        assert call is not None
        read = 0
        for letter in self._held:
            call.read(letter)
            read += 1
            if call.done or call.failed:
                break
        self._raw += self._held[:read]
        self._held = self._held[read:]
        if call.name is not None and not self._opened:
            yield CallBegin(call.name)
            self.calls, self._opened = self.calls + 1, True
        if arguments := call.take():
            yield CallArguments(arguments)
        if self._opened:
            self._raw = ""
        if call.done or call.failed:
            if not self._opened:
                yield from self._leave()
            else:
                self._call, self._state = None, CALLS
                self._called, self._opened = True, False

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
    CALL: CallSplitter._read_call,
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
        tools: Tools | None = None,
    ) -> None:
        """`calls` None: none are looked for. `begun`: the prompt ended within reasoning.

        most: calls that are told of; more are left out. tools: what types the values of calls that
        are written without.
        """
        self._reasoning = ReasoningSplitter(thinking, begun=begun)
        self._splitter, self._most = CallSplitter(calls, tools or {}), most
        around = thinking.around if thinking else ()
        self._unwrapper = Unwrapper(around) if around else None
        self.calls = 0
        """Calls that have begun."""

    def feed(self, text: str) -> list[Part]:
        """Return the new parts."""
        reasoning, rest = self._reasoning.feed(text)
        parts = self._unwrap(self._splitter.feed(rest), last=False)
        return list(self._noted([Reasoning(reasoning), *parts]))

    def close(self) -> list[Part]:
        """Return what was held back; nothing more will come."""
        reasoning, rest = self._reasoning.close()
        parts = self._unwrap([*self._splitter.feed(rest), *self._splitter.close()], last=True)
        return list(self._noted([Reasoning(reasoning), *parts]))

    def _unwrap(self, parts: Iterable[Part], *, last: bool) -> Iterator[Part]:
        """Yield parts without the marks around content."""
        for part in parts:
            if self._unwrapper is not None and isinstance(part, Content):
                yield Content(self._unwrapper.feed(part.text))
            else:
                yield part
        if last and self._unwrapper is not None:
            yield Content(self._unwrapper.feed("", last=True))

    def _noted(self, parts: Iterable[Part]) -> Iterator[Part]:
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
