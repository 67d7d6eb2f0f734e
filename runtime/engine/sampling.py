"""Random numbers and log probabilities of sampled tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dovetail.runtime.schedule.request import Request, TokenLogprob

_WORD = (1 << 64) - 1
_BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))


def draw_uniform(request: Request, ahead: int = 0, again: int = 0) -> float:
    """Return a token's number in [0, 1): a function of (seed, sample index, its place) alone.

    ahead: tokens between the request's newest one and the one that is drawn. again: 1 for a second
    draw. Counter-based, so it does not depend on which other requests share the batch.
    """
    generator = np.random.Philox(
        key=np.array([request.seed & _WORD, request.index], np.uint64),
        counter=np.array([request.generated + ahead, again, 0, 0], np.uint64),
    )
    return min(float(np.random.Generator(generator).random()), _BELOW_ONE)


def score_token(
    logits: npt.NDArray[np.float32], token: int, count: int, total: float
) -> TokenLogprob:
    """Return what a row [vocab] says of `token`, and its `count` most likely ones.

    total: the row's `log_sum`.
    """
    rank = 1 + int(np.count_nonzero(logits > logits[token]))
    logprob = float(logits[token]) - total
    return TokenLogprob(token, logprob, top_logprobs(logits, count, total), rank)


def top_logprobs(
    logits: npt.NDArray[np.float32], count: int, total: float
) -> tuple[tuple[int, float], ...]:
    """Return the `count` most likely (token id, log softmax) of one row [vocab], best first.

    total: the row's `log_sum`.
    """
    count = min(count, len(logits))
    if count == 0:
        return ()
    if count == 1:  # quicker, and what harnesses ask for
        best = np.array([logits.argmax()])
    else:
        best = np.argpartition(logits, -count)[-count:]
        best = best[np.lexsort((best, -logits[best]))]
    return tuple((int(i), float(logits[i]) - total) for i in best)


def log_sum(logits: npt.NDArray[np.float32]) -> float:
    """Return the logarithm of the sum of e**logit of one row [vocab]."""
    wide = logits.astype(np.float64)
    peak = float(wide.max())
    return peak + float(np.log(np.exp(wide - peak).sum()))
