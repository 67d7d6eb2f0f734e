"""Texts under a bound: what fits is read as ever, of what does not hardly more than would fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from dovetail.compiler.models.encoder_spec import read_encoder_spec
from dovetail.ir.errors import LengthError, RequestError
from dovetail.runtime.embed.texts import TextEncoder
from dovetail.runtime.text.tokenizer import (
    BYTES_PER_TOKEN,
    SLICE,
    Tokenizer,
    beginning,
    ending,
)
from dovetail.tiny_world import ENCODER, LLAMA
from tests.runtime.text.test_tokenizer import KINDS

LIBRARY = {name: make() for name, make in KINDS.items()}
LIBRARY["llama"] = tokenizers.Tokenizer.from_file(str(LLAMA / "tokenizer.json"))
WORDS = st.lists(st.sampled_from(["hello", "he", "llama", "🙂", "w", "日本語", "12"]), max_size=60)
SENTENCE = "Zorvia lies on the river Ossa. "
MIB = 1 << 20


def over(library: Any) -> Tokenizer:
    """Return a tokenizer of ours over one of the library."""
    made = Tokenizer(Path("tokenizer.json"))
    made.__dict__["_tokenizer"] = library
    return made


class Counting:
    """A tokenizer of the library that counts the letters it is given."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self.letters, self._inner = 0, inner

    def encode(self, text: str, **options: Any) -> Any:
        self.letters += len(text)
        return self._inner.encode(text, **options)

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        self.letters += sum(map(len, texts))
        return self._inner.encode_batch(texts, **options)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.letters += sum(map(len, texts))
        return self._inner.encode_batch_fast(texts, **options)


@pytest.mark.parametrize("kind", LIBRARY)
@given(words=WORDS, most=st.integers(1, 80), special=st.booleans())
def test_a_text_is_read_whole_or_refused(
    kind: str, words: list[str], most: int, special: bool
) -> None:
    text, library = " ".join(words), LIBRARY[kind]
    whole = library.encode(text, add_special_tokens=special).ids
    assert over(library).encode(text, special=special) == whole
    try:
        assert over(library).encode(text, most=most, special=special) == whole
        assert len(whole) <= most
    except LengthError as error:
        assert len(whole) > most or len(text.encode()) > most * BYTES_PER_TOKEN
        assert str(most) in str(error)


@pytest.mark.parametrize("kind", LIBRARY)
@pytest.mark.parametrize("piece", [SENTENCE, "a", "日本", "12 ", "🙂"])
def test_a_long_text_that_fits_is_read_as_ever(kind: str, piece: str) -> None:
    """One that is counted in slices first, with not a token to spare."""
    text, library = piece * (5 * SLICE // len(piece)), LIBRARY[kind]
    whole = library.encode(text).ids
    assert over(library).encode(text, most=len(whole)) == whole
    with pytest.raises(LengthError):
        over(library).encode(text, most=len(whole) - 1)


@pytest.mark.parametrize("piece", [SENTENCE, "a", " ", "日本"])
@pytest.mark.parametrize("most", [1024, 131_072])
def test_of_a_huge_text_little_is_tokenised(piece: str, most: int) -> None:
    counting: Any = Counting(LIBRARY["llama"])
    text = piece * (16 * MIB // len(piece))
    with pytest.raises(LengthError, match=f"{most}"):
        over(counting).encode(text, most=most)
    assert counting.letters <= 8 * most
    counting.letters = 0
    assert len(over(counting).encode(text, last=20)) == 20
    assert counting.letters <= 20 * 2 * BYTES_PER_TOKEN
    counting.letters = 0
    over(counting).cut(text, 20)
    assert counting.letters <= 20 * 2 * BYTES_PER_TOKEN


@pytest.mark.parametrize("kind", LIBRARY)
@given(words=WORDS, most=st.integers(1, 40), special=st.booleans())
def test_the_end_of_a_text_has_its_last_tokens(
    kind: str, words: list[str], most: int, special: bool
) -> None:
    library, text = LIBRARY[kind], " ".join(words * 20)
    whole = library.encode(text, add_special_tokens=special).ids
    assert over(library).encode(text, last=most, special=special) == whole[-most:]


@pytest.mark.parametrize("kind", LIBRARY)
@given(words=WORDS, most=st.integers(1, 40))
def test_the_beginning_of_a_text_has_no_more_tokens_than_asked(
    kind: str, words: list[str], most: int
) -> None:
    library, text = LIBRARY[kind], " ".join(words * 20)
    part = over(library).cut(text, most)
    assert text.startswith(part)
    if len(library.encode(text, add_special_tokens=False).ids) <= most:
        assert part == text
    found = len(library.encode(part, add_special_tokens=False).ids)
    assert found <= most + 1  # a cut within a character may take more
    assert found >= min(most, len(words)) // 2 - 1


@given(text=st.text(alphabet="ab ", max_size=200), letters=st.integers(1, 100))
def test_parts_are_cut_at_spaces_and_within_bounds(text: str, letters: int) -> None:
    first, last = beginning(text, letters), ending(text, letters)
    assert text.startswith(first) and text.endswith(last)
    for part in (first, last):
        assert part == text if len(text) <= letters else letters - letters // 8 <= len(part)
        assert len(part) <= letters


def test_half_a_surrogate_pair_is_told_of() -> None:
    tokenizer = Tokenizer(LLAMA / "tokenizer.json")
    for options in ({}, {"most": 9}, {"last": 9}):
        with pytest.raises(RequestError, match="half a surrogate pair at 1"):
            tokenizer.encode("a\ud800", **options)


def test_an_encoder_reads_of_a_long_text_what_it_takes() -> None:
    spec = read_encoder_spec(ENCODER)
    service: Any = None  # of vectors
    reader = TextEncoder("", spec, ENCODER / "tokenizer.json", service)
    inner = reader._tokenizer
    counting: Any = Counting(inner)
    reader.__dict__["_tokenizer"] = counting
    text = SENTENCE * 40_000
    (found,) = reader.read([text])
    assert np.array_equal(found, inner.encode(text).ids)
    assert counting.letters <= spec.max_tokens * BYTES_PER_TOKEN
    counting.letters = 0
    ((ids, kinds),) = reader.read_pairs("Where is it?", [SENTENCE * 9000])
    wanted = inner.encode("Where is it?", SENTENCE * 9000)
    assert np.array_equal(ids, wanted.ids) and len(kinds) == len(ids)
