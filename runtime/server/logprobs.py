"""Log probabilities as the two kinds of completions show them.

In: what the engine noted for each token. Out: reply structs. End tokens are part of neither text
nor list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dovetail.runtime.request import TokenLogprob
from dovetail.runtime.server.models import ServedModel
from dovetail.runtime.server.replies import ChatLogprobs, TextLogprobs, TokenLogprobs, TopLogprob
from dovetail.runtime.tokenizer import Tokenizer


def chat_logprobs(model: ServedModel, found: Sequence[TokenLogprob] | None) -> ChatLogprobs | None:
    """Return the list of a chat; None where none were asked for."""
    if not found:
        return None
    tokenizer = model.tokenizer
    content = []
    for one in _shown(model, found):
        chosen = _top(tokenizer, one.token_id, one.logprob)
        content.append(
            TokenLogprobs(
                token=chosen.token,
                logprob=chosen.logprob,
                bytes=chosen.bytes,
                top_logprobs=[_top(tokenizer, *top) for top in one.top],
            )
        )
    return ChatLogprobs(content=content)


def text_logprobs(
    model: ServedModel, found: Sequence[TokenLogprob] | None, offset: int, top: int
) -> TextLogprobs | None:
    """Return the lists of a completion whose text begins at `offset`, with `top` rivals each."""
    if not found:
        return None
    tokenizer, shown = model.tokenizer, list(_shown(model, found))
    tokens = [_written(tokenizer.spell(one.token_id)) for one in shown]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    rivals = [
        {_written(tokenizer.spell(token)): _finite(logprob) for token, logprob in one.top}
        for one in shown
    ]
    return TextLogprobs(
        tokens=tokens,
        token_logprobs=[_finite(one.logprob) for one in shown],
        top_logprobs=rivals if top else None,
        text_offset=offsets,
    )


def _shown(model: ServedModel, found: Sequence[TokenLogprob]) -> Iterable[TokenLogprob]:
    assert model.file is not None
    ends = model.file.spec.eos_token_ids
    return (one for one in found if one.token_id not in ends)


def _top(tokenizer: Tokenizer, token: int, logprob: float) -> TopLogprob:
    spelled = tokenizer.spell(token)
    text = spelled.decode(errors="replace")
    return TopLogprob(token=text, logprob=_finite(logprob), bytes=list(spelled))


def _written(spelled: bytes) -> str:
    """Return a token's text; parts of characters as OpenAI writes them, each byte by its number."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _finite(logprob: float) -> float:
    """Return a number that JSON can hold: what has no chance is at -9999, as OpenAI has it."""
    return max(logprob, -9999.0)
