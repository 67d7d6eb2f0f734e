"""The recording measurer: nothing on record is run again, and all times compare."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from dovetail.codegen.library import LibrarySpec, build_library
from dovetail.codegen.targets import host_target
from dovetail.compiler.measure.meter import Candidate, GemmCase, Measurement, Meter
from dovetail.compiler.measure.paired import PairedRatio
from dovetail.compiler.measure.recorder import (
    BATCH,
    Allowance,
    Identity,
    Recorder,
    describe_disturbed,
    describe_failed,
    hardware_key,
)
from dovetail.compiler.rules.schedules import gemm_requests, make_schedule
from dovetail.ir.artifact import KernelEntry, KernelIndex
from dovetail.ir.tuning import RecordSet
from dovetail.topology.hardware import read_hardware
from tests.compiler.records import TrustingRecords, make_record

CASE = GemmCase(kind="linear", n=32, k=16, m=4, dtype="f32", threads=1)
DEFAULT = Candidate("default", ())


class Script:
    """A measurer that knows how long each candidate takes on a machine of a given slowness."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = {"default": 1.0, "fast": 0.5, "bad": 0.0} | seconds
        self.slowness, self.time, self.asked, self.given = 1.0, 0.0, [], []

    def now(self):
        return self.time

    def measure(self, case, candidates, *, rounds, seconds):
        self.asked.append([c.kernel for c in candidates])
        self.given.append(seconds)
        self.time += 10.0
        return tuple(self.one(c, rounds) for c in candidates)

    def one(self, candidate, rounds):
        seconds = self.seconds[candidate.kernel] * self.slowness
        if not seconds:
            return Measurement(candidate=candidate, status="crash")
        return Measurement(
            candidate=candidate, status="ok", seconds=seconds, low=seconds, high=seconds,
            runs=rounds, ratio=PairedRatio(seconds, seconds),
        )  # fmt: skip


def identity(*names: str, digest: str = "d", **changed) -> Identity:
    kernels = tuple(
        KernelEntry(name=name, family="f", params=(), binding={}, digest=digest) for name in names
    )
    usual = {"target": "generic", "library": "l", "source": "s", "compiler": "cc 1", "flags": ()}
    index = KernelIndex(**usual | changed, kernels=kernels)
    return Identity.of(read_hardware(), index)


def recorder(script: Script, records: RecordSet, **options) -> Recorder:
    return Recorder(script, identity(*script.seconds), records, **options)


def names(*kernels: str) -> tuple[Candidate, ...]:
    return tuple(Candidate(kernel, ()) for kernel in kernels)


def test_what_is_on_record_is_not_run_again():
    records, first, second = RecordSet(), Script(), Script()
    before = recorder(first, records).measure(CASE, names("default", "fast"), rounds=3, seconds=1)
    again = recorder(second, records)
    found = again.measure(CASE, names("default", "bad", "fast"), rounds=3, seconds=1)
    assert (found[0], found[2]) == before
    assert [m.status for m in found] == ["ok", "crash", "ok"]
    assert describe_failed([again, again]) == (
        "1 of the schedules that were tried failed (1 crash); none of them serves"
    )
    assert second.asked == [["default", "bad"]]  # the reference goes along
    assert (again.measured, len(again.trials)) == (1, 3)
    assert again.measure(CASE, names("bad"), rounds=9, seconds=1)[0].status == "crash"
    assert len(second.asked) == 1  # what failed is not tried again


def test_more_rounds_are_measured_again_and_fewer_are_not():
    records, script = RecordSet(), Script()
    now = recorder(script, records)
    now.measure(CASE, names("default", "fast"), rounds=3, seconds=1)
    assert now.measure(CASE, names("default", "fast"), rounds=5, seconds=1)[1].runs == 5
    assert len(script.asked) == 2 and len(records.known) == 4
    for rounds, runs in ((3, 3), (4, 5), (5, 5)):  # as the same search had them the first time
        assert now.measure(CASE, names("fast"), rounds=rounds, seconds=1)[0].runs == runs
    assert len(script.asked) == 2


def test_times_of_a_slower_day_are_scaled_by_the_reference():
    records, script = RecordSet(), Script(other=0.8)
    recorder(script, records).measure(CASE, names("default", "fast"), rounds=3, seconds=1)
    script.slowness = 1.4
    later = recorder(script, records)
    found = later.measure(CASE, names("default", "fast", "other"), rounds=3, seconds=1)
    assert [m.seconds for m in found] == pytest.approx([1.0, 0.5, 0.8])
    assert [(m.low, m.high) for m in found] == [(m.seconds, m.seconds) for m in found]
    assert found[2].ratio == PairedRatio(1.4 * 0.8, 1.4 * 0.8)  # taken in turns: nothing to scale
    assert later.trials[-1].seconds == pytest.approx(1.12)  # the record says what was measured
    assert later.trials[-1].reference.seconds == pytest.approx(1.4)


@pytest.mark.parametrize("kernels", [("default", "fast", "other"), ("fast", "other")])
def test_a_reference_that_is_built_anew_is_none(kernels):
    records, script = RecordSet(), Script(other=0.8)
    recorder(script, records).measure(CASE, names("default", "fast"), rounds=3, seconds=1)
    anew = identity(*kernels)
    if "default" in kernels:
        anew.builds["default"] = "new"
    Recorder(script, anew, records).measure(CASE, names("fast", "other"), rounds=3, seconds=1)
    assert script.asked[1] == ["fast", "other"]


class Busy(Script):
    """A machine whose slowness at each call is given beforehand."""

    def __init__(self, *slowness: float, **seconds: float) -> None:
        super().__init__(**seconds)
        self.slownesses = list(slowness)

    def measure(self, case, candidates, *, rounds, seconds):
        self.slowness = self.slownesses.pop(0)
        return super().measure(case, candidates, rounds=rounds, seconds=seconds)


def test_what_a_case_is_compared_with_first_stays_what_it_is_compared_with():
    now = recorder(Busy(1.0, 1.25, 1.4, other=0.8), RecordSet())
    now.measure(CASE, names("default", "fast"), rounds=3, seconds=1)
    now.measure(CASE, names("default"), rounds=5, seconds=1)
    found = now.measure(CASE, names("other"), rounds=3, seconds=1)
    assert found[0].seconds == pytest.approx(0.8)
    assert now.inner.asked[2] == ["default", "other"]


def test_trials_of_a_busy_machine_are_run_again():
    script, records = Busy(1.0, 5.0, 1.0, other=0.8), RecordSet()
    now = recorder(script, records)
    now.measure(CASE, names("default", "fast"), rounds=3, seconds=1)
    found = now.measure(CASE, names("default", "other"), rounds=3, seconds=1)
    assert found[1].seconds == pytest.approx(0.8)
    assert script.asked[1:] == [["default", "other"]] * 2
    assert (now.measured, now.disturbed, describe_disturbed([now])) == (3, 0, None)
    assert len(now.trials) == 4 and {r.seconds for r in records.known.values()} == {1.0, 0.5, 0.8}


def test_what_stays_disturbed_does_not_count_and_is_missing_later():
    script, records = Busy(1.0, 4.0, 5.0, other=0.8), RecordSet()
    now = recorder(script, records)
    now.measure(CASE, names("default"), rounds=3, seconds=1)
    found = now.measure(CASE, names("other", "default"), rounds=3, seconds=1)
    assert [m.status for m in found] == ["skipped", "ok"]
    assert (now.measured, now.disturbed, len(now.trials)) == (1, 1, 2)
    assert "1 trials were disturbed" in describe_disturbed([now])
    kept = [r for r in records.known.values() if r.kernel == "other"]
    assert [(r.seconds, records.trusts(r)) for r in kept] == [(4.0, False)]
    spent = recorder(script, records, allowance=Allowance(0.0))
    found = spent.measure(CASE, names("default", "other"), rounds=3, seconds=1)
    assert [m.status for m in found] == ["ok", "skipped"]
    calm = recorder(Script(other=0.8), records)
    assert calm.measure(CASE, names("other"), rounds=3, seconds=1)[0].seconds == 0.8
    assert calm.measured == 1


def test_a_failed_reference_scales_nothing():
    script = Script()
    found = recorder(script, RecordSet()).measure(CASE, names("bad", "fast"), rounds=3, seconds=1)
    assert [m.seconds for m in found] == [0.0, 0.5]


def test_a_spent_budget_leaves_what_is_on_record():
    records, script = RecordSet(), Script(other=0.8, more=0.9)
    recorder(script, records).measure(CASE, names("default", "fast"), rounds=3, seconds=1)
    now = recorder(script, records, allowance=Allowance(5.0))
    found = now.measure(CASE, names("default", "other"), rounds=3, seconds=1)
    assert [m.status for m in found] == ["ok", "ok"]  # begun before five seconds had passed
    found = now.measure(CASE, names("more", "fast", "default"), rounds=3, seconds=1)
    assert [m.status for m in found] == ["skipped", "ok", "ok"]
    assert (now.measured, now.disturbed, now.now()) == (1, 0, 20.0)
    assert [record.cost for record in now.trials] == [5.0, 10.0, 5.0, 5.0]


def test_untried_work_has_seconds_of_its_own():
    script = Script()
    now = recorder(script, RecordSet(), allowance=Allowance(0.0, {CASE.work: 5.0}))
    other = msgspec.structs.replace(CASE, n=48)
    assert now.measure(other, names("default"), rounds=3, seconds=1)[0].status == "skipped"
    taller = msgspec.structs.replace(CASE, m=9)
    assert now.measure(taller, names("default"), rounds=3, seconds=1)[0].status == "ok"
    assert now.measure(CASE, names("default"), rounds=3, seconds=1)[0].status == "skipped"
    assert now.spent == 10.0


def test_other_code_shapes_and_older_records_do_not_answer():
    records, script = RecordSet(), Script()
    recorder(script, records).measure(CASE, names("default"), rounds=3, seconds=1)
    wider = msgspec.structs.replace(CASE, n=48)
    recorder(script, records).measure(wider, names("default"), rounds=3, seconds=1)
    others = ({"digest": "e"}, {"compiler": "cc 2"}, {"flags": ("-O3",)})
    for other in (identity("default", **changed) for changed in others):
        Recorder(script, other, records).measure(CASE, names("default"), rounds=3, seconds=1)
    later = datetime.now(UTC) + timedelta(seconds=1)
    recorder(script, records, since=later).measure(CASE, names("default"), rounds=3, seconds=1)
    assert len(script.asked) == 6


def test_large_sets_are_recorded_in_batches_that_share_the_reference():
    kernels = {f"k{i}": 1.0 + i for i in range(2 * BATCH)}
    script, seen = Script(**kernels), []
    now = recorder(script, RecordSet(), notify=lambda record: seen.append(record.kernel))
    found = now.measure(CASE, names("default", *kernels, "k0"), rounds=3, seconds=66.0)[:-1]
    assert [len(asked) for asked in script.asked] == [BATCH, BATCH + 1, 2]
    assert script.given == [2.0 * BATCH, 2.0 * BATCH, 2.0]  # equal parts of the seconds
    assert all(asked[0] == "default" for asked in script.asked)
    assert [m.candidate.kernel for m in found] == seen == ["default", *kernels]


def test_records_of_this_machine_and_these_kernels_match():
    here = identity("k", "other")
    fields = {"kernel": "k", "build": here.builds["k"]}
    own = [make_record(hardware=here.machine(n), threads=n, **fields) for n in (1, 2)]
    others = [{"target": "x"}, {"build": "x"}, {"kernel": "x"}, {"threads": 2}]
    others += [{"hardware": here.machine(2)}, {"kernel": "other", "build": here.builds["other"]}]
    usual = {"hardware": here.machine(1), **fields}
    records = [*own, *(make_record(**usual | other) for other in others)]
    assert list(here.matching(records)) == [*own, records[-1]]


def test_machines_differ_in_what_kernels_are_fast_by():
    machine = read_hardware()
    key = hardware_key(machine, 1, 1)
    assert key.caches == tuple(map(machine.cache_bytes, (1, 2, 3))) and key.cpu == machine.cpu_model
    assert hardware_key(machine, 2, 1) != key != hardware_key(machine, 1, 2)
    flags = (*machine.isa_flags, "a-flag-that-no-target-asks-for")
    assert hardware_key(msgspec.structs.replace(machine, isa_flags=flags), 1, 1) == key


def test_an_allowance_is_spent_but_for_what_untried_work_has():
    assert Allowance(5.0, {CASE.work: 3.0}).less(2.0) == Allowance(3.0, {CASE.work: 3.0})
    assert Allowance(5.0).less(7.0) == Allowance(0.0)


def test_over_a_real_meter():
    target, hardware = host_target(), read_hardware()
    built = build_library(LibrarySpec(target=target, kernels=gemm_requests(("f32",), target)))
    schedule = make_schedule(m_tile=2, block_n=1)
    linear = [k.name for k in built.index.kernels if k.name.startswith("gemm_linear_f32")]
    candidates = tuple(Candidate(name, schedule) for name in linear)
    with Meter(built.path, built.index, pool_bytes=1 << 20) as meter:
        now = Recorder(meter, Identity.of(hardware, built.index), TrustingRecords())
        found = now.measure(CASE, candidates, rounds=3, seconds=1)
        assert now.measure(CASE, candidates, rounds=3, seconds=1) == found
    assert now.measured == len(candidates)
    record = now.trials[0]
    assert record.hardware == hardware_key(hardware, 1, built.index.abi)
    assert record.target == target.name and set(record.hardware.isa) >= target.cpu_features
    assert len({record.build for record in now.trials}) == len(candidates)
