"""Has the tokens of a step chosen where options of requests change logits.

In: rows of raw logits. Out: the rows as their requests ask for, and tokens chosen from them. A
request's rows follow each other: what is excluded from one depends on the tokens before it, so a
drafted token's row is looked at once the token has been chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from dovetail.ir.errors import RequestError
from dovetail.runtime.engine.logits import LogitRules
from dovetail.runtime.native.step import StepBuffers, StepShape
from dovetail.runtime.schedule.request import Request, SamplingParams
from dovetail.runtime.text.masks import TRIES, Grammars, Logits, TokenMask


@dataclass(slots=True)
class _Walk:
    """The way over a request's rows, as far as its drafted tokens prove right."""

    request: Request
    rules: LogitRules
    mask: TokenMask | None
    row: int
    ahead: int = 0  # drafted tokens before `row`
    fresh: bool = True  # whether nothing of `row` was changed yet

    @property
    def free(self) -> bool:
        """Whether a token of the row is chosen as it is, which the grammar tries."""
        mask = self.mask
        return mask is not None and mask.found and not mask.due and not self.rules.more

    @property
    def draws(self) -> bool:
        """Whether there is a choice but for the likeliest token."""
        return self.request.params.temperature > 0 and not (self.mask and self.mask.forced)

    def restrict(self, logits: Logits) -> bool:
        """Change the row; return whether it was changed for the first time.

        Raises RequestError where its grammar cannot be followed.
        """
        fresh, self.fresh = self.fresh, False
        if fresh:
            tokens, drafted = self.request.tokens, self.request.drafted[: self.ahead]
            self.rules.apply(logits, [*tokens, *drafted] if drafted else tokens)
        elif self.mask is not None:
            self.mask.apply(logits)
        return fresh

    def advance(self, buffers: StepBuffers) -> bool:
        """Take tokens that were chosen; return whether one has to be chosen anew, at `row`."""
        drafted = self.request.drafted
        while True:
            token, logprob = buffers.chosen(self.row)
            if not math.isfinite(logprob):
                return False
            if self.mask is not None and not self.mask.take(token):
                self.fresh = False
                return True
            if self.ahead == len(drafted) or drafted[self.ahead] != token:
                return False
            self.row, self.ahead, self.fresh = self.row + 1, self.ahead + 1, True
            if self.rules.more or (self.mask is not None and self.mask.due):
                return True


class Rules:
    """The rules of all requests of an engine."""

    def __init__(
        self, ends: Sequence[int], fail: Callable[[Request, RequestError], None], *, drafts: bool
    ) -> None:
        """`ends`: the model's end tokens. `fail` ends who has a grammar that cannot be followed.

        drafts: whether tokens that grammars force are drafted.
        """
        self._ends, self._fail, self._drafts = ends, fail, drafts
        self._known: WeakKeyDictionary[Request, tuple[LogitRules, TokenMask | None]] = (
            WeakKeyDictionary()
        )

    def choose(
        self,
        shape: StepShape,
        buffers: StepBuffers,
        grammars: Grammars,
        sample: Callable[[int | None], None],
    ) -> dict[int, Logits]:
        """Have tokens chosen by `sample`; return the raw logits of changed rows that show them.

        sample: of a row alone, by another random number, or of all.
        """
        raw: dict[int, Logits] = {}
        walks = begun = self._begin(shape, grammars)
        self._restrict((walk for walk in begun if not walk.free), buffers, raw, sample)
        sample(None)
        while walks := [
            walk for walk in walks if not walk.request.finished and walk.advance(buffers)
        ]:
            grammars.follow(walk.mask for walk in walks if walk.mask is not None)
            if self._restrict(walks, buffers, raw, sample):
                sample(None)
        left = [walk for walk in begun if walk.mask is not None and not walk.request.finished]
        for walk in left if self._drafts else ():
            assert walk.mask is not None
            walk.request.forced = walk.mask.force()
        grammars.follow(walk.mask for walk in left if walk.mask is not None)
        return raw

    def _begin(self, shape: StepShape, grammars: Grammars) -> list[_Walk]:
        walks, before = list[_Walk](), None
        for row, request in enumerate(shape.outputs):
            if request.ruled and request is not before:
                try:
                    walks.append(_Walk(request, *self._find(request, grammars), row))
                except RequestError as error:
                    self._fail(request, error)
            before = request
        return walks

    def _restrict(
        self,
        walks: Iterable[_Walk],
        buffers: StepBuffers,
        raw: dict[int, Logits],
        sample: Callable[[int | None], None],
    ) -> bool:
        """Change the rows where walks stand; return whether tokens are still to be chosen.

        Another token instead of one that was refused is chosen at once.
        """
        left = False
        for walk in walks:
            logits = buffers.logits(walk.row)
            if walk.request.params.logprobs is not None and walk.row not in raw:
                raw[walk.row] = logits.copy()
            try:
                if walk.restrict(logits):
                    left = True
                elif walk.draws:
                    sample(walk.row)
                else:
                    buffers.choose_likeliest(walk.row)
            except RequestError as error:
                self._fail(walk.request, error)
        return left

    def _find(self, request: Request, grammars: Grammars) -> tuple[LogitRules, TokenMask | None]:
        """Return the rules of a request; RequestError where its grammar cannot be followed."""
        found = self._known.get(request)
        if found is None:
            params, mask = request.params, None
            if params.grammar:
                left, tries = request.max_tokens - request.generated, _count_tries(params)
                mask = grammars.open(params.grammar, left, tries)
                request.accepts = mask.count_accepted
            prompt = request.tokens[: request.prompt_length]
            found = LogitRules(params, prompt, self._ends, mask), mask
            self._known[request] = found
        return found


def _count_tries(params: SamplingParams) -> int | None:
    """Return how many more choices than one are tried before the mask, None where none can be."""
    if params.temperature == 0:
        return TRIES
    filters = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return None if filters else 0
