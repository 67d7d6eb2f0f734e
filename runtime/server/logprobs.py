"""Log probabilities as the two kinds of completions show them.

In: what the engine noted for each token. Out: reply structs. End tokens are part of neither text
nor list, but where a list begins with the prompt's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        for one in _shown(model, found)
    ]
    return ChatLogprobs(content=content)


def text_logprobs(
    model: ServedModel, found: Sequence[TokenLogprob] | None, offset: int, top: int
) -> TextLogprobs | None:
    """Return the lists of a completion whose text begins at `offset`, with `top` rivals each."""
    if not found:
        return None
    shown = list(_shown(model, found))
    return _lists(model.tokenizer, [one.token_id for one in shown], shown, offset, top)


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
    start = len(echo) - sum(_letters(tokenizer, token) for token in prompt)
    return _lists(tokenizer, ids, found, start, top)


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
    offset: int,
    top: int,
) -> TextLogprobs:
    """Return the lists of tokens whose text begins at `offset`; the first may have no entry."""
    offsets = []
    for token in ids:
        offsets.append(max(0, offset))  # a decoder may leave out the space before a first word
        offset += _letters(tokenizer, token)
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


def _letters(tokenizer: Tokenizer, token: int) -> int:
    """Return how many characters of a text begin with this token; special ones are no text."""
    if token in tokenizer.special:
        return 0
    return sum(byte & 0xC0 != 0x80 for byte in tokenizer.spell(token))


def _shown(model: ServedModel, found: Sequence[TokenLogprob]) -> Iterable[TokenLogprob]:
    assert model.file is not None
    ends = model.file.spec.eos_token_ids
    return (one for one in found if one.token_id not in ends)


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
