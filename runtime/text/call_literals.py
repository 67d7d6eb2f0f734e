"""Literals of Python and the like, turned into JSON letter by letter.

In: the letters of a call's arguments, `city="Paris", days=2)` or `city:<|"|>Paris<|"|>,days:2}`.
Out: their JSON, as it comes.
"""

from __future__ import annotations

import json
import math
import string

from dovetail.runtime.text.call_reader import DONE, FAILED, SPACE, Reader
from dovetail.runtime.text.tokenizer import longest_start

CLOSES = {"{": "}", "[": "]", "(": ")"}
SIGNS = ",:=()[]{}"
ENDS = ",)]}:="
"""What may follow a text that has ended: before all else a quote is part of it, as in `'it's'`."""
WORDS = {"true": "true", "false": "false", "null": "null"}
WORDS |= {"True": "true", "False": "false", "None": "null"}
ESCAPES = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "\\": "\\\\", "/": "/"}
ESCAPES |= {'"': '\\"', "'": "'", "\n": ""}
DIGITS = {"x": 2, "u": 4, "U": 8}
QUOTES = ('"', "'")
MAX_DEPTH = 200
KEY, KEYED, VALUE, WORD, TEXT, CLOSING, AFTER = range(2, 9)


class LiteralReader(Reader):
    """Arguments under way. `done`, `failed`, `name`, `take` and `read` as of a CallReader."""

    def __init__(self, name: str, close: str, quote: str = "", *, strict: bool = False) -> None:
        """`close` ends the arguments. `quote`: as of a CallFormat.

        strict: this is a call only if its first argument has a name, or there is none.
        """
        self.name = None if strict else name
        self._said, self._quotes = name, (quote, '"') if quote else QUOTES
        self._open = [(close, True)]  # what closes each bracket, and whether keys are in it
        self._phase, self._out = KEY, "{"
        self._held = ""  # of a word, a mark, an escape, or what may be the end of a text
        self._quote = ""  # of the text under way
        self._keyed = True  # whether that, or the word, is a key
        self._comma = False  # whether one is to be written before the next item

    def take(self) -> str:
        """Return what has come of their JSON since the last time."""
        if self.name is None:
            return ""
        found, self._out = self._out, ""
        return found

    def read(self, letter: str) -> None:
        """Read a letter."""
        _READ[self._phase](self, letter)

    # ---- phases ----

    def _read_item(self, letter: str) -> None:
        """Read the first letter of a key or value, or of the mark before it."""
        self._keyed = self._phase == KEY
        self._held += letter
        if any(quote.startswith(self._held) for quote in self._quotes):
            if self._held in self._quotes:
                self._quote, self._held, self._phase = self._held, "", TEXT
                self._write('"')
            return
        text, self._held = self._held, ""
        if len(text) > 1:  # it began like a mark
            self._held, self._phase = text[:-1], WORD
            self.read(letter)
        elif letter in CLOSES and not self._keyed and len(self._open) < MAX_DEPTH:
            self._write("{" if letter == "{" else "[")
            self._open.append((CLOSES[letter], letter == "{"))
            self._phase = KEY if letter == "{" else VALUE
        elif letter == self._open[-1][0] and self._keyed == self._open[-1][1]:
            self._close()
        elif letter in SIGNS:
            self._phase = FAILED
        elif letter not in SPACE:
            self._held, self._phase = letter, WORD

    def _read_word(self, letter: str) -> None:
        if letter not in SIGNS or (letter in ":=" and not self._keyed):
            self._held += letter
            return
        word, self._held = self._held.strip(SPACE), ""
        self._write(_quote(word) if self._keyed else read_word(word))
        self._end_item(letter)

    def _read_text(self, letter: str) -> None:
        if len(self._quote) > 1:
            self._read_raw(letter)
        elif self._held:
            self._read_escape(letter)
        elif letter == self._quote:
            self._phase = CLOSING
        elif letter == "\\":
            self._held = letter
        else:
            self._out += _inside(letter)

    def _read_raw(self, letter: str) -> None:
        self._held += letter
        ended = self._held.endswith(self._quote)
        keep = len(self._quote) if ended else longest_start(self._held, (self._quote,))
        cut = len(self._held) - keep
        self._out += _inside(self._held[:cut]) + '"' * ended
        self._held = "" if ended else self._held[cut:]
        if ended:
            self._end_item()

    def _read_escape(self, letter: str) -> None:
        """Read an escape of JSON or Python; what is none stands for itself."""
        size = DIGITS.get(self._held[1:2])
        if size is None:
            if letter not in DIGITS:
                self._out += ESCAPES.get(letter, _inside("\\" + letter))
            self._held = "\\" + letter if letter in DIGITS else ""
        elif letter not in string.hexdigits:
            self._out, self._held = self._out + _inside(self._held), ""
            self.read(letter)
        else:
            self._held += letter
            if len(self._held) == size + 2:
                self._out, self._held = self._out + _spell(self._held), ""

    def _read_closing(self, letter: str) -> None:
        """Read what follows a quote: it ends the text if that goes on with a sign."""
        if letter in SPACE:
            self._held += letter
        elif letter in ENDS:
            self._out, self._held = self._out + '"', ""
            self._end_item(letter)
        else:
            self._out += _inside(self._quote + self._held)
            self._held, self._phase = "", TEXT
            self.read(letter)

    def _read_keyed(self, letter: str) -> None:
        if letter in ":=":
            self._out += ": "
            self._phase, self.name = VALUE, self._said
        elif letter not in SPACE:
            self._phase = FAILED

    def _read_after(self, letter: str) -> None:
        close, keys = self._open[-1]
        if letter == ",":
            self._comma, self._phase = True, KEY if keys else VALUE
        elif letter == close:
            self._close()
        elif letter not in SPACE:
            self._phase = FAILED

    # ---- items ----

    def _write(self, text: str) -> None:
        """Write the beginning of a key or value."""
        self._out += (", " if self._comma else "") + text
        self._comma = False

    def _end_item(self, letter: str = "") -> None:
        """Go on behind a key or value; `letter` came there."""
        self._phase = KEYED if self._keyed else AFTER
        if letter:
            self.read(letter)

    def _close(self) -> None:
        _, keys = self._open.pop()
        self._out += "}" if keys else "]"
        self._comma, self._keyed, self._phase = False, False, AFTER
        if not self._open:
            self._phase, self.name = DONE, self._said


def read_word(word: str) -> str:
    """Return the JSON of a word without quotes: a number, a name of Python or JSON, else a text."""
    if word in WORDS or _is_json(word):
        return WORDS.get(word, word)
    for read in (int, _whole, float):
        try:
            found = read(word)
        except ValueError:
            continue
        if math.isfinite(found):
            return json.dumps(found)
    return _quote(word)


def _whole(word: str) -> int:
    return int(word, 0)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(word: str) -> None:
    raise ValueError(word)


def read_literal(text: str) -> str | None:
    """Return the JSON of a value that is JSON or a literal of Python, None where it is neither."""
    text = text.strip(SPACE)
    if _is_json(text):
        return text
    if text in WORDS:
        return WORDS[text]
    if text[:1] not in CLOSES:
        return None
    reader = LiteralReader("", ")")
    for letter in f"v={text})":
        if reader.done or reader.failed:
            return None
        reader.read(letter)
    found = reader.take()
    return found[len('{"v": ') : -1] if reader.done and _is_json(found) else None


def _spell(escape: str) -> str:
    """Return the JSON of an escape by number, half of a surrogate pair as it is."""
    number = int(escape[2:], 16)
    if number <= 0xFFFF:
        return f"\\u{number:04x}"
    return _inside(chr(number)) if number <= 0x10FFFF else _inside(escape)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _inside(text: str) -> str:
    """Return a text as it stands between the quotes of JSON."""
    return _quote(text)[1:-1]


_READ = {
    KEY: LiteralReader._read_item,
    VALUE: LiteralReader._read_item,
    KEYED: LiteralReader._read_keyed,
    WORD: LiteralReader._read_word,
    TEXT: LiteralReader._read_text,
    CLOSING: LiteralReader._read_closing,
    AFTER: LiteralReader._read_after,
}
"""What reads a letter in each phase: one that is DONE or FAILED takes no more."""
