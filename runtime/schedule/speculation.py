"""Which tokens are drafted for the next step, so that it may bring a request several of them.

In: a planned step with decodes, what its requests have written, how long steps took. Out: the step
with rows for drafted tokens: what stood behind the longest end of a request's text where it stood
before, in the prompt, the answer or what is given beside them, what the request's grammar forces,
or what a draft model thinks where that is likelier to hold. A drafted token counts if it is the one
that is chosen in its place, so tokens are the same with drafts and without, however they are
chosen. A row is drafted where it raises the tokens that a second should bring, by the measured
times of steps and by what came of the request's drafts.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from dovetail.ir.errors import DovetailError, RequestError
from dovetail.runtime.schedule.draft_model import Drafter, Guess
from dovetail.runtime.schedule.experience import FADE, FADE_ALL, MARGIN, HitRate, RowTimes
from dovetail.runtime.schedule.plan import Batch, StepPlan
from dovetail.runtime.schedule.queue import RequestQueues
from dovetail.runtime.schedule.request import Request
from dovetail.runtime.schedule.suffix_automaton import SuffixAutomaton

DRAFTED = 8
"""Most tokens that are drafted for a request in a step, where nothing else is said."""
FORCED = 0.9
"""Part of the tokens forced by grammars that should hold: others may spell the same text."""
SHORT, LONG = 2, 31
"""Tokens of a match: shorter ones are none, longer ones as good."""
SHARE = 0.005
"""Part of the time that looks after a request's first one take: where steps are short, most pass
without."""
FREE = 0.8
"""A look costs nothing: it gives way only where its chance is below this part of the model's."""
EARNED = 0.5
"""What looks may take, too: this part of the time that a drafted token saves which holds."""
MOST_SAVED = 2e-4
"""Seconds that are kept for looks."""
MOST_READ = 1 << 14
"""Last tokens of a prompt that are looked up."""
MOST_BESIDE = 1 << 11
"""Tokens beside a request that are: few, for all are read when it is looked up first."""

log = logging.getLogger("dovetail")


def read_speculation(config: Mapping[str, object] | str | None) -> int:
    """Return the most drafted tokens by vLLM's `speculative_config`, a mapping or JSON; 0: none.

    Raises RequestError for another method than `suffix`, or a wrong value.
    """
    if config is None:
        return 0
    try:
        read = json.loads(config) if isinstance(config, str) else config
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, Mapping):
        raise RequestError('speculative_config must be an object such as {"method": "suffix"}')
    given = dict(read)
    if (method := given.pop("method", "suffix")) != "suffix":
        raise RequestError(f"speculative_config: the method is suffix, not {method!r}")
    most = given.pop("num_speculative_tokens", DRAFTED)
    if given:
        raise RequestError(
            f"speculative_config has method and num_speculative_tokens, not {sorted(given)[0]!r}"
        )
    if isinstance(most, bool) or not isinstance(most, int) or not 0 <= most <= 64:
        raise RequestError(f"num_speculative_tokens must be from 0 to 64, not {most!r}")
    return most


class Lookup:
    """The text of a request, what came of its drafts, the size of its last match (0: forced)."""

    def __init__(self, request: Request) -> None:
        self._text = SuffixAutomaton()
        self._text.extend(request.beside[:MOST_BESIDE])
        self._read = max(0, len(request.tokens) - MOST_READ)
        self.hits, self.size = HitRate(FADE), 0

    def draft(self, request: Request, most: int) -> list[int]:
        """Return up to `most` tokens that may follow; sets `size`."""
        if request.forced:
            self.size = 0
            return request.forced[:most]
        text = self._text
        text.extend(request.tokens[self._read :])
        self._read = len(request.tokens)
        length, place = text.find()
        self.size = min(length, LONG).bit_length()
        if length < SHORT:
            return []
        found = text.read(place, most)
        return found[: request.accepts(found)] if request.accepts is not None else found


class Speculation:
    """Drafts of all requests of a scheduler."""

    def __init__(self, most: int, rows: int) -> None:
        """most: tokens that are drafted for a request. rows: of a step, at most."""
        self._most, self._rows = most, rows
        self.times = RowTimes(rows)
        """Of steps that only decode."""
        self._mixed = RowTimes(2 * rows)
        """Of those that read prompts, too."""
        self.drafter: Drafter | None = None
        """A draft model: who opens the engine has one."""
        self.counts: Counter[str] = Counter()
        """Drafts, their tokens, and those of them that were chosen, under vLLM's names."""
        self._guessed: Collection[int] = ()
        """Requests whose drafts of the step under way are the model's."""
        self._last: tuple[RowTimes, tuple[int, ...], int, float] | None = None
        """Whose times the step under way counts among, its decodes, rows and beginning."""
        self._lookups: WeakKeyDictionary[Request, Lookup] = WeakKeyDictionary()
        self._hits = [HitRate(FADE_ALL) for _ in range(LONG.bit_length() + 1)]
        """By the size of the match: 1, 2 to 3, 4 to 7 tokens and so on."""
        self.share = SHARE
        self._saved = 0.0  # seconds for looks, none below 0
        self._earned = 0.0  # by a token that holds
        self._before: tuple[int, float] | None = None  # a request of the last step, when it began

    def extend(self, plan: StepPlan, queues: RequestQueues) -> StepPlan:
        """Return `plan` with rows for drafts, which their requests hold as `drafted`.

        A request is named once for each of its rows. Steps of two batches, and such as move KV, get
        none.
        """
        last, self._last = self._last, None
        if plan.moves or len(plan.batches) != 1 or not plan.batches[0].tokens:
            return plan
        (batch,), now = plan.batches, queues.clock()
        members = (*batch.gpu_decode, *batch.cpu_decode)
        if self._before is not None and self._before[0] in queues.requests:  # it was busy since
            self._earn(self.share * (now - self._before[1]))
        self._before = members[0] if members else batch.prefill[0].request, now
        if last is not None and last[1] == members[: len(last[1])]:
            last[0].learn(last[2], now - last[3])
        looks = self._saved >= 0
        if not members or not (looks or self.drafter):
            return plan
        times = self._mixed if batch.prefill else self.times
        rows, drafted, guessing = batch.tokens, dict[int, int](), 0.0
        if rows < len(times.line):
            known = len(self._lookups)
            drafted, guessing = self._draft(batch, times.line, queues, looks)
            if looks and len(self._lookups) == known:
                self._saved += now + guessing - queues.clock()
            self._earned = EARNED * times.line[rows] / len(members)
        self._last = times, members, rows + sum(drafted.values()), now + guessing
        if not drafted:
            return plan
        gpu, cpu = (
            tuple(n for n in numbers for _ in range(1 + drafted.get(n, 0)))
            for numbers in (batch.gpu_decode, batch.cpu_decode)
        )
        return replace(plan, batches=(replace(batch, gpu_decode=gpu, cpu_decode=cpu),))

    def learn(self, request: Request, *, held: bool) -> None:
        """Take note of a drafted token: whether it was the one that was chosen."""
        self.counts["accepted_tokens"] += held
        if self.drafter is not None and request.id in self._guessed:
            self.drafter.learn(request, held=held)
            return
        lookup = self._lookups[request]
        self._hits[lookup.size].learn(held)
        if lookup.size:
            lookup.hits.learn(held)
        self._earn(held * self._earned)

    def _earn(self, seconds: float) -> None:
        self._saved = min(self._saved + seconds, MOST_SAVED)

    def _draft(
        self, batch: Batch, line: Sequence[float], queues: RequestQueues, looks: bool
    ) -> tuple[dict[int, int], float]:
        """Give requests their drafts; return how many tokens each got, the model's seconds."""
        members = (*batch.gpu_decode, *batch.cpu_decode)
        found: dict[int, tuple[list[int], list[float]]] = {}  # and the chances that they hold
        unsure: dict[Request, int] = {}
        for number in members:
            request = queues.requests[number]
            most = min(self._most, request.max_tokens - request.generated - 1)
            if most < 1:
                continue
            tokens, chance = self._look_up(request, most) if looks else ([], 0.0)
            found[number] = tokens, [chance ** (i + 1) for i in range(len(tokens))]
            if self.drafter and (not tokens or chance < FREE * self.drafter.chance(request)):
                unsure[request] = most
        room = min(
            self._rows - len(members) - sum(chunk.places for chunk in batch.prefill),
            queues.limits.max_step_tokens - batch.tokens,
            len(line) - 1 - batch.tokens,
        )
        seconds = line[batch.tokens : batch.tokens + max(0, room) + 1]
        guesses, guessing = self._guess(unsure, seconds, len(members), queues.answer_tokens)
        self._guessed = guesses.keys()
        found.update((number, (guess.tokens, guess.gains)) for number, guess in guesses.items())
        gains = [(gain, number) for number, (_, chances) in found.items() for gain in chances]
        gains.sort(reverse=True)
        chosen = gains[: _choose(gains[: max(0, room)], seconds, len(members))]
        counts = Counter(number for _, number in chosen)
        given: dict[int, int] = {}
        for number, count in counts.items():
            request = queues.requests[number]
            have = queues.room_for(request, count, spare=len(members))
            if tokens := found[number][0][:have]:
                request.drafted, given[number] = tokens, len(tokens)
        self.counts["drafts"] += len(given)
        self.counts["draft_tokens"] += sum(given.values())
        return given, guessing

    def _look_up(self, request: Request, most: int) -> tuple[list[int], float]:
        """Return what may follow by the request's text or its grammar, and each token's chance."""
        lookup = self._lookups.get(request)
        if lookup is None:
            lookup = self._lookups[request] = Lookup(request)
        tokens = lookup.draft(request, most)
        usual = self._hits[lookup.size].chance(lookup.size / (lookup.size + 2) or FORCED)
        return tokens, lookup.hits.chance(usual) if lookup.size else usual

    def _guess(
        self,
        wanted: Mapping[Request, int],
        seconds: Sequence[float],
        tokens: int,
        usual: float | None,
    ) -> tuple[Mapping[int, Guess], float]:
        """Return what the draft model thinks, and its seconds; one that fails is left out."""
        if not (self.drafter and wanted):
            return {}, 0.0
        try:
            found = self.drafter.draft(wanted, seconds, tokens, usual or math.inf)
        except DovetailError as error:
            log.warning("the draft model is not used any more: %s", error)
            self.drafter = None
            return {}, 0.0
        return found, self.drafter.spent


def _choose(gains: Sequence[tuple[float, int]], seconds: Sequence[float], tokens: float) -> int:
    """Return how many of the rows with these gains raise the tokens of a second most.

    seconds: of the step by rows beyond those that it has, in which it brings `tokens`.
    """
    most, best = tokens / seconds[0] * MARGIN, 0
    for count, (gain, _) in enumerate(gains, 1):
        tokens += gain
        if tokens > most * seconds[count]:
            best, most = count, tokens / seconds[count]
    return best
