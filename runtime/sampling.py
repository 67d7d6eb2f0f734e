"""Random numbers and log probabilities of sampled tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dovetail.runtime.request import Request

_WORD = (1 << 64) - 1
_BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))


def draw_uniform(request: Request) -> float:
    """Return this step's number in [0, 1): a function of (seed, sample index, step) alone.

    Counter-based, so it does not depend on which other requests share the batch.
    """
    generator = np.random.Philox(
        key=np.array([request.seed & _WORD, request.index], np.uint64),
        counter=np.array([request.generated, 0, 0, 0], np.uint64),
    )
    return min(float(np.random.Generator(generator).random()), _BELOW_ONE)


def top_logprobs(logits: npt.NDArray[np.float32], count: int) -> tuple[tuple[int, float], ...]:
    """Return the `count` most likely (token id, log softmax) of one row [vocab], best first."""
    count = min(count, len(logits))
    if count == 0:
        return ()
    wide = logits.astype(np.float64)
    best = np.argpartition(wide, -count)[-count:]
    best = best[np.lexsort((best, -wide[best]))]
    total = _log_sum(wide)
    return tuple((int(i), float(wide[i]) - total) for i in best)


def logprob_of(logits: npt.NDArray[np.float32], token: int) -> float:
    """Return the log softmax of one token of a row [vocab]."""
    return float(logits[token]) - _log_sum(logits.astype(np.float64))


def _log_sum(wide: npt.NDArray[np.float64]) -> float:
    peak = float(wide.max())
    return peak + float(np.log(np.exp(wide - peak).sum()))
