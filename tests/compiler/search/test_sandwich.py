"""`sandwich` on a made-up machine: finds the optimum, in few trials, within its budget."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dovetail.compiler.rules.schedules import SILU
from dovetail.compiler.search.policy import CANDIDATE_GAIN, DEFAULT, LEAST_GAIN, MEASURED, REUSED
from dovetail.compiler.search.rows import make_rows
from dovetail.compiler.search.sandwich import Sandwich
from dovetail.compiler.search.space import PREFETCHES, Program, Slice
from dovetail.ir.errors import ScheduleError
from dovetail.ir.schedule import ORDERS
from tests.compiler.search.landscape import Landscape, bowl, panels_of, task

LONG = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class OneOrder(Sandwich):
    def vary_orders(self, bench):
        """Try none."""


class OneScheme(Sandwich):
    def schemes(self, bench):
        return (bench.default.scheme,)


class NoReuse(Sandwich):
    def settled_on(self, history):
        return None


def optimum(one, m, land):
    """The least seconds over every tile, scheme and slices in steps of the search's own units."""
    problem = one.problem(m)
    return min(
        land.seconds(problem.case, problem.candidate(Program(tile, part, scheme, PREFETCHES[0])))
        for tile in problem.tiles()
        for scheme in problem.schemes()
        for part in (Slice(0, 1, k) for k in range(0, one.op.k, 64))
    )


def seconds(one, m, land, program):
    problem = one.problem(m)
    return land.seconds(problem.case, problem.candidate(program))


@pytest.mark.parametrize("threads", [1, 2, 6])
def test_it_finds_the_optimum(threads):
    land, one = Landscape(), task(threads=threads, points=(1, 14, 64))
    found = Sandwich().search(one, land)
    for m, choice in found.choices.items():
        assert seconds(one, m, land, choice.program) <= (1 + CANDIDATE_GAIN) * optimum(one, m, land)
    assert found.trials == len(land.asked) and found.seconds == land.clock


def test_it_takes_split_k_where_it_pays():
    def cost(case, panels, values):
        return bowl(case, panels, values) / (4 if values["grid_k"] == 2 else 1)

    one = task()
    assert Sandwich().search(one, Landscape(cost)).choices[8].program.scheme.k == 2


def weight_stays(case, panels, values):
    """Rows in slices of 14 pass by a block of the weight in half the time; otherwise they cost."""
    seconds = bowl(case, panels, values) / (2 if values["block_m"] == 14 else 1)
    return seconds / (2 if values["block_m"] == 14 and ORDERS[values["order"]] == "nkm" else 1)


def test_it_changes_the_order_of_loops_where_that_pays():
    one = task(points=(64, 128))
    whole, without = (
        policy().search(one, Landscape(weight_stays)) for policy in (Sandwich, OneOrder)
    )
    for m in one.points:
        turned, plain = whole.choices[m], without.choices[m]
        assert (turned.program.order, plain.program.order) == ("nkm", "mkn")
        assert turned.seconds <= 0.55 * plain.seconds
        assert make_rows(one, whole.choices)[-1].schedule[-1] == ORDERS.index("nkm")
    assert 0 < whole.trials - without.trials <= 0.25 * without.trials


def test_slices_are_tuned_on_under_the_better_order():
    """In order `nkm` slices of K of 128 are best, in the others of 256."""

    def cost(case, panels, values):
        deep = {**values, "block_k": 2 * values["block_k"]}
        other = ORDERS[values["order"]] == "nkm"
        return weight_stays(case, panels, deep if other else values)

    (choice,) = Sandwich().search(task(points=(64,)), Landscape(cost)).choices.values()
    assert (choice.program.order, choice.program.slice.k) == ("nkm", 128)


def test_slices_grow_from_those_that_are_good_in_their_own_order():
    """K innermost: of 256, as the rules'; else of 384, which lies on the way from 512 only."""
    elsewhere = {64: 3.0, 128: 2.5, 256: 1.5, 384: 0.8, 448: 1.0, 512: 1.2}

    def cost(case, panels, values):
        seconds = 1e-4 if values["grid_n"] == case.threads else 4e-4
        if ORDERS[values["order"]][-1] == "k":
            return seconds * (1.0 if values["block_k"] == 256 else 2.0)
        return seconds * elsewhere.get(values["block_k"], 1.6)

    one = task(points=(64,))
    assert (one.default(64).order, one.default(64).slice.k) == ("mnk", 256)
    (choice,) = Sandwich().search(one, Landscape(cost)).choices.values()
    assert (choice.program.order, choice.program.slice.k) == ("mkn", 384)


@pytest.mark.parametrize("ahead", PREFETCHES)
def test_it_takes_the_prefetch_distance_that_pays(ahead):
    def cost(case, panels, values):
        return bowl(case, panels, values) / (2 if values["prefetch"] == ahead else 1)

    (choice,) = Sandwich().search(task(points=(64,)), Landscape(cost)).choices.values()
    assert choice.program.prefetch == ahead


def test_distances_are_tried_before_slices_grow_and_with_other_tiles():
    """Of two tiles the one that is worse by the rules' distance is best by its own."""

    def cost(case, panels, values):
        own = values["prefetch"] == -1024 and panels == 3
        return bowl(case, panels, values) / (9 if own else 4 if values["prefetch"] == -1024 else 1)

    one, land = task(points=(64,)), Landscape(cost)
    (choice,) = Sandwich().search(one, land).choices.values()
    assert (choice.program.prefetch, choice.program.tile.panels) == (-1024, 3)
    slices = [candidate.schedule[2] for _, candidate in land.asked]
    grown = next(i for i, size in enumerate(slices) if size not in {0, one.default(64).slice.k})
    assert {c.schedule[7] for _, c in land.asked[:grown]} == set(PREFETCHES)


def test_few_programs_are_timed_before_slices_grow():
    """As many as `breadth` says, and the default."""

    class First(Landscape):
        count = 0

        def measure(self, case, candidates, **limits):
            self.count = self.count or len(candidates)
            return super().measure(case, candidates, **limits)

    counts = []
    for breadth in (3, 64):
        land = First()
        Sandwich(breadth=breadth).search(task(points=(64,)), land)
        counts.append(land.count)
    assert counts[0] <= 3 + 1 < counts[1]


def test_slices_grow_for_micro_kernels_near_the_best_only():
    def cost(case, panels, values):
        return bowl(case, panels, values) * (1 if panels == 2 else 2)

    one, grown = task(points=(64,)), []
    seeds = {0, one.default(64).slice.k}  # slices of K that all are timed with
    for slack in (0.3, 9.0):
        land = Landscape(cost)
        OneScheme(slack=slack, growing=99).search(one, land)
        grown.append({panels_of(c) for _, c in land.asked if c.schedule[2] not in seeds})
    assert grown[0] == {2} < grown[1]


def test_large_m_get_more_of_the_budget():
    one, land = task(points=(1, 512), seconds=8.0), Landscape(lambda *_: 0.01)
    Sandwich().search(one, land)
    small = [case for case, _ in land.asked if case.m == 1]
    assert 0 < len(small) < len(land.asked) / 4


def test_all_micro_kernels_are_tried_until_the_window_is_full():
    one, land = task(points=LONG[:8]), Landscape()
    NoReuse(window=4).search(one, land)
    tried = {
        m: {(c.kernel, c.schedule[0]) for case, c in land.asked if case.m == m} for m in LONG[:8]
    }
    assert all(len(tried[m]) >= len(one.problem(m).tiles()) for m in LONG[:4])
    assert all(len(tried[m]) <= 4 + 1 for m in LONG[4:8])  # and the default


def test_slices_that_settled_are_reused():
    one = task(points=LONG)
    costs = {}
    for reuse, policy in ((True, Sandwich), (False, NoReuse)):
        land = Landscape()
        found = policy(window=99).search(one, land)
        costs[reuse] = len([1 for case, _ in land.asked if case.m >= 192])
        sources = {found.choices[m].source for m in LONG[-4:]}
        assert sources == ({REUSED} if reuse else {"measured"})
        for m in LONG[-4:]:
            best = optimum(one, m, land)
            assert seconds(one, m, land, found.choices[m].program) <= 1.05 * best
    assert costs[True] < costs[False] / 2


@pytest.mark.parametrize("name", ["block_k", "grid_m"])
def test_what_changes_with_m_is_not_reused(name):
    """The best slice, or the best thread grid, is another at every other M."""

    def cost(case, panels, values):
        odd = LONG.index(case.m) % 2
        if name == "block_k":
            values = {**values, "block_k": values["block_k"] * (4 if odd else 1)}
            return bowl(case, panels, values)
        return bowl(case, panels, values) / (9 if values["grid_m"] == 1 + odd else 1)

    found = Sandwich(window=99).search(task(points=LONG), Landscape(cost))
    assert {choice.source for choice in found.choices.values()} == {MEASURED}


def test_a_budget_is_kept_and_the_rest_gets_the_rules():
    one, land = task(points=LONG, seconds=0.5), Landscape()
    found = Sandwich().search(one, land)
    assert land.clock < 2 * one.seconds
    assert found.choices.keys() == set(LONG)
    none = Sandwich().search(replace(one, seconds=0.0), empty := Landscape())
    assert not empty.asked
    assert {c.source for c in none.choices.values()} == {DEFAULT}
    assert all(none.choices[m].program == one.default(m) for m in LONG)


def test_failing_kernels_are_never_chosen():
    land = Landscape(bad=lambda c: "wrong" if c.schedule[2] == 256 else None)
    one = task()
    found = Sandwich().search(one, land)
    assert all(choice.program.slice.k != 256 for choice in found.choices.values())


def test_a_default_that_fails_gives_way_whatever_the_budget():
    one = task()
    rules = {one.problem(m).candidate(one.default(m)).kernel for m in one.points}
    land = Landscape(bad=lambda c: "wrong" if c.kernel in rules else None)
    brief = replace(one, points=(64,), seconds=1e-9)
    for some in (one, brief):
        rows = make_rows(some, Sandwich().search(some, land).choices)
        assert not rules & {row.kernel for row in rows}
    every = Landscape(bad=lambda c: "crash")
    with pytest.raises(ScheduleError, match=r"no kernel for linear 512x1024 .*\d+ crash"):
        Sandwich().search(one, every)


def test_gains_within_the_noise_leave_the_default():
    def flat(case, panels, values):
        return 1.0 if values["block_k"] == 0 else 1 - LEAST_GAIN / 2

    one = task()
    found = Sandwich().search(one, Landscape(flat))
    assert all(found.choices[m].program == one.default(m) for m in one.points)


def test_the_gated_product_is_searched_without_k():
    land = Landscape()
    found = Sandwich().search(task(kind=SILU, n=700), land)
    assert all(candidate.schedule[2] == 0 for _, candidate in land.asked)
    assert {choice.program.tile.panels for choice in found.choices.values()} == {2}


def test_same_measurements_same_choices():
    one = task(seconds=3.0)
    assert Sandwich().search(one, Landscape()) == Sandwich().search(one, Landscape())
