"""How tokenizers over bytes cut a text into words, by the names that GGUF files have for it.

In: `tokenizer.ggml.pre`. Out: `Words`: the patterns, each applied to what those before it left.
The patterns are those of the models' own tokenizer.json.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from dovetail.ir.errors import SpecError

_TAKEN = r"'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_TAKEN}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_PATH_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_DIGIT, _DIGITS = r"\p{N}", r"\p{N}{1,3}"


def _letters(digits: str, signs: str = _SIGNS) -> str:
    """Return the pattern of Llama 3 and of Qwen: a sign may begin a word of letters."""
    return rf"(?i:{_TAKEN})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{signs}|{_LINES}"


def _cases(digits: str, ends: str = "") -> str:
    """Return the pattern of Tekken and of GPT-4o: a capital within a word begins another."""
    first, rest = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    small = rf"[^\r\n\p{{L}}\p{{N}}]?[{first}]*[{rest}]+{ends}"
    large = rf"[^\r\n\p{{L}}\p{{N}}]?[{first}]+[{rest}]*{ends}"
    return rf"{small}|{large}|{digits}|{_PATH_SIGNS}|{_LINES}"


@dataclass(frozen=True, slots=True)
class Words:
    """A way to cut words.

    whole_first: a word that is a token needs no merges. begins: whether a text begins with the
    bos token unless the file tells. composes: letters and their accents are one sign first (NFC).
    """

    patterns: tuple[str, ...]
    whole_first: bool = False
    begins: bool = False
    composes: bool = False


_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT)
_CHINESE = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
    r"\p{N}+",
)
_V3 = (
    _DIGITS,
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}",
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
_MARKED = rf"(?i:{_TAKEN})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|{_DIGIT}"
_QWEN35 = rf"{_MARKED}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}"
_LLAMA3 = Words((_letters(_DIGITS),), whole_first=True, begins=True)
_THREES = Words((_letters(_DIGITS),))
_PLAIN = Words((_GPT2,))
_SINGLE = Words((_DIGIT, _GPT2))
_QWEN = Words((_letters(_DIGIT),), composes=True)

WORDS: dict[str, Words] = {
    "default": Words(_DEFAULT),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "trillion", "olmo", "exaone4"), _PLAIN),
    **dict.fromkeys(("roberta-bpe", "modern-bert"), _PLAIN),
    **dict.fromkeys((f"jina-v2-{language}" for language in ("code", "de", "es")), _PLAIN),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), _THREES),
    "smollm": _SINGLE,
    "starcoder": _SINGLE,
    "refact": _SINGLE,
    **dict.fromkeys(("minerva-7b", "command-r"), _SINGLE),
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "megrez": _QWEN,
    "qwen35": Words((_QWEN35,), composes=True),
    **dict.fromkeys(("stablelm2", "hunyuan"), replace(_QWEN, composes=False)),
    "seed-coder": Words((_letters(_DIGIT, r" ?[^\s\p{L}\p{N}]+"),)),
    "tekken": Words((_cases(_DIGIT),), whole_first=True, begins=True),
    "gpt-4o": Words((_cases(_DIGITS, rf"(?i:{_TAKEN})?"),)),
    "deepseek-llm": Words(_CHINESE),
    "deepseek-coder": Words(_CODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), Words(_V3)),
}
"""tokenizer.ggml.pre -> how it cuts; files that name none have what llama.cpp calls default."""


def find_words(path: Path, pre: object) -> Words:
    """Return the way a file names; SpecError, which lists those known, for another."""
    if isinstance(pre, str) and pre in WORDS:
        return WORDS[pre]
    raise SpecError(
        f"{path}: tokenizer.ggml.pre is {pre!r}, which is not supported; supported: "
        f"{', '.join(WORDS)}"
    )
