"""The division of the CPU: what is whose, what is lent, and what it is simulated to cost."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.topology import division as divisions
from dovetail.topology.division import (
    DECODE,
    ENCODERS,
    ENGINE,
    KNOWN,
    LOOKS,
    NOISE,
    PREFILL,
    REST,
    SEARCHES,
    STAGES,
    Demand,
    Prices,
    Shares,
    Trend,
    divide,
    follow_trend,
    lend,
    redivide,
    worker_of,
)
from dovetail.topology.hardware import HardwareSpec, read_hardware
from dovetail.topology.parameters import default_parameters
from tests.topology.corpus import CORPUS, TOPOLOGIES, truths

TRUTHS = truths()
LOAD = {
    PREFILL: Demand(1e11, 1e9),
    DECODE: Demand(5e10, 2e10),
    SEARCHES: Demand(1e9, 8e9),
    ENCODERS: Demand(2e11, 1e9),
}
PERIOD = 0.3
LINES = st.sampled_from(
    ["core:2", "core:3", "package:2 core:2 pu:2", "package:2 numa:2 core:6", "numa:3 l3:2 core:4"]
)
demands = st.builds(Demand, st.floats(1e6, 1e12), st.floats(1e6, 1e11))
loads = st.fixed_dictionaries({SEARCHES: demands, ENCODERS: demands}).flatmap(
    lambda both: st.sampled_from([both, {PREFILL: LOAD[PREFILL], DECODE: LOAD[DECODE], **both}])
)


def cores_of(spec: HardwareSpec, cpus: tuple[int, ...]) -> list[int]:
    """Return the cores of PUs, each as often as it has one."""
    core = {pu.id: pu.core for pu in spec.pus}
    return [core[cpu] for cpu in cpus]


def check_division(spec: HardwareSpec, shares: Shares) -> None:
    """Each core is in one share, or in equal ones; a share is in one memory node, or in turns."""
    home = {pu.id: pu.node for pu in spec.pus}
    allowed = {pu.core for pu in spec.pus if pu.id in spec.allowed_pus}
    workers = {worker_of(stage): set(cpus) for stage, cpus in shares.items() if stage != DECODE}
    for one, other in combinations(workers.values(), 2):
        assert one == other or not one & other
    held = [cpu for share in {frozenset(w) for w in workers.values()} for cpu in share]
    assert sorted(cores_of(spec, tuple(held))) == sorted(allowed)
    assert set(shares.get(DECODE, ())) <= set(shares.get(PREFILL, ()))
    sizes = {node: len({pu.core for pu in spec.pus if pu.node == node and pu.core in allowed})
             for node in home.values()}  # fmt: skip
    for share in workers.values():
        nodes = {home[cpu] for cpu in share}
        parts = [sum(home[cpu] == node for cpu in share) for node in nodes]
        most = min(sizes[node] for node in nodes)
        whole = len(nodes) == 1 or len(share) > most
        assert whole or max(parts) - min(parts) <= 1, "as many of each, or of one"


@settings(max_examples=40, deadline=None)
@given(LINES, loads)
def test_each_core_is_divided_once_and_the_best_beats_all_cores_for_everyone(
    line: str, load: dict[str, Demand]
) -> None:
    spec = read_hardware(line)
    plan = divide(spec, default_parameters(spec), load)
    for division in plan.divisions:
        assert division.shares.keys() == load.keys()
        check_division(spec, division.shares)
    assert plan.divisions[0].seconds <= plan.everyone


@settings(deadline=None)
@given(LINES, st.sets(st.sampled_from(STAGES), min_size=1), st.data())
def test_what_is_idle_is_lent_and_nobody_loses_a_share(
    line: str, busy: set[str], data: st.DataObject
) -> None:
    if len(busy.intersection(ENGINE)) == 2:
        busy.discard(PREFILL)  # one phase at a time
    spec = read_hardware(line)
    plan = divide(spec, default_parameters(spec), LOAD)
    shares = data.draw(st.sampled_from(plan.divisions)).shares
    now = lend(shares, busy)
    assert now.keys() == busy and all(now.values())
    held = [cpu for cpus in now.values() for cpu in cpus]
    everything = {cpu for cpus in shares.values() for cpu in cpus}
    apart = len({frozenset(shares[stage]) for stage in busy}) == len(busy)
    if apart:
        assert sorted(held) == sorted(everything), "each PU has one worker"
        assert all(set(shares[stage]) <= set(now[stage]) for stage in busy)
    assert set(held) <= everything


def test_of_equal_shares_one_worker_goes_where_it_is_idle() -> None:
    """On two cores: the engine has one, searches and encoders take turns on the other."""
    shares = {PREFILL: (0,), DECODE: (0,), SEARCHES: (1,), ENCODERS: (1,)}
    assert lend(shares, {DECODE, ENCODERS}) == {DECODE: (0,), ENCODERS: (1,)}
    assert lend(shares, {SEARCHES, ENCODERS}) == {SEARCHES: (1,), ENCODERS: (0,)}
    assert lend(shares, {DECODE, SEARCHES, ENCODERS})[ENCODERS] == (1,)
    assert lend(shares, {DECODE}) == {DECODE: (0, 1)}


def test_bandwidth_is_dealt_by_what_is_read() -> None:
    """A stage that only reads takes longer beside another one that does; computing stays."""
    spec = read_hardware("core:16")
    computes, reads = Demand(1e11, 0.0), Demand(0.0, 1e11)
    prices = Prices(spec, default_parameters(spec), {ENCODERS: computes, SEARCHES: reads})
    few, many = tuple(range(8)), tuple(range(8, 16))
    alone = prices.seconds({SEARCHES: few}) | prices.seconds({ENCODERS: many})
    assert prices.seconds({SEARCHES: few, ENCODERS: many}) == pytest.approx(alone)
    both = Prices(spec, default_parameters(spec), {ENCODERS: reads, SEARCHES: reads})
    assert both.seconds({SEARCHES: few, ENCODERS: many})[SEARCHES] > alone[SEARCHES] * 1.5


def test_shares_follow_the_load() -> None:
    spec = read_hardware("core:12")
    before = divide(spec, default_parameters(spec), LOAD).shares
    embedding = {PREFILL: 0.1, DECODE: 0.5, SEARCHES: 0.2, ENCODERS: 8.0}
    after = redivide(spec, before, embedding, 1.0)
    assert after is not None and len(after[ENCODERS]) > len(before[ENCODERS])
    check_division(spec, after)
    assert redivide(spec, after, embedding, 1.0) is None, "they serve it already"
    alone = {PREFILL: 0.0, DECODE: 9.0, SEARCHES: 0.0, ENCODERS: 0.0}
    assert redivide(spec, before, alone, 1.0) is None, "what is idle is lent anyhow"


NEEDS = (
    {PREFILL: 0.1, DECODE: 0.5, SEARCHES: 0.2, ENCODERS: 8.0},
    {PREFILL: 2.0, DECODE: 6.0, SEARCHES: 0.2, ENCODERS: 0.3},
    {PREFILL: 0.1, DECODE: 0.5, SEARCHES: 8.0, ENCODERS: 0.2},
)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=5),
    st.sampled_from([0.5, 1.0]),
)
def test_shares_stay_for_a_while_however_the_load_swings(
    swings: list[tuple[int, int]], period: float
) -> None:
    spec = read_hardware("core:4")
    shares, trend = divide(spec, default_parameters(spec), LOAD).shares, Trend()
    given_at, now, alike = [-REST] * 3, 0.0, 0
    for need, looks in swings:
        seen = {stage: worked * period for stage, worked in NEEDS[need].items()}
        for look in range(looks):
            now += period
            alike = alike + 1 if look else 1
            better = redivide(spec, shares, seen, period)
            trend, given_now = follow_trend(spec, shares, trend, seen, period, now)
            if given_now is not None:
                assert now - given_at[-1] >= LOOKS * period and now - given_at[-3] >= REST
                check_division(spec, given_now)
                given_at.append(now)
                shares = given_now
            elif better is not None and alike >= LOOKS:
                assert now < given_at[-1] + REST + LOOKS * period, "what lasts is followed"


def test_a_look_that_differs_begins_the_count_anew() -> None:
    spec = read_hardware("core:4")
    shares, trend = divide(spec, default_parameters(spec), LOAD).shares, Trend()
    still = {stage: 0.0 for stage in STAGES}
    for turn in range(20):
        seen = still if turn % LOOKS == LOOKS - 1 else NEEDS[0]
        trend, given_now = follow_trend(spec, shares, trend, seen, 1.0, float(turn))
        assert given_now is None


def test_a_load_that_hardly_changes_is_not_priced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """But one that changes a little in each look is, so it is followed in the end."""
    spec = read_hardware("core:12")
    shares, trend = divide(spec, default_parameters(spec), LOAD).shares, Trend()
    shares = redivide(spec, shares, NEEDS[0], 1.0) or shares
    searches = list[Shares]()
    monkeypatch.setattr(
        divisions, "divide", lambda *given: searches.append(shares) or divide(*given)
    )
    for look in range(20):
        noise = 1 + NOISE / 2 * (-1) ** look
        seen = {stage: cores * noise * PERIOD for stage, cores in NEEDS[0].items()}
        trend, better = follow_trend(spec, shares, trend, seen, PERIOD, look * PERIOD)
        assert better is None and len(searches) <= 2
    one = {stage: 0.3 * (stage == ENCODERS) for stage in STAGES}
    assert follow_trend(spec, shares, trend, one, PERIOD, 9.0)[0] == trend, "nobody is beside it"
    load, now = dict(NEEDS[0]), 20 * PERIOD
    while better is None and load[DECODE] < 12:
        now, load[DECODE] = now + PERIOD, load[DECODE] * (1 + NOISE / 2)
        seen = {stage: cores * PERIOD for stage, cores in load.items()}
        trend, better = follow_trend(spec, shares, trend, seen, PERIOD, now)
        assert len(trend.good) <= KNOWN
    assert better is not None and len(better[DECODE]) > len(shares[DECODE]) and not trend.good


@pytest.mark.skipif(not TRUTHS, reason=f"no topologies under {CORPUS}; set DOVETAIL_CORPUS")
@pytest.mark.parametrize("file", [truth.file for truth in TRUTHS])
def test_every_machine_is_divided_and_gains_by_it(file: str) -> None:
    """Simulated, by the contention model."""
    spec = read_hardware(Path(TOPOLOGIES / file))
    plan = divide(spec, default_parameters(spec), LOAD)
    check_division(spec, plan.shares)
    assert plan.divisions[0].seconds < plan.everyone
