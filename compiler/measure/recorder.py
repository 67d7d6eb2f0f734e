"""A measurer that remembers: trials that are on record are not run again, new ones are recorded.

In: a `Measurer` that runs trials, what identifies the library and the machine, and earlier records.
Out: measurements that compare with each other, and a record of each trial as soon as it is done.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from dovetail.codegen.targets import TARGETS
from dovetail.compiler.measure.meter import (
    SKIPPED,
    Candidate,
    Case,
    GateCase,
    Measurement,
    StoppableMeasurer,
)
from dovetail.compiler.measure.paired import PairedRatio
from dovetail.ir.artifact import KernelIndex
from dovetail.ir.tuning import (
    OK,
    TIMEOUT,
    HardwareKey,
    RecordKey,
    RecordSet,
    Reference,
    TuningRecord,
    WorkKey,
)
from dovetail.topology.hardware import HardwareSpec

BATCH = 16
"""Trials timed in turns and recorded together: what a kill at a bad moment loses at most."""
BEHIND = "+"
"""Between the builds of a gate and of the product before it."""
TRIES = 2
"""How often trials are run while the machine turns out to be busy with something else."""


def hardware_key(hardware: HardwareSpec, cores: int, abi: int) -> HardwareKey:
    """Return the key under which times on `cores` cores of a machine are kept."""
    known = frozenset[str]().union(*(target.cpu_features for target in TARGETS.values()))
    return HardwareKey(
        arch=hardware.arch,
        isa=tuple(sorted(known.intersection(hardware.isa_flags))),
        cpu=hardware.cpu_model,
        caches=(hardware.cache_bytes(1), hardware.cache_bytes(2), hardware.cache_bytes(3)),
        cores=cores,
        abi=abi,
    )


@dataclass(frozen=True, slots=True)
class Identity:
    """What all trials of one library on one machine share; makes their records."""

    hardware: HardwareSpec
    index: KernelIndex
    builds: dict[str, str]

    @classmethod
    def of(cls, hardware: HardwareSpec, index: KernelIndex) -> Identity:
        """Return the identity of a library whose kernels are in `index`."""
        tools = msgspec.json.encode((index.compiler, index.flags))
        builds = {
            kernel.name: hashlib.sha256(tools + kernel.digest.encode()).hexdigest()[:16]
            for kernel in index.kernels
        }
        return cls(hardware, index, builds)

    def machine(self, cores: int) -> HardwareKey:
        """Return the key of the machine when so many cores are used."""
        return hardware_key(self.hardware, cores, self.index.abi)

    def matching(self, records: Iterable[TuningRecord]) -> Iterator[TuningRecord]:
        """Yield the records of this machine that were made with these kernels."""
        machines: dict[int, HardwareKey] = {}
        known = frozenset(self.builds.values())
        for record in records:
            own, behind, before = record.build.partition(BEHIND)
            if self.builds.get(record.kernel) != own or (behind and before not in known):
                continue
            threads = record.threads
            if threads not in machines:
                machines[threads] = self.machine(threads)
            if record.hardware == machines[threads] and record.target == self.index.target:
                yield record

    def key(self, case: Case, candidate: Candidate, rounds: int) -> RecordKey:
        """Return what a record of this trial answers for."""
        unknown = Measurement(candidate=candidate, status=TIMEOUT)
        return self.record(case, unknown, rounds=rounds).key

    def _build(self, case: Case, kernel: str) -> str:
        """Return the build of a kernel, and of the product that a gate is behind."""
        before = case.before(kernel) if isinstance(case, GateCase) else None
        return self.builds[kernel] + (BEHIND + self.builds[before] if before else "")

    def record(
        self,
        case: Case,
        found: Measurement,
        *,
        rounds: int,
        reference: Reference | None = None,
        cost: float = 0.0,
    ) -> TuningRecord:
        """Return the record of a trial that ended now."""
        return TuningRecord(
            target=self.index.target,
            hardware=self.machine(case.threads),
            kernel=found.candidate.kernel,
            build=self._build(case, found.candidate.kernel),
            kind=case.kind,
            shape=case.shape,
            dtype=case.dtype,
            threads=case.threads,
            schedule=found.candidate.schedule,
            status=found.status,
            seconds=found.seconds,
            low=found.low,
            high=found.high,
            runs=found.runs,
            rounds=rounds,
            reference=reference,
            ratio=found.ratio,
            cost=cost,
            when=datetime.now(UTC),
        )


@dataclass(frozen=True, slots=True)
class Allowance:
    """Seconds in which trials may be run: in all, and those that untried work has anyway."""

    seconds: float = math.inf
    untried: Mapping[WorkKey, float] = field(default_factory=dict)

    def less(self, spent: float) -> Allowance:
        """Return what is left when so many seconds are spent."""
        return Allowance(max(0.0, self.seconds - spent), self.untried)


class NoMachine:
    """A measurer of a machine that is not at hand: of its trials there are records at best."""

    def now(self) -> float:
        """Return 0: no time passes."""
        return 0.0

    def stop(self) -> None:
        """Nothing runs."""

    def measure(
        self, case: Case, candidates: Sequence[Candidate], *, rounds: int, seconds: float
    ) -> tuple[Measurement, ...]:
        """Return nothing but that no candidate was run."""
        return tuple(Measurement(candidate=c, status=SKIPPED) for c in candidates)


@dataclass(slots=True)
class Recorder:
    """A `Measurer` over another one: looks trials up first, records those it has to run.

    trials: all records that answered, in order, times as they were measured. measured: how many
    of them were run. disturbed: trials that came to nothing, since the machine was busy each time.
    since: earlier records do not count. allowance: seconds of running
    trials after which those that are missing are skipped. notify: told of every record.
    """

    inner: StoppableMeasurer
    identity: Identity
    records: RecordSet = field(default_factory=RecordSet)
    since: datetime | None = None
    allowance: Allowance = field(default_factory=Allowance)
    notify: Callable[[TuningRecord], None] | None = None
    trials: list[TuningRecord] = field(default_factory=list)
    measured: int = 0
    disturbed: int = 0
    _spent: dict[WorkKey, float] = field(default_factory=lambda: defaultdict(float))
    _references: dict[Case, Reference | None] = field(default_factory=dict)

    def now(self) -> float:
        """Return the inner clock: budgets are for trials that are run."""
        return self.inner.now()

    @property
    def spent(self) -> float:
        """Seconds in which trials were run."""
        return sum(self._spent.values())

    def may_run(self, work: WorkKey) -> bool:
        """Tell whether there is time left for trials of some work."""
        own = self.allowance.untried.get(work, 0.0)
        return self.spent < self.allowance.seconds or self._spent[work] < own

    def measure(
        self, case: Case, candidates: Sequence[Candidate], *, rounds: int, seconds: float
    ) -> tuple[Measurement, ...]:
        """Return one measurement per candidate; times are scaled to the case's first reference."""
        wanted = tuple(dict.fromkeys(candidates))
        found = {c: r for c in wanted if (r := self._on_record(case, c, rounds)) is not None}
        if isinstance(case, GateCase):  # a ratio is to the product of its search
            found = {c: r for c, r in found.items() if _is_beside(r, wanted[0])}
        self._count(found.values())
        missing = [c for c in wanted if c not in found]
        first = self._first(case, wanted[0], found)
        for start in range(0, len(missing), BATCH):
            if not self.may_run(case.work):
                break
            batch = missing[start : start + BATCH]
            share = seconds * len(batch) / len(missing)
            found |= self._run_calmly(case, first, batch, rounds, share)
        if wanted[0] in found:
            self._references.setdefault(case, found[wanted[0]].reference)
        base = self._references.get(case)
        return tuple(
            _measurement(found[c], base) if c in found else Measurement(candidate=c, status=SKIPPED)
            for c in candidates
        )

    def _first(
        self, case: Case, wanted: Candidate, found: Mapping[Candidate, TuningRecord]
    ) -> Candidate:
        """Return the case's reference: as before, or of the records, or the one wanted first."""
        recorded = found[wanted].reference if wanted in found else None
        reference = self._references.get(case, recorded)
        if reference is None or self.identity.builds.get(reference.kernel) != reference.build:
            return wanted
        return Candidate(reference.kernel, reference.schedule)

    def _on_record(self, case: Case, candidate: Candidate, rounds: int) -> TuningRecord | None:
        record = self.records.lookup(self.identity.key(case, candidate, rounds))
        return None if record and self.since and record.when < self.since else record

    def _run_calmly(
        self, case: Case, first: Candidate, batch: Sequence[Candidate], rounds: int, seconds: float
    ) -> dict[Candidate, TuningRecord]:
        """Run a batch, and once more what was disturbed; what still is comes to nothing."""
        found: dict[Candidate, TuningRecord] = {}
        for _ in range(TRIES):
            left = [candidate for candidate in batch if candidate not in found]
            if left and self.may_run(case.work):
                made = self._run(case, first, left, rounds, seconds)
                found |= {c: r for c, r in made.items() if self.records.trusts(r)}
        self.measured += len(found)
        self.disturbed += len(batch) - len(found)
        self._count(found.values())
        return found

    def _run(
        self, case: Case, first: Candidate, batch: Sequence[Candidate], rounds: int, seconds: float
    ) -> dict[Candidate, TuningRecord]:
        """Time a batch in turns with the reference, and record it."""
        start = self.inner.now()
        asked = tuple(dict.fromkeys((first, *batch)))
        measured = self.inner.measure(case, asked, rounds=rounds, seconds=seconds)
        cost = (self.inner.now() - start) / len(batch)
        self._spent[case.work] += cost * len(batch)
        reference = self._reference(measured[0])
        made = {
            m.candidate: self.identity.record(
                case, m, rounds=rounds, reference=reference, cost=cost
            )
            for m in measured
            if m.candidate in batch
        }
        self.records.append(tuple(made.values()))
        return made

    def _reference(self, found: Measurement) -> Reference | None:
        if found.status != OK:
            return None
        kernel, schedule = found.candidate.kernel, found.candidate.schedule
        build = self.identity.builds[kernel]
        return Reference(kernel=kernel, build=build, schedule=schedule, seconds=found.seconds)

    def _count(self, records: Iterable[TuningRecord]) -> None:
        for record in records:
            self.trials.append(record)
            if self.notify:
                self.notify(record)


def describe_failed(recorders: Iterable[Recorder]) -> str | None:
    """Return a sentence on the trials that failed, by how they did; None where all were right."""
    failed = {r.key: r.status for recorder in recorders for r in recorder.trials if r.status != OK}
    if not failed:
        return None
    counts = ", ".join(
        f"{count} {status}" for status, count in sorted(Counter(failed.values()).items())
    )
    return f"{len(failed)} of the schedules that were tried failed ({counts}); none of them serves"


def describe_disturbed(recorders: Iterable[Recorder]) -> str | None:
    """Return a sentence on the trials that other load has spoilt, None where there are none."""
    count = sum(recorder.disturbed for recorder in recorders)
    if not count:
        return None
    return (
        f"{count} trials were disturbed by other work on the machine and do not count, nor do "
        "their seconds; `dovetail tune --missing` runs them again, as does a later compile on a "
        "quiet machine if most trials were disturbed"
    )


def _is_beside(record: TuningRecord, first: Candidate) -> bool:
    known = record.reference
    return known is not None and (known.kernel, known.schedule) == (first.kernel, first.schedule)


def _measurement(record: TuningRecord, base: Reference | None) -> Measurement:
    """Return what a record says, in the machine's state when the base was timed."""
    scale = record.scale_to(base)
    return Measurement(
        candidate=Candidate(record.kernel, record.schedule),
        status=record.status,
        seconds=record.seconds * scale,
        low=record.low * scale,
        high=record.high * scale,
        runs=record.runs,
        ratio=PairedRatio(*record.ratio),
    )
