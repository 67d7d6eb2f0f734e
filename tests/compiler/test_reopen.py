"""Artifacts compiled anew: the same models, workflows and weights under other schedules."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dovetail.cli.model_cache import find_untuned
from dovetail.compiler.pipeline import compile_model
from dovetail.compiler.reopen import read_artifact
from dovetail.compiler.request import CompileRequest
from dovetail.compiler.write.report import CompileReport
from dovetail.ir.errors import ArtifactError, SpecError
from dovetail.ir.ragraph import END, START, RAGraph
from dovetail.runtime.app import load
from dovetail.runtime.artifact import Artifact, open_artifact
from dovetail.topology.hardware import read_hardware
from tests.compiler.virtual import use_virtual_meters
from tests.encoders import save_encoder
from tests.models import save_model


def echo() -> RAGraph:
    graph = RAGraph("echo")
    graph.add_generation("say", prompt="{input}", output="said")
    graph.add_edge(START, "say")
    graph.add_edge("say", END)
    return graph


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact by rules, with an encoder, a workflow and the checkpoint's sampling options."""
    folder = tmp_path_factory.mktemp("reopen")
    save_model(folder / "model", "llama")
    save_encoder(folder / "encoder", "bert")
    compile_model(
        {"llm": folder / "model", "embedder": folder / "encoder"},
        output=folder / "app.dove",
        effort="none",
        threads=1,
        workflows=[echo()],
        max_step_tokens=64,
        weight_dtype="f32",
    )
    return folder / "app.dove"


def opened(path: Path) -> Artifact:
    return open_artifact(path, read_hardware(), check_weights=True)


def test_it_holds_what_the_other_held_and_answers_alike(given: Path, tmp_path: Path) -> None:
    compile_model(given, output=tmp_path / "new.dove", effort="none")
    old, new = opened(given), opened(tmp_path / "new.dove")
    assert old.manifest.model_fingerprint == new.manifest.model_fingerprint
    assert new.manifest.files.keys() == old.manifest.files.keys()
    assert (new.service, new.workflows[0].template) == (old.service, old.workflows[0].template)
    for one, other in zip(old.parts, new.parts, strict=True):
        assert (one.file, one.schedules, one.tapes) == (other.file, other.schedules, other.tapes)
        assert one.weights.samefile(other.weights)
    answers = []
    for path in (old.path, new.path):
        with load(path, deterministic=True) as app:
            answers.append(app.generate([[3, 1, 4, 1, 5]], max_tokens=8)[0].token_ids)
    assert answers[0] == answers[1]


KERNEL = """
@kernel
def twice(n: i64, x: ptr[f32], out: ptr[f32]):
    for i in vrange(n):
        v = vload(x + i)
        vstore(out + i, vadd(v, v))
"""


def test_kernels_of_a_user_are_not_lost_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "twice.dk").write_text(KERNEL)
    model, app = save_model(tmp_path / "model", "llama"), tmp_path / "app.dove"
    own = (str(tmp_path / "twice.dk"),)
    assert not told_of_own(compile_model(model, output=app, kernels=own, effort="none"))
    (note,) = told_of_own(compile_model(app, output=tmp_path / "new.dove", effort="none"))
    assert note.endswith(f"to have them, give --kernel {own[0]}")
    output = tmp_path / "again.dove"
    assert not told_of_own(compile_model(app, output=output, kernels=own, effort="none"))
    assert [has_twice(path) for path in (app, tmp_path / "new.dove", output)] == [True, False, True]
    assert find_untuned([app], {"app": app}, {}, None) == []  # it would be served without them


def told_of_own(report: CompileReport) -> list[str]:
    return [note for note in report.notes if "of your own" in note]


def has_twice(path: Path) -> bool:
    return "twice" in {kernel.name for kernel in opened(path).kernels.kernels}


def test_schedules_are_measured_for_the_plan_that_was_asked_for(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_virtual_meters(monkeypatch)
    output = tmp_path / "new.dove"
    report = compile_model(given, output=output, budget=1.0, database=tmp_path / "db")
    assert report.rows["measured"] > 0 and report.encoders
    assert opened(output).service == opened(given).service


def test_the_mix_of_requests_is_kept_until_another_is_given(given: Path, tmp_path: Path) -> None:
    def again(source: Path, name: str, mix: str | None) -> list[str]:
        compile_model(source, output=tmp_path / name, effort="none", mix=mix)
        command = opened(tmp_path / name).manifest.command
        return [word for word in command if word.startswith("--mix=")]

    assert again(given, "even.dove", None) == []
    assert again(given, "chats.dove", "16:1:1") == ["--mix=16:1:1"]
    assert again(tmp_path / "chats.dove", "kept.dove", None) == ["--mix=16:1:1"]
    assert again(tmp_path / "chats.dove", "rag.dove", "1:16:1") == ["--mix=1:16:1"]
    read = [
        (tmp_path / name / "plans/choice.json").read_bytes() for name in ("chats.dove", "kept.dove")
    ]
    assert msgspec.json.decode(read[0])["divisions"] == msgspec.json.decode(read[1])["divisions"]


def test_what_is_settled_cannot_be_asked_for(given: Path, tmp_path: Path) -> None:
    options: Any
    for options in ({"weight_dtype": "bf16"}, {"max_context": 64}, {"workflows": [echo()]}):
        with pytest.raises(SpecError, match=f"{next(iter(options))} cannot change"):
            compile_model(given, output=tmp_path / "new.dove", **options)


def test_one_for_another_cpu_becomes_one_for_this_machine(given: Path, tmp_path: Path) -> None:
    away, hardware = tmp_path / "away.dove", read_hardware()
    (here,) = opened(given).manifest.targets
    other = "x86-64-avx2" if hardware.arch == "aarch64" else "aarch64-neon"
    shutil.copytree(given, away)
    (away / "kernels" / here).rename(away / "kernels" / other)
    manifest = msgspec.json.decode((away / "manifest.json").read_bytes())
    manifest["targets"] = [other, "cuda"]
    manifest["files"] = {k.replace(here, other): v for k, v in manifest["files"].items()}
    (away / "manifest.json").write_bytes(msgspec.json.encode(manifest))

    with pytest.raises(ArtifactError, match=r"none of which .*`dovetail compile .*away\.dove -o"):
        opened(away)
    read = read_artifact(CompileRequest(model=away, output=tmp_path / "new.dove"))
    assert {device.name for model in read for device in model.devices} == {"cuda"}
    compile_model(away, output=tmp_path / "new.dove", effort="none", targets=(here,))
    assert opened(tmp_path / "new.dove").manifest.targets == (here,)
    assert {target.name for model in read for target in model.targets} == {here}


def test_a_damaged_one_is_refused(given: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.dove").mkdir()
    (tmp_path / "bad.dove" / "manifest.json").write_text("{}")
    with pytest.raises(ArtifactError):
        compile_model(tmp_path / "bad.dove", output=tmp_path / "new.dove")
