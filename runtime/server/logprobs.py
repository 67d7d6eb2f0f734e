"""Log probabilities as the two kinds of completions show them.

In: what the engine noted for each token. Out: reply structs. End tokens are part of neither text
nor list, but where a list begins with the prompt's.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from dovetail.runtime.schedule.request import TokenLogprob
from dovetail.runtime.server.models import ServedModel
from dovetail.runtime.server.replies import (
    ChatLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TextLogprobs,
    TokenLogprobs,
    TopLogprob,
)
from dovetail.runtime.text.tokenizer import Tokenizer


class Offsets:
    """Where tokens of one text begin, in its characters: also while later text is held back.

    `special`: special tokens are text, too.
    """

    def __init__(self, model: ServedModel, start: int = 0, *, special: bool = False) -> None:
        self._model, self._letters, self._special = model, start, special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def letters(self) -> int:
        """Characters that have begun."""
        return self._letters + bool(self._decoder.getstate()[0])

    def take(self, token: int) -> int:
        """Return where the next token begins."""
        place, tokenizer = self.letters, self._model.tokenizer
        if self._special or token not in tokenizer.special:
            self._letters += len(self._decoder.decode(tokenizer.spell(token)))
        return max(0, place)  # a decoder may leave out the space before a first word


def chat_logprobs(model: ServedModel, found: Sequence[TokenLogprob] | None) -> ChatLogprobs | None:
    """Return the list of a chat; None where none were asked for."""
    if not found:
        return None
    tokenizer = model.tokenizer
    content = [
        TokenLogprobs(
            **_spelled(tokenizer, one.token_id, one.logprob),
            top_logprobs=[TopLogprob(**_spelled(tokenizer, *top)) for top in one.top],
        )
        for one in found
        if _is_shown(model, one)
    ]
    return ChatLogprobs(content=content)


def text_logprobs(
    model: ServedModel, found: Sequence[TokenLogprob] | None, offsets: Offsets, top: int
) -> TextLogprobs | None:
    """Return the lists of a completion or a piece of it, with `top` rivals of each token."""
    if not found:
        return None
    placed = [(one, offsets.take(one.token_id)) for one in found]
    shown = [(one, place) for one, place in placed if _is_shown(model, one)]
    ids, listed = [one.token_id for one, _ in shown], [one for one, _ in shown]
    return _lists(model.tokenizer, ids, listed, [place for _, place in shown], top)


def echo_logprobs(
    model: ServedModel,
    prompt: Sequence[int],
    found: Sequence[TokenLogprob | None],
    echo: str,
    top: int,
) -> TextLogprobs:
    """Return the lists of a prompt, shown as `echo`, and of what was generated behind it.

    Every token has its place, an end token, too: clients tell prompt and answer apart by counting.
    """
    tokenizer = model.tokenizer
    ids = [*prompt, *(one.token_id for one in found[len(prompt) :] if one)]
    behind = Offsets(model)
    for token in prompt:
        behind.take(token)
    offsets = Offsets(model, len(echo) - behind.letters)
    return _lists(tokenizer, ids, found, list(map(offsets.take, ids)), top)


def list_candidates(
    model: ServedModel, found: Sequence[TokenLogprob | None] | None, count: int | None
) -> PromptLogprobs | UnsetType:
    """Return for each token of a prompt itself and the `count` likeliest ones, as vLLM has it."""
    if found is None or count is None:
        return UNSET
    return [_candidates(model.tokenizer, one, count) if one else None for one in found]


def _candidates(tokenizer: Tokenizer, one: TokenLogprob, count: int) -> dict[str, PromptLogprob]:
    ranked = enumerate(one.top[:count], 1)
    listed = [(one.token_id, one.logprob, one.rank or 1)]
    listed += [(token, logprob, rank) for rank, (token, logprob) in ranked if token != one.token_id]
    return {
        str(token): PromptLogprob(
            logprob=_finite(logprob),
            rank=rank,
            decoded_token=tokenizer.spell(token).decode(errors="replace"),
        )
        for token, logprob, rank in listed
    }


def _lists(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    found: Sequence[TokenLogprob | None],
    offsets: list[int],
    top: int,
) -> TextLogprobs:
    """Return the lists of tokens; the first may have no entry."""
    return TextLogprobs(
        tokens=[_written(tokenizer.spell(token)) for token in ids],
        token_logprobs=[_finite(one.logprob) if one else None for one in found],
        top_logprobs=[_rivals(tokenizer, one, top) if one else None for one in found]
        if top
        else None,
        text_offset=offsets,
    )


def _rivals(tokenizer: Tokenizer, one: TokenLogprob, top: int) -> dict[str, float]:
    """Return the likeliest tokens, and the one that was chosen where it is none of these."""
    found: dict[str, float] = {}
    for token, logprob in (*one.top[:top], (one.token_id, one.logprob)):
        found.setdefault(_written(tokenizer.spell(token)), _finite(logprob))
    return found


def _is_shown(model: ServedModel, one: TokenLogprob) -> bool:
    assert model.file is not None
    return one.token_id not in model.file.spec.eos_token_ids


def _spelled(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    spelled = tokenizer.spell(token)
    text = spelled.decode(errors="replace")
    return {"token": text, "logprob": _finite(logprob), "bytes": list(spelled)}


def _written(spelled: bytes) -> str:
    """Return a token's text; parts of characters as OpenAI writes them, each byte by its number."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _finite(logprob: float) -> float:
    """Return a number that JSON can hold: what has no chance is at -9999, as OpenAI has it."""
    return max(logprob, -9999.0)
