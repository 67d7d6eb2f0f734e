"""What a small draft model thinks will follow, for all requests of a step together.

In: requests, seconds of a step by its rows, a function that has the model read batches. Out: drafts
with the chance that each token holds. The model reads what a request has got since the last step,
then each token that it found likeliest: one pass brings every draft one more. Passes are made where
they raise the tokens that a second should bring. Its KV lies in a pool of its own. A text that is
new to it is read some rows a step, where what that saves of the answer should be more than it
takes.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TypeAlias

from dovetail.runtime.schedule.experience import (
    FADE,
    FADE_ALL,
    FORGET,
    KEPT,
    MARGIN,
    HitRate,
    RowTimes,
)
from dovetail.runtime.schedule.kv_pool import KvPool, hash_blocks
from dovetail.runtime.schedule.plan import Batch, Limits, PrefillChunk
from dovetail.runtime.schedule.request import Metrics, Request, SamplingParams

USUAL = 0.7
"""Part of its tokens that should hold, where nothing is known yet."""
SURENESS = 8
"""Tokens are told apart by so many ranges of the probability that the model gave them."""
NEAR = 16
"""Tokens behind which it has read a request: more are a text that is new to it."""
NEW_ROWS = 64
"""Most rows of such texts in a step: everybody waits for them."""
PLAIN = 64
"""Of so many steps one has no draft, so that it is known how long these take."""

Read: TypeAlias = Callable[
    [Batch, Mapping[int, Request], Callable[[int], "array[int]"]], Sequence[tuple[int, float]]
]
"""Has the model read a batch of texts by number, whose blocks the last argument gives; returns the
likeliest next token of each that was read to its end, in row order, and its log probability."""


@dataclass(slots=True, eq=False)
class _DraftText:
    """A request as the model has read it: its first `known` tokens, then what it thought."""

    request: Request
    text: Request
    known: int
    fits: bool = True  # whether the model knows all of the request's tokens
    hits: HitRate = field(default_factory=lambda: HitRate(FADE))
    sure: list[int] = field(default_factory=list)  # of each token drafted in this step, its range

    def follow(self, vocab_size: int) -> None:
        """Take the request's new tokens in; forget what was thought and did not come."""
        tokens, text = self.request.tokens, self.text
        held, least = self.known, min(len(text.tokens), len(tokens))
        while held < least and text.tokens[held] == tokens[held]:
            held += 1
        text.tokens[held:] = tokens[held:]
        self.fits &= max(tokens[held:], default=0) < vocab_size
        self.known = len(tokens)
        text.computed = min(text.computed, held, len(tokens) - 1)


@dataclass(slots=True, eq=False)
class Guess:
    """What is drafted for a request: at most so many tokens, and the chance that each holds."""

    copy: _DraftText
    most: int
    chance: float  # of the next one, if all before it hold
    gain: float = 1.0  # that all hold
    tokens: list[int] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)


class _Experience:
    """What came of drafted tokens: of all, and by how sure the model was of them."""

    def __init__(self) -> None:
        self.all = HitRate(FADE_ALL)
        self.sure = [HitRate(FADE_ALL) for _ in range(SURENESS)]


class Drafter:
    """The draft model's view of all requests of a scheduler."""

    def __init__(
        self, limits: Limits, pool: KvPool, read: Read, clock: Callable[[], float]
    ) -> None:
        """limits, pool: the draft model's own."""
        self.limits, self.pool, self._read, self._clock = limits, pool, read, clock
        self.spent = 0.0
        """Seconds that drafting took in the last step."""
        self._copies: dict[int, _DraftText] = {}
        self._known = _Experience(), _Experience()  # of greedy answers, of drawn ones
        self._forget_times()
        self._steps = 0

    def chance(self, request: Request) -> float:
        """Return the part of the request's next drafted tokens that should hold."""
        copy, usual = self._copies.get(request.id), self._of(request).all.chance(USUAL)
        return copy.hits.chance(usual) if copy else usual

    def draft(
        self,
        wanted: Mapping[Request, int],
        seconds: Sequence[float],
        tokens: int,
        usual: float = math.inf,
    ) -> dict[int, Guess]:
        """Return drafts by the numbers of their requests.

        wanted: the most tokens of each. seconds: of the step by rows beyond those that it has, in
        which it brings `tokens`. usual: tokens of an answer.
        """
        began = self._clock()
        self._steps += 1
        self._drop_finished()
        guesses = [] if self._steps % PLAIN == 0 else self._draft(wanted, seconds, tokens, usual)
        self.spent = self._clock() - began
        return {guess.copy.request.id: guess for guess in guesses if guess.tokens}

    def learn(self, request: Request, *, held: bool) -> None:
        """Take note of a token that it drafted in this step."""
        copy, known = self._copies[request.id], self._of(request)
        for rate in (known.sure[copy.sure.pop(0)], copy.hits, known.all):
            rate.learn(held)

    def warm(self) -> None:
        """Read a text that nobody sees: its times, of a machine that loads, tell nothing."""
        tokens = min(self.limits.max_context, self.limits.max_step_tokens, NEW_ROWS) - 1
        if tokens < 1:
            return
        request = Request(-1, [0] * tokens, tokens, 1, SamplingParams(), Metrics(0.0))
        guess = Guess(self._open(request), 2, USUAL)
        for _ in range(2):
            self._pass([guess], NEW_ROWS)
        request.finish("stop")
        self._drop_finished()
        self.pool.forget()
        self._forget_times()

    def _forget_times(self) -> None:
        self._times = RowTimes(self.limits.max_decodes)
        self._row_seconds: deque[float] = deque(maxlen=KEPT)  # of those of new texts
        self._doubt = 1.0  # what of the times of passes is believed, while these do not pay

    def _of(self, request: Request) -> _Experience:
        return self._known[request.params.temperature > 0]

    # ---- a step ----

    def _drop_finished(self) -> None:
        for number in [n for n, copy in self._copies.items() if copy.request.finished]:
            self.pool.close(number)
            del self._copies[number]
        for copy in self._copies.values():
            copy.sure.clear()

    def _draft(
        self, wanted: Mapping[Request, int], seconds: Sequence[float], tokens: int, usual: float
    ) -> Sequence[Guess]:
        found = [
            Guess(self._copies.get(request.id) or self._open(request), most, self.chance(request))
            for request, most in wanted.items()
        ]
        for guess in found:
            guess.copy.follow(self.limits.vocab_size)
        found = [guess for guess in found if guess.copy.fits]
        chosen, rate = self._choose(found, seconds, tokens, MARGIN)
        for guess in found:
            if guess not in chosen:
                guess.copy.hits.forget()
        if not chosen:
            for known in self._known:
                known.all.forget()
            self._doubt *= FORGET
            return ()
        reading = self._leave_new(chosen, seconds[0] - tokens / rate, usual)
        active = self._pass(reading, NEW_ROWS)
        while active:
            rows, gain = sum(len(g.tokens) for g in chosen), sum(sum(g.gains) for g in chosen)
            short = [guess for guess in active if len(guess.tokens) < guess.most]
            worth, _ = self._choose(short, seconds[rows:], tokens + gain)
            active = self._pass(worth, 0)
        return chosen

    def _choose(
        self, guesses: Sequence[Guess], seconds: Sequence[float], tokens: float, bar: float = 1.0
    ) -> tuple[Sequence[Guess], float]:
        """Return those for which another pass should pay, and the tokens a second that it brings.

        seconds: of the step by further rows, in which it brings `tokens` without a pass.
        """
        guesses = sorted(guesses, key=lambda guess: -guess.gain * guess.chance)
        best, rate = 0, bar * tokens / seconds[0]
        gain = ahead = 0.0
        for count, guess in enumerate(guesses[: self.limits.max_step_sequences], 1):
            gain, ahead = gain + guess.gain, ahead + guess.gain * guess.chance
            each = self._doubt * self._pass_seconds(count)
            more, chance, sum_ = gain, ahead / gain, tokens
            most = min(guess.most - len(guess.tokens), (len(seconds) - 1) // count)
            for passes in range(1, most + 1):
                more *= chance
                sum_ += more
                speed = sum_ / (seconds[passes * count] + passes * each)
                if speed > rate:
                    best, rate = count, speed
        return guesses[:best], rate

    def _pass_seconds(self, texts: int) -> float:
        line = self._times.line
        return line[min(texts, len(line) - 1)] if line else 0.0  # unknown: it is tried

    def _leave_new(self, chosen: Sequence[Guess], saved: float, usual: float) -> Sequence[Guess]:
        """Return them without texts that are new, where these take more time than they save.

        saved: seconds of a token.
        """
        new = [guess.copy for guess in chosen if guess.copy.text.pending > NEAR]
        if not new or not self._row_seconds:
            return chosen
        answers = (copy.request.max_tokens - copy.request.generated for copy in new)
        left = fmean(min(answer, usual) for answer in answers)
        takes = sum(copy.text.pending for copy in new) * median(self._row_seconds)
        return chosen if takes < left * saved else [g for g in chosen if g.copy not in new]

    # ---- a pass ----

    def _open(self, request: Request) -> _DraftText:
        text = Request(request.id, [], 0, 1, SamplingParams(), Metrics(0.0))
        text.computed = self.pool.open(request.id, hash_blocks(request.tokens))
        text.tokens = request.tokens[: text.computed]
        copy = self._copies[request.id] = _DraftText(request, text, text.computed)
        copy.follow(self.limits.vocab_size)
        return copy

    def _pass(self, guesses: Sequence[Guess], new_rows: int) -> Sequence[Guess]:
        """Have the model read what is left of texts; return the drafts that got a token.

        new_rows: most of texts that are new.
        """
        chunks, decodes = list[PrefillChunk](), list[int]()
        ended: tuple[list[Guess], list[Guess]] = [], []
        room = min(self.limits.max_step_tokens, new_rows + NEAR * len(guesses))
        for guess in sorted(guesses, key=lambda guess: guess.copy.text.pending):
            text = guess.copy.text
            length = min(text.pending, room)
            if not (length and self._make_room(text)):
                continue
            room -= length
            single = text.pending == 1
            if length == text.pending:
                ended[single].append(guess)
            if single:
                decodes.append(text.id)
            else:
                chunks.append(PrefillChunk(text.id, text.computed, length))
        return self._compute(chunks, decodes, [*ended[0], *ended[1]])

    def _make_room(self, text: Request) -> bool:
        """Tell whether a text has blocks, or got them."""
        length = len(text.tokens)
        missing = self.pool.missing(text.id, length)
        if length > self.limits.max_context or missing > self.pool.free_blocks:
            return False
        self.pool.grow(text.id, length)
        return True

    def _compute(
        self, chunks: Sequence[PrefillChunk], decodes: Sequence[int], ended: Sequence[Guess]
    ) -> Sequence[Guess]:
        """ended: whose texts are read to their end, in row order."""
        if not (chunks or decodes):
            return ()
        lengths = {chunk.request: chunk.length for chunk in chunks} | dict.fromkeys(decodes, 1)
        texts = {number: self._copies[number].text for number in lengths}
        batch, began = Batch(tuple(chunks), cpu_decode=tuple(decodes)), self._clock()
        found = self._read(batch, texts, self.pool.table)
        took = self._clock() - began
        if batch.tokens > NEAR * len(texts):
            self._row_seconds.append(took / batch.tokens)
        else:  # a token of each text, or two where its draft held
            usual = self._pass_seconds(len(texts))
            self._doubt = min(1.0, took / usual) if usual and self._doubt < 1.0 else 1.0
            self._times.learn(len(texts), took)
        for number, text in texts.items():
            text.computed += lengths[number]
            known = self._copies[number].known  # what it thought is for nobody else
            self.pool.publish(number, text.tokens, min(text.computed, known))
        pairs = zip(ended, found, strict=True)
        return [guess for guess, (token, sure) in pairs if self._take(guess, token, sure)]

    def _take(self, guess: Guess, token: int, logprob: float) -> bool:
        """Add a token to a draft; tell whether it can be one."""
        copy = guess.copy
        if not math.isfinite(logprob) or not 0 <= token < self.limits.vocab_size:
            return False
        accepts, tokens = copy.request.accepts, [*guess.tokens, token]
        if accepts is not None and accepts(tokens) < len(tokens):
            return False
        probability = math.exp(min(0.0, logprob))
        kind = min(SURENESS - 1, int(SURENESS * probability))
        guess.gain *= self._of(copy.request).sure[kind].chance(probability)
        guess.tokens, guess.gains = tokens, [*guess.gains, guess.gain]
        copy.sure.append(kind)
        copy.text.tokens.append(token)
        return True
