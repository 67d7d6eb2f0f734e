"""The bundled encoder as a service: the app's vectors, queues from measuring or the profile."""

from __future__ import annotations

import importlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.compiler.pipeline import compile_model
from dovetail.ir.errors import ArtifactError, CapacityError
from dovetail.runtime.app import load
from dovetail.runtime.embedding.line import Line
from dovetail.runtime.embedding.open import open_service
from dovetail.runtime.embedding.process import ProcessInstance
from dovetail.runtime.embedding.source import artifact_source, open_encoder
from dovetail.tiny_world import ENCODER

TEXTS = ["Where does Ada live?", "", "The harbour of Elm.", "x " * 900] * 8
SLO = 30.0
"""Seconds: these tests are about results, on machines that may be busy."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("service") / "tiny.dove"
    compile_model(ENCODER, output=output, effort="none", threads=1)
    return output


def test_a_service_gives_the_app_s_vectors_and_keeps_its_lines(path: Path) -> None:
    with load(path) as app:
        wanted = app.embed(TEXTS)
    with open_service(path, slo=0.02, classes=(32,), threads=1) as service:  # measures
        depths = service.manager.depths()
    assert depths.keys() == {"cpu"} and len(depths["cpu"]) == 2  # 32 tokens, the model's 256
    kept = json.loads((path / "models/embedder/profile.json").read_bytes())
    assert [row["length"] for row in kept["latency"]] == [32, 256]
    assert all(len(row["points"]) >= 1 for row in kept["latency"])
    with open_service(path, slo=SLO, classes=(32,), threads=1) as service:  # by the profile
        assert min(service.manager.depths()["cpu"]) > max(depths["cpu"])
        np.testing.assert_allclose(service.embed(TEXTS), wanted, atol=1e-6)
        instance = service._instances["cpu"][0]
        assert isinstance(instance, ProcessInstance)
        os.kill(instance.pid, signal.SIGKILL)
        np.testing.assert_allclose(service.embed(TEXTS), wanted, atol=1e-6)


def test_an_emulated_accelerator_runs_the_same_model_and_a_slow_cpu_stays_out(path: Path) -> None:
    with load(path) as app:
        wanted = app.embed(TEXTS)
    lines = [Line(1e-4, 1e-4)]
    with open_service(path, slo=1e-6, classes=(), threads=1, emulated=lines) as service:
        assert service.manager.depths() == {"emulated0": (0,), "cpu": (0,)}  # Eq. 11
        with pytest.raises(CapacityError) as never:
            service.embed(["x"], wait=False)
        assert never.value.retry_after is None
        job = service.submit_bulk(service._pool().encode(TEXTS[:8]))  # without an SLO
        np.testing.assert_allclose(job.result(), wanted[:8], atol=1e-6)
        assert "emulated0" in {query.device for query in job.queries}


def test_what_is_no_encoder_is_refused(path: Path) -> None:
    with pytest.raises(ArtifactError, match="no encoder called 'other'"):
        open_service(path, model="other")
    with pytest.raises(ArtifactError):
        ProcessInstance(artifact_source(path / "missing"))
    encoder = open_encoder(str(path), 1)
    assert encoder.dim == 128
    encoder.close()


@pytest.fixture
def embed(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("embed")


def test_the_benchmark_writes_the_issue_s_keys(embed: Any, path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    parts = ["table3", "published", "overhead", "concurrency", "load"]
    arguments = ["--repeats", "1", "--seconds", "0.5", "--threads", "1", "--json", str(out)]
    embed.main([str(path), "--only", *parts, "--slo", "0.05", *arguments])
    report = json.loads(out.read_text())
    keys = {"gain_0.05s", "cpu_share_0.05s", "depth_error", "manager_overhead_ms", "table3_off_by"}
    assert keys <= report["summary"].keys()
    assert report["summary"]["table3_off_by"] <= 1
    assert report["summary"].get("load_held_afterwards", 0) == 0
    parts = {row["part"] for row in report["rows"]}
    assert parts == {"table3", "fig5", "fig6", "overhead", "concurrency", "load"}
    (row,) = [row for row in report["rows"] if row["part"] == "concurrency"]
    assert row["gain"] == pytest.approx(
        (sum(row["together"].values()) - row["alone"]["npu"]) / max(row["alone"]["npu"], 1)
    )


@pytest.mark.long
def test_the_benchmark_draws_curves_of_this_machine(embed: Any, path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    embed.main([str(path), "--only", "curves", "--slo", "0.2", "--cores", "1", "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert {row["part"] for row in rows} == {"fig5", "fig6"}
    npu = [row["npu"] for row in rows if row["part"] == "fig5"]
    assert npu[0] > npu[-1]  # of 16 and of the most tokens
    lengths = [row["length"] for row in rows if row["part"] == "fig5"]
    assert lengths == [16, 75, 150, 256], "an encoder's limit ends the curve"
