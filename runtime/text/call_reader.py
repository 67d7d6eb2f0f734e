"""One call of a tool as a model writes it, read letter by letter: a JSON object, or its arguments.

In: letters. Out: the name, and the arguments' text as far as it has come. Arguments are passed on
as they were written, once it is sure that this is a call.
"""

from __future__ import annotations

import json

NAME, ARGUMENTS = "name", ("arguments", "parameters")
BESIDE = frozenset({NAME, *ARGUMENTS, "type", "id"})
"""Keys of a call. Where calls have no mark of their own, an object with others is no call."""
SPACE = " \t\r\n"
CLOSES = {"{": "}", "[": "]"}
DONE, FAILED = 0, 1
"""Phases of every reader; each has others from 2 on."""
KEY, KEY_TEXT, COLON, VALUE, AFTER = range(2, 7)


class Reader:
    """What a call, or its arguments, is read by, in phases."""

    _phase: int

    @property
    def done(self) -> bool:
        """Whether it is complete."""
        return self._phase == DONE

    @property
    def failed(self) -> bool:
        """Whether what came last does not belong to it."""
        return self._phase == FAILED


class CallReader(Reader):
    """A call under way. `done`: it is complete; `failed`: it is none, or wrong from here on.

    `name` is known once it is sure that this is a call.
    """

    def __init__(self, name: str | None = None, *, strict: bool = False) -> None:
        """`name`: arguments alone are to come, of this tool. `strict`: see BESIDE."""
        self.name: str | None = None
        self._said, self._strict, self._alone = name, strict, name is not None
        self._phase = KEY
        self._key, self._text = "", ""  # a key's text, and a value's
        self._open: list[str] = []  # brackets that a value has yet to close
        self._quoted = self._escaped = False
        self._arguments: str | None = None  # what has come and was not taken
        self._streams = False  # whether the value under way is taken as it comes
        if self._alone:
            self._key, self._phase = ARGUMENTS[0], VALUE

    def take(self) -> str:
        """Return what has come of the arguments since the last time."""
        if self.name is None or not self._arguments:
            return ""
        found, self._arguments = self._arguments, ""
        return found

    def read(self, letter: str) -> None:
        """Read a letter behind the opening brace, which is the caller's to see."""
        _READ[self._phase](self, letter)
        if self.name is None and self._said is not None and self._arguments is not None:
            self.name = self._said
        if self.done and self.name is None and self._said is not None and not self._strict:
            self.name, self._arguments = self._said, "{}"

    # ---- phases ----

    def _read_key(self, letter: str) -> None:
        if letter == '"':
            self._key, self._phase = "", KEY_TEXT
        elif letter == "}":
            self._phase = DONE
        elif letter not in SPACE:
            self._phase = FAILED

    def _read_key_text(self, letter: str) -> None:
        if not self._ends_text(letter):
            self._key += letter
            return
        known = self._key in BESIDE
        self._phase = COLON if known or not self._strict else FAILED

    def _read_colon(self, letter: str) -> None:
        if letter == ":":
            self._text, self._phase = "", VALUE
        elif letter not in SPACE:
            self._phase = FAILED

    def _read_value(self, letter: str) -> None:
        if not self._text and letter in SPACE:
            return
        plain = not (self._quoted or self._open)
        if self._text and plain and letter in ",}]" + SPACE:  # behind a number or a word
            self._end_value()
            self._read_after(letter)
            return
        if not self._text:
            first = self._arguments is None and self._key in ARGUMENTS
            self._streams = first and letter == "{"
            self._arguments = "" if self._streams else self._arguments
        self._text += letter
        if self._streams:
            assert self._arguments is not None
            self._arguments += letter
        if self._quoted:
            self._quoted = not self._ends_text(letter)
        elif letter == '"':
            self._quoted = True
        elif letter in CLOSES:
            self._open.append(CLOSES[letter])
        elif letter in "}]" and (not self._open or self._open.pop() != letter):
            self._phase = FAILED
            return
        if self._text[0] in '"{[' and not (self._quoted or self._open):
            self._end_value()

    def _read_after(self, letter: str) -> None:
        if letter == ",":
            self._phase = KEY
        elif letter == "}":
            self._phase = DONE
        elif letter not in SPACE:
            self._phase = FAILED

    # ---- values ----

    def _ends_text(self, letter: str) -> bool:
        """Tell whether a letter of a quoted text is its closing quote."""
        if self._escaped:
            self._escaped = False
            return False
        self._escaped = letter == "\\"
        return letter == '"'

    def _end_value(self) -> None:
        self._phase = DONE if self._alone else AFTER
        if self._key == NAME and self._said is None:
            self._said = _loads(self._text, "")
            if not self._said:
                self._phase = FAILED
        elif self._key in ARGUMENTS and self._arguments is None:
            self._arguments = _loads(self._text, self._text) or "{}"


_READ = {
    KEY: CallReader._read_key,
    KEY_TEXT: CallReader._read_key_text,
    COLON: CallReader._read_colon,
    VALUE: CallReader._read_value,
    AFTER: CallReader._read_after,
}
"""What reads a letter in each phase: one that is DONE or FAILED takes no more."""


def _loads(value: str, otherwise: str) -> str:
    """Return what a JSON text says, "" for null; `otherwise` where it is none."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return otherwise
    if found is None:
        return ""
    return found if isinstance(found, str) else otherwise
