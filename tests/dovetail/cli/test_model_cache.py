"""What an artifact of the cache is known by: it never stands in for another model or machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from dovetail.cli import model_cache
from dovetail.cli.model_cache import find_artifact
from dovetail.topology.hardware import HardwareSpec, read_hardware


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache in which every artifact that is looked for is there, so that none is compiled."""
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_cache, "_fits", lambda _path: True)
    return tmp_path / "cache/models"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "llm").mkdir()
    (tmp_path / "llm/config.json").write_text("{}")
    return tmp_path / "llm"


def test_a_plan_for_few_cores_does_not_serve_on_many(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the first start was in a container with a quota, or on another node."""

    def found(machine: str, **limits: float) -> Path:
        def read(source: str | Path = machine) -> HardwareSpec:
            return replace(read_hardware(source), **limits)

        monkeypatch.setattr(model_cache, "read_hardware", read)
        return find_artifact(model, {})

    places = [found("core:2 pu:1"), found("core:8 pu:1"), found("core:8 pu:1", cpu_quota=4.0)]
    assert len({*places}) == 3 and all(place.parent == cache for place in places)
    assert found("core:8 pu:1", cpu_quota=2.0) == places[0]  # as many cores of the same kind


def test_what_was_tuned_of_an_artifact_elsewhere_does_not_serve_here(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    copies = set()
    for machine in ("core:2 pu:1", "core:8 pu:1"):
        monkeypatch.setattr(model_cache, "read_hardware", lambda m=machine: read_hardware(m))
        copies |= {*model_cache.find_artifacts([tmp_path], ["one"], {}).values()}
    assert len(copies) == 2


@pytest.mark.parametrize("option", ["model", "adapter"])
@pytest.mark.parametrize("inside", ["", "model.gguf"])
def test_what_is_beside_a_model_may_change(
    model: Path, cache: Path, tmp_path: Path, option: str, inside: str
) -> None:
    """Be it a folder or one file."""
    given = tmp_path / "beside"
    file = given
    if inside:
        given.mkdir()
        file = given / inside
    file.write_bytes(b"first")
    first = find_artifact(model, {option: (f"name={given}",)})
    assert find_artifact(model, {option: (f"name={given}",)}) == first
    file.write_bytes(b"second")
    assert find_artifact(model, {option: (f"name={given}",)}) != first
