"""The serving benchmark: its loads and figures, and one small run of all sides."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.repository import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from common import Report, earlier_rows
from generate_peers import programs_missing
from serve import HEADLINE_SCALE, SETUPS, is_done, make_curves, next_part, summarise
from serve_load import (
    Arrival,
    Level,
    Served,
    Slo,
    find_goodput,
    make_arrivals,
    measure_level,
    percentile,
    read_trace,
)
from serve_workers import planning_share

TRACE = [(i * i / 100, 10 * i, i % 7) for i in range(1, 200)]
SLO = Slo(0.2, 0.1)


def arrivals(kind: str, rate: float = 5.0) -> list[Arrival]:
    options = {
        "prompt_scale": 0.5,
        "answer_scale": 1.0,
        "longest": 64,
        "vocabulary": 100,
        "seed": 3,
    }
    return make_arrivals(TRACE, kind, rate, 50, **options)


@pytest.mark.parametrize("kind", ["poisson", "azure"])
def test_arrivals_have_the_rate_and_the_lengths_asked_for(kind: str) -> None:
    found = arrivals(kind)
    assert len(found) == 50 and found == arrivals(kind)
    times = [a.at for a in found]
    assert times == sorted(times) and times[0] >= 0
    assert times[-1] == pytest.approx(10.0)
    for one in found:
        assert len(one.prompt) + one.answer <= 64 and one.answer >= 2 and one.prompt
        assert all(3 <= token < 100 for token in one.prompt)
    faster = arrivals(kind, 50.0)
    assert [a.prompt for a in faster] == [a.prompt for a in found]
    assert [a.at * 10 for a in faster] == pytest.approx(times)


def test_azure_keeps_the_gaps_of_the_trace() -> None:
    times = [a.at for a in arrivals("azure")]
    gaps = [b - a for a, b in pairwise(times)]
    assert gaps == sorted(gaps) and gaps[-1] > 1.2 * gaps[0]


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile([]) == 0.0
    assert percentile([5.0]) == 5.0
    assert percentile([float(i) for i in range(10, 0, -1)]) == 9.0
    level = measure_level(2.0, [Served(0.1 * i, None if i % 2 else 0.01 * i) for i in range(10)])
    assert (level.rate, level.ttft, level.tpot) == (2.0, pytest.approx(0.8), pytest.approx(0.08))


def test_goodput_lies_where_the_slo_just_holds() -> None:
    levels = [Level(1.0, 0.1, 0.01), Level(2.0, 0.4, 0.01), Level(4.0, 0.2, 0.4)]
    assert find_goodput(levels, SLO, 0.4) == 0.0
    assert find_goodput(levels, SLO, 0.5) == pytest.approx(1.0)
    assert find_goodput(levels, SLO, 1.0) == pytest.approx(1.5)  # evenly in the logarithm
    assert find_goodput(levels, SLO, 2.0) == pytest.approx(2.0)
    assert find_goodput(list(reversed(levels)), SLO, 4.0) == pytest.approx(4.0)
    assert find_goodput(levels, SLO, 10.0) == 4.0  # not beyond what was measured


def test_goodput_falls_with_stricter_slos() -> None:
    levels = [Level(r, 0.05 * r, 0.02 * r) for r in (1.0, 2.0, 3.0, 5.0)]
    found = [find_goodput(levels, SLO, scale) for scale in (0.25, 0.5, 0.75, 1.0, 2.0)]
    assert found == sorted(found) and found[0] > 0


def test_the_share_of_planning_counts_the_fullest_steps_alone() -> None:
    spans = []
    for step, plan, decode in ((10.0, 1.0, 2), (20.0, 2.0, 8), (30.0, 1.0, 8)):
        spans.append({"name": "step", "dur": step})
        spans.append({"name": "schedule", "dur": plan})
        spans.append({"name": "forward", "dur": step / 2, "args": {"decode": decode}})
    assert planning_share(spans) == {"fraction": pytest.approx(3 / 50), "running": 8}


def test_the_summary_takes_the_lowest_rate_where_a_peer_never_holds() -> None:
    rows = [
        {"model": "m", "arrivals": kind, "side": side, "scale": HEADLINE_SCALE, "goodput": g,
         "bound": 0.5}
        for kind in ("poisson", "azure")
        for side, g in (("dovetail", 4.0), ("transformers", 2.0), ("llamacpp", 0.0))
    ]  # fmt: skip
    summary = summarise(rows)
    assert summary["goodput_vs_transformers"] == summary["goodput_vs_best"] == pytest.approx(2.0)
    assert summary["goodput_vs_llamacpp"] == pytest.approx(8.0)
    assert "scheduler_fraction" not in summary
    assert "goodput_vs_llamacpp" not in summarise([r for r in rows if r["side"] != "llamacpp"])


def test_the_trace_of_the_azure_set_is_read(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.9799600,110,27"
    )
    assert read_trace(tmp_path / "t.csv") == [(0.0, 4808, 10), (pytest.approx(2.0), 110, 27)]


def test_rates_go_up_until_the_loosest_slo_is_missed() -> None:
    place = {"model": "tiny", "arrivals": "poisson", "side": "dovetail"}
    first, second = SETUPS["tiny"].parts
    rows: list[dict[str, Any]] = [{**place, "capacity": 4.0}]
    assert next_part(rows, "tiny") == first and not is_done(rows, "tiny", "dovetail")
    held = {**place, "part": first, "rate": 4.0 * first, "p90_ttft_ms": 20.0, "p90_tpot_ms": 9.0}
    assert next_part([*rows, held], "tiny") == second
    assert next_part([*rows, held | {"p90_tpot_ms": 1001.0}], "tiny") is None
    rows += [held, held | {"part": second, "rate": 4.0 * second}]
    assert next_part(rows, "tiny") is None
    both = [*rows, *(row | {"arrivals": "azure"} for row in rows)]
    assert not is_done(both, "tiny", "dovetail")  # batch 8 is not yet compared
    assert is_done([*both, place | {"batch8_vs_batch1": 4.0}], "tiny", "dovetail")
    curve = {row["scale"]: row for row in make_curves(rows)}
    assert (curve[1.0]["goodput"], curve[1.0]["open"]) == (4.0 * second, True)


def test_a_run_resumes_a_report_of_the_same_settings(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    config = {"scales": (1.0, 2.0), "setup": {"parts": (0.5,)}, "peers": ("a",)}
    Report("serve", config, [{"model": "m"}]).write(file)
    same = ("scales", "setup")
    assert earlier_rows(file, config | {"peers": ("b",)}, same) == [{"model": "m"}]
    assert earlier_rows(tmp_path / "none.json", config, same) == []
    with pytest.raises(SystemExit, match="leave --resume away"):
        earlier_rows(file, config | {"scales": (1.0,)}, same)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_small_run_has_all_keys(tmp_path: Path) -> None:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:17:{i % 60:02}.0,{100 + i},{2 + i % 5}" for i in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    command = [sys.executable, "benchmarks/serve.py", "--models", "tiny"]
    command += ["--peers", "transformers,llamacpp", "--effort", "none", "--threads", "1"]
    command += ["--trace", str(tmp_path / "t.csv"), "--json", str(tmp_path / "f.json")]
    subprocess.run(command, cwd=ROOT, check=True)
    summary = json.loads((tmp_path / "f.json").read_text())["summary"]
    assert {"goodput_vs_transformers", "batch8_vs_batch1", "scheduler_fraction"} <= set(summary)
    assert ("goodput_vs_llamacpp" in summary) == (not programs_missing())
    before = (tmp_path / "f.json").read_bytes()
    again = subprocess.run([*command, "--resume"], cwd=ROOT, check=True, capture_output=True)
    assert b"requests/s" not in again.stdout and (tmp_path / "f.json").read_bytes() == before
