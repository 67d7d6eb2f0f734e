"""The perplexity of a text under a model, as llama.cpp's `llama-perplexity` measures it.

In: the tokens of a text. Out: windows that follow each other without overlap; of each one the
second half is scored, given all that is before it in its window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.ir.errors import RequestError

if TYPE_CHECKING:
    from dovetail.runtime.app import App

LEAST_CONTEXT = 4


@dataclass(frozen=True, slots=True)
class Perplexity:
    """What a text came to. `context` tokens are a window, and windows begin so far apart.

    standard_error: of the perplexity, from the spread of the log probabilities.
    """

    perplexity: float
    standard_error: float
    mean_logprob: float
    scored_tokens: int
    tokens: int
    windows: int
    context: int


def cut_windows(
    app: App, text: str, context: int, max_tokens: int | None = None
) -> list[list[int]]:
    """Return the windows of `context` tokens that the first `max_tokens` of a text fill.

    Where the tokenizer puts a begin token before texts, it takes the first place of each window.
    Raises RequestError where the text does not fill a window, or the artifact has no tokenizer.
    """
    if app.tokenizer is None:
        raise RequestError(f"{app.artifact.path} has no tokenizer, so a text cannot be scored")
    tokens = app.tokenizer.encode(text, special=False)[:max_tokens]
    if not LEAST_CONTEXT <= context <= len(tokens):
        raise RequestError(
            f"{len(tokens)} tokens do not fill a window of {context}; give a longer text, or a "
            f"context from {LEAST_CONTEXT} to {max(LEAST_CONTEXT, len(tokens))}"
        )
    begin = app.tokenizer.encode("")[:1]
    begin = begin if begin == [app.engine.spec.bos_token_id] else []
    starts = range(0, len(tokens) - context + 1, context)
    return [begin + tokens[start + len(begin) : start + context] for start in starts]


def measure_perplexity(
    app: App,
    windows: Sequence[Sequence[int]],
    show: Callable[[int, int], None] = lambda done, total: None,
) -> Perplexity:
    """Return the perplexity of the second halves of windows of equal length.

    `show` is told how many are done. Raises what `App.score` does.
    """
    context, found = len(windows[0]), list[float]()
    for done, window in enumerate(windows):
        show(done, len(windows))
        (score,) = app.score(window)
        found += [one for one in score.logprobs[context // 2 + 1 :] if one is not None]
    show(len(windows), len(windows))
    return _summary(found, len(windows), context)


def _summary(found: Sequence[float], windows: int, context: int) -> Perplexity:
    scored = len(found)
    mean = math.fsum(found) / scored
    spread = math.fsum((one - mean) ** 2 for one in found) / scored
    perplexity = math.exp(-mean)
    return Perplexity(
        perplexity=perplexity,
        standard_error=perplexity * math.sqrt(spread / max(1, scored - 1)),
        mean_logprob=mean,
        scored_tokens=scored,
        tokens=windows * context,
        windows=windows,
        context=context,
    )
