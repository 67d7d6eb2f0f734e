"""Why an artifact is served the way it is: candidates, their scores, the figures behind them.

The contents of `plans/choice.json`; `graph/serve.json` holds what was chosen.
"""

from __future__ import annotations

import msgspec

CHOICE = "plans/choice.json"
SIMULATED, MEASURED, ASKED = "simulated", "measured", "asked for"
"""Where a choice comes from: the contention model, a replay on this machine, the user."""


class Figure(msgspec.Struct, frozen=True):
    """One number of the contention model, in SI units, and where it comes from."""

    value: float
    source: str


class PlanCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration of a phase; seconds of that phase per request of the trace.

    cpus: process by process. nodes: the NUMA nodes that each process uses. levels: the TopoTree it
    was cut from. measured: None where it was not run. tuned: its kernels were searched for, so that
    it was measured with these, not with those of the default schedules.
    """

    processes: int
    threads: int
    cpus: tuple[int, ...]
    nodes: tuple[tuple[int, ...], ...]
    levels: str
    simulated: float | None = None
    measured: float | None = None
    tuned: bool = False


class PairChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Indices of a prefill and of a decode candidate; seconds per request of the trace.

    switch: of the simulated seconds, those that moving between different memory nodes costs.
    """

    prefill: int
    decode: int
    simulated: float | None = None
    switch: float = 0.0
    measured: float | None = None


class DivisionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A division of the CPU: the PUs that each stage keeps while other workers work.

    seconds: that a request of each kind takes the workers, what is idle being lent, simulated.
    busiest: of those, what the busiest worker would take if nothing were; None: nobody has a share.
    """

    shares: dict[str, tuple[int, ...]]
    seconds: float
    busiest: float | None = None


class PlanChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`plans/choice.json`: all pairs that were compared; the first one was chosen.

    source: SIMULATED, MEASURED or ASKED. batches: sequences decoded together, each number for an
    equal part of the tokens. replay: what was run to measure. cut: what the search of
    configurations left out. divisions: of the CPU, the one that serves first, all cores for
    everyone last.
    """

    schema: int = 1
    source: str
    trace: str = ""
    batches: tuple[int, ...] = (1,)
    replay: str = ""
    prefill: tuple[PlanCandidate, ...]
    decode: tuple[PlanCandidate, ...]
    pairs: tuple[PairChoice, ...]
    divisions: tuple[DivisionChoice, ...] = ()
    figures: dict[str, Figure] = {}
    cut: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def processes(self) -> set[int]:
        """The numbers of processes of any phase."""
        return {candidate.processes for candidate in (*self.prefill, *self.decode)}
