"""What the last steps of a kind have shown, which is forgotten where no more of them come.

In: samples, and a call now and then. Out: the samples that still count. An answer that keeps steps
of the kind from being made keeps itself from being learnt anew: it fades, so that they are tried
again.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Sample = TypeVar("Sample")


class Recent(Generic[Sample]):
    """At most `most` samples, oldest first; `known` when at least `fewest` are there.

    Fewer give no answer that could keep steps from being made: they stay, and add up.
    """

    def __init__(self, most: int, fewest: int) -> None:
        self.samples: deque[Sample] = deque(maxlen=most)
        self.fewest = fewest
        self._learnt = False  # since the last `review`

    @property
    def known(self) -> bool:
        """Whether there are enough samples for an answer."""
        return len(self.samples) >= self.fewest

    def add(self, sample: Sample) -> None:
        """Take note of a sample."""
        self.samples.append(sample)
        self._learnt = True

    def review(self) -> bool:
        """Forget the oldest of known samples where none came since the last call; tell whether.

        When too few are left for an answer all are: the next answer is that of new ones.
        """
        fades = self.known and not self._learnt
        self._learnt = False
        if fades:
            self.samples.popleft()
            if not self.known:
                self.samples.clear()
        return fades
