"""How long stages take: what was measured beforehand, and what reports teach meanwhile.

In: measured `StageCosts`, then seconds of sub-stages, searches and replies. Out: the budget of a
sub-stage and the predictions by which a transformation is kept or left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from dovetail.ir.workflow import Name
from dovetail.runtime.retrieval.budget import ScanCost, best_budget

FRESH = 0.1
"""Weight of the newest figure in a running mean."""
TINY = 1e-12
"""Seconds that nothing takes less of: what is divided by may have been measured as nothing."""
PARTS = 8
"""Sub-stages of a reply at most."""
BUCKETS = 16
"""Parts of a search for which it is counted apart how often what was best then stayed so."""
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

    node: Name
    characters: int
    search: Name
    left: float
    scanned: float


@dataclass(slots=True)
class Learned:
    """Running figures. stage: mean seconds of a whole search (t_R), None before the first.

    replies: mean seconds of each node's. kept: of each node's searches, how often what was nearest
    after a part of it stayed so, and how often that was looked at.
    """

    costs: StageCosts
    overhead: float = field(init=False)
    stage: float | None = None
    speed: float = 1.0  # seconds that scans took, over those predicted
    replies: dict[Name, float] = field(default_factory=dict)
    kept: dict[tuple[Name, int], tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin with what was measured."""
        self.overhead = self.costs.overhead + self.costs.scan.fixed

    @property
    def budget(self) -> float:
        """Seconds that a sub-stage should take (mb)."""
        return best_budget(self.overhead, self.stage or 0.0)

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

    def reply(self, node: Name) -> float:
        """Predict the seconds of a node's reply."""
        return self.replies.get(node, self.costs.reply)

    def steps(self, node: Name, batch: int) -> int:
        """Return how many decode steps of a node's reply fit in a sub-stage; at least one.

        A reply is cut into PARTS at most: more would tell little, and each is a report.
        """
        seconds = max(self.budget, self.reply(node) / PARTS)
        return max(1, int(seconds / max(self.costs.step.seconds(batch), TINY)))

    def scan_seconds(self, vectors: Sequence[int]) -> float:
        """Predict a scan on the CPU of so many vectors for each search."""
        return self.speed * self.costs.scan.seconds(vectors)

    def shared_seconds(self, vectors: int) -> float:
        """Predict how long all threads take to compare so many vectors."""
        cost = self.costs.scan
        return self.speed * cost.per_vector * vectors / cost.threads

    def guess_gain(self, guess: Guessed, load: int) -> float:
        """Predict the seconds that begin a generation on a guess saves, less what others lose.

        If the guess holds, generation and the rest of the search overlap; if not, its prompt and
        steps have held up the `load` generations under way.
        """
        step, overlap = self.costs.step, min(guess.left, self.reply(guess.node))
        slower = step.per_sequence / max(step.seconds(load + 1), TINY)
        lost = load * (step.prefill * guess.characters + overlap * slower)
        chance = self.chance(guess.search, guess.scanned)
        return chance * overlap - (1 - chance) * lost

    def scout_gain(self, search: Name) -> float:
        """Predict the seconds that a history saves a node's search, less what looking costs others.

        Where the first part of a search shows what is nearest, a history shows nothing sooner. Who
        comes while a scout is scanned for waits for half a sub-stage.
        """
        first = min((part for name, part in self.kept if name == search), default=0)
        sooner = 1 - self.chance(search, first / BUCKETS)
        return sooner * (self.stage or inf) - self.budget / 2

    def chance(self, search: Name, scanned: float) -> float:
        """Return how often what was best after part of a node's search stayed so."""
        kept, tried = self.kept.get((search, _bucket(scanned)), UNKNOWN)
        return kept / tried

    # ---- what reports teach ----

    def stayed(self, search: Name, scanned: float, held: bool) -> None:
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

    def replied(self, node: Name, seconds: float) -> None:
        """Take the seconds of a whole generation."""
        self.replies[node] = _mean(self.reply(node), seconds)


def _mean(before: float, newest: float) -> float:
    return before + FRESH * (newest - before)


def _bucket(part: float) -> int:
    return min(int(part * BUCKETS), BUCKETS - 1)
