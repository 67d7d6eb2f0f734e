"""A `Meter` on a clock of its own: times follow from the candidate, whatever else the machine does.

Put in the place of the real one it makes tests of what searches and jobs do with trials exact.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from dovetail.compiler import pipeline
from dovetail.compiler.measure.meter import Candidate, Case, Measurement
from dovetail.compiler.measure.paired import PairedRatio
from dovetail.compiler.search import choose
from dovetail.compiler.tune import model as tune
from dovetail.ir.artifact import KernelIndex

OVERHEAD = 5e-3
"""Seconds that pass for a candidate beside its runs."""

Trial = tuple[Case, Candidate, int]


class VirtualMeter(closing):
    """A Meter whose clock only measuring moves.

    asked: every trial of every meter. spread: how far apart quartiles lie; a busy machine has 10.
    status: what every trial ends in.
    """

    asked: ClassVar[list[Trial]] = []
    spread: ClassVar[float] = 1.0
    status: ClassVar[str] = "ok"

    def __init__(
        self, library: Path, index: KernelIndex, *, pool_bytes: int, cpus: tuple[int, ...] = ()
    ) -> None:
        super().__init__(self)
        assert library.is_file() and pool_bytes > 0
        self.kernels = {kernel.name for kernel in index.kernels}
        self.clock = 0.0

    def now(self) -> float:
        return self.clock

    def stop(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing runs."""

    def measure(
        self, case: Case, candidates: Sequence[Candidate], *, rounds: int, seconds: float
    ) -> tuple[Measurement, ...]:
        found = [self.one(case, candidate, rounds) for candidate in candidates]
        ratios = [m.seconds / (found[0].seconds or 1.0) for m in found]
        return tuple(
            msgspec.structs.replace(m, ratio=PairedRatio(ratio, ratio * self.spread))
            for m, ratio in zip(found, ratios, strict=True)
        )

    def one(self, case: Case, candidate: Candidate, rounds: int) -> Measurement:
        assert candidate.kernel in self.kernels
        self.asked.append((msgspec.structs.replace(case, cpus=()), candidate, rounds))
        luck = zlib.crc32(msgspec.json.encode((case.shape, candidate))) / 2**32
        time = 1e-4 * (0.5 + luck)
        self.clock += OVERHEAD + rounds * time
        if self.status != "ok":
            return Measurement(candidate=candidate, status=self.status)
        high = time * self.spread
        return Measurement(
            candidate=candidate, status="ok", seconds=time, low=time, high=high, runs=rounds
        )


def use_virtual_meters(patch: pytest.MonkeyPatch) -> list[Trial]:
    """Have compiles and jobs measure virtually; return the list of all trials from now on.

    What is found so serves, though it is in truth no faster than the rules.
    """
    patch.setattr(VirtualMeter, "asked", [])
    for module in (choose, tune):
        patch.setattr(module, "Meter", VirtualMeter)
    patch.setattr(pipeline, "compare_tables", lambda found, *_: (found, None))
    return VirtualMeter.asked
