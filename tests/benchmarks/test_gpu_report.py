"""The report of an accelerator runs without one; sections that fail or are late leave others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("faiss")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_report.py"
TINY = ("--device", "torch:cpu", "--tiny")


def run(output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, "--output", output, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_sections_write_one_json_and_one_page(tmp_path: Path) -> None:
    done = run(tmp_path, *TINY, "--sections", "tests,products,clusters,neo")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu_report.json").read_text())
    summary = report["summary"]
    assert summary["tests"]["state"] == "ok"
    (counts,) = (row for row in report["rows"] if row["section"] == "tests")
    assert counts["failed"] == 0 and counts["passed"] + counts["skipped"] > 100
    assert summary["products"]["state"] == "left out"
    assert "NVIDIA" in summary["products"]["said"]
    found = [row["same"] for row in report["rows"] if row["section"] == "clusters"]
    assert found == [1.0, 1.0]
    neo = [row["offload"] for row in report["rows"] if row["section"] == "neo"]
    assert neo == ["off", "auto"]
    page = (tmp_path / "gpu_report.md").read_text()
    assert page.startswith("# Report of torch:cpu")
    assert "| tests | passed | failed | skipped |" in page
    assert {path.name for path in tmp_path.iterdir()} == {"gpu_report.json", "gpu_report.md"}


@pytest.mark.long
def test_tokens_per_second_stand_beside_those_of_a_peer(tmp_path: Path) -> None:
    done = run(tmp_path, *TINY, "--sections", "speed-1b")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "gpu_report.json").read_text())["rows"]
    assert {row["side"] for row in rows} == {"dovetail", "transformers"} and len(rows) == 6
    assert all(
        isinstance(row[name], float) for row in rows for name in ("tokens_per_second", "ratio")
    )


def test_a_section_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytest refuses an option; then nothing is found to be wrong with the next section."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")
    done = run(tmp_path, *TINY, "--sections", "tests,products")
    assert done.returncode == 1
    report = json.loads((tmp_path / "gpu_report.json").read_text())
    states = {name: about["state"] for name, about in report["summary"].items()}
    assert states == {"tests": "failed", "products": "left out"}
    assert "--no-such-option" in (tmp_path / "gpu_report.md").read_text()


def test_a_late_section_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import gpu_report
    import gpu_sections

    late = gpu_sections.Section(gpu_sections.run_tests, 0, "never done")
    monkeypatch.setitem(gpu_report.SECTIONS, "tests", late)
    (tmp_path / "out").mkdir()
    done = gpu_report.run_section("tests", gpu_sections.Setting("torch:cpu", True), tmp_path)
    assert done.state == "late" and "not done in 0 s" in done.about


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_one_sentence_says_what_to_do(tmp_path: Path) -> None:
    done = run(tmp_path / "none")
    assert done.returncode == 2 and not (tmp_path / "none").exists()
    assert done.stderr.strip().count("\n") == 0 and "--device torch:cpu --tiny" in done.stderr


def test_an_unknown_section_is_told_with_those_there_are(tmp_path: Path) -> None:
    done = run(tmp_path, *TINY, "--sections", "speed")
    assert done.returncode == 2 and "speed-1b" in done.stderr


def test_sections_take_ten_minutes_at_most() -> None:
    sys.path.insert(0, str(SCRIPT.parent))
    from gpu_sections import SECTIONS

    assert sum(section.seconds for section in SECTIONS.values()) <= 600
