"""A short calibration of this machine: plausible figures, kept, used, and their sources told."""

from __future__ import annotations

import dataclasses
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from dovetail.codegen.targets import host_target
from dovetail.compiler.plan import calibrate
from dovetail.compiler.plan.service import choose_plans
from dovetail.topology.hardware import HardwareSpec, read_hardware
from dovetail.topology.parameters import MachineParameters, default_parameters
from dovetail.topology.presets import preset_model
from dovetail.topology.replay import DEFAULT_TRACE

MEASURED = "measured here"
MODEL = preset_model("tinyllama", weight_dtype="f32")


@pytest.fixture(scope="module")
def here() -> HardwareSpec:
    return read_hardware()


def write(figures: dict[str, float], here: HardwareSpec, cache: Path) -> None:
    file = calibrate.calibration_file(here, "f32", host_target(), cache)
    file.parent.mkdir()
    file.write_bytes(msgspec.json.encode(figures))


def test_all_that_is_measured_is_plausible(here: HardwareSpec) -> None:
    found = calibrate.measure_figures(here, "f32", host_target())
    assert {"core_flops", "core_bandwidth", "package_bandwidth"} <= set(found)
    assert 1e8 < found["core_bandwidth"] <= found["package_bandwidth"] * here.sockets < 1e13
    assert 1e8 < found["core_flops"] < 1e13
    if here.usable_threads > 1:
        assert 1e-8 < found["rank_step"] < 1
    assert set(found) <= {field.name for field in fields(MachineParameters)}


def test_figures_on_record_are_used_and_say_so(here: HardwareSpec, tmp_path: Path) -> None:
    write({"core_flops": 12e9, "rank_step": 3e-7}, here, tmp_path)
    for measure in (True, False):
        figures = calibrate.calibrate(here, "f32", host_target(), tmp_path, measure=measure)
        assert (figures.core_flops.value, figures.core_flops.source) == (12e9, MEASURED)
        assert figures.rank_step.source == MEASURED
        assert figures.barrier == default_parameters(here).barrier
    other = calibrate.calibrate(here, "bf16", host_target(), tmp_path, measure=False)
    assert other == default_parameters(here)


def test_figures_of_other_kernels_are_none(
    here: HardwareSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of an earlier version, whose kernels were slower."""
    write({"core_flops": 12e9}, here, tmp_path)
    monkeypatch.setattr(calibrate, "generator_digest", lambda: "f" * 64)
    found = calibrate.calibrate(here, "f32", host_target(), tmp_path, measure=False)
    assert found == default_parameters(here)


def test_figures_that_cannot_be_kept_serve_and_leave_nothing_behind(
    here: HardwareSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "busy_cores", lambda pus: 0.0)
    monkeypatch.setattr(calibrate, "measure_figures", lambda *_: {"core_flops": 12e9})
    file = calibrate.calibration_file(here, "f32", host_target(), tmp_path)
    file.mkdir(parents=True)
    found = calibrate.calibrate(here, "f32", host_target(), tmp_path)
    assert (found.core_flops.value, found.core_flops.source) == (12e9, MEASURED)
    assert list(file.parent.iterdir()) == [file]


def test_damaged_records_are_none(here: HardwareSpec, tmp_path: Path) -> None:
    write({"core_flops": -1.0}, here, tmp_path)
    file = calibrate.calibration_file(here, "f32", host_target(), tmp_path)
    for content in (file.read_bytes(), b"", b"{", b'{"speed": 1.0}', b"[]"):
        file.write_bytes(content)
        assert calibrate.read_calibration(file) == {}


def test_other_machines_have_their_defaults(here: HardwareSpec, tmp_path: Path) -> None:
    write({"core_flops": 12e9}, here, tmp_path)
    other = read_hardware("core:8")
    for measured in (False, True):
        found = calibrate.figures_of(
            "core:8", other, MODEL, host_target(), DEFAULT_TRACE, measured=measured, cache=tmp_path
        )
        assert dataclasses.replace(found, row_shares=()) == default_parameters(other)
        assert [rows for rows, _ in found.row_shares] == [1, 128, 256, 512, 1024, 2048]


def test_bandwidth_is_shared_by_packages_and_l3_groups() -> None:
    spec = read_hardware("package:2 l3:2 core:4")
    rates = {1: 20e9, 16: 160e9}
    found = calibrate.measure_bandwidths(spec, lambda threads, _: rates[threads])
    assert found["core_bandwidth"] == 20e9 and found["package_bandwidth"] == 80e9
    assert found["l3_bandwidth"] == 40e9


def test_the_figures_of_sums_give_the_times_they_came_from() -> None:
    found = calibrate.sum_figures(4e-6, 4e-6 + calibrate.LARGE / 10e9)
    assert found["rank_step"] == pytest.approx(1e-6)
    assert found["all_reduce_bandwidth"] == pytest.approx(10e9)
    assert "all_reduce_bandwidth" not in calibrate.sum_figures(2e-6, 1e-6)


def test_a_plan_names_measured_figures_and_follows_them(here: HardwareSpec) -> None:
    spec = replace(read_hardware("package:1 core:8"), source="test")
    slow_cores = default_parameters(spec).measured(core_bandwidth=1e9, package_bandwidth=100e9)
    slow_memory = default_parameters(spec).measured(core_bandwidth=50e9, package_bandwidth=50e9)
    threads = []
    for figures in (slow_cores, slow_memory):
        model = preset_model("tinyllama")
        choice = choose_plans(spec, model, DEFAULT_TRACE, parameters=figures)
        assert choice.figures["core_bandwidth"].source == MEASURED
        assert choice.figures["barrier"].source != MEASURED
        favourite = min(choice.pairs, key=lambda pair: pair.simulated or 0.0)
        best = choice.decode[favourite.decode]
        threads.append(best.processes * best.threads)
    assert threads[0] > threads[1]
