"""DOVETAIL_TARGET on the roads that compile, run and measure."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.cli.model_cache import _key
from dovetail.codegen.targets import TARGETS, host_target
from dovetail.compiler.measure.roofline import measure_fma_rate
from dovetail.compiler.pipeline import compile_model
from dovetail.compiler.request import choose_targets
from dovetail.ir.cpu import FORCED_TARGET
from dovetail.ir.errors import ArtifactError, SpecError
from dovetail.runtime.app import load
from dovetail.runtime.machine.isa import allowed_targets
from dovetail.topology.hardware import read_hardware
from tests.hosts import host_targets
from tests.models import save_model

FOREIGN = next(name for name in TARGETS if name not in {t.name for t in host_targets()})


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> str:
    """Force a target that every machine runs, the best one of few."""
    monkeypatch.setenv(FORCED_TARGET, "generic")
    return "generic"


def test_it_is_what_is_compiled_for(forced: str) -> None:
    assert host_target().name == forced
    for hardware in (read_hardware(), read_hardware("package:2 core:4")):
        assert [target.name for target in choose_targets((), hardware)] == [forced]
    named = host_targets()[0].name
    assert [t.name for t in choose_targets((named,), read_hardware())] == [named]
    assert measure_fma_rate(1, passes=1) > 0


def test_artifacts_are_made_and_opened_by_it(
    forced: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path / "model", "llama")
    report = compile_model(model, output=tmp_path / "a.dove", effort="none", threads=1)
    assert report.targets == (forced,) and allowed_targets(read_hardware()) == (forced,)
    both = tuple(dict.fromkeys((host_targets()[0].name, forced)))
    compile_model(model, output=tmp_path / "b.dove", effort="none", threads=1, targets=both)
    with load(tmp_path / "b.dove") as app:
        assert app.artifact.target == forced
    served = _key(model, {})
    monkeypatch.delenv(FORCED_TARGET)
    with load(tmp_path / "b.dove") as app:
        assert app.artifact.target == both[0]
    if len(both) > 1:
        assert _key(model, {}) != served  # what `serve` finds its compiled models by
        monkeypatch.setenv(FORCED_TARGET, both[0])
        with pytest.raises(ArtifactError, match=f"DOVETAIL_TARGET asks for {both[0]}"):
            load(tmp_path / "a.dove")


@pytest.mark.parametrize(
    ("name", "complaint"), [("z80", "is no target"), (FOREIGN, "this CPU cannot run")]
)
def test_what_cannot_be_forced_is_one_sentence(
    name: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCED_TARGET, name)
    for road in (
        host_target,
        lambda: choose_targets((), read_hardware()),
        lambda: allowed_targets(read_hardware()),
    ):
        with pytest.raises(SpecError, match=rf"DOVETAIL_TARGET is '{name}', .*{complaint}.*unset"):
            road()


def test_nothing_is_forced_by_an_empty_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORCED_TARGET, "")
    assert host_target() == choose_targets((), read_hardware())[0]
    assert len(allowed_targets(read_hardware())) == len(host_targets())
