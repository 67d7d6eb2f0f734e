"""The gain of a search is the workload's time under the default schedules over the chosen ones'."""

import pytest

from dovetail.compiler.rules.payload import GemmUse, Payload
from dovetail.compiler.rules.schedules import LINEAR, GemmOp
from dovetail.compiler.search.gain import measure_gain, row_at
from dovetail.ir.schedule import Row, ScheduleTable
from tests.compiler.records import make_record

OP = GemmOp("qkv", LINEAR, 32, 64, "f32")
SLOW, FAST = ("slow", (0,) * 9), ("fast", (0,) * 8)


def trial(m, candidate, seconds, status="ok"):
    times = {"seconds": seconds, "low": seconds * 0.9, "high": seconds * 1.1, "runs": 3}
    if status != "ok":
        times = dict.fromkeys(times, 0)
    shape = {"n": 32, "k": 64, "m": m}
    kernel, schedule = candidate
    return make_record(shape=shape, kernel=kernel, schedule=schedule, status=status, **times)


def table(*rows):
    made = tuple(Row(m_lo=m, kernel=c[0], schedule=c[1]) for m, c in rows)
    return ScheduleTable(
        target="generic", op="qkv", n=32, k=64, dtype="f32", phase="any", threads=1, rows=made
    )


def payload(sizes):
    return Payload((GemmUse(OP, 2, sizes),))


def test_gain_is_weighed_by_the_workload():
    chosen = table((1, SLOW), (2, FAST))
    records = [trial(1, SLOW, 1.0), trial(1, FAST, 3.0), trial(8, SLOW, 4.0), trial(8, FAST, 2.0)]
    gain = measure_gain(payload({1: 0.5, 8: 0.25, 99: 0.25}), [chosen], records)
    assert gain.ratio == pytest.approx((0.5 * 1.0 + 0.25 * 4.0) / (0.5 * 1.0 + 0.25 * 2.0))
    assert gain.low == pytest.approx(gain.ratio * 0.9 / 1.1)
    assert gain.high == pytest.approx(gain.ratio * 1.1 / 0.9)
    assert (gain.points, gain.of_points) == (2, 3)


def test_the_trials_are_gone_through_once():
    records = [trial(m, candidate, 1.0) for m in (1, 8) for candidate in (SLOW, FAST)]
    gain = measure_gain(payload({1: 0.5, 8: 0.5}), [table((1, FAST))], iter(records))
    assert gain.points == 2


def test_the_confirming_run_counts():
    records = [trial(1, SLOW, 1.0), trial(1, FAST, 0.5), trial(1, SLOW, 2.0), trial(1, FAST, 1.0)]
    gain = measure_gain(payload({1: 1.0}), [table((1, FAST))], records)
    assert gain.ratio == pytest.approx(2.0)


def test_without_measurements_there_is_none():
    assert measure_gain(payload({1: 1.0}), [table((1, FAST))], []) is None
    wrong = [trial(1, SLOW, 1.0), trial(1, FAST, 0.5, status="wrong")]
    assert measure_gain(payload({1: 1.0}), [table((1, FAST))], wrong) is None


def test_rows_by_m():
    chosen = table((1, SLOW), (5, FAST))
    assert [row_at(chosen, m).kernel for m in (1, 4, 5, 100)] == ["slow", "slow", "fast", "fast"]
