"""The simulator against the bars of Sandwich Fig. 3 (figures in its alt text, in seconds)."""

from __future__ import annotations

from itertools import permutations

import msgspec
import pytest

from dovetail.ir.model import ExpertSpec
from dovetail.topology.configuration import Configuration, cross_section, memory_homes
from dovetail.topology.contention import Simulator, matrix_elements
from dovetail.topology.fundamental import build_tree
from dovetail.topology.hardware import read_hardware
from dovetail.topology.parameters import default_parameters
from dovetail.topology.presets import preset_model

MODEL = preset_model("llama-3-8b", weight_dtype="f32")
KUNPENG = read_hardware("package:4 numa:2 core:24")
EPYC = read_hardware("package:2 numa:1 l3:16 core:4 pu:2")
TOKENS = 2064  # the figure does not say how many; it only scales all bars

FIGURE_3 = {
    "all cores of all NUMA nodes": 1053.0,
    "one core less per cluster": 196.63,
    "as many less, the last of each node": 197.75,
    "fast nodes only": 283.5,
    "slow nodes only": 300.62,
    "TP 2": 556.03,
    "TP 4": 418.35,
    "TP 8": 383.12,
    "TP 16": 639.05,
}


def seconds(simulator: Simulator, configuration: Configuration) -> float:
    return simulator.decode(configuration, batch=1, context=512).total * TOKENS


@pytest.fixture(scope="module")
def bars() -> dict[str, float]:
    parameters = default_parameters(KUNPENG)
    assert parameters == default_parameters(EPYC)  # one set for both machines
    simulator, homes = Simulator(KUNPENG, parameters, MODEL), memory_homes(KUNPENG)
    tree = build_tree(KUNPENG).tree
    nodes = cross_section(tree, 2, homes)
    less = cross_section(tree.group(4, 1, 3).remove(1, 4), 2, homes)
    last = cross_section(tree.remove(6, 3), 2, homes)
    found = [nodes, less, last, *(Configuration(nodes.processes[i::2]) for i in (0, 1))]
    values = [seconds(simulator, configuration) for configuration in found]
    tree = build_tree(EPYC).tree.remove(1, 4)  # one thread per core
    for _ in range(3):
        tree = tree.group(2, 1, 2)
    simulator, homes = Simulator(EPYC, parameters, MODEL), memory_homes(EPYC)
    values += [seconds(simulator, cross_section(tree, depth, homes)) for depth in (1, 2, 3, 4)]
    return dict(zip(FIGURE_3, values, strict=True))


def test_the_order_of_all_nine_bars(bars: dict[str, float]) -> None:
    assert sorted(bars, key=bars.__getitem__) == sorted(FIGURE_3, key=FIGURE_3.__getitem__)


def test_ratios_of_all_bars_are_within_30_percent(bars: dict[str, float]) -> None:
    for one, other in permutations(FIGURE_3, 2):
        measured, simulated = FIGURE_3[one] / FIGURE_3[other], bars[one] / bars[other]
        assert simulated == pytest.approx(measured, rel=0.3), (one, other)


@pytest.mark.parametrize("tokens", [512, 2048])
def test_prefill_wants_all_cores(tokens: int) -> None:
    for spec, depth in ((KUNPENG, 2), (KUNPENG, 1), (EPYC, 1)):
        simulator = Simulator(spec, default_parameters(spec), MODEL)
        homes, tree = memory_homes(spec), build_tree(spec).tree
        cores = next(d for d, level in enumerate(tree.levels, 1) if level.kind == "core")
        everything = simulator.prefill(cross_section(tree, depth, homes), tokens=tokens).total
        for n in range(1, tree.levels[cores - 1].arity):
            fewer = cross_section(tree.remove(n, cores), depth, homes)
            assert simulator.prefill(fewer, tokens=tokens).total > everything


def test_a_quota_and_slower_cores_slow_a_plan_down() -> None:
    spec = read_hardware("package:1 numa:1 core:8")
    whole = cross_section(build_tree(spec).tree, 0, memory_homes(spec))
    parameters = default_parameters(spec)

    def work(machine: object) -> float:
        return Simulator(machine, parameters, MODEL).prefill(whole, tokens=512).work

    half = msgspec.structs.replace(spec, cpu_quota=4.0)
    slow = msgspec.structs.replace(
        spec, pus=tuple(msgspec.structs.replace(pu, capacity=512) for pu in spec.pus)
    )
    assert work(half) == pytest.approx(2 * work(spec))
    assert 1.5 * work(spec) < work(slow) <= 2 * work(spec)


def test_threads_on_one_core_share_it() -> None:
    spec = read_hardware("core:4 pu:2")
    homes, tree = memory_homes(spec), build_tree(spec).tree
    simulator = Simulator(spec, default_parameters(spec), MODEL)
    siblings, alone = cross_section(tree, 0, homes), cross_section(tree.remove(1, 2), 0, homes)
    apart = cross_section(tree, 2, homes)  # eight processes of one PU
    for step in ("decode", "prefill"):
        arguments = {"batch": 1, "context": 9} if step == "decode" else {"tokens": 64}
        times = [getattr(simulator, step)(c, **arguments).work for c in (siblings, alone, apart)]
        assert times[0] == pytest.approx(times[1]) == pytest.approx(times[2])


def test_parts_add_up_and_grow_with_the_work() -> None:
    simulator = Simulator(KUNPENG, default_parameters(KUNPENG), MODEL)
    pair = cross_section(build_tree(KUNPENG).tree, 1, memory_homes(KUNPENG))
    one = simulator.decode(pair, batch=1, context=100)
    many = simulator.decode(pair, batch=64, context=4000)
    assert one.total == one.work + one.coherence + one.all_reduce + one.barriers + one.preemption
    assert many.work > one.work and many.all_reduce > one.all_reduce
    assert simulator.weights == 4 * matrix_elements(MODEL)
    assert matrix_elements(MODEL) == pytest.approx(7.5e9, rel=0.01)  # 8.03e9 less the embeddings


def test_steps_read_the_experts_of_their_rows() -> None:
    mixture = msgspec.structs.replace(MODEL, experts=ExpertSpec(count=8, used=2))
    simulator = Simulator(EPYC, default_parameters(EPYC), mixture)
    expert = 3 * MODEL.hidden_size * MODEL.intermediate_size * MODEL.n_layers
    rest = matrix_elements(MODEL) - expert
    assert simulator.elements == rest + 2 * expert
    assert [simulator.read(rows) for rows in (1, 3, 4, 512)] == [
        4 * (rest + count * expert) for count in (2, 6, 8, 8)
    ]
    assert simulator.weights == simulator.read(4)  # memory has all


def test_measured_figures_replace_defaults_and_say_so() -> None:
    parameters = default_parameters(KUNPENG).measured(core_flops=1e9)
    sources = parameters.sources()
    assert (sources["core_flops"].value, sources["core_flops"].source) == (1e9, "measured here")
    assert all(figure.source for figure in sources.values())
