"""What is done with a row of raw logits: rules of a request's options, and log probabilities.

In: one row [vocab] and the tokens so far. Out: the row, changed in place before a token is chosen
from it; log probabilities. Rules, order and float32 arithmetic are vLLM's; presence and frequency
penalties are OpenAI's, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from dovetail.runtime.schedule.request import SamplingParams, TokenLogprob
from dovetail.runtime.text.masks import EXCLUDED, Logits, TokenMask


class LogitRules:
    """The rules of one request: counts grow with its answer, so a step costs little.

    In this order: only what the grammar lets through remains, only `allowed_token_ids` of it; the
    last token of a bad word whose others have just been written goes; ends go before `min_tokens`;
    `logit_bias` is added; then for tokens of prompt or answer logits above 0 are divided by
    `repetition_penalty`, others multiplied; each occurrence in the answer costs
    `frequency_penalty`, the first one `presence_penalty`. A tokenizer may know tokens that the
    model has not: nothing is to be excluded there.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        ends: Iterable[int],
        mask: TokenMask | None = None,
    ) -> None:
        """`ends`: the model's end tokens. `mask`: of its grammar, where it has one."""
        self._params, self._start, self._read = params, len(prompt), len(prompt)
        self._mask = mask
        seen = dict.fromkeys(prompt) if params.repetition_penalty != 1 else {}
        self._places = {token: place for place, token in enumerate(seen)}
        self._ids = np.fromiter(seen, np.int64, len(seen))
        self._counts = np.zeros(len(seen), np.float32)
        self.more = replace(params, grammar="").changes_logits
        """Whether there are others than the grammar."""
        penalties = params.presence_penalty, params.frequency_penalty
        self._counts_tokens = any(penalties) or params.repetition_penalty != 1
        self._ends = np.array(sorted({*ends, *params.stop_token_ids}), np.int64)
        self._allowed = np.array(params.allowed_token_ids, np.int64)
        self._biased = np.array([token for token, _ in params.logit_bias], np.int64)
        self._biases = np.array([bias for _, bias in params.logit_bias], np.float32)

    def apply(self, logits: Logits, tokens: Sequence[int]) -> None:
        """Change `logits` [vocab] for the token that follows `tokens`, prompt and answer."""
        self._exclude(logits, tokens)
        if len(self._biased):
            logits[self._biased] += self._biases
        if self._counts_tokens:
            self._count(tokens)
            self._penalise(logits)

    def _exclude(self, logits: Logits, tokens: Sequence[int]) -> None:
        if self._mask is not None:
            self._mask.apply(logits)
            if self._mask.ended:
                return
        if len(self._allowed):
            kept = logits[self._allowed]
            logits[:] = EXCLUDED
            logits[self._allowed] = kept
        for *begin, last in self._params.bad_word_ids:
            at = len(tokens) - len(begin)
            if at >= self._start and tokens[at:] == begin and last < len(logits):
                logits[last] = EXCLUDED
        if len(tokens) - self._start < self._params.min_tokens:
            logits[self._ends[self._ends < len(logits)]] = EXCLUDED

    def _count(self, tokens: Sequence[int]) -> None:
        """Count what has been generated since the last step."""
        for token in tokens[self._read :]:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._ids):
                self._ids = np.append(self._ids, token)
                self._counts = np.append(self._counts, np.float32(0))
            self._counts[place] += 1
        self._read = len(tokens)

    def _penalise(self, logits: Logits) -> None:
        params, found = self._params, logits[self._ids]
        repeated = np.float32(params.repetition_penalty)
        found = np.where(found > 0, found / repeated, found * repeated)
        found -= np.float32(params.frequency_penalty) * self._counts
        found -= np.float32(params.presence_penalty) * (self._counts > 0)
        logits[self._ids] = found


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
