"""What drafted tokens brought, and what steps took, of late: what drafting is decided by.

In: whether drafted tokens held, seconds of steps. Out: the chance of the next one, seconds by rows.
"""

from __future__ import annotations

import itertools
from collections import deque

KEPT = 8
"""Newest times of steps with a number of rows: their median counts."""
FEW = 4
"""Times from which they count."""
STALE = 512
"""Steps after which times do not count any more: texts have become longer or shorter."""
REVIEW = 8
"""Steps between two looks at the times."""
EASE = 12
"""Beyond the rows whose times are known, a step is expected to take twice as long with so many
more, and as many again: little enough that it is tried."""
MARGIN = 1.1
"""More tokens a second by this factor are expected of a step with drafts."""
PRIOR = 3.0
"""Drafted tokens that count for as much as what is expected without any."""
FADE, FADE_ALL = 0.95, 0.98
"""What each drafted token leaves of what those before it count: of a request, of all."""
FORGET = 0.99
"""What a step without drafts leaves of it: what was given up is tried again now and then."""


class HitRate:
    """Drafted tokens that were chosen, and those that were not; the newest ones count most."""

    def __init__(self, fade: float) -> None:
        self._fade, self._held, self._all = fade, 0.0, 0.0

    def learn(self, held: bool) -> None:
        """Take note of a drafted token."""
        self._held, self._all = self._held * self._fade + held, self._all * self._fade + 1

    def forget(self) -> None:
        """Let what was seen count a little less."""
        self._held, self._all = self._held * FORGET, self._all * FORGET

    def chance(self, expected: float) -> float:
        """Return the part that holds, where `expected` is what one would think without any."""
        return (self._held + PRIOR * expected) / (self._all + PRIOR)


class RowTimes:
    """Seconds of a step by its rows, from those of late."""

    def __init__(self, most: int) -> None:
        """`most`: rows of a step."""
        self._most = most
        self._seen: dict[int, deque[float]] = {}
        self._newest: dict[int, int] = {}
        self._steps = 0
        self.line: list[float] = []
        """Seconds by rows, from 0; empty while nothing is known."""

    def learn(self, rows: int, seconds: float) -> None:
        """Take note of a step; one of more rows than the most tells nothing."""
        if rows > self._most:
            return
        self._steps += 1
        seen = self._seen.setdefault(rows, deque(maxlen=KEPT))
        if self._newest.get(rows, 0) < self._steps - STALE:
            seen.clear()
        seen.append(seconds)
        self._newest[rows] = self._steps
        if len(seen) <= FEW or self._steps % REVIEW == 0:
            self._draw()

    def _draw(self) -> None:
        known = [
            (rows, sorted(seen)[(len(seen) - 1) // 2])
            for rows, seen in sorted(self._seen.items())
            if len(seen) >= FEW and self._newest[rows] >= self._steps - STALE
        ]
        if not known:
            self.line = []
            return
        line = [known[0][1]] * (known[0][0] + 1)
        for (low, before), (high, after) in itertools.pairwise(known):
            step = (after - before) / (high - low)
            line += [before + step * (i + 1) for i in range(high - low)]
        rows, seconds = known[-1]
        more = range(1, self._most - rows + 1)
        self.line = line + [seconds * (1 + i / (rows + EASE)) for i in more]
