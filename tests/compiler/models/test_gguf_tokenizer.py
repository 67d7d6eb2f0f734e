"""Tokenizers of GGUF files: ids equal those of the tokenizer.json that a file was made of."""

import json
import math
import random
from itertools import count, groupby, pairwise

import gguf
import numpy as np
import pytest
import tokenizers

from dovetail.compiler.files.gguf_file import read_gguf
from dovetail.compiler.models.gguf_model import GgufModel
from dovetail.compiler.models.gguf_words import WORDS
from dovetail.compiler.models.source import open_model
from dovetail.ir.errors import ArtifactError, SpecError
from dovetail.ir.options import advised
from dovetail.runtime.text.chat_template import Message, read_template
from dovetail.runtime.text.tokenizer import read_tokenizer
from tests.gguf_files import add_tokenizer, smollm2
from tests.repository import ROOT

TINY = ROOT / "examples" / "tiny_world" / "models" / "llama"
TEXTS = [
    "Hello world",
    "  two  spaces ",
    "a\n\n\nb\r\n c\t\td",
    "I'm WE'LL don't",
    "12345 6 78.90 x1y22z333",
    "naïve café e\u0301 日本語 العربية हिन्दी 😀👩‍👧",
    "def f(x):\n    return x**2  # c\n",
    "½ ² Ⅷ ١٢٣ \u00a0\u2003",
    "HelloWorld fooBAR/baz\n/usr",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
]


def save(path, *changes):
    """Write a file that has no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for change in changes:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GgufModel(read_gguf(path))


def load(source):
    return tokenizers.Tokenizer.from_buffer(source.file("tokenizer.json"))


def test_ids_are_those_of_the_tokenizer_it_was_made_of(tmp_path):
    """The tiny world cuts numbers in a way of its own, so that texts have none."""
    ours = load(save(tmp_path / "m.gguf", add_tokenizer(TINY)))
    theirs = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    lines = (ROOT / "README.md").read_text().splitlines()
    texts = [line for line in lines if not any(letter.isnumeric() for letter in line)]
    texts += ["<|user|>What?<|end|>\n<|assistant|> ", "  naïve\t漢字😀 ", "<|end"]
    for text in texts:
        ids = theirs.encode(text).ids
        assert ours.encode(text).ids == ids
        for keep in (True, False):
            assert ours.decode(ids, skip_special_tokens=keep) == theirs.decode(
                ids, skip_special_tokens=keep
            )


def test_files_beside_it(tmp_path):
    source = save(tmp_path / "m.gguf", add_tokenizer(TINY), lambda w: w.add_eot_token_id(3))
    generation = json.loads(source.file("generation_config.json"))
    assert generation == {"eos_token_id": [1, 3]}
    (tmp_path / "tokenizer_config.json").write_bytes(source.file("tokenizer_config.json"))
    ours, theirs = read_template(tmp_path), read_template(TINY)
    messages = [Message(role="user", content="What?")]
    assert ours.render(messages) == theirs.render(messages)
    assert source.file("chat_template.jinja") is None


def test_sampling_that_a_file_advises_is_that_of_a_generation_config(tmp_path):
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("general.sampling.temp", 0.7)
        writer.add_float32("general.sampling.top_p", 0.9)
        writer.add_float32("general.sampling.min_p", 0.05)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_float32("general.sampling.mirostat_tau", 5.0)

    source = save(tmp_path / "m.gguf", add_tokenizer(TINY), add)
    generation = json.loads(source.file("generation_config.json"))
    assert generation.pop("eos_token_id") == [1]
    assert generation == {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "top_k": 20}
    assert advised(generation) == generation


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_sampling_by_no_number_is_left_out(value, tmp_path):
    source = save(
        tmp_path / "m.gguf",
        add_tokenizer(TINY),
        lambda writer: writer.add_float32("general.sampling.top_k", value),
    )
    assert json.loads(source.file("generation_config.json")) == {"eos_token_id": [1]}


def test_a_file_without_tokens(tmp_path):
    source = save(tmp_path / "m.gguf", lambda w: w.add_tokenizer_model("no_vocab"))
    assert source.file("tokenizer.json") is None and source.file("tokenizer_config.json") is None
    assert json.loads(source.file("generation_config.json")) == {}


@pytest.mark.parametrize("known", ["bos", "eos", "both"])
def test_tokens_around_a_text(known, tmp_path):
    def change(writer):
        writer.add_bos_token_id(2)
        writer.add_add_bos_token(known != "eos")
        writer.add_add_eos_token(known != "bos")

    ours = load(save(tmp_path / "m.gguf", add_tokenizer(TINY), change))
    ids = ours.encode("a", add_special_tokens=False).ids
    assert ours.encode("a").ids == [2] * (known != "eos") + ids + [1] * (known != "bos")


# ---- ways to cut words ----

CUTS = {
    "gpt-2": ["I", "'m", " 1234", " don", "'t", "  ", " A", "'", "LL", "\n", "\n", "x", "?!"],
    "smollm": ["I", "'m", " ", "1", "2", " don", "'t", "  ", " A", "'", "LL", "\n", "\n", "x"],
    "llama-bpe": ["I", "'m", " ", "123", "4", " don", "'t", "  ", " A", "'LL", "\n\n", "x", "?!"],
    "qwen2": ["I", "'m", " ", "1", "2", "3", "4", " don", "'t", "  ", " A", "'LL", "\n\n", "x"],
    "qwen35": ["कि", "'m", " ", "1", "2", " हिन", "'LL", "\n\n", "?!"],  # marks stay with letters
    "tekken": ["I", "'m", " ", "1", "2", "3", "4", " foo", "BAR", "  ", " Ab", "\n\n", "?/\n"],
    "gpt-4o": ["I'm", " ", "123", "4", " don't", "  ", " Ab", "CD", "\n\n"],
    "deepseek-llm": ["I", "'", "m", " ", "1234", " don", "'", "t", "\n", "\n", "漢字"],
    "deepseek-coder": ["I", "'", "m", " ", "1", "2", " don", "'", "t", "\n", "漢字", "x"],
    "deepseek-v3": ["I", "'m", " ", "123", "4", " don", "'t", "  ", " A", "漢字", "?!\n"],
    "default": ["I", "'", "m", " ", "123", "4", " don", "'", "t", " "],
}


@pytest.mark.parametrize("pre", CUTS)
def test_words(pre, tmp_path):
    """A text of such words is cut into them again."""
    words = CUTS[pre]
    source = save(tmp_path / "m.gguf", add_tokenizer(TINY, pre))
    found = load(source).pre_tokenizer.pre_tokenize_str("".join(words))
    text = "".join(words)
    assert [text[start:end] for _, (start, end) in found] == words


def test_letters_are_composed_for_qwen(tmp_path):
    ours = load(save(tmp_path / "m.gguf", add_tokenizer(TINY, "qwen2")))
    assert ours.encode("e\u0301").ids == ours.encode("é").ids


@pytest.mark.parametrize("pre", WORDS)
def test_all_ways_keep_the_text(pre, tmp_path):
    ours = load(save(tmp_path / "m.gguf", add_tokenizer(TINY, pre)))
    for text in TEXTS:
        wanted = text.replace("e\u0301", "é") if WORDS[pre].composes else text
        assert ours.decode(ours.encode(text, add_special_tokens=False).ids) == wanted


def test_an_unknown_way_is_one_sentence(tmp_path):
    source = save(tmp_path / "m.gguf", add_tokenizer(TINY, "martian"))
    with pytest.raises(
        SpecError, match=r"pre is 'martian'.*supported: default, gpt-2.*deepseek-v3"
    ):
        source.file("tokenizer.json")


# ---- SentencePiece ----

PIECES = ["▁", "▁▁", "▁▁▁▁", "t", "h", "e", "a", "n", "d", "i", "s", "o", "r", ".", ",", "1", "漢"]
PIECES += [
    "th",
    "he",
    "the",
    "▁the",
    "an",
    "and",
    "▁and",
    "in",
    "is",
    "▁is",
    "on",
    "▁t",
    "▁a",
    "or",
]
PIECES += [
    "er",
    "▁th",
    "ther",
    "other",
    "▁other",
    "nd",
    "ed",
    "aa",
    "aaa",
    "her",
    "re",
    "est",
    "st",
]


def add_pieces(seed, prefix=True, change=None):
    """Return what writes a vocabulary of SentencePiece with the pieces in a random order."""
    order = random.Random(seed).sample(PIECES, len(PIECES))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *order, "<|x|>"]
    scores = [*[0.0] * 259, *(-float(i) for i in range(len(order))), 0.0]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(order), 4]

    def add(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(prefix)

    return add, tokens, dict(zip(tokens, scores, strict=True))


def merge_by_score(text, tokens, scores):
    """Return the ids of a text as SentencePiece finds them: the best pair, the first of equals."""
    ids = {token: i for i, token in enumerate(tokens)}
    pieces = list(text)
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in ids]
        if not pairs:
            break
        at = -max(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    found = []
    for piece in pieces:
        found += [ids[piece]] if piece in ids else [ids[f"<0x{b:02X}>"] for b in piece.encode()]
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_are_merged_by_score(seed, prefix, tmp_path):
    change, tokens, scores = add_pieces(seed, prefix)
    ours = load(save(tmp_path / "m.gguf", change))
    draw = random.Random(seed + 100)
    for _ in range(60):
        text = "".join(
            draw.choice(["the", "and", " ", "other", *"thenadisor.,1漢é😀"]) for _ in range(40)
        )
        spaced = (" " * prefix + text).replace(" ", "▁")
        assert ours.encode(text).ids == [1, *merge_by_score(spaced, tokens, scores)]
        assert ours.decode(ours.encode(text).ids) == text


def test_merges_of_gemma_4_join_no_end_of_a_line(tmp_path):
    change, tokens, scores = add_pieces(3, prefix=False)
    lines = ["\n", "\n\n", "e\n"]
    merges = [
        f"{token[:cut]} {token[cut:]}"
        for token in sorted(PIECES, key=lambda piece: -scores[piece])
        for cut in range(len(token) - 1, 0, -1)
        if {token[:cut], token[cut:]} <= set(PIECES)
    ]

    def with_merges(writer):
        change(writer)
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list([*tokens, *lines])
        writer.add_token_types([*[1] * len(tokens), 1, 1, 1])
        writer.add_token_merges([*merges, "\n \n", "e \n"])

    ours, ids = load(save(tmp_path / "m.gguf", with_merges)), [*tokens, *lines]
    wanted = [*merge_by_score("the▁other", tokens, scores), ids.index("\n\n"), ids.index("the")]
    assert ours.encode("the other\n\nthe").ids == [1, *wanted]
    assert ours.decode(wanted) == "the other\n\nthe"


def test_tokens_in_a_text_of_pieces(tmp_path):
    change, tokens, _ = add_pieces(0)
    ours = load(save(tmp_path / "m.gguf", change))
    ids = ours.encode("<s>the</s><|x|>the").ids
    the = tokens.index("▁the")
    assert ids == [1, 1, the, 2, tokens.index("<|x|>"), the]
    assert ours.decode(ids) == "the<|x|> the"


def test_normalizations_that_are_none_are_told(tmp_path):
    """The library ends by a panic, which is no Exception."""
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AQI="}
    content = json.loads((TINY / "tokenizer.json").read_text()) | {"normalizer": normalizer}
    with pytest.raises(ArtifactError, match="is not a tokenizer"):
        read_tokenizer(tmp_path / "tokenizer.json", json.dumps(content).encode())


BAD = {
    "another kind": (lambda w: w.add_tokenizer_model("rwkv"), "is 'rwkv'; supported: gpt2, llama"),
    "no merges": (lambda w: w.add_tokenizer_model("gpt2"), "merges must be a list"),
    "no scores": (lambda w: w.add_tokenizer_model("llama"), "scores must be a number for each"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_bad_vocabularies(change, message, tmp_path):
    source = save(tmp_path / "m.gguf", change, lambda w: w.add_token_list(["a", "b"]))
    with pytest.raises(SpecError, match=message):
        source.file("tokenizer.json")


PARTS = {
    "merges": (lambda w: w.add_token_merges(["b a"]), "which does not make a token of two"),
    "no pair": (lambda w: w.add_token_merges(["ab"]), "which does not make a token of two"),
    "types": (lambda w: w.add_token_types([1]), "a number for each token"),
    "flag": (
        lambda w: w.add_string("tokenizer.ggml.add_bos_token", "yes"),
        "add_bos_token must be true or false",
    ),
}


@pytest.mark.parametrize(("change", "message"), PARTS.values(), ids=PARTS)
def test_bad_parts(change, message, tmp_path):
    def begin(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(["a", "b", "ab"])
        if "merges" not in change.__code__.co_names[0]:
            writer.add_token_merges(["a b"])

    source = save(tmp_path / "m.gguf", begin, change)
    with pytest.raises(SpecError, match=message):
        source.file("tokenizer.json")


def test_a_token_twice(tmp_path):
    source = save(tmp_path / "m.gguf", lambda w: w.add_token_list(["a", "a"]))
    with pytest.raises(SpecError, match="a token twice"):
        source.file("tokenizer.json")


def split_digits(text):
    """Return the parts of a text, each digit of which is one."""
    counter = count()
    parts = groupby(text, key=lambda letter: next(counter) if letter.isnumeric() else -1)
    return ["".join(part) for _, part in parts]


def test_a_real_file_has_the_ids_of_transformers():
    pytest.importorskip("torch")
    from transformers import AutoTokenizer

    path = smollm2()
    ours = load(open_model(path))
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    draw = random.Random(0)
    letters = [*"abcde fgh.,1234\n\t é漢😀", "  ", "'ll", "<|im_end|>"]
    texts = [*TEXTS, *("".join(draw.choices(letters, k=40)) for _ in range(100))]
    for text in texts:  # transformers does not read `pre`, which has each digit be a word
        wanted = [token for part in split_digits(text) for token in theirs.encode(part)]
        assert ours.encode(text).ids == wanted
    messages = [{"role": "user", "content": "Hi"}]
    wanted = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    config = json.loads(open_model(path).file("tokenizer_config.json"))
    assert config["chat_template"] == theirs.chat_template and "<|im_start|>user\nHi" in wanted
    assert np.isin(ours.encode(wanted).ids[0], [1])


@pytest.mark.parametrize(("kind", "stops"), [(3, [1, 2]), (4, [1, 2]), (1, [1])])
def test_a_token_that_ends_a_turn_stops_answers(tmp_path, kind, stops):
    """Gemma's files name the end of a text alone; normal text is no such token."""

    def change(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<eos>", "<end_of_turn>", "<|end|>", "a"])
        writer.add_token_types([2, 3, kind, 3, 1])
        writer.add_token_scores([0.0] * 5)
        writer.add_eos_token_id(1)
        writer.add_chat_template("{% for m in messages %}{{ m.content }}<end_of_turn>{% endfor %}")

    source = save(tmp_path / "m.gguf", change)
    assert json.loads(source.file("generation_config.json"))["eos_token_id"] == stops


def test_the_end_of_a_part_of_an_answer_of_gpt_oss_stops_nothing(tmp_path):
    def change(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<|return|>", "<|end|>", "<|call|>", "a"])
        writer.add_token_types([2, 3, 3, 3, 1])
        writer.add_token_scores([0.0] * 5)
        writer.add_eos_token_id(1)
        writer.add_chat_template("{{ m }}<|end|>{{ call }}<|call|>{{ last }}<|return|>")

    source = save(tmp_path / "m.gguf", change)
    assert json.loads(source.file("generation_config.json"))["eos_token_id"] == [1, 3]
