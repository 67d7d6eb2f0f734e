"""The tokenizer in the metadata of a GGUF file as tokenizer.json and the files beside it.

In: a GgufFile. Out: what the library `tokenizers` reads, for the kinds that the supported families
have: `gpt2`, BPE over bytes with merges in a list, cut into words as `pre` names; `llama`,
SentencePiece's BPE, whose merges follow from the scores of the pieces; `gemma4`, the same with
merges in a list, which join no line's end to a line; and of encoders `bert`, WordPiece, and `t5`,
SentencePiece's unigrams.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.compiler.files.gguf_file import GgufFile
from dovetail.compiler.models.gguf_encoder import ENCODERS
from dovetail.compiler.models.gguf_words import Words, find_words
from dovetail.ir.errors import SpecError

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
"""Types of tokens; all others are normal."""
MAX_PIECE = 1024
"""Letters of a piece whose halves are looked for."""
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_TOKENS = "tokenizer.ggml.tokens"
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_SAMPLING: dict[str, tuple[str, Callable[[Any], float]]] = {
    "temp": ("temperature", lambda value: round(float(value), 6)),
    "top_p": ("top_p", lambda value: round(float(value), 6)),
    "min_p": ("min_p", lambda value: round(float(value), 6)),
    "top_k": ("top_k", int),
}
"""By keys of `general.sampling`: names of generation_config.json, and how values are read, which
are floats of 32 bits."""
_STOPS = ("eos_token_id", "eot_token_id", "eom_token_id")
_TURN_ENDS = ("<end_of_turn>", "<turn|>", "<|end|>", "<|im_end|>", "<|eot_id|>")
"""Tokens that end an assistant's turn where the chat template writes them: files of Gemma and Phi
name only the token that ends a text."""
_HARMONY_ENDS = ("<|return|>", "<|call|>")
"""The same of gpt-oss, in whose turns `<|end|>` ends but a part."""

Json = dict[str, Any]
Merges = Callable[["_Vocabulary"], list[list[str]]]


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The tokens of a file. ids: of texts; kinds: of tokens, by id."""

    file: GgufFile
    tokens: Sequence[str]
    kinds: Sequence[int]
    ids: Mapping[str, int] = field(repr=False)

    def fail(self, key: str, message: str) -> SpecError:
        """Return the error for a wrong `tokenizer.ggml.` key."""
        return SpecError(f"{self.file.path}: tokenizer.ggml.{key} {message}")

    def token_id(self, key: str) -> int | None:
        """Return a token that a key names by its id, None where it names none there is."""
        found = self.file.values.get(f"tokenizer.ggml.{key}")
        known = isinstance(found, int) and not isinstance(found, bool)
        return found if known and 0 <= found < len(self.tokens) else None  # type: ignore[operator,return-value]

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        found = self.file.values.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(found, bool):
            raise self.fail(key, "must be true or false")
        return found


def tokenizer_json(file: GgufFile) -> Json | None:
    """Return tokenizer.json, None for a file without tokens.

    Raises SpecError for kinds and ways to cut words that are not supported.
    """
    found = _read_vocabulary(file)
    if found is None:
        return None
    kind = file.values.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise found.fail("model", f"is {kind!r}; supported: {', '.join(_KINDS)}")
    if kind == "bert":
        found = _spell_pieces(found)
    parts, begins = _KINDS[kind](found)
    around = _around_pairs(found, kind) if _of_encoder(file) else _post_processor(found, begins)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added_tokens(found)),
        **parts,
        "post_processor": around,
    }


def _of_encoder(file: GgufFile) -> bool:
    return file.values.get("general.architecture") in ENCODERS


def tokenizer_config(file: GgufFile) -> Json | None:
    """Return tokenizer_config.json: special tokens and the chat template."""
    found = _read_vocabulary(file)
    if found is None:
        return None
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name, key in _SPECIAL.items():
        if (token := found.token_id(key)) is not None:
            config[name] = found.tokens[token]
    template = file.values.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return config


def generation_config(file: GgufFile) -> Json:
    """Return generation_config.json: the tokens that end a text or a turn, how to draw others."""
    sampling = {
        name: read(value)
        for key, (name, read) in _SAMPLING.items()
        if isinstance(value := file.values.get(f"general.sampling.{key}"), int | float)
        and math.isfinite(value)
    }
    found = _read_vocabulary(file)
    if found is None:
        return sampling
    stops = [token for key in _STOPS if (token := found.token_id(key)) is not None]
    template = str(file.values.get("tokenizer.chat_template"))
    known = _HARMONY_ENDS if _HARMONY_ENDS[0] in template else _TURN_ENDS
    ends = [end for end in known if end in found.ids and end in template]
    stops += [i for end in ends if found.kinds[i := found.ids[end]] in (CONTROL, USER_DEFINED)]
    config: Json = {**sampling, "bos_token_id": found.token_id("bos_token_id")}
    config["eos_token_id"] = list(dict.fromkeys(stops))
    return {key: value for key, value in config.items() if value not in (None, [])}


def _read_vocabulary(file: GgufFile) -> _Vocabulary | None:
    tokens = file.values.get(_TOKENS)
    if tokens is None:
        return None
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise SpecError(f"{file.path}: {_TOKENS} is no list of strings")
    kinds = file.values.get("tokenizer.ggml.token_type")
    if kinds is None:
        kinds = np.ones(len(tokens), np.int32)
    if (
        not isinstance(kinds, np.ndarray)
        or kinds.dtype.kind not in "iu"
        or len(kinds) != len(tokens)
    ):
        raise SpecError(f"{file.path}: tokenizer.ggml.token_type must be a number for each token")
    ids = {token: i for i, token in enumerate(tokens) if token}
    if len(ids) != sum(map(bool, tokens)):
        raise SpecError(f"{file.path}: {_TOKENS} has a token twice")
    return _Vocabulary(file, tokens, kinds.tolist(), ids)


def _added_tokens(found: _Vocabulary) -> Iterator[Json]:
    """Yield the tokens that are found in a text before it is cut into words."""
    for i, kind in enumerate(found.kinds):
        if kind in (CONTROL, USER_DEFINED, UNKNOWN) and found.tokens[i]:
            yield {
                "id": i,
                "content": found.tokens[i],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != USER_DEFINED,
            }


def _post_processor(found: _Vocabulary, begins: bool) -> Json | None:
    """Return what puts tokens around a text. begins: whether one does by default."""
    ends = [
        found.token_id(key) if found.flag(flag, default) else None
        for key, flag, default in (
            ("bos_token_id", "add_bos_token", begins),
            ("eos_token_id", "add_eos_token", False),
        )
    ]
    names = ["" if i is None else found.tokens[i] for i in ends]
    if not any(names):
        return None
    bos, eos = ([{"SpecialToken": {"id": name, "type_id": 0}}] if name else [] for name in names)
    text = {side: {"Sequence": {"id": side, "type_id": 0}} for side in "AB"}
    return {
        "type": "TemplateProcessing",
        "single": [*bos, text["A"], *eos],
        "pair": [*bos, text["A"], *eos, *bos, text["B"], *eos],
        "special_tokens": {
            name: {"id": name, "ids": [i], "tokens": [name]}
            for i, name in zip(ends, names, strict=True)
            if name
        },
    }


def _around_pairs(found: _Vocabulary, kind: str) -> Json | None:
    """Return what puts an encoder's tokens around a text, and between two.

    Of RoBERTa and XLM-R two stand between; BERT tells which text each token is of.
    """
    first, last = (
        next((i for key in keys if (i := found.token_id(key)) is not None), None)
        for keys in (("cls_token_id", "bos_token_id"), ("seperator_token_id", "eos_token_id"))
    )
    if first is None or last is None:
        return None
    twice = kind == "t5" or found.file.values.get("tokenizer.ggml.pre") == "roberta-bpe"

    def part(side: str, number: int) -> list[Json]:
        text = {"Sequence": {"id": side, "type_id": number}}
        return [text, {"SpecialToken": {"id": found.tokens[last], "type_id": number}}]

    begin = {"SpecialToken": {"id": found.tokens[first], "type_id": 0}}
    one, other = part("A", 0), part("B", int(kind == "bert"))
    return {
        "type": "TemplateProcessing",
        "single": [begin, *one],
        "pair": [begin, *one, *one[1:] * twice, *other],
        "special_tokens": {
            found.tokens[i]: {"id": found.tokens[i], "ids": [i], "tokens": [found.tokens[i]]}
            for i in (first, last)
        },
    }


# ---- bert ----


def _spell_pieces(found: _Vocabulary) -> _Vocabulary:
    """Return the tokens as WordPiece has them: files mark the begins of words, it what follows."""
    tokens = [
        token if kind == CONTROL else _spell(token)
        for token, kind in zip(found.tokens, found.kinds, strict=True)
    ]
    return replace(found, tokens=tokens, ids={t: i for i, t in enumerate(tokens) if t})


def _spell(token: str) -> str:
    if token.startswith(SPACE):
        return token.removeprefix(SPACE) or SPACE
    return f"##{token}" if token else ""


def _make_bert(found: _Vocabulary) -> tuple[Json, bool]:
    """Return the parts of WordPiece; a vocabulary without capitals is of small letters."""
    unknown = found.token_id("unknown_token_id")
    plain = (t for t, kind in zip(found.tokens, found.kinds, strict=True) if kind != CONTROL)
    small = not any(any(map(str.isupper, token)) for token in plain if not token.startswith("["))
    parts = {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": small,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]" if unknown is None else found.tokens[unknown],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": _entries(found),
        },
    }
    return parts, True


# ---- t5 ----


def _make_t5(found: _Vocabulary) -> tuple[Json, bool]:
    """Return the parts of SentencePiece's unigrams, as XLM-R's: words begin with a space."""
    scores = _read_scores(found)
    charsmap = found.file.values.get("tokenizer.ggml.precompiled_charsmap")
    normal = None
    if isinstance(charsmap, np.ndarray):
        data = base64.b64encode(charsmap.astype(np.uint8).tobytes()).decode()
        normal = {"type": "Precompiled", "precompiled_charsmap": data}
    spaces = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
    parts = {
        "normalizer": normal,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "WhitespaceSplit"}, spaces],
        },
        "decoder": spaces,
        "model": {
            "type": "Unigram",
            "unk_id": found.token_id("unknown_token_id"),
            "vocab": [[t, s] for t, s in zip(found.tokens, scores.tolist(), strict=True)],
            "byte_fallback": False,
        },
    }
    return parts, True


# ---- gpt2 ----


def _make_gpt2(found: _Vocabulary) -> tuple[Json, bool]:
    """Return the parts of BPE over bytes, and whether it begins a text with a token."""
    pre = found.file.values.get("tokenizer.ggml.pre", "default")
    words = find_words(found.file.path, pre)
    parts = {
        "normalizer": {"type": "NFC"} if words.composes else None,
        "pre_tokenizer": _cut(words),
        "decoder": {"type": "ByteLevel", **_BYTES},
        "model": {
            "type": "BPE",
            "ignore_merges": words.whole_first,
            "vocab": _entries(found),
            "merges": _read_merges(found),
        },
    }
    return parts, words.begins


_BYTES = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _cut(words: Words) -> Json:
    splits = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in words.patterns
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, {"type": "ByteLevel", **_BYTES}]}


def _entries(found: _Vocabulary) -> dict[str, int]:
    """Return the vocabulary without places that were left free."""
    return {token: i for token, i in found.ids.items() if found.kinds[i] != UNUSED}


def _read_merges(found: _Vocabulary) -> list[list[str]]:
    merges = found.file.values.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise found.fail("merges", "must be a list of strings")
    pairs = []
    for merge in merges:
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at < 0 or not {left, right, left + right} <= found.ids.keys():
            raise found.fail("merges", f"has {merge[:60]!r}, which does not make a token of two")
        pairs.append([left, right])
    return pairs


# ---- llama ----


def _make_llama(found: _Vocabulary, merges: Merges | None = None) -> tuple[Json, bool]:
    """Return the parts of SentencePiece's BPE, and that it begins a text with a token.

    merges: what tells its merges, by default the scores.
    """
    unknown = found.token_id("unknown_token_id")
    begins = (
        [{"type": "Prepend", "prepend": SPACE}]
        if found.flag("add_space_prefix", not merges)
        else []
    )
    strips = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins else []
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    parts = {
        "normalizer": {"type": "Sequence", "normalizers": [*begins, spaces]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strips],
        },
        "model": {
            "type": "BPE",
            "unk_token": None if unknown is None else found.tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": _entries(found),
            "merges": (merges or _score_merges)(found),
        },
    }
    return parts, True


def _make_gemma4(found: _Vocabulary) -> tuple[Json, bool]:
    """Return the parts of Gemma 4's BPE, and that it begins a text with a token."""
    parts, begins = _make_llama(found, _read_merges)
    ends = {"type": "Split", "pattern": {"Regex": "\\n+"}, "behavior": "Isolated"}
    return {**parts, "pre_tokenizer": {**ends, "invert": False}}, begins


def _read_scores(found: _Vocabulary) -> npt.NDArray[Any]:
    scores = found.file.values.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(found.tokens):
        raise found.fail("scores", "must be a number for each token")
    return scores


def _score_merges(found: _Vocabulary) -> list[list[str]]:
    """Return the merges that make pieces of two others, the best score first."""
    scores = _read_scores(found)
    special = (UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE)
    pieces = {token for token, i in found.ids.items() if found.kinds[i] not in special}
    if any(len(piece) > MAX_PIECE for piece in pieces):
        raise found.fail("tokens", f"has a piece of more than {MAX_PIECE} letters")
    ranks = sorted(
        (-float(scores[found.ids[piece]]), found.ids[piece]) for piece in pieces if len(piece) > 1
    )
    if any(math.isnan(score) for score, _ in ranks):
        raise found.fail("scores", "has values that are no numbers")
    merges: list[list[str]] = []
    for _, i in ranks:
        token = found.tokens[i]
        for cut in range(len(token) - 1, 0, -1):  # of equal pieces the longer left one is first
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces:
                merges.append([left, right])
    return merges


_KINDS: dict[str, Callable[[_Vocabulary], tuple[Json, bool]]] = {
    "gpt2": _make_gpt2,
    "llama": _make_llama,
    "gemma4": _make_gemma4,
    "bert": _make_bert,
    "t5": _make_t5,
}
