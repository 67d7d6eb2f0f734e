"""Decoders that rank: how much likelier than "no" they answer "yes" about a query and a document.

In: a folder's config.json, tokenizer and chat template. Out: the tokens that are compared, and the
text that a query and a document are put into.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dovetail.compiler.files.config import Config
from dovetail.ir.errors import DovetailError, SpecError
from dovetail.runtime.text.chat_template import read_template
from dovetail.runtime.text.tokenizer import read_tokenizer

_TOKENS, _ORIGINAL = "classifier_from_token", "is_original_qwen3_reranker"
"""Keys of config.json that vLLM knows, too: [no, yes]; and that texts are put as Qwen's are."""
_CAUSAL = "ForCausalLM"
_KNOWN = "qwen3-reranker"
"""Part of the names of models whose files may tell neither."""
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The text that Qwen3-Reranker was trained with, and its usual instruction."""


@dataclass(frozen=True, slots=True)
class PairText:
    """How a query and a document become one text, by their names in braces; "" as a tokenizer does.

    instruction: what stands for its own name where nothing else is asked for.
    """

    template: str = ""
    instruction: str | None = None


def ranks(config: Config, names: Iterable[str]) -> bool:
    """Tell whether a decoder's head is asked for answers to pairs; names: of the model.

    One that was made a classifier goes by those names, too.
    """
    whole = any(name.endswith(_CAUSAL) for name in config.texts("architectures"))
    return config.has(_TOKENS) or (whole and _is_qwen3(config, names))


def _is_qwen3(config: Config, names: Iterable[str]) -> bool:
    return config.flag(_ORIGINAL) or any(_KNOWN in name.lower() for name in names)


def read_token_ids(told: Config) -> tuple[int, ...]:
    """Return the tokens that sentence-transformers' files name: of yes, and of no if it counts."""
    keys = [key for key in ("true_token_id", "false_token_id") if told.has(key)]
    return tuple(told.integer(key, 0, 1 << 24) for key in keys or ("true_token_id",))


def read_answers(config: Config, path: Path, tokenizer: bytes | None) -> tuple[int, ...]:
    """Return the tokens of yes and of no, by the file at `path`, which the content is of."""
    tokens = config.texts(_TOKENS) if config.has(_TOKENS) else ("no", "yes")
    if len(tokens) != 2:
        raise config.fail(_TOKENS, "but must be two: what is answered to no, and to yes")
    if tokenizer is None:
        raise SpecError(f"{path} is needed to find the tokens {' and '.join(tokens)}")
    known = read_tokenizer(path, tokenizer)
    found = (known.token_to_id(token) for token in reversed(tokens))
    ids = tuple(token for token in found if token is not None)
    if len(ids) != len(tokens):
        raise SpecError(f"{path} has no tokens {' and '.join(tokens)} for answers")
    return ids


def read_pair_text(config: Config, folder: Path, names: Iterable[str], *, asks: bool) -> PairText:
    """Return how texts are put: by a chat template that knows queries and documents, or as Qwen's.

    asks: the template is to begin the answer.
    """
    told = _render(folder, asks)
    if told.template:
        return told
    return PairText(QWEN3, INSTRUCTION) if _is_qwen3(config, names) else PairText()


def _render(folder: Path, asks: bool) -> PairText:
    """Return what a folder's chat template makes of names in braces.

    As sentence-transformers has it: an instruction is what the system says.
    """
    template = read_template(folder)
    if template is None:
        return PairText()
    pair = [{"role": role, "content": f"{{{role}}}"} for role in ("query", "document")]
    system = {"role": "system", "content": "{instruction}"}
    found = []
    try:
        for messages in (pair, [system, *pair]):
            try:
                text = template.render(messages, add_generation_prompt=asks)
            except DovetailError:  # one of conversations takes no such roles
                text = ""
            found.append(text if all(text.count(m["content"]) == 1 for m in messages) else "")
    finally:
        template.close()
    plain, told = found
    before, _, after = told.partition("{instruction}")
    if told and plain.startswith(before) and plain.endswith(after):
        return PairText(told, plain[len(before) : len(plain) - len(after)])
    return PairText(plain)
