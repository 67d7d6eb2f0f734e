"""llama.cpp's programs: the newest build is taken, and what they print is read."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from tests.repository import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import llamacpp
from llamacpp import BENCH, Batched, find_programs, parse_batched, parse_build, run_measured

FIGURES = """\
load_backend: loaded CPU backend from /x/libggml-cpu-zen4.so
{"n_kv_max": 2048, "n_batch": 2048, "n_ubatch": 512, "flash_attn": 1, "n_threads": 2, "pp": 32, \
"tg": 64, "pl": 8, "n_kv": 768, "t_pp": 0.307558, "speed_pp": 832.4, "t_tg": 1.5, \
"speed_tg": 341.3, "t": 1.807558, "speed": 424.9}
"""


def write_program(folder: Path, build: int) -> None:
    folder.mkdir(parents=True)
    file = folder / BENCH
    file.write_text(f"#!/bin/sh\necho 'version: 0.6.0-dev (build {build}, commit unknown)' >&2\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def forget() -> None:
    find_programs.cache_clear()


@pytest.mark.usefixtures("forget")
def test_the_newest_build_of_folder_and_path_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(find_programs.cache_clear)
    for place, build in (("peers/old", 900), ("peers/deep/new", 11434), ("bin", 4000)):
        write_program(tmp_path / place, build)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/bin")
    monkeypatch.delenv("DOVETAIL_PEERS", raising=False)
    found = find_programs()
    assert found is not None and (found.build, found.folder) == (4000, tmp_path / "bin")
    find_programs.cache_clear()
    monkeypatch.setenv("DOVETAIL_PEERS", str(tmp_path / "peers"))
    found = find_programs()
    assert found is not None and found.path("x") == str(tmp_path / "peers/deep/new/x")
    find_programs.cache_clear()
    monkeypatch.setenv("DOVETAIL_PEERS", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_programs() is None
    with pytest.raises(RuntimeError, match="DOVETAIL_PEERS"):
        llamacpp.quantize(tmp_path / "a", tmp_path / "b", "Q4_0")


def test_builds_and_figures_are_read_from_what_is_printed() -> None:
    assert parse_build("version: 0.6.0-dev (build 11434, commit unknown)\nbuilt with GNU") == 11434
    assert parse_build("version: 5012 (abcdef)\nbuilt with cc") == 5012
    assert parse_build("what?") == 0
    assert parse_batched(FIGURES) == Batched(prefill=0.307558, decode=1.5)
    assert parse_batched("load_backend: loaded CPU backend\n") is None


def test_a_program_is_run_with_its_memory_and_its_end_is_told() -> None:
    script = "b = bytearray(200 << 20); b[::4096] = b'x' * len(b[::4096]); print('done')"
    text, seconds, peak = run_measured([sys.executable, "-c", script])
    assert text == "done\n" and seconds > 0 and peak > 200 << 20
    with pytest.raises(RuntimeError, match=r"ended with 3: no such model"):
        run_measured(["/bin/sh", "-c", "echo no such model >&2; exit 3"])
