"""How long stages take: what was measured beforehand, and what reports teach meanwhile.

In: measured `StageCosts`, then seconds of sub-stages, searches and replies. Out: the budget of a
sub-stage and the predictions by which a transformation is kept or left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, TypeAlias

from dovetail.ir.live_graph import Left
from dovetail.ir.workflow import Name
from dovetail.runtime.retrieval.budget import ScanCost, best_budget

FRESH = 0.1
"""Weight of the newest figure in a running mean."""
FADED = 1e-3
"""Part of what is known of a node's searches after others that one without a history takes away."""
TINY = 1e-12
"""Seconds that nothing takes less of: what is divided by may have been measured as nothing."""
PARTS = 8
"""Sub-stages of a reply at most."""
BUCKETS = 16
"""Parts of a search for which it is counted apart how often what was best then stayed so."""
Named: TypeAlias = tuple[str, Name]
"""A node by the names of its workflow and its own: others have nodes of that name, too."""
UNKNOWN = (1.0, 2.0)
"""What of nothing known stayed, of how much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of one decode step: `fixed`, and `per_sequence` for each sequence in the batch.

    prefill: that each character of a new prompt adds to a step.
    """

    fixed: float
    per_sequence: float = 0.0
    prefill: float = 0.0

    def seconds(self, batch: int) -> float:
        """Predict a step."""
        return self.fixed + self.per_sequence * batch


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Measured costs to begin with.

    scan: of clusters on the CPU. device: on the GPU, `fixed` being launch and synchronisation;
    None where clusters cannot be there. overhead: seconds that a sub-stage takes beyond its scan
    (beta). step: of the engine. reply: seconds of a whole generation.
    """

    scan: ScanCost
    overhead: float
    step: StepCost
    device: ScanCost | None = None
    reply: float = 1.0


@dataclass(frozen=True, slots=True)
class Guessed:
    """A generation that may be begun on a guess.

    node: that replies, to a prompt of so many characters. search: the node it waits for. left:
    seconds until that is over. scanned: part of it that is over, 0..1.
    """

    node: Named
    characters: int
    search: Named
    left: float
    scanned: float


class Needed(NamedTuple):
    """Parts of a search, 0..1, that hold what it found: those that must be scanned to know it.

    alone: nearest centroid first, had it no history. plain: so, but for the documents of its
    history. ordered: the same as history orders clusters.
    """

    alone: float
    plain: float
    ordered: float


UNTRIED = Needed(alone=1.0, plain=1.0, ordered=0.0)
"""Before a search was seen that came after another: history may save all of it."""


@dataclass(slots=True)
class Learned:
    """Running figures. stage: mean seconds of a whole search (t_R), None before the first.

    came: when the last search came; apart: mean seconds between two, None before the second.
    embedding: seconds until a query is a vector. replies: mean seconds of each node's. needed:
    means of each node's searches after others. kept: of each node's searches, how often what was
    nearest after a part of it stayed so, and how often that was looked at.
    """

    costs: StageCosts
    overhead: float = field(init=False)
    stage: float | None = None
    came: float | None = None
    apart: float | None = None
    embedding: float = 0.0
    speed: float = 1.0  # seconds that scans took, over those predicted
    replies: dict[Named, float] = field(default_factory=dict)
    needed: dict[Named, Needed] = field(default_factory=dict)
    kept: dict[tuple[Named, int], tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin with what was measured."""
        self.overhead = self.costs.overhead + self.costs.scan.fixed

    def budget(self, backlog: float = 0.0) -> float:
        """Return the seconds that a sub-stage should take (mb) where so many seconds' work waits.

        A search that joins it takes as long at least, whatever those before it took (t_R).
        """
        return best_budget(self.overhead, max(self.stage or 0.0, backlog))

    def split_gain(self, work: float, part: float, waiting: float) -> float:
        """Predict the seconds saved where searches of `work` seconds are cut after `part` of them.

        waiting: how many wait for the part: other searches, those that come meanwhile, and whoever
        looks at what is found. On average each waits for half as much less (HedraRAG, Eq. 1), and
        pays, as does the search itself, for more sub-stages.
        """
        more = max(1.0, work / max(self.budget(work), TINY) - 1)
        return waiting * (work - part) / 2 - (1 + waiting) * more * self.overhead

    def coming(self, seconds: float, now: float) -> float:
        """Predict how many searches come in so many seconds; fewer the longer none has come."""
        if self.apart is None or self.came is None:
            return 0.0
        return seconds / max(self.apart, now - self.came, TINY)

    @property
    def device_weight(self) -> float:
        """Seconds of a vector on the device over those that it takes of all threads of the CPU."""
        scan, device = self.costs.scan, self.costs.device
        assert device is not None, "there is no device"
        return device.per_vector * scan.threads / max(scan.per_vector, TINY)

    @property
    def room(self) -> float:
        """Generations up to which an engine is under-used: half of what it can do at most.

        At this many, a step's fixed part takes as long as its sequences do (T_curr < T_max / 2).
        An engine that is idle has room for one, whatever was measured.
        """
        return max(1.0, self.costs.step.fixed / max(self.costs.step.per_sequence, TINY))

    def reply(self, node: Named) -> float:
        """Predict the seconds of a node's reply."""
        return self.replies.get(node, self.costs.reply)

    def steps(self, node: Named, batch: int) -> int:
        """Return how many decode steps of a node's reply fit in a sub-stage; at least one.

        A reply is cut into PARTS at most: more would tell little, and each is a report.
        """
        seconds = max(self.budget(), self.reply(node) / PARTS)
        return max(1, int(seconds / max(self.costs.step.seconds(batch), TINY)))

    def scan_seconds(self, vectors: Sequence[int]) -> float:
        """Predict a scan on the CPU of so many vectors for each search."""
        return self.speed * self.costs.scan.seconds(vectors)

    def shared_seconds(self, vectors: float) -> float:
        """Predict how long all threads take to compare so many vectors."""
        cost = self.costs.scan
        return self.speed * cost.per_vector * vectors / cost.threads

    def guess_gain(self, guess: Guessed, load: int) -> float:
        """Predict the seconds that begin a generation on a guess saves, less what others lose.

        If the guess holds, generation and the rest of the search overlap; but its prompt goes
        before those of searches that end sooner, and what the engine does for prompts in that time
        is what others lose. If not, its prompt and steps have held up the `load` generations under
        way, and those that come meanwhile; and the true prompt waits for what is left of the step
        that computes the wrong one. By Little's law prompts take the part load * prompt / reply of
        the engine's time; from a half on no guess pays.
        """
        step, reply = self.costs.step, max(self.reply(guess.node), TINY)
        overlap, prompt = min(guess.left, reply), step.prefill * guess.characters
        free = 1 - self._prompts(guess, load)
        if free <= 0.5:
            return -inf
        slower = step.per_sequence / max(step.seconds(load + 1), TINY)
        chance = self.chance(guess.search, guess.scanned)
        gained = chance * overlap * (2 - 1 / free)
        lost = load * (prompt / free + overlap * slower) + max(0.0, prompt - overlap)
        return gained - (1 - chance) * lost

    def why_no_guess(self, guess: Guessed, load: int) -> Left:
        """Say why `guess_gain` is nothing."""
        if (part := self._prompts(guess, load)) >= 0.5:
            said = f"prompts take {min(1.0, part):.0%} of the engine's time; from half on none pays"
            return Left("prompts", said)
        chance, left = self.chance(guess.search, guess.scanned), 1e3 * guess.left
        said = (
            f"{left:.1f} ms of the search are left to overlap, and {chance:.0%} of such guesses "
            f"hold: its request and {load} generations under way would lose more"
        )
        return Left("loss", said)

    def _prompts(self, guess: Guessed, load: int) -> float:
        """Return the part of the engine's time that prompts take, by Little's law."""
        prompt = self.costs.step.prefill * guess.characters
        return load * prompt / max(self.reply(guess.node), TINY)

    def scout_gain(self, search: Named, load: int) -> float:
        """Predict the seconds by which a history shows a node's search what is nearest sooner.

        Less what looking costs others: who comes while a scout is scanned for waits for half a
        sub-stage, and the `load` replies under way for the CPU, which turns what is written into
        vectors, two at least, unless the engine has a device. Of nothing known, all may be saved.
        """
        alone, plain, ordered = self.needed.get(search, UNTRIED)
        sooner = (alone - min(plain, ordered)) * (self.stage or inf)
        reading = 2 * self.embedding * load if self.costs.device is None else 0.0
        return sooner - self.budget() / 2 - reading

    def order_gain(self, search: Named) -> float:
        """Predict the seconds by which history's order finds what is nearest sooner."""
        needed = self.needed.get(search, UNTRIED)
        return (needed.plain - needed.ordered) * (self.stage or 1.0)

    def chance(self, search: Named, scanned: float) -> float:
        """Return how often what was best after part of a node's search stayed so."""
        kept, tried = self.kept.get((search, _bucket(scanned)), UNKNOWN)
        return kept / tried

    # ---- what reports teach ----

    def begun(self, now: float) -> None:
        """Take that a search has come which a call waits for."""
        if self.came is not None:
            gap = now - self.came
            self.apart = gap if self.apart is None else _mean(self.apart, gap)
        self.came = now

    def embedded(self, seconds: float) -> None:
        """Take the seconds until a query was a vector."""
        self.embedding = _mean(self.embedding, seconds) if self.embedding else seconds

    def note_needed(self, search: Named, needed: Needed | None) -> None:
        """Take what a node's search after another needed, whichever order was followed.

        None: it had no history. What is known fades then, so that a scout is tried again where
        only scouts would show that they pay by now.
        """
        newest, weight = (UNTRIED, FADED) if needed is None else (needed, FRESH)
        before = self.needed.get(search, UNTRIED)
        pairs = zip(before, newest, strict=True)
        self.needed[search] = Needed(*(_mean(*pair, weight) for pair in pairs))

    def stayed(self, search: Named, scanned: float, held: bool) -> None:
        """Take whether what was best after a part of a node's search was so in the end.

        Old searches count less and less.
        """
        key = search, _bucket(scanned)
        kept, tried = self.kept.get(key, UNKNOWN)
        self.kept[key] = (1 - FRESH) * kept + held, (1 - FRESH) * tried + 1

    def scanned(self, predicted: float, seconds: float, overhead: float) -> None:
        """Take what a scan on the CPU took, and what its sub-stage took beyond comparing vectors.

        overhead: the scan's fixed part, threads that waited for others, and until its report came.
        """
        self.overhead = _mean(self.overhead, max(0.0, overhead))
        if predicted > 0:
            self.speed = max(TINY, _mean(self.speed, self.speed * seconds / predicted))

    def searched(self, seconds: float) -> None:
        """Take the seconds of a whole search, waiting for others included."""
        self.stage = seconds if self.stage is None else _mean(self.stage, seconds)

    def replied(self, node: Named, seconds: float) -> None:
        """Take the seconds of a whole generation."""
        self.replies[node] = _mean(self.reply(node), seconds)


def _mean(before: float, newest: float, weight: float = FRESH) -> float:
    return before + weight * (newest - before)


def _bucket(part: float) -> int:
    return min(int(part * BUCKETS), BUCKETS - 1)
