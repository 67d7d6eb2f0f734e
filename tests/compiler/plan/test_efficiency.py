"""Predicted speed of products of few rows, relative to large ones, and its place in plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dovetail.codegen.targets import TARGETS
from dovetail.compiler.plan.efficiency import FULL_ROWS, SOURCE, predict_shares, with_shares
from dovetail.compiler.rules.schedules import LINEAR, GemmOp
from dovetail.compiler.search.dietcode import choose, predict_costs
from dovetail.compiler.search.policy import PREDICTED, SearchTask
from dovetail.ir.artifact import PhasePlan
from dovetail.ir.plans import Figure
from dovetail.topology.configuration import Configuration, Process
from dovetail.topology.contention import Simulator
from dovetail.topology.hardware import read_hardware
from dovetail.topology.parameters import default_parameters
from dovetail.topology.plan import plan_topology
from dovetail.topology.presets import preset_model
from dovetail.topology.replay import DEFAULT_TRACE, Trace, step_rows

MODEL = preset_model("tinyllama", weight_dtype="f32")
HARDWARE = read_hardware("package:1 l3:1 core:8")


@pytest.mark.parametrize("name", list(TARGETS))
def test_shares_are_of_the_speed_of_large_products(name: str) -> None:
    shares = predict_shares(HARDWARE, MODEL, TARGETS[name], (1, 64, 1024))
    assert list(shares) == [1, 64, FULL_ROWS, 1024]
    assert shares[FULL_ROWS] == 1
    assert 0.3 < shares[1] < 1.25 and 0.8 < shares[64] < 1.25 and 0.8 < shares[1024] < 1.25


def test_costs_without_measuring_choose_tiles_that_fit_the_rows() -> None:
    target = TARGETS["x86-64-avx2"]
    op, points = GemmOp("o", LINEAR, 512, 512, "f32"), (1, 6, 96)
    task = SearchTask(op, target, PhasePlan(threads=1, cpus=()), HARDWARE, points)
    costs = predict_costs(task)
    chosen = {m: choose(task, m, costs) for m in points}
    assert all(choice.source == PREDICTED for choice in chosen.values())
    assert chosen[1].program.tile.rows < chosen[96].program.tile.rows


def test_rows_of_a_trace() -> None:
    assert step_rows(Trace("t", ((5000, 1), (7, 1)), batches=(3, 2))) == (2, 3, 7, 904, 2048)


def test_slower_small_products_slow_decode_only_and_want_more_cores() -> None:
    plain = default_parameters(HARDWARE).measured(core_bandwidth=40e9, package_bandwidth=80e9)
    slow = replace(plain, row_shares=((1, Figure(0.02, "test")), (64, Figure(1.0, "test"))))
    every = Configuration((Process(tuple(range(8)), (0,)),))
    steps = []
    for figures in (plain, slow):
        simulator = Simulator(HARDWARE, figures, MODEL)
        decode = simulator.decode(every, batch=1, context=10).total
        steps.append((decode, simulator.prefill(every, tokens=512).total))
    assert steps[0][0] < steps[1][0] and steps[0][1] == steps[1][1]
    cores = [
        len(plan_topology(HARDWARE, MODEL, parameters=f).pairs[0].decode.configuration.pus)
        for f in (plain, slow)
    ]
    assert cores[0] < cores[1]


def test_every_share_names_its_source() -> None:
    figures = default_parameters(HARDWARE)
    found = with_shares(figures, HARDWARE, MODEL, TARGETS["x86-64-avx2"], DEFAULT_TRACE)
    sources = found.sources()
    assert sources["core_flops_share_of_1_rows"].source == SOURCE
    assert {n: sources[n] for n in figures.sources()} == figures.sources()
