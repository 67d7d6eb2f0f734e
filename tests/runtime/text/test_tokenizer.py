"""Tokenizers and streams of text: never half a character, never part of a stop text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from dovetail.ir.errors import ArtifactError, RequestError
from dovetail.runtime.app import load
from dovetail.runtime.text.tokenizer import TextStream, Tokenizer

MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("a", "b")]


def byte_level() -> HfTokenizer:
    """GPT-2 style: 256 bytes, a few merges, one special token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    made = HfTokenizer(models.BPE(vocab, MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>"])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


def sentencepiece() -> HfTokenizer:
    """Llama-2 style: pieces that begin with the space mark, bytes as a fallback."""
    pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abehlorw", "▁he", "llo"]
    merges = [("▁", "h"), ("▁h", "e"), ("l", "l"), ("ll", "o")]
    for left, right in merges:
        if left + right not in pieces:
            pieces.append(left + right)
    vocab = {piece: i for i, piece in enumerate(pieces)}
    made = HfTokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


KINDS = {"byte_level": byte_level, "sentencepiece": sentencepiece}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    KINDS[request.param]().save(str(path))
    return Tokenizer(path)


def test_a_length_of_training_neither_cuts_nor_fills_a_text(tmp_path: Path) -> None:
    """Trainers save tokenizers with the length that they cut and filled their texts to."""
    made = byte_level()
    whole = made.encode("hello world").ids
    made.enable_truncation(3)
    made.enable_padding(length=64, direction="left")
    made.save(str(tmp_path / "tokenizer.json"))
    found = Tokenizer(tmp_path / "tokenizer.json")
    assert found.encode("hello world") == whole
    assert found.encode("hello world", last=64) == whole
    assert found.cut("hello world", 5) == "hello worl"


TEXTS = [
    "hello world",
    "héllo wörld",
    "日本語 テキスト",
    "a🙂b 👩‍👩‍👧 c",
    " two  spaces ",
    "hello" * 20,
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_streams_add_up_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in ids] + [stream.close()]
    assert "".join(pieces) == stream.text == tokenizer.decode(ids) == text
    stream = TextStream(tokenizer)
    stream.push(*ids)
    assert stream.text == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 260), max_size=30), cuts=st.lists(st.integers(1, 12)))
def test_any_ids_make_a_stream_however_they_come(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int]
) -> None:
    alone, together, left = TextStream(tokenizer), TextStream(tokenizer), list(ids)
    pieces = [alone.push(token) for token in ids] + [alone.close()]
    for cut in (*cuts, len(ids)):
        together.push(*left[:cut])
        del left[:cut]
    together.close()
    assert "".join(pieces) == alone.text
    assert together.text == alone.text or "\N{REPLACEMENT CHARACTER}" in alone.text


def test_a_cut_character_leaves_those_before_it_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("你好")[:-1]
    alone, together = TextStream(tokenizer), TextStream(tokenizer)
    for token in ids:
        alone.push(token)
    together.push(*ids)
    for stream in (alone, together):
        stream.close()
        assert stream.text.startswith("你") and stream.text != "你好"
    assert alone.text == together.text


@settings(max_examples=80, deadline=None)
@given(
    text=st.text("abéł", max_size=24),
    stop=st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_texts_cut_exactly_where_they_first_appear(text: str, stop: list[str]) -> None:
    stream = TextStream(SHARED, stop)
    pieces = []
    for token in SHARED.encode(text):
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    if not stream.stopped:
        pieces.append(stream.close())
    # the stop text whose end comes first stops the stream; of those, the earliest start counts
    ends = [text.find(s) + len(s) for s in stop if s in text]
    if ends:
        seen = text[: min(ends)] if stream.stopped else ""
        assert stream.stopped
        assert any(text.startswith(stream.text + s) for s in stop)
        assert len(stream.text) <= len(seen)
    else:
        assert not stream.stopped and stream.text == text
    assert "".join(pieces) == stream.text


@settings(max_examples=80, deadline=None)
@given(
    text=st.text("ab", max_size=16),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    least=st.integers(0, 8),
)
def test_a_kept_stop_text_that_ends_late_enough_is_the_end(
    text: str, stop: list[str], least: int
) -> None:
    stream = TextStream(SHARED, stop, keeps_stop=True, least=least)
    ids, read = SHARED.encode(text, special=False), 0
    for token in ids:
        stream.push(token)
        read += 1
        if stream.stopped:
            break
    stream.close()
    early = len(SHARED.decode(ids[:least]))  # letters of the tokens that end nothing
    hits = [
        (i + len(s), i)
        for s in stop
        for i in range(len(text))
        if text.startswith(s, i) and i + len(s) > early
    ]
    assert stream.stopped == bool(hits)
    if hits:
        assert any(stream.text == text[:end] for end, _ in hits)
        assert min(hits)[0] <= len(SHARED.decode(ids[:read])) and read > least
    else:
        assert stream.text == text


@pytest.fixture(scope="module", autouse=True)
def shared_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("shared") / "tokenizer.json"
    byte_level().save(str(path))
    SHARED._path = path


SHARED = Tokenizer(Path("unset"))


def test_special_tokens_are_added_and_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    byte_level().save(str(path))
    tokenizer = Tokenizer(path)
    ids = tokenizer.encode("hello")
    assert len(ids) == 2 and tokenizer.decode(ids) == "hello"


def test_text_without_utf8_form_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="surrogate"):
        SHARED.encode("ok \ud800")


def test_a_broken_tokenizer_is_an_artifact_error(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        Tokenizer(path).encode("x")


def toy_tokenizer(path: Path) -> Path:
    """Words for the toy model's 97 ids."""
    made = HfTokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(path))
    return path


def test_text_in_and_out_with_stop_texts(
    make_artifact: Callable[..., Path], answer: Callable[..., list[int]], tmp_path: Path
) -> None:
    path = make_artifact(tokenizer=toy_tokenizer(tmp_path / "toy.json"))
    ids = answer([1, 2, 3], 20, eos=False)
    words = " ".join(f"w{i}" for i in ids)
    with load(path) as app:
        options = {"max_tokens": 20, "ignore_eos": True}
        (whole,) = app.generate("w1 w2 w3", **options)
        assert (whole.text, list(whole.token_ids)) == (words, ids)
        stop = f"w{ids[6]} "
        (cut,) = app.generate("w1 w2 w3", stop=[stop, "zzz"], **options)
        assert cut.text == words[: words.index(stop)] and cut.finish_reason == "stop"
        streamed = "".join(c.text for c in app.stream("w1 w2 w3", stop=stop, **options))
        assert streamed == cut.text
        assert app.engine.scheduler.pool.free_blocks == app.engine.scheduler.pool.n_blocks


def test_without_a_tokenizer_only_ids_are_taken(make_artifact: Callable[..., Path]) -> None:
    with load(make_artifact()) as app:
        with pytest.raises(RequestError, match="token ids"):
            app.generate("hello")
        assert app.generate([1])[0].text is None
