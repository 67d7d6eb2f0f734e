"""GPUs that embed: found, started, left out. A process of the CPU's encoder stands for a GPU."""

from __future__ import annotations

import importlib
import logging
import os
import signal
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dovetail.compiler.pipeline import compile_model
from dovetail.ir.errors import DeviceError
from dovetail.runtime.artifact import Artifact, open_artifact
from dovetail.runtime.embedding import capacity, gpus
from dovetail.runtime.embedding.gpus import start_gpus
from dovetail.runtime.embedding.instance import EncoderSource, InstanceLost
from dovetail.runtime.embedding.open import open_service
from dovetail.runtime.embedding.process import ProcessInstance
from dovetail.runtime.embedding.settings import EmbeddingSettings
from dovetail.runtime.embedding.source import artifact_source, open_encoder
from dovetail.runtime.encoder_texts import open_encoders
from dovetail.tiny_world import ENCODER
from dovetail.topology.hardware import read_hardware
from dovetail.topology.values import AcceleratorSpec, HardwareSpec
from tests.runtime.embedding.toy_encoders import DEADLY, HEAVY

TEXTS = [[5, 6, 7], [8], [9, 10]]
IDS = [np.array(text, np.int32) for text in TEXTS]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("gpus") / "tiny.dove"
    compile_model(ENCODER, output=output, effort="none", threads=1, weight_dtype="f32")
    return output


@pytest.fixture
def hardware() -> HardwareSpec:
    device = AcceleratorSpec(kind="cuda", name="cuda0", model="Emulated 9")
    return msgspec.structs.replace(read_hardware(), accelerators=(device,))


@pytest.fixture
def artifact(path: Path) -> Artifact:
    """The artifact as if it had kernels for GPUs."""
    found = open_artifact(path, read_hardware())
    targets = (*found.manifest.targets, "cuda")
    return replace(found, manifest=msgspec.structs.replace(found.manifest, targets=targets))


@pytest.fixture
def standing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a process on the CPU stand for each GPU."""

    def source(path: Path, ordinal: int, model: str | None = None) -> EncoderSource:
        assert ordinal == 0
        return artifact_source(path, 1, model)

    monkeypatch.setattr(gpus, "gpu_source", source)


@pytest.fixture(scope="module")
def wanted(path: Path) -> np.ndarray:
    with closing(open_encoder(str(path), 1)) as encoder:
        return encoder.embed_tokens(IDS)


def test_without_an_slo_the_gpu_serves_alone_and_comes_back_when_it_dies(
    artifact: Artifact, hardware: HardwareSpec, wanted: np.ndarray, standing: None
) -> None:
    embeddings = open_encoders(artifact, hardware, threads=1)
    with closing(embeddings):
        service = embeddings.choose(labels=False).service
        assert service.manager.depths().keys() == {"cuda0"}
        np.testing.assert_allclose(embeddings.embed(TEXTS), wanted, atol=1e-6)
        instance = service._instances["cuda0"][0]["embedder"]
        assert isinstance(instance, ProcessInstance)
        os.kill(instance.pid, signal.SIGKILL)
        np.testing.assert_allclose(embeddings.embed(TEXTS), wanted, atol=1e-6)
        assert service.held == {"cuda0": 0}


def test_within_an_slo_the_cpu_takes_what_the_gpu_has_no_room_for(
    artifact: Artifact, hardware: HardwareSpec, wanted: np.ndarray, standing: None, path: Path
) -> None:
    small = EmbeddingSettings(slo=0.02, arrival="closed", classes=())
    open_service(artifact, hardware, small, threads=1).close()  # measures both
    kept = msgspec.json.decode((path / "models/embedder/profile.json").read_bytes())
    assert {row["device"] for row in kept["latency"]} == {"cuda0", "cpu"}
    assert "Emulated 9" in kept["key"]["device"], "another GPU has other lines"
    with open_service(artifact, hardware, replace(small, slo=30.0), threads=1) as service:
        for name, depth in (("cuda0", 1), ("cpu", 2)):
            spec = replace(service.manager.spec(name), depths=(depth,))
            service.change(lambda manager, spec=spec: manager.set_queue(spec))
        job = service.submit(IDS, model="embedder")
        assert [query.device for query in job.queries] == ["cuda0", "cpu", "cpu"]
        np.testing.assert_allclose(job.result(), wanted, atol=1e-6)


def test_a_gpu_that_cannot_have_the_encoder_is_left_out(
    artifact: Artifact,
    hardware: HardwareSpec,
    wanted: np.ndarray,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its process finds the artifact as it is, without kernels for GPUs."""
    with closing(open_encoders(artifact, hardware, threads=1)) as embeddings:
        assert embeddings.choose(labels=False).service.manager.depths().keys() == {"cpu"}
        np.testing.assert_allclose(embeddings.embed(TEXTS), wanted, atol=1e-6)
    assert "cuda0 does not embed" in caplog.text and "--target cuda" in caplog.text


def test_an_artifact_without_kernels_starts_nothing(
    path: Path, hardware: HardwareSpec, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dovetail")
    with ExitStack() as opened:
        assert start_gpus(open_artifact(path, hardware), hardware, opened) == {}
    assert "cuda0: the artifact has no kernels for it" in caplog.text


def test_an_encoder_that_is_lost_ends_its_process(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
    source = EncoderSource(module="toy_encoders", function="gpu")
    with closing(ProcessInstance(source)) as instance:
        with pytest.raises(DeviceError, match="out of memory in a pass of 2 tokens"):
            instance.embed_tokens([np.array([HEAVY, 1], np.int32)])
        assert instance.embed_tokens(IDS).shape == (3, 8)
        with pytest.raises(InstanceLost):
            instance.embed_tokens([np.array([DEADLY], np.int32)])
        instance.restart()
        assert instance.embed_tokens(IDS).shape == (3, 8)
    written = capfd.readouterr().err
    assert "illegal memory access" in written and "Traceback" not in written


@pytest.mark.long
def test_the_real_pair_is_measured_where_there_is_one(
    artifact: Artifact,
    hardware: HardwareSpec,
    path: Path,
    standing: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capacity, "read_hardware", lambda: hardware)
    assert capacity.measure_gpu(path, 8, 0.02, repeats=1, threads=1) is None
    monkeypatch.setattr(capacity, "open_artifact", lambda *_: artifact)
    found = capacity.measure_gpu(path, 8, 0.02, repeats=1, threads=1)
    assert found is not None and found.accelerator == "cuda0: Emulated 9"
    assert found.together.keys() == {"npu", "cpu"} and found.late == 0


def test_the_benchmark_says_that_there_is_no_gpu(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    embed: Any = importlib.import_module("embed")
    out = tmp_path / "out.json"
    embed.main([str(path), "--only", "gpu", "--slo", "0.02", "--json", str(out)])
    assert "gpu: left out" in capsys.readouterr().out
    assert msgspec.json.decode(out.read_bytes())["rows"] == []
