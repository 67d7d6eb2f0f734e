"""What the benchmarks share: artifacts are measured only as the sources at hand make them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dovetail.codegen import text_cache
from tests.repository import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from common import keep_current


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
