"""Planning of tuning jobs, and the scoreboard: pure, so every figure is known beforehand."""

from __future__ import annotations

from collections import namedtuple

import msgspec
import pytest

from dovetail.codegen.targets import host_target
from dovetail.compiler.measure.jobs import (
    Scoreboard,
    allow,
    core_sets,
    flops,
)
from dovetail.compiler.measure.recorder import Allowance
from dovetail.compiler.rules.payload import make_payload
from dovetail.compiler.rules.schedules import gemm_ops
from dovetail.compiler.rules.workload import DEFAULT_WORKLOAD
from dovetail.compiler.search.parts import job_name, plan_job, spent_seconds
from dovetail.compiler.search.tables import EFFORTS, search_tasks
from dovetail.ir.errors import SpecError
from dovetail.ir.tuning import Reference
from dovetail.topology.hardware import read_hardware
from dovetail.topology.values import HardwareSpec, PuSpec
from tests.compiler.measure.test_recorder import identity
from tests.compiler.records import WHEN, make_record
from tests.compiler.rules.test_tables import SPEC, plan


def items_of(spec, phases):
    payload = make_payload(spec, DEFAULT_WORKLOAD, 512, 8)
    effort = EFFORTS["fast"]
    return plan_job(search_tasks(payload, (phases,), read_hardware(), host_target(), effort))


ITEMS = items_of(SPEC, plan(2, 1))
Searches = namedtuple("Searches", "items identity")


def machine(cores: int) -> HardwareSpec:
    pus = tuple(PuSpec(id=i, core=i, socket=0, node=0) for i in range(cores))
    return msgspec.structs.replace(
        read_hardware(), pus=pus, allowed_pus=tuple(range(cores)), caches=(), cpu_quota=None
    )


def trial(kernel, seconds, *, beside=2.0, m=1, **fields):
    """A trial that was timed in turns with the kernel `rule`, which took `beside` then."""
    reference = Reference(kernel="rule", build="b", schedule=(0,) * 9, seconds=beside)
    times = {"seconds": seconds, "low": seconds * 0.9, "high": seconds * 1.1}
    shape = {"n": 32, "k": 64, "m": m}
    return make_record(kernel=kernel, reference=reference, shape=shape, **times | fields)


def test_every_product_is_searched_once_for_each_thread_count():
    assert {(i.op.op, i.phase.threads) for i in ITEMS} == {
        (op.op, threads) for op in gemm_ops(SPEC) for threads in (2, 1)
    }
    assert max(m for i in ITEMS if i.phase.threads == 2 for m in i.points) == 512
    alike = msgspec.structs.replace(SPEC, intermediate_size=SPEC.hidden_size)
    items = items_of(alike, plan(1, 1))
    assert [i.op.op for i in items] == ["qkv", "o", "gate_up", "head"]  # down is as o


def test_a_job_is_known_again_by_its_work_and_kernels():
    name = job_name([Searches(ITEMS, identity("a", "b"))], "fast")
    assert name == job_name([Searches(ITEMS, identity("b", "a"))], "fast")
    others = [
        job_name([Searches(ITEMS[1:], identity("a", "b"))], "fast"),
        job_name([Searches(ITEMS, identity("a", "b", digest="e"))], "fast"),
        job_name([Searches(ITEMS, identity("a", "b"))], "full"),
        job_name([Searches(ITEMS, identity("a", "b", target="x"))], "fast"),
    ]
    assert len({name, *others}) == 5


@pytest.mark.parametrize(
    ("cores", "threads", "workers", "expected"),
    [
        (8, 2, 3, ((0, 1), (2, 3), (4, 5))),
        (8, 4, 3, ((0, 1, 2, 3), (4, 5, 6, 7))),
        (2, 2, 4, ((0, 1),)),
        (2, 2, 1, ((0, 1),)),
    ],
)
def test_workers_share_no_core(cores, threads, workers, expected):
    found, note = core_sets(machine(cores), threads, workers)
    assert found == expected
    assert (note is None) == (len(expected) == workers)
    assert note is None or note.startswith(f"{len(expected)} of {workers} workers")


def test_workers_are_as_many_as_the_quota_has_cores_for():
    limited = msgspec.structs.replace(machine(8), cpu_quota=4.0)
    found, note = core_sets(limited, 2, 4)
    assert len(found) == 2 and "2 of 4 workers" in note


def test_more_threads_than_the_machine_allows_are_refused():
    with pytest.raises(SpecError, match="cannot bind 3 threads"):
        core_sets(machine(2), 3, 1)


def test_what_was_spent_counts_for_these_kernels_shapes_and_machine_only():
    here = identity("k")
    item = next(i for i in ITEMS if i.op.kind == "linear" and i.phase.threads == 1)
    usual = {
        "build": here.builds["k"],
        "hardware": here.machine(1),
        "shape": {"n": item.op.n, "k": item.op.k, "m": 3},
        "dtype": item.op.dtype,
        "cost": 2.0,
    }

    def spent(since=None, **fields):
        found = spent_seconds([make_record(**usual | fields)], [Searches(ITEMS, here)], since)
        assert found.keys() == {i.work for i in ITEMS}
        return found[item.work]

    assert spent() == spent(WHEN) == 2.0
    others = [{"build": "x"}, {"shape": {"n": 1, "k": 1, "m": 3}}, {"threads": 2}, {"kind": "silu"}]
    assert [spent(**other) for other in others] == [0.0] * 4
    assert spent(WHEN.replace(year=2027)) == 0.0
    two = (make_record(**usual) for _ in range(2))
    parts = [Searches(items, here) for items in (ITEMS[:1], ITEMS)]
    assert spent_seconds(two, parts)[item.work] == 4.0


def test_what_was_never_tried_has_its_part_of_the_budget():
    first, second = (item.work for item in ITEMS[:2])
    assert allow(10.0, {first: 0.0, second: 0.0}) == Allowance(10.0, {first: 5.0, second: 5.0})
    assert allow(10.0, {first: 6.0, second: 0.0}, 0.3) == Allowance(4.0, {second: 5.0})
    assert allow(10.0, {first: 8.0, second: 0.0}, 0.3) == Allowance(0.0, {second: 5.0})
    assert allow(10.0, {first: 8.0, second: 3.0}) == Allowance(0.0, {})


def test_gains_are_medians_over_the_default_with_the_band_of_the_quartiles():
    board = Scoreboard()
    for record in (trial("rule", 2.0), trial("fast", 1.0), trial("slow", 3.0)):
        board.add(record)
    (point,) = board.points()
    assert (point.kernel, point.gain) == ("fast", 2.0)
    assert (point.gain_low, point.gain_high) == pytest.approx((2 * 0.9 / 1.1, 2 * 1.1 / 0.9))
    assert point.gflops == pytest.approx(2 * 32 * 64 / 1.0 / 1e9)
    board.add(trial("rule", 2.0, m=8))
    at = board.progress(done=1, items=3, elapsed=10.0, budget=100.0)
    assert at.gain == pytest.approx(2**0.5) and at.gain_low < at.gain < at.gain_high
    assert (at.trials, at.eta, at.best_gflops) == (4, 20.0, board.points()[1].gflops)


def test_the_default_is_the_reference_wherever_it_is_met():
    board = Scoreboard()
    other = (1,) * 9
    for record in (trial("rule", 1.6, schedule=other), trial("fast", 1.0), trial("rule", 2.0)):
        board.add(record)
    assert board.points()[0].gain == 2.0
    alone = Scoreboard()
    alone.add(trial("rule", 2.0))
    (point,) = alone.points()
    assert (point.gain, point.gain_low, point.gain_high) == (1.0, 1.0, 1.0)


def test_the_best_is_what_is_least_disturbed():
    board = Scoreboard()
    for record in (trial("steady", 1.0), trial("late", 1.1, low=0.8), trial("rule", 2.0)):
        board.add(record)
    assert board.points()[0].kernel == "late"


def test_work_is_told_apart_by_all_that_its_times_depend_on():
    board = Scoreboard()
    usual = trial("rule", 2.0)
    apart = [
        {"kind": "silu"},
        {"dtype": "bf16"},
        {"threads": 2},
        {"shape": {"n": 1, "k": 1, "m": 1}},
    ]
    for fields in ({}, *apart):
        board.add(msgspec.structs.replace(usual, **fields))
    assert len(board.points()) == 5
    at = board.progress(done=1, items=9, elapsed=60.0, budget=100.0)
    assert (at.eta, at.best_gflops) == (40.0, max(p.gflops for p in board.points()))
    assert board.progress(done=1, items=9, elapsed=120.0, budget=100.0).eta == 0.0


def test_trials_of_a_slower_day_compare_by_their_reference():
    board = Scoreboard()
    board.add(trial("rule", 2.0))
    board.add(trial("fast", 3.0, beside=6.0))
    board.add(trial("slow", 1.8))
    assert (board.points()[0].kernel, board.points()[0].gain) == ("fast", pytest.approx(2.0))


def test_the_trial_of_more_rounds_stands():
    board = Scoreboard()
    records = [trial("rule", 2.0), trial("lucky", 0.5), trial("lucky", 1.6, rounds=9)]
    for record in (*records, records[1]):
        board.add(record)
    assert board.points()[0].gain == pytest.approx(2.0 / 1.6)


def test_failed_trials_are_counted_and_never_best():
    board = Scoreboard()
    nothing = {"seconds": 0, "low": 0, "high": 0, "runs": 0}
    for status in ("wrong", "crash", "crash", "timeout"):
        board.add(make_record(status=status, **nothing))
    assert board.points() == ()
    at = board.progress(done=0, items=2, elapsed=5.0, budget=8.0)
    assert at.failed == {"crash": 2, "timeout": 1, "wrong": 1}
    assert (at.gain, at.best_gflops, at.eta) == (1.0, 0.0, 3.0)


def test_a_gated_product_counts_both_halves():
    shape = {"n": 3, "k": 5, "m": 7}
    assert (flops("linear", shape), flops("silu", shape)) == (210.0, 420.0)


def test_attention_counts_what_a_row_may_see():
    shape = {"n_q": 3, "n_kv": 1, "head_dim": 16, "rows": 1, "context": 10}
    assert flops("decode_attention", shape) == 4 * 3 * 16 * 10
    assert flops("prefill_attention", shape | {"rows": 4}) == 4 * 3 * 16 * (10 + 9 + 8 + 7)
