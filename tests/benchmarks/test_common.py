"""What the benchmarks share: artifacts are measured only as the sources at hand make them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from dovetail.codegen import text_cache
from dovetail.topology.hardware import read_hardware
from dovetail.topology.values import CacheSpec
from tests.repository import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from common import family, keep_current, machine_name, speedup


def test_machines_whose_cpus_have_one_name_are_told_apart_by_their_caches() -> None:
    first = CacheSpec(level=1, kind="data", bytes=32 << 10, line_bytes=64, pus=(0,))
    caches = (first, replace(first, level=2, bytes=1 << 20))
    here = replace(read_hardware(), cpu_model="AMD EPYC", allowed_pus=(0,), caches=caches)
    other = replace(here, caches=(replace(first, bytes=48 << 10), *caches[1:]))
    assert machine_name(here) == "AMD EPYC, L1 32 KiB, L2 1024 KiB" != machine_name(other)


class Maker:
    """Writes an artifact and counts how often."""

    def __init__(self, artifact: Path) -> None:
        self.artifact, self.made = artifact, 0

    def __call__(self) -> None:
        self.artifact.mkdir(exist_ok=True)
        self.made += 1


def test_an_artifact_is_made_again_for_other_sources_or_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Maker(tmp_path / "m.dove")
    for settings, made in (("fast", 1), ("fast", 1), ("full", 2), ("full", 2)):
        keep_current(make.artifact, make, settings)
        assert make.made == made
    monkeypatch.setattr(text_cache, "digest_sources", lambda *_: "of other sources")
    keep_current(make.artifact, make, "full")
    assert make.made == 3


def test_an_artifact_of_unknown_sources_is_made_again(tmp_path: Path) -> None:
    make = Maker(tmp_path / "m.dove")
    make.artifact.mkdir()  # by hand, or by a make that was interrupted
    keep_current(make.artifact, make)
    assert make.made == 1


def test_what_cannot_be_made_is_tried_again(tmp_path: Path) -> None:
    make = Maker(tmp_path / "m.dove")

    def fail() -> None:
        make()
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        keep_current(make.artifact, fail)
    keep_current(make.artifact, make)
    assert make.made == 2


def test_a_family_has_those_below_its_children() -> None:
    """A server's engine computes for the benchmark that runs it: it is no noise of others."""
    inner = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", outer], **pipes, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        below = int(child.stdout.readline())
        assert {os.getpid(), child.pid, below} <= set(family(os.getpid()))
        child.stdin.close()


def test_a_speedup_is_bounded_from_below() -> None:
    ours, theirs = [1.0] * 9, [2.0, 1.9, 1.8, 2.1, 2.2, 1.7, 2.3, 2.4, 1.6]
    found = speedup(ours, theirs)
    assert found["ratio"] == pytest.approx(2.0)
    assert found["bound"] == pytest.approx(1.6)  # of nine, the least
    assert speedup(ours[:6], theirs[:6])["bound"] is None
