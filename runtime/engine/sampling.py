"""Log probabilities of tokens, from raw logits."""

from __future__ import annotations

import numpy as np

from dovetail.runtime.schedule.logit_rules import Logits
from dovetail.runtime.schedule.request import TokenLogprob


def score_token(logits: Logits, token: int, count: int, total: float) -> TokenLogprob:
    """Return what a row [vocab] says of `token`, and its `count` most likely ones.

    total: the row's `log_sum`.
    """
    rank = 1 + int(np.count_nonzero(logits > logits[token]))
    logprob = float(logits[token]) - total
    return TokenLogprob(token, logprob, top_logprobs(logits, count, total), rank)


def top_logprobs(logits: Logits, count: int, total: float) -> tuple[tuple[int, float], ...]:
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


def log_sum(logits: Logits) -> float:
    """Return the logarithm of the sum of e**logit of one row [vocab]."""
    wide = logits.astype(np.float64)
    peak = float(wide.max())
    return peak + float(np.log(np.exp(wide - peak).sum()))
