"""Profiles measured on this CPU with a small model's own kernels, and kept in its artifact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.compiler.pipeline import compile_model
from dovetail.ir.errors import ArtifactError, SpecError
from dovetail.ir.model import KV_BLOCK
from dovetail.ir.profile import ProfileFile
from dovetail.runtime.app import App, load
from dovetail.runtime.engine import profiler
from dovetail.runtime.engine.profiler import load_profile, measure_profile, plan_points, profile_key
from dovetail.runtime.native.step import StepShape
from dovetail.runtime.schedule.cost_tables import PROFILE
from dovetail.runtime.schedule.request import SamplingParams
from dovetail.topology.hardware import read_hardware
from tests.models import save_model
from tests.runtime.schedule.integrity import check_integrity

PROMPT = [1 + i % 90 for i in range(40)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiler")
    save_model(folder / "model", "llama")
    options = {
        "effort": "none",
        "max_step_tokens": 64,
        "max_context": 256,
        "weight_dtype": "f32",
    }
    compile_model(folder / "model", output=folder / "app.dove", **options)  # type: ignore[arg-type]
    return folder / "app.dove"


@pytest.fixture
def app(path: Path) -> Iterator[App]:
    with load(path, threads=1, kv_blocks=128) as loaded:
        yield loaded
    for file in path.rglob(PROFILE):
        file.unlink()


def profile(app: App, seconds: float = 0.3) -> ProfileFile:
    part = next(iter(app.artifact.models.values()))
    return load_profile(app.artifact, part, app.engine, read_hardware(), seconds)


def test_rows_are_measured_at_the_ends_of_every_table_and_the_engine_is_left_as_it_was(
    app: App,
) -> None:
    before = app.generate([PROMPT], max_tokens=8)[0].token_ids
    found = profile(app)
    rows = {name: {row.at for row in rows} for name, rows in found.tables.items()}
    assert {(1,), (64,)} <= rows["linear"] & rows["prefill"]
    assert (1, 16) in rows["cpu_decode"]
    assert (1, 256) in rows["cpu_decode"]
    most = app.engine.scheduler.limits.max_step_sequences
    assert (most, 16 * most) in rows["cpu_decode"]
    every = [row for rows in found.tables.values() for row in rows]
    assert {row.origin for row in every} == {"measured"}
    assert all(row.seconds > 0 and row.spread >= 0 for row in every)
    assert found.created
    check_integrity(app.engine.scheduler.pool)
    assert app.engine.scheduler.pool.free_blocks == 128
    assert app.generate([PROMPT], max_tokens=8)[0].token_ids == before


def test_attention_is_measured_over_all_that_memory_holds_in_one_layer(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert app.engine.spec.n_layers > 1
    keys = app.engine.executor.model.kv.layers("k")[0]
    layer = 2 * len(keys) // app.engine.scheduler.pool.n_blocks * 100
    monkeypatch.setattr(profiler, "KV_BYTES", layer)
    rows = {row.at for row in profile(app, 0.0).tables["cpu_decode"]}
    most = app.engine.scheduler.limits.max_step_sequences
    assert (most, 100 * KV_BLOCK // most // KV_BLOCK * KV_BLOCK * most) in rows


def test_rows_of_a_step_differ_as_they_may_choose_experts(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, ids = app.engine.executor, list[list[int]]()
    forward = executor.forward

    def watch(shape: StepShape) -> None:
        ids.append(executor.buffers.arrays["token_ids"][: shape.n_tokens].tolist())
        forward(shape)

    monkeypatch.setattr(executor, "forward", watch)
    profile(app, 0.0)
    assert max(map(len, ids)) == 64
    assert all(len(set(found)) == len(found) for found in ids)


def test_a_profile_is_kept_and_read_again(app: App, path: Path) -> None:
    first = profile(app)
    assert len(list(path.rglob(PROFILE))) == 1
    assert profile(app) == first  # times would differ
    with load(path) as again:  # and the artifact still opens
        assert again.generate([PROMPT], max_tokens=1)


def test_a_profile_of_another_thread_count_or_kernel_is_refused(app: App, path: Path) -> None:
    profile(app)
    (file,) = path.rglob(PROFILE)
    text = file.read_text()
    file.write_text(text.replace('"threads": 1', '"threads": 64'))
    with pytest.raises(ArtifactError, match="threads 64 where 1 is used"):
        profile(app)
    kernels = text.split('"kernels": "')[1][:64]
    file.write_text(text.replace(kernels, "0" * 64))
    with pytest.raises(ArtifactError, match="kernels"):
        profile(app)


def test_a_busy_engine_is_not_profiled(app: App) -> None:
    (request,) = app.engine.submit(PROMPT, SamplingParams())
    with pytest.raises(SpecError, match="busy"):
        profile(app)
    app.engine.finish(request, "abort")


def test_points_go_from_the_ends_inwards_and_fit_the_memory() -> None:
    points = list(plan_points(512, 64, 2048, 16384))
    assert len(points) == len(set(points))
    ends = {point for end, point in points if end}
    assert points[: len(ends)] == [(True, p) for p in [q for _, q in points[: len(ends)]]]
    assert {("linear", (1,)), ("linear", (512,)), ("cpu_decode", (1, 2048))} <= ends
    decode = [at for _, (table, at) in points if table == "cpu_decode"]
    assert all(tokens <= 16384 for _, tokens in decode)
    assert {s for s, _ in decode} == {1, 2, 4, 8, 16, 32, 64}
    assert len(points) < 100
    linear = [at[0] for _, (table, at) in points if table == "linear"]
    assert linear[:3] == [1, 512, 32]
    assert sorted(linear) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def test_tables_of_one_point_are_planned_too() -> None:
    assert len(list(plan_points(1, 1, 1, 16))) == 4


def test_single_tables_may_be_measured_alone(app: App) -> None:
    executor = app.engine.executor
    key = profile_key(app.artifact, executor.model, read_hardware())
    found = measure_profile(executor, executor.limits, key, 0.1, ("cpu_decode",))
    assert set(found.tables) == {"cpu_decode"}
