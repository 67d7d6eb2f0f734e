from __future__ import annotations

import pytest
from msgspec.structs import replace

from dovetail.ir.model import ModelSpec
from dovetail.topology.configuration import Configuration, cross_section, memory_homes
from dovetail.topology.contention import Simulator
from dovetail.topology.fundamental import build_tree
from dovetail.topology.hardware import read_hardware
from dovetail.topology.parameters import default_parameters
from dovetail.topology.presets import preset_model
from dovetail.topology.replay import Replay, Trace

SPEC = read_hardware("package:2 numa:2 core:8")
SIMULATOR = Simulator(SPEC, default_parameters(SPEC), preset_model("tinyllama"))


def plan(depth: int) -> Configuration:
    return cross_section(build_tree(SPEC).tree, depth, memory_homes(SPEC))


def test_a_trace_is_sampled_at_even_quantiles() -> None:
    trace = Trace("t", tuple((n, n) for n in range(1000, 0, -1)))
    lengths = [prompt for prompt, _ in trace.sample(4).requests]
    assert lengths == [126, 376, 626, 876]
    assert Trace("t", ((1, 2),)).sample(4).requests == ((1, 2),)


def test_seconds_are_means_over_requests() -> None:
    replay = Replay(SIMULATOR, Trace("t", ((100, 10), (3000, 20))))
    config = plan(2)
    prompts = [SIMULATOR.prefill(config, tokens=n).total for n in (100, 2048, 952)]
    context = (10 * 105 + 20 * 3010) / 30
    step = SIMULATOR.decode(config, batch=1, context=context).total
    assert replay.prefill(config) == pytest.approx(sum(prompts) / 2)
    assert replay.decode(config) == pytest.approx(15 * step)


def test_a_batch_shares_the_weights_that_a_step_reads() -> None:
    one = Replay(SIMULATOR, Trace("t", ((100, 10),)))
    eight = Replay(SIMULATOR, Trace("t", ((100, 10),), batches=(8,)))
    assert eight.decode(plan(1)) < one.decode(plan(1)) / 2


def test_plans_of_one_family_switch_for_nothing() -> None:
    replay = Replay(SIMULATOR, Trace("t", ((512, 64),)))
    same = replay.pair(plan(2), plan(2))
    assert same.switch == 0 and same.total == replay.prefill(plan(2)) + replay.decode(plan(2))
    # each of two processes sees the nodes of its package; its views of four processes' heads too
    assert replay.pair(plan(1), plan(2)).switch == 0
    # four processes see half of what two have on two nodes each
    half = replay.pair(plan(2), plan(1)).switch
    mirrored = Configuration(plan(2).processes[::-1])
    assert 0 < half < replay.pair(Configuration(mirrored.processes[:2]), plan(2)).switch


def test_a_switch_moves_keys_and_values_as_they_are_stored() -> None:
    model = preset_model("tinyllama")
    moved = [
        replay.pair(plan(2), plan(1)).switch * SIMULATOR.parameters.package_link.value
        for dtype in ("bf16", "f32")
        for replay in [Replay(_simulate(replace(model, kv_dtype=dtype)), Trace("t", ((512, 64),)))]
    ]
    row = 2 * model.n_layers * model.n_kv_heads * model.head_dim
    assert moved[1] - moved[0] == pytest.approx(0.5 * 512 * row * (4 - 2))


def _simulate(model: ModelSpec) -> Simulator:
    return Simulator(SPEC, default_parameters(SPEC), model)
