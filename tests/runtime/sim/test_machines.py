"""Assumed machines: every figure has a source, and the tables follow the roofline they state."""

from __future__ import annotations

import pytest

from dovetail.ir.errors import SpecError
from dovetail.runtime.schedule.cost_tables import AXES, TablePredictor
from dovetail.runtime.sim.machines import (
    MACHINES,
    Machine,
    Roofline,
    assumed_profile,
    find_machine,
    kv_token_bytes,
)
from dovetail.topology.presets import preset_model

MACHINE = pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)


@MACHINE
def test_tables_interpolate_the_roofline(machine: Machine) -> None:
    spec = preset_model(machine.model, kv_dtype="bf16")
    costs, table = Roofline(machine, spec), TablePredictor(assumed_profile(machine, spec))
    for tokens in (1, 3, 45, costs.knee, costs.knee + 1, 777, 20480):
        assert table.linear(tokens) == pytest.approx(costs.linear(tokens), rel=1e-9)
        assert table.head(tokens) == pytest.approx(costs.head(tokens), rel=1e-9)
        assert table.gpu_decode(tokens) == pytest.approx(costs.gpu_decode(tokens))
        assert table.prefill([tokens]) == pytest.approx(costs.prefill(tokens), rel=3e-3)
        assert table.swap(tokens) == pytest.approx(costs.swap(tokens), rel=1e-6)
        for sequences in (1, 33, 4000):
            expected = costs.cpu_decode(sequences, sequences * tokens)
            assert table.cpu_decode(sequences, sequences * tokens) == pytest.approx(expected)
    assert table.launch() == machine.launch.value


@MACHINE
def test_rows_and_figures_say_where_they_come_from(machine: Machine) -> None:
    spec = preset_model(machine.model, kv_dtype="bf16")
    profile = assumed_profile(machine, spec)
    assert set(profile.tables) == set(AXES)
    assert {row.origin for rows in profile.tables.values() for row in rows} == {"assumed"}
    assert len(profile.sources) == 7
    assert all(":" in line for line in profile.sources)


def test_known_layers_take_what_their_bytes_take() -> None:
    spec = preset_model("llama-3-8b", kv_dtype="bf16")
    assert kv_token_bytes(spec) == 4096
    costs = Roofline(MACHINES["a10g"], spec)
    weights = 0.436e9  # bytes of one layer, as counted by hand
    assert costs.linear(1) == pytest.approx(weights / 450e9 + 25e-6, rel=2e-3)
    assert costs.linear(4000) == pytest.approx(weights * 4000 / 60e12 + 25e-6, rel=2e-3)
    assert costs.gpu_decode(26400) == pytest.approx(26400 * 4096 / 450e9)


def test_a_better_cpu_changes_only_decode_on_the_cpu() -> None:
    machine, spec = MACHINES["a10g"], preset_model("llama-3-8b", kv_dtype="bf16")
    plain, better = (Roofline(m, spec) for m in (machine, machine.with_cpu(4)))
    assert better.cpu_decode(1, 10**6) < plain.cpu_decode(1, 10**6) / 3.9
    assert better.linear(100) == plain.linear(100)
    assert "4 x" in machine.with_cpu(4).sources()[4]


def test_an_unknown_machine_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(SpecError, match="t4, a10g, h100, h200"):
        find_machine("b300")
