"""The offload benchmark: its cells are those of the issue, and its keys follow from the rows."""

from __future__ import annotations

import gzip
import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail.runtime.schedule.plan import Batch, Move, StepPlan
from tests.timelines import check_timeline

TRACE = "input_tokens,output_tokens\n" + "330,20\n" * 40
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:{second:02d}.5000000,2000,9\n" for second in range(40)
)


@pytest.fixture
def offload(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("offload")


def test_cells_cover_every_setting_and_figure(offload: Any, tmp_path: Path) -> None:
    (tmp_path / "osc_summarize_lengths_neo.csv").write_text(TRACE)
    (tmp_path / "AzureLLMInferenceTrace_code.csv").write_text(AZURE)
    cells = list(offload.make_cells(tmp_path))
    groups = {cell.group for cell in cells}
    assert groups == {"settings", "fig8b", "fig9", "fig10a", "osc", "azure", "held_out"}
    h200 = [cell for cell in cells if (cell.group, cell.machine) == ("settings", "h200")]
    blocks = {cell.gpu_blocks for cell in h200}
    assert blocks == {54, 100, 200, 400, 1650}
    assert {c.machine for c in cells if c.group == "azure"} == {"a10g", "h100"}
    lengths = {(c.machine, c.prompt, c.output) for c in cells if c.group == "settings"}
    assert {("t4", 330, 45), ("a10g", 1000, 100), ("a10g", 1000, 200)} <= lengths
    drawn = [cell for cell in cells if cell.group == "held_out"]
    assert len({cell.seed for cell in drawn}) == len(drawn) == offload.HELD_OUT
    assert list(offload.draw_cells()) == drawn
    azure = next(cell for cell in cells if cell.group == "azure")
    assert [a.prompt for a in azure.arrivals(0)] == [2000] * 40
    assert azure.arrivals(0)[-1].at == pytest.approx(39 / offload.AZURE["a10g"])


def test_a_small_run_writes_the_keys(
    offload: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "osc_summarize_lengths_neo.csv").write_text(TRACE)
    out = tmp_path / "out.json"
    arguments = ["--traces", str(tmp_path), "--only", "osc", "--scale", "0.1", "--json", str(out)]
    offload.main(arguments)
    body = json.loads(out.read_text())
    (row,) = body["rows"]
    assert row["requests"] == 40
    assert row["auto_vs_off"] == pytest.approx(row["auto_rate"] / row["off_rate"])
    assert body["summary"]["min_auto_vs_gpuonly"] == row["auto_vs_off"]
    assert "sim_auto_vs_gpuonly_t4" not in body["summary"]  # its cells were not run
    assert len(body["config"]["assumptions"]) == 4
    assert "osc" in capsys.readouterr().out


def test_a_run_that_resumes_keeps_its_cells(offload: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "osc_summarize_lengths_neo.csv").write_text(TRACE)
    out = tmp_path / "out.json"
    arguments = ["--traces", str(tmp_path), "--only", "osc", "--scale", "0.1", "--json", str(out)]
    first = offload.main(arguments)
    monkeypatch.setattr(offload, "run_cell", None)  # nothing is run again
    again = offload.main([*arguments, "--resume"])
    assert again.rows == first.rows == json.loads(out.read_text())["rows"]
    assert again.summary == first.summary
    cell = next(c for c in offload.make_cells(tmp_path, 0.1) if c.group == "osc")
    offload.simulate_cell(again, replace(cell, group="other"), 0)  # known from another figure
    assert [r["group"] for r in again.rows] == ["osc", "other"]
    with pytest.raises(SystemExit, match="another machine or setting"):
        offload.main([*arguments, "--resume", "--seed", "1"])


HELD_OUT = (  # machine, prompt, output, requests, blocks, model, CPU bandwidth, seed
    ("t4", 250, 30, 100, 80, None, 1.0, 1),
    ("t4", 600, 70, 60, 130, None, 0.5, 2),
    ("a10g", 600, 150, 90, 1000, None, 1.0, 3),
    ("a10g", 1500, 60, 60, 2400, None, 2.0, 1),
    ("h100", 1200, 60, 90, 1200, None, 1.0, 2),
    ("h100", 2000, 30, 90, 3000, None, 1.0, 3),
    ("h200", 700, 30, 120, 300, None, 1.0, 1),
    ("h200", 500, 80, 120, 800, None, 1.0, 2),
    ("h200", 1000, 50, 60, 200, "llama-2-7b", 1.0, 3),
    ("h200", 1000, 50, 90, 1650, None, 1.0, 3),
)
"""Settings that no figure has; the benchmark's group `held_out` has more, drawn after the policy
was fixed."""


@pytest.mark.parametrize("values", HELD_OUT, ids=lambda v: "-".join(map(str, v)))
def test_auto_loses_to_the_gpu_alone_in_no_setting_held_out(
    offload: Any, values: tuple[Any, ...]
) -> None:
    *cell, seed = values
    found = offload.run_cell(offload.Cell("held out", *cell), seed)
    assert found["auto_vs_off"] >= 0.98
    assert found["auto_vs_off_exact"] >= 1.0 - 1e-9
    assert found["auto_vs_full"] >= 1.0
    assert found["refused"] == 0


def row(group: str, machine: str, auto: float, **more: float) -> dict[str, object]:
    known = {"auto_vs_off_exact": 1.0, "auto_vs_full": 2.0, "full_vs_off": 0.5, "cpu": 1.0}
    return {"group": group, "machine": machine, "auto_vs_off": auto, **known, **more}


def test_keys_take_the_least_of_their_cells(offload: Any) -> None:
    found = offload.summarize(
        [
            row("settings", "h200", 1.5),
            row("settings", "h200", 0.99),
            row("settings", "t4", 5.0),
            row("fig8b", "h100", 1.1, full_vs_off=0.7),
            row("fig8b", "h100", 1.2, full_vs_off=0.3),
            row("fig10a", "a10g", 1.2, cpu=1),
            row("fig10a", "a10g", 1.6, cpu=4),
        ]
    )
    assert found["sim_auto_vs_gpuonly_h200"] == found["min_auto_vs_gpuonly"] == 0.99
    assert found["sim_auto_vs_gpuonly_t4"] == 5.0
    assert "sim_auto_vs_gpuonly_h100" not in found
    assert found["fig8b_fastdecode_at_longest"] == 0.3
    assert found["fig10a_g5.2xlarge"] == found["fig10a_g5.4xlarge"] == pytest.approx(0.2)
    assert found["fig10a_g5.16xlarge"] == pytest.approx(0.6)
    assert "fig10a_g5.8xlarge" not in found


def test_a_device_is_measured_and_foretold(offload: Any) -> None:
    device = importlib.import_module("offload_device")
    plans = [
        StepPlan((Batch(gpu_decode=(1,)), Batch(cpu_decode=(2, 3)))),
        StepPlan((Batch(gpu_decode=(1,)),), moves=(Move(1, (0,), (1,)),)),
    ]
    found = device.judge_plans(plans)
    assert (found["two_batch"], found["cpu_decodes"], found["moves"]) == (0.5, 0.5, 1)
    rounds = [{"policy": "off", "rate": rate, "steps": 2} for rate in (4.0, 2.0, 3.0)]
    joined = device.join_rounds(rounds)
    assert (joined["rate"], joined["rounds"], joined["spread"]) == (3.0, 3, pytest.approx(2 / 3))
    rows = [joined, {**joined, "policy": "auto", "rate": 6.0}]
    assert device.summarize_device(rows) == {}  # `full` was not run
    rows += [{**joined, "policy": "full", "rate": 5.0}]
    rows += [{"group": "simulated", "policy": "auto", "simulated_vs_measured": 1.1}]
    keys = device.summarize_device(rows)
    assert keys["auto_vs_off"] == 2.0
    assert keys["auto_vs_better"] == 1.2
    assert keys["simulated_vs_measured_auto"] == 1.1
    assert "auto_vs_off_half" not in keys
    rows += [
        {**joined, "policy": f"{name}, half", "rate": 8.0 + i}
        for i, name in enumerate(("off", "auto"))
    ]
    keys = device.summarize_device(rows)
    assert (keys["auto_vs_off_half"], keys["auto_vs_off"]) == (9.0 / 8.0, 2.0)
    assert keys["auto_vs_better_half"] == 9.0 / 8.0


def test_lengths_are_those_of_the_trace_made_smaller(offload: Any, tmp_path: Path) -> None:
    device = importlib.import_module("offload_device")
    lines = [
        {"input_length": 160 * i, "output_length": 100 * i, "timestamp": 0} for i in range(1, 40)
    ]
    with gzip.open(tmp_path / device.TRACE, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    load = device.read_load(tmp_path, 8, 4, 700, seed=3)
    assert load == device.read_load(tmp_path, 8, 4, 700, seed=3)
    allowed = {(10 * i, min(512, 100 * i)) for i in range(1, 40) if 10 * i + 100 * i <= 700}
    allowed |= {(10 * i, 512) for i in range(6, 19)}
    assert set(load.lengths) <= allowed
    ways = {way.name: way.options for way in device.list_ways("torch:cpu", load)}
    longest = max(map(sum, load.lengths))
    assert ways["auto"]["gpu_blocks"] == max(load.blocks // device.KV_PART, longest // 16 + 2)
    assert ways["whole"]["gpu_blocks"] > load.blocks
    assert "threads" not in ways["whole"]  # torch has all cores
    half = max(load.blocks // device.HALF, longest // 16 + 2)
    for name in ("off", "auto"):
        assert ways[f"{name}, half"] == {**ways[name], "gpu_blocks": half}
    more = {w.name: w.options for w in device.list_ways("torch:cpu", load, device.SIMPLER)}
    for name in device.SIMPLER:
        way = more[f"full, {name}"]
        assert way["settings"].pipelining == name and way.items() >= ways["full"].items()
    with pytest.raises(SystemExit, match="--traces"):
        device.read_load(tmp_path / "none", 8, 4, 700, seed=3)


def test_a_device_is_measured_in_every_way_and_recorded(
    offload: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a tiny model: its figures mean nothing; `auto` mixes only where the clock says so."""
    pytest.importorskip("torch")
    from tests.runtime.accel.engines import make_artifact

    device = importlib.import_module("offload_device")
    artifact = make_artifact(tmp_path)
    monkeypatch.setattr(device, "compile_model", lambda *_: artifact)
    monkeypatch.setattr(device, "STEP_TOKENS", 64)
    monkeypatch.setattr(importlib.import_module("dovetail.runtime.accel.profile"), "BUDGET", 0.2)
    lines = [{"input_length": 16 * n, "output_length": 30} for n in range(20, 60)]
    with gzip.open(tmp_path / device.TRACE, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    out, timeline = tmp_path / "out.json", tmp_path / "timeline.json"
    asked = ["--device", "torch:cpu", "--traces", str(tmp_path), "--json", str(out)]
    asked += ["--rounds", "1", "--requests", "8", "--in-flight", "8", "--ways", "off", "auto"]
    asked += ["full", "--pipelines", "none", "--timeline", str(timeline), "--record", "full, none"]
    offload.main(asked)
    body = json.loads(out.read_text())
    measured = {row["policy"]: row for row in body["rows"] if row["group"] == "device"}
    assert [*measured] == ["off", "auto", "full", "off, half", "auto, half", "full, none"]
    for name, row in measured.items():
        assert row["rate"] > 0 and (row["cpu_decodes"] > 0 or "off" in name or "auto" in name)
    assert measured["full, none"]["two_batch"] == 0 == measured["off, half"]["cpu_decodes"]
    assert {row["policy"] for row in body["rows"] if row["group"] == "simulated"} == {
        *device.POLICIES
    }
    assert body["config"]["gpu_blocks_half"] > body["config"]["gpu_blocks"]
    assert body["summary"].keys() >= {"auto_vs_off", "auto_vs_better_half"}
    assert check_timeline(timeline).spans
