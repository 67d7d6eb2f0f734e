"""Text to token ids and back, on `tokenizers`; streaming text is cut only between characters.

In: a tokenizer.json. `TextStream` turns ids, one at a time, into text and watches for stop texts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.ir.errors import ArtifactError
from dovetail.runtime.bounded import (
    begin_within,
    check_unicode,
    encode,
    encode_end,
    encode_within,
)

if TYPE_CHECKING:
    import tokenizers

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a decoder gives for the first bytes of a character whose rest is still to come."""
MAX_UNFINISHED = 8
"""Tokens that may be held back for it; more are not UTF-8 in the making."""


SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""How vocabularies of SentencePiece write a space."""
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


def _byte_letters() -> dict[str, int]:
    """Return the letters by which byte-level vocabularies write bytes: printable ones themselves.

    The others are the letters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    shown = {chr(byte): byte for byte in printable}
    return shown | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


_LETTERS = _byte_letters()


class Tokenizer:
    """A tokenizer.json, read when it is first needed; `content` stands in for the file."""

    def __init__(self, path: Path, content: bytes | None = None) -> None:
        self._path, self._content = path, content
        self._loaded: tokenizers.Tokenizer | None = None
        self._single: dict[int, str] = {}  # texts of tokens that stand alone
        self._spelled: dict[int, bytes] = {}

    @property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        if self._loaded is None:
            import tokenizers  # noqa: PLC0415 - callers that give token ids never need it

            try:
                content = self._path.read_bytes() if self._content is None else self._content
                self._loaded = tokenizers.Tokenizer.from_buffer(content)
            except Exception as error:  # the library raises bare Exception
                raise ArtifactError(
                    f"{self._path}: is not a tokenizer ({error}); put a valid tokenizer.json into "
                    f"the model directory and run `dovetail compile MODEL` again"
                ) from None
        return self._loaded

    def check(self) -> None:
        """Read the file now; ArtifactError where it is no tokenizer."""
        _ = self._tokenizer

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids of tokens that are no text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token for token, facts in added.items() if facts.special)

    def encode(
        self, text: str, *, special: bool = True, most: int | None = None, last: int | None = None
    ) -> list[int]:
        """Return the ids of `text`, with the special tokens that go around one if `special`.

        most: a text that has more is refused, soon and unread. last: so many from its end, and
        little more of it is read.

        Raises RequestError for text that has no UTF-8 form, LengthError where it is too long.
        """
        if last is not None and (most is None or last <= most):
            return encode_end(self._tokenizer, text, last, special=special)
        if most is not None:
            return encode_within(self._tokenizer, text, most, special=special)
        check_unicode(text, "the prompt")
        return encode(self._tokenizer, text, special=special)

    def cut(self, text: str, most: int) -> str:
        """Return the beginning of a text that has `most` tokens at most, without special ones."""
        return begin_within(self._tokenizer, text, most)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens."""
        if len(ids) != 1:
            return self._tokenizer.decode(list(ids), skip_special_tokens=True)
        found = self._single.get(ids[0])  # streams ask for each token alone, again and again
        if found is None:
            found = self._tokenizer.decode(list(ids), skip_special_tokens=True)
            self._single[ids[0]] = found
        return found

    def spell(self, token: int) -> bytes:
        """Return the UTF-8 bytes that one token stands for, which may be parts of a character.

        An id beyond the vocabulary stands for nothing.
        """
        if token not in self._spelled:
            self._spelled[token] = self._spell(token)
        return self._spelled[token]

    def _spell(self, token: int) -> bytes:
        raw = self._tokenizer.id_to_token(token)
        if raw is None:
            return b""
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        if UNFINISHED in text and all(letter in _LETTERS for letter in raw):
            return bytes(_LETTERS[letter] for letter in raw)
        if byte := _BYTE_TOKEN.fullmatch(raw):
            return bytes([int(byte[1], 16)])
        if SPACE in raw:  # a decoder drops the space of a first word
            text = raw.replace(SPACE, " ")
        return text.encode()


class TextStream:
    """The text of one completion as it grows.

    `push` returns the text that is certain: no half characters, nothing that may turn out to be
    the start of a stop text. The text before the stop text is all there is after a stop, with
    `keeps_stop` that text, too. Stop texts that end within the first `least` tokens do not count.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        keeps_stop: bool = False,
        least: int = 0,
    ) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self.keeps_stop, self._least = keeps_stop, least
        self._early = 0  # letters of what is held that came within the first `least` tokens
        self._ids: list[int] = []
        self._anchor = 0  # decoding starts here, so that joining spaces come out right
        self._read = 0  # ids up to here are in the text
        self._held = ""  # decoded, but may be the start of a stop text
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; return the new certain text."""
        self._ids.append(token)
        return self._release(self._decode_new(last=False), last=False)

    def close(self) -> str:
        """Return what was held back; nothing more will come."""
        return self._release(self._decode_new(last=True), last=True)

    def _decode_new(self, *, last: bool) -> str:
        known = self._tokenizer.decode(self._ids[self._anchor : self._read])
        full = self._tokenizer.decode(self._ids[self._anchor :])
        waiting = len(self._ids) - self._read
        unfinished = full.endswith(UNFINISHED) and waiting < MAX_UNFINISHED
        if len(full) <= len(known) or (unfinished and not last):
            return ""
        self._anchor, self._read = self._read, len(self._ids)
        return full[len(known) :]

    def _release(self, new: str, *, last: bool) -> str:
        if not self._stop:
            self.text += new
            return new
        if self.stopped:
            return ""
        pending = self._held + new
        early = len(self._ids) <= self._least
        places = (
            [] if early else [place for stop in self._stop if (place := self._find(stop, pending))]
        )
        if places:
            self.stopped = True
            start, end = min(places)
            certain, self._held = pending[: end if self.keeps_stop else start], ""
        else:
            keep = 0 if last else _longest_start(pending, self._stop)
            certain = pending[: len(pending) - keep]
            self._held = pending[len(pending) - keep :]
        self._early = len(self._held) if early else max(0, self._early - len(certain))
        self.text += certain
        return certain

    def _find(self, stop: str, pending: str) -> tuple[int, int] | None:
        """Return where a stop text begins and ends, if it ends among what counts."""
        at = pending.find(stop, max(0, self._early - len(stop) + 1))
        return None if at < 0 else (at, at + len(stop))


def _longest_start(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of `text` with which some stop text begins."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
