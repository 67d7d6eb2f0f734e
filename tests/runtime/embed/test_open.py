"""The bundled encoder as a service: the app's vectors, queues from measuring or the profile."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.compiler.pipeline import compile_model
from dovetail.ir.errors import ArtifactError, CapacityError, DeviceError
from dovetail.runtime.app import App, load
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.embed.encoder import artifact_source, open_encoder
from dovetail.runtime.embed.process import ProcessInstance
from dovetail.runtime.embed.service import EmbeddingService
from dovetail.runtime.embed.settings import EmbeddingSettings
from dovetail.tiny_world import ENCODER
from dovetail.topology.hardware import read_hardware
from tests.processes import stop
from tests.runtime.embed.integrity import held

TEXTS = ["Where does Ada live?", "", "The harbour of Elm.", "x " * 900] * 8
TORCH = "torch:cpu"
SLO = 30.0
"""Seconds: these tests are about results, on machines that may be busy."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("service") / "tiny.dove"
    compile_model(ENCODER, output=output, effort="none", threads=1, weight_dtype="f32")
    return output


def service_of(app: App) -> EmbeddingService:
    return app.embeddings.choose(labels=False).service


def queues(**options: Any) -> EmbeddingSettings:
    return EmbeddingSettings(**{"slo": SLO, "classes": (32,), **options})


def test_queues_give_the_same_vectors_and_keep_their_lines(path: Path) -> None:
    with load(path) as app:
        wanted = app.embed(TEXTS)
        assert service_of(app).manager.depths().keys() == {"cpu"}
    with load(path, threads=1, embedding=queues(slo=0.02)) as app:  # measures
        depths = service_of(app).manager.depths()
    assert depths.keys() == {"cpu"} and len(depths["cpu"]) == 2  # 32 tokens, the model's 256
    kept = json.loads((path / "models/embedder/profile.json").read_bytes())
    assert [row["length"] for row in kept["latency"]] == [32, 256]
    assert all(len(row["points"]) >= 1 for row in kept["latency"])
    with load(path, threads=1, embedding=queues()) as app:  # by the profile
        service = service_of(app)
        assert min(service.manager.depths()["cpu"]) > max(depths["cpu"])
        np.testing.assert_allclose(app.embed(TEXTS), wanted, atol=1e-6)
        instance = service._instances["cpu"][0]["embedder"]
        assert isinstance(instance, ProcessInstance) and instance.pid is not None
        launch, held_back = instance._launch, threading.Event()
        instance._launch = lambda: (held_back.wait(), launch())[1]  # type: ignore[method-assign]
        os.kill(instance.pid, signal.SIGKILL)
        while "SIGKILL" not in app.failure:  # it is not known at once
            os.sched_yield()
        assert not app.ready
        held_back.set()
        again = asyncio.run(app.aembed(TEXTS, wait=True))  # BUSY, else, while it is started anew
        np.testing.assert_allclose(again, wanted, atol=1e-6)
        assert held(service) == {"cpu": 0}


def test_the_overflow_goes_to_the_cpu_and_what_is_beyond_is_busy(path: Path) -> None:
    """WindVE's three answers from the ordinary call: accelerator, CPU, BUSY."""
    with load(path) as app:
        wanted = app.embed(TEXTS[:3])

    def set_depth(name: str, depth: int) -> None:
        service.set_queue(replace(service.manager.spec(name), depths=(depth,)))

    settings = queues(arrival="closed", classes=())
    with load(path, threads=1, embedding=replace(settings, slo=0.02), device=TORCH):
        pass  # measured soon: the lines are those of any SLO
    with load(path, threads=1, embedding=settings, device=TORCH) as app:
        service = service_of(app)
        set_depth(TORCH, 1)
        set_depth("cpu", 2)
        chosen = app.embeddings.choose(labels=False)
        ids = chosen.read(TEXTS[:3], None, None)
        job = service.submit(ids, model=chosen.name)
        assert [query.device for query in job.queries] == [TORCH, "cpu", "cpu"]
        np.testing.assert_allclose(job.result(), wanted, atol=1e-5)
        set_depth(TORCH, 0)
        cpu = service._instances["cpu"][0]["embedder"]
        assert isinstance(cpu, ProcessInstance)
        stop(cpu.pid)
        waiting = service.submit(ids[1:], model=chosen.name)
        with pytest.raises(CapacityError) as busy:
            app.embed(TEXTS[0])
        assert busy.value.retry_after is not None and busy.value.retry_after > 0
        os.kill(cpu.pid, signal.SIGCONT)
        np.testing.assert_allclose(waiting.result(), wanted[1:], atol=1e-5)


def test_a_slow_cpu_stays_out_and_waiting_calls_are_served(path: Path) -> None:
    with load(path) as app:
        wanted = app.embed(TEXTS[:8])
    settings = queues(slo=1e-6, classes=())
    with load(path, threads=1, embedding=settings) as app:
        assert service_of(app).manager.depths() == {"cpu": (0,)}  # Eq. 11
        with pytest.raises(CapacityError) as never:
            app.embed(["x"])
        assert never.value.retry_after is None
        np.testing.assert_allclose(app.embed(TEXTS[:8], wait=True), wanted, atol=1e-6)


def test_an_encoder_comes_back_with_the_same_model_only(path: Path, tmp_path: Path) -> None:
    """As an engine does: see `test_an_artifact_may_be_replaced_while_it_is_served`."""
    served = shutil.copytree(path, tmp_path / "tiny.dove")
    other = shutil.copytree(ENCODER, tmp_path / "other")
    text = (other / "config.json").read_text()
    (other / "config.json").write_text(text.replace("1e-12", "1e-2"))
    with load(served, apart=True) as app:
        wanted = app.embed(TEXTS[:3])
        cpu = service_of(app)._instances["cpu"][0]["embedder"]
        assert isinstance(cpu, ProcessInstance)
        for model in (ENCODER, other):
            compile_model(model, output=served, effort="none", threads=1, weight_dtype="f32")
            assert cpu.pid is not None
            os.kill(cpu.pid, signal.SIGKILL)
            if model == ENCODER:
                np.testing.assert_allclose(app.embed(TEXTS[:3]), wanted, atol=1e-5)
        with pytest.raises(DeviceError):
            app.embed(TEXTS[:3])
        assert "was replaced by another model while it was served" in app.failure


def test_what_is_no_encoder_is_refused(path: Path) -> None:
    opened = open_artifact(path, read_hardware())
    with pytest.raises(ArtifactError):
        ProcessInstance(artifact_source(replace(opened, path=path / "missing")))
    with pytest.raises(ArtifactError, match="no encoder called 'other'"):
        open_encoder(str(path), 1, "other")
    encoder = open_encoder(str(path), 1)
    assert encoder.dim == 128
    encoder.close()


@pytest.fixture
def embed(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("embed")


@pytest.mark.long
def test_the_benchmark_writes_the_issue_s_keys(embed: Any, path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    parts = ["table3", "published", "overhead", "device", "device-load"]
    arguments = ["--repeats", "1", "--seconds", "0.5", "--threads", "1", "--json", str(out)]
    arguments += ["--device", "cpu"]
    embed.main([str(path), "--only", *parts, "--slo", "0.05", *arguments])
    report = json.loads(out.read_text())
    keys = {"device_depth_error_0.05s", "manager_overhead_ms", "table3_off_by"}
    assert keys <= report["summary"].keys()
    assert report["summary"]["table3_off_by"] <= 1
    parts = {row["part"] for row in report["rows"]}
    assert parts == {"table3", "published5", "published6", "overhead", "device", "device-load"}
    (row,) = [row for row in report["rows"] if row["part"] == "device"]
    assert row["accelerator"].startswith("none") and row["together"].keys() == {"cpu"}
    (row,) = [row for row in report["rows"] if row["part"] == "device-load"]
    assert row.get("held_afterwards", 0) == 0


@pytest.mark.long
def test_the_benchmark_draws_curves_of_this_machine(embed: Any, path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    embed.main([str(path), "--only", "curves", "--slo", "0.2", "--cores", "1", "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert {row["part"] for row in rows} == {"fig5", "fig6"}
    cpu = [row["cpu"] for row in rows if row["part"] == "fig5"]
    assert cpu[0] > cpu[-1]  # of 16 and of the most tokens
    lengths = [row["length"] for row in rows if row["part"] == "fig5"]
    assert lengths == [16, 75, 150, 256], "an encoder's limit ends the curve"
