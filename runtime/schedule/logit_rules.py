"""What a request's options do to its logits before a token is chosen from them.

In: raw logits of one row and the tokens so far. Out: the row, changed in place. Rules, order and
float32 arithmetic are vLLM's; presence and frequency penalties are OpenAI's, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dovetail.runtime.schedule.request import SamplingParams

Logits = npt.NDArray[np.float32]
EXCLUDED = np.float32(-np.inf)


class Mask(Protocol):
    """What a grammar lets through next."""

    @property
    def ended(self) -> bool:
        """Whether nothing but an end may come."""

    def apply(self, logits: Logits) -> None:
        """Exclude all else from a row [vocab]."""


class LogitRules:
    """The rules of one request: counts grow with its answer, so a step costs little.

    In this order: only what the grammar lets through remains, only `allowed_token_ids` of it; the
    last token of a bad word whose others have just been written goes; ends go before `min_tokens`;
    `logit_bias` is added; then for tokens of prompt or answer logits above 0 are divided by
    `repetition_penalty`, others multiplied; each occurrence in the answer costs
    `frequency_penalty`, the first one `presence_penalty`.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        ends: Iterable[int],
        mask: Mask | None = None,
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
            if at >= self._start and tokens[at:] == begin:
                logits[last] = EXCLUDED
        if len(tokens) - self._start < self._params.min_tokens:
            logits[self._ends] = EXCLUDED

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
