"""Texts to token ids under a bound: what cannot fit is refused or cut before it is tokenised.

In: a tokenizer of the library, a text, the most tokens that fit. Out: token ids or a LengthError, a
text's beginning or end. To tokenise a megabyte takes up to a second, to see how long it is no time:
bytes are bounded first, then tokens while they are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dovetail.ir.errors import LengthError, RequestError

if TYPE_CHECKING:
    import tokenizers

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


def check_unicode(text: str, name: str) -> bytes:
    """Return the UTF-8 form of a text; RequestError where it has none."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} is not valid Unicode: half a surrogate pair at {error.start}"
        ) from None


def encode(tokenizer: tokenizers.Tokenizer, text: str, *, special: bool = True) -> list[int]:
    """Return the ids of `text`. Other threads run meanwhile: the library's `encode` holds them up.

    special: with the special tokens that go around a text.
    """
    if len(text) <= SHORT:
        return list(tokenizer.encode(text, add_special_tokens=special).ids)
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)


def encode_within(
    tokenizer: tokenizers.Tokenizer, text: str, most: int, *, special: bool = True
) -> list[int]:
    """Return the ids of `text`, `most` at most; about as many are made of any text.

    Raises LengthError where there are more, or surely would be.
    """
    size = len(check_unicode(text, "the prompt"))
    if size > most * BYTES_PER_TOKEN:
        raise _too_long(f"{size} bytes", f"{most} tokens, {most * BYTES_PER_TOKEN} bytes at most")
    if len(text) > max(SLICE, 4 * most):  # less costs no more than what fits may cost
        count = 0
        for piece in _slices(text):
            count += len(encode(tokenizer, piece, special=False)) - SLACK
            if count > most:
                raise _too_long(f"more than {most} tokens", f"{most} tokens")
    ids = encode(tokenizer, text, special=special)
    if len(ids) > most:
        raise _too_long(f"{len(ids)} tokens", f"{most} tokens")
    return ids


def encode_end(
    tokenizer: tokenizers.Tokenizer, text: str, most: int, *, special: bool = True
) -> list[int]:
    """Return the last `most` of the ids of `text`, or those of its last bytes where it is huge."""
    check_unicode(text, "the prompt")
    ids: list[int] = []
    for share in SHARES:
        part = ending(text, share * most)
        ids = encode(tokenizer, part, special=special)
        if len(ids) > most + SLACK or len(part) == len(text):
            break
    return ids[-most:]


def begin_within(tokenizer: tokenizers.Tokenizer, text: str, most: int) -> str:
    """Return the beginning of `text` that has `most` tokens at most, special ones not counted."""
    part = ""
    for share in SHARES:
        part = beginning(text, share * most)
        (found,) = tokenizer.encode_batch([part], add_special_tokens=False)
        if len(found.ids) > most:
            return beginning(part, found.offsets[most][0])
        if len(part) == len(text):
            break
    return part


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
