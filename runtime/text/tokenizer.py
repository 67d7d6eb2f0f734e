"""Text to token ids and back, on `tokenizers`; streaming text is cut only between characters.

In: a tokenizer.json. `TextStream` turns ids, one at a time, into text and watches for stop texts.
Texts that cannot fit are refused or cut before they are tokenised: to tokenise a megabyte takes up
to a second, to see how long it is no time. Bytes are bounded first, then tokens while counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.ir.errors import ArtifactError, LengthError, RequestError

if TYPE_CHECKING:
    import tokenizers

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a decoder gives for the first bytes of a character whose rest is still to come."""
MAX_UNFINISHED = 8
"""Tokens that may be held back for it; more are not UTF-8 in the making."""
BYTES_PER_TOKEN = 32
"""Bytes that a token has at most, over a whole text: tokens of prose have 4 or 5, those of code
with deep indents 10. A bound by the vocabulary's longest token, often 128 spaces, would let a text
of 16 MB be tokenised for a context of 131,072 tokens."""
SHARES = (8, BYTES_PER_TOKEN)
"""Letters for each token that a part of a text is sought in: few need the second."""
SLICE = 1 << 14
"""Letters between two looks at how many tokens there are by now."""
SLACK = 16
"""Tokens by which the pieces of a text may have more than the whole, for each cut: of the word that
was cut, or of what a tokenizer puts before a text."""
SHORT = 1 << 13
"""Letters that are tokenised on this thread: others wait for some milliseconds, which is less than
a thread of the library's own may wait for a core."""


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


def read_tokenizer(path: Path, content: bytes | None = None) -> tokenizers.Tokenizer:
    """Return what a tokenizer.json, or its `content`, holds; ArtifactError where it is none.

    A length that texts had in training, to which the file cuts or fills them, is no part of it.
    """
    import tokenizers  # noqa: PLC0415 - callers that give token ids never need it

    try:
        data = path.read_bytes() if content is None else content
        found = tokenizers.Tokenizer.from_buffer(data)
        found.no_truncation()
        found.no_padding()
        return found
    except BaseException as error:  # the library raises bare Exception, and panics beside it
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ArtifactError(
            f"{path}: is not a tokenizer ({error}); put a valid tokenizer.json into the model "
            "directory and run `dovetail compile MODEL` again"
        ) from None


class Tokenizer:
    """A tokenizer.json, read when it is first needed; `content` stands in for the file."""

    def __init__(self, path: Path, content: bytes | None = None) -> None:
        self._path, self._content = path, content
        self._single: dict[tuple[int, bool], str] = {}  # texts of tokens that stand alone
        self._spelled: dict[int, bytes] = {}

    @cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        return read_tokenizer(self._path, self._content)

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
        size = len(check_unicode(text, "the prompt"))
        if last is not None and (most is None or last <= most):
            return self._encode_end(text, last, special=special)
        if most is not None:
            self._bound(text, size, most)
        ids = self._encode(text, special=special)
        if most is not None and len(ids) > most:
            raise _too_long(f"{len(ids)} tokens", f"{most} tokens")
        return ids

    def _encode(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of `text`. Other threads run meanwhile, which `encode` would hold up."""
        if len(text) <= SHORT:
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def _bound(self, text: str, size: int, most: int) -> None:
        """Raise LengthError where a text of `size` bytes surely has more tokens than `most`.

        About `most` tokens are made of any text.
        """
        if size > most * BYTES_PER_TOKEN:
            raise _too_long(
                f"{size} bytes", f"{most} tokens, {most * BYTES_PER_TOKEN} bytes at most"
            )
        if len(text) <= max(SLICE, 4 * most):  # which costs no more than what fits may cost
            return
        count = 0
        for piece in _slices(text):
            count += len(self._encode(piece, special=False)) - SLACK
            if count > most:
                raise _too_long(f"more than {most} tokens", f"{most} tokens")

    def _encode_end(self, text: str, most: int, *, special: bool) -> list[int]:
        """Return the last `most` ids of `text`, or those of its last bytes where it is huge."""
        ids: list[int] = []
        for share in SHARES:
            part = ending(text, share * most)
            ids = self._encode(part, special=special)
            if len(ids) > most + SLACK or len(part) == len(text):
                break
        return ids[-most:]

    def cut(self, text: str, most: int) -> str:
        """Return the beginning of a text that has `most` tokens at most, without special ones."""
        part = ""
        for share in SHARES:
            part = beginning(text, share * most)
            (found,) = self._tokenizer.encode_batch([part], add_special_tokens=False)
            if len(found.ids) > most:
                return beginning(part, found.offsets[most][0])
            if len(part) == len(text):
                break
        return part

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of `ids`, without special tokens unless `special`."""
        if len(ids) != 1:
            return self._tokenizer.decode(list(ids), skip_special_tokens=not special)
        found = self._single.get((ids[0], special))  # streams ask for each token alone, again
        if found is None:
            found = self._tokenizer.decode(list(ids), skip_special_tokens=not special)
            self._single[ids[0], special] = found
        return found

    def find_special(self, text: str) -> int | None:
        """Return the id of the special token that is written so; None where there is none."""
        token = self._tokenizer.token_to_id(text)
        return token if token in self.special else None

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
    `special`: special tokens are text, too.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        keeps_stop: bool = False,
        least: int = 0,
        special: bool = False,
    ) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self.keeps_stop, self._least, self._special = keeps_stop, least, special
        self._early = 0  # letters of what is held that came within the first `least` tokens
        self._ids: list[int] = []
        self._anchor = 0  # decoding starts here, so that joining spaces come out right
        self._read = 0  # ids up to here are in the text
        self._held = ""  # decoded, but may be the start of a stop text
        self.text = ""
        self.stopped = False

    @property
    def seeks(self) -> bool:
        """Whether a stop text may end it: then tokens come one at a time."""
        return bool(self._stop)

    def push(self, *tokens: int) -> str:
        """Add tokens; return the new certain text: that of one at a time, as far as it is text."""
        if len(tokens) > 1 and UNFINISHED in self._decode(*self._ids[self._anchor :], *tokens):
            return "".join(map(self.push, tokens))  # a decoder lets bad bytes spoil those before
        self._ids += tokens
        return self._release(self._decode_new(last=False), last=False)

    def close(self) -> str:
        """Return what was held back; nothing more will come."""
        return self._release(self._decode_new(last=True), last=True)

    def _decode_new(self, *, last: bool) -> str:
        known = self._decode(*self._ids[self._anchor : self._read])
        full = self._decode(*self._ids[self._anchor :])
        waiting = len(self._ids) - self._read
        unfinished = full.endswith(UNFINISHED) and waiting < MAX_UNFINISHED
        if len(full) <= len(known) or (unfinished and not last):
            return ""
        self._anchor, self._read = self._read, len(self._ids)
        return full[len(known) :]

    def _decode(self, *ids: int) -> str:
        return self._tokenizer.decode(ids, special=self._special)

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
            keep = 0 if last else longest_start(pending, self._stop)
            certain = pending[: len(pending) - keep]
            self._held = pending[len(pending) - keep :]
        self._early = len(self._held) if early else max(0, self._early - len(certain))
        self.text += certain
        return certain

    def _find(self, stop: str, pending: str) -> tuple[int, int] | None:
        """Return where a stop text begins and ends, if it ends among what counts."""
        at = pending.find(stop, max(0, self._early - len(stop) + 1))
        return None if at < 0 else (at, at + len(stop))


def longest_start(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of `text` with which some stop text begins."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest


# ---- bounds ----


def check_unicode(text: str, name: str) -> bytes:
    """Return the UTF-8 form of a text; RequestError where it has none."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} is not valid Unicode: half a surrogate pair at {error.start}"
        ) from None


def beginning(text: str, letters: int) -> str:
    """Return the first `letters` of a text at most, cut before a space where one is near the end.

    Tokens of the words before it are those that they have in the whole text.
    """
    if len(text) <= letters:
        return text
    at = text.rfind(" ", letters - letters // 8, letters)
    return text[: letters if at <= 0 else at]


def ending(text: str, letters: int) -> str:
    """Return the last `letters` of a text at most, cut before a space where one is near."""
    if len(text) <= letters:
        return text
    start = len(text) - letters
    at = text.find(" ", start, start + letters // 8)
    return text[max(start, at) :]


def _slices(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        piece = beginning(text[at : at + SLICE + 1], SLICE)
        at += len(piece)
        yield piece


def _too_long(size: str, room: str) -> LengthError:
    return LengthError(f"the prompt has {size}, the context holds {room}; shorten it")
