"""`dovetail bench`: simulations with their timeline, cost tables of this machine, bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dovetail.cli.model_cache import find_artifact
from dovetail.tiny_world import ENCODER
from tests.dovetail.commands import assert_one_sentence, dovetail
from tests.timelines import check_timeline

OSC = "input_tokens,output_tokens\n" + "300,12\n350,9\n" * 15


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "osc.csv"
    path.write_text(OSC)
    return path


def test_all_policies_are_compared_and_the_timeline_is_sound(trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "timeline.json"
    arguments = ("bench", "offload", "--simulate", "t4", "--trace", trace)
    result = dovetail(*arguments, "--timeline", picture, "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert set(report["results"]) == {"auto", "off", "full"}
    assert report["throughput_vs_off"]["off"] == 1.0
    assert report["results"]["auto"]["requests"] == 30
    assert any("T4 datasheet" in line for line in report["assumptions"])
    facts = check_timeline(picture)
    assert facts.spans > 100
    assert facts.seconds == pytest.approx(report["results"]["auto"]["seconds"], rel=0.01)
    table = dovetail(*arguments, "--offload", "off", "--requests", 5)
    assert table.code == 0, table.err
    assert "llama-2-7b on t4 (simulated), 54 KV blocks" in table.out


def test_a_timeline_that_cannot_be_written_costs_no_figures(trace: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"  # as on a disk without room
    full.symlink_to("/dev/full")
    arguments = ("--simulate", "t4", "--trace", trace, "--offload", "off", "--requests", 5)
    result = dovetail("bench", "offload", *arguments, "--timeline", full)
    assert_one_sentence(result)
    assert "No space left" in result.err and "54 KV blocks" in result.out
    assert Path("/dev/full").is_char_device() and full.is_symlink()


def test_arrivals_are_those_of_the_trace_or_of_a_rate(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    lines = [{"arrival_s": 100.0 * i, "input_length": 20, "output_length": 2} for i in range(3)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    arguments = ("bench", "offload", "--simulate", "h200", "--trace", trace, "--offload", "off")
    recorded = json.loads(dovetail(*arguments, "--json").out)["results"]["off"]
    assert recorded["seconds"] == pytest.approx(200, rel=0.01)
    faster = json.loads(dovetail(*arguments, "--speed", 10, "--json").out)["results"]["off"]
    assert faster["seconds"] == pytest.approx(20, rel=0.05)
    poisson = json.loads(dovetail(*arguments, "--rate", 100, "--json").out)["results"]["off"]
    assert poisson["seconds"] < 2


@pytest.mark.parametrize(
    "options",
    [
        ("--simulate", "b300"),
        ("--simulate", "t4", "--model", "gpt-5"),
        ("--simulate", "t4", "--offload", "maybe"),
        ("--simulate", "t4", "--rate", "-1"),
        ("--simulate", "t4", "--rate", "nan"),
    ],
)
def test_bad_input_is_one_sentence(trace: Path, options: tuple[str, ...]) -> None:
    assert_one_sentence(dovetail("bench", "offload", "--trace", trace, *options))


def test_a_missing_trace_is_one_sentence(tmp_path: Path) -> None:
    arguments = ("bench", "offload", "--simulate", "t4", "--trace", tmp_path / "none.csv")
    assert_one_sentence(dovetail(*arguments))


def test_a_profile_is_measured_once_and_shown(artifact: Path, tmp_path: Path) -> None:
    own = tmp_path / "app.dove"
    shutil.copytree(artifact, own)
    arguments = ("bench", "profile", own, "--budget", "0.2s", "--threads", "1")
    first = dovetail(*arguments, "--json")
    assert first.code == 0, first.err
    report = json.loads(first.out)
    assert {"linear", "prefill", "cpu_decode", "head"} == set(report["tables"])
    assert json.loads(dovetail(*arguments, "--json").out) == report
    shown = dovetail(*arguments)
    assert shown.code == 0 and "measured" in shown.out
    assert_one_sentence(dovetail("bench", "profile", own, "--threads", "2", "--budget", "1"))


@pytest.mark.parametrize("option", ["--context", "--sequences"])
def test_options_of_a_step_without_calls_are_refused(artifact: Path, option: str) -> None:
    result = dovetail("bench", "profile", artifact, option, "2", "--budget", "0.1s")
    assert_one_sentence(result)
    assert "--calls" in result.err


def test_an_encoder_has_no_profile() -> None:
    result = dovetail("bench", "profile", find_artifact(ENCODER, {}))
    assert_one_sentence(result)
    assert "has no model that generates" in result.err


def test_the_calls_of_a_step_are_shown(artifact: Path) -> None:
    arguments = ("bench", "profile", artifact, "--calls", "--budget", "0.1s", "--threads", "1")
    result = dovetail(*arguments, "--context", "20", "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report["sequences"] == 1 and report["context"] > 20 and report["steps"] >= 8
    rows = {row["op"]: row for row in report["rows"]}
    assert rows["gate_up"]["weight_gb_s"] > 0 and rows["rmsnorm"]["weight_gb_s"] is None
    table = dovetail(*arguments)
    assert table.code == 0, table.err
    assert "a decode step of 1 sequence" in table.out and "gate_up" in table.out
    assert_one_sentence(dovetail(*arguments, "--context", 10**6))
