"""Accelerators that embed: found, started, left out. Torch on the CPU is one that is here."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dovetail.compiler.pipeline import compile_model
from dovetail.ir.errors import DeviceError
from dovetail.runtime.artifact import Artifact, open_artifact
from dovetail.runtime.child.child import ChildLost
from dovetail.runtime.embed import devices
from dovetail.runtime.embed import open as opening
from dovetail.runtime.embed.encoder import EncoderSource, open_encoder
from dovetail.runtime.embed.open import open_encoders, open_service
from dovetail.runtime.embed.process import ProcessInstance
from dovetail.runtime.embed.settings import EmbeddingSettings
from dovetail.runtime.sim import capacity
from dovetail.tiny_world import ENCODER
from dovetail.topology.hardware import read_hardware
from dovetail.topology.synthetic import read_synthetic
from dovetail.topology.values import AcceleratorSpec, HardwareSpec
from tests.runtime.embed.integrity import held
from tests.runtime.embed.toy_encoders import DEADLY, HEAVY

TEXTS = [[5, 6, 7], [8], [9, 10]]
IDS = [np.array(text, np.int32) for text in TEXTS]
TORCH = "torch:cpu"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("accelerators") / "tiny.dove"
    compile_model(ENCODER, output=output, effort="none", threads=1, weight_dtype="f32")
    return output


@pytest.fixture
def hardware(monkeypatch: pytest.MonkeyPatch) -> HardwareSpec:
    """This machine; where it has one CPU, both sides run on that."""
    found, here = read_hardware(), devices.host_pus
    if len(here(found)) < 2:
        monkeypatch.setattr(devices, "host_pus", lambda spec: here(spec) * 2)
    return found


@pytest.fixture
def artifact(path: Path) -> Artifact:
    return open_artifact(path, read_hardware())


@pytest.fixture(scope="module")
def wanted(path: Path) -> np.ndarray:
    with closing(open_encoder(str(path), 1)) as encoder:
        return encoder.embed_tokens(IDS)


def test_without_an_slo_the_device_serves_alone_and_comes_back_when_it_dies(
    artifact: Artifact, hardware: HardwareSpec, wanted: np.ndarray, accelerator: str
) -> None:
    """A GPU's rows are of bf16 activations, whose values have 8 bits: of unit length, 1e-2."""
    embeddings, atol = open_encoders(artifact, hardware, device=accelerator), 1e-5
    if accelerator != TORCH:
        atol = 1e-2
    with closing(embeddings):
        service = embeddings.choose(labels=False).service
        (name,) = service.manager.depths()
        assert name.startswith(accelerator)
        np.testing.assert_allclose(embeddings.embed(TEXTS), wanted, atol=atol)
        instance = service._instances[name][0]["embedder"]
        assert isinstance(instance, ProcessInstance)
        os.kill(instance.pid, signal.SIGKILL)
        np.testing.assert_allclose(embeddings.embed(TEXTS), wanted, atol=atol)
        assert held(service) == {name: 0}


@pytest.mark.long
def test_within_an_slo_the_cpu_takes_what_the_device_has_no_room_for(
    artifact: Artifact, hardware: HardwareSpec, wanted: np.ndarray, path: Path
) -> None:
    small = EmbeddingSettings(slo=0.02, arrival="closed", classes=())
    open_service(artifact, hardware, small, device=TORCH).close()  # measures both
    kept = msgspec.json.decode((path / "models/embedder/profile.json").read_bytes())
    assert {row["device"] for row in kept["latency"]} == {TORCH, "cpu"}
    with open_service(artifact, hardware, replace(small, slo=30.0), device=TORCH) as service:
        for name, depth in ((TORCH, 1), ("cpu", 2)):
            spec = replace(service.manager.spec(name), depths=(depth,))
            service.set_queue(spec)
        job = service.submit(IDS, model="embedder")
        assert [query.device for query in job.queries] == [TORCH, "cpu", "cpu"]
        np.testing.assert_allclose(job.result(), wanted, atol=1e-5)


def test_a_device_that_torch_does_not_have_is_left_out_unless_it_was_named(
    artifact: Artifact, wanted: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process asks torch, which knows of no such accelerator here."""
    device = AcceleratorSpec(kind="npu", name="npu0", model="Emulated 9")
    hardware = msgspec.structs.replace(read_hardware(), accelerators=(device,))
    with closing(open_encoders(artifact, hardware, threads=1)) as embeddings:
        assert embeddings.choose(labels=False).service.manager.depths().keys() == {"cpu"}
        np.testing.assert_allclose(embeddings.embed(TEXTS), wanted, atol=1e-6)
    assert "npu0 is not used for embeddings" in caplog.text and "has no device npu:0" in caplog.text
    with pytest.raises(DeviceError, match="has no device npu:0"):
        open_encoders(artifact, hardware, device="npu")
    with closing(open_encoders(artifact, hardware, threads=1, device="cpu")) as embeddings:
        assert embeddings.choose(labels=False).service.manager.depths().keys() == {"cpu"}


def test_without_torch_nothing_is_started(
    artifact: Artifact, hardware: HardwareSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "find_torch", lambda: None)
    with pytest.raises(DeviceError, match="torch is not installed"):
        open_encoders(artifact, hardware, device=TORCH)


@pytest.mark.long
def test_a_device_that_leaves_no_cpu_embeds_alone(
    artifact: Artifact, wanted: np.ndarray, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = devices.host_pus(read_hardware())[:1]
    monkeypatch.setattr(devices, "host_pus", lambda spec: first)
    settings = EmbeddingSettings(slo=30.0, arrival="closed", classes=())
    with open_service(artifact, read_hardware(), settings, device=TORCH) as service:
        assert service.manager.depths().keys() == {TORCH}
        np.testing.assert_allclose(
            service.submit(IDS, model="embedder").result(), wanted, atol=1e-5
        )


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
        back = threading.Event()
        instance.changed = lambda: back.set() if instance.ready else None
        with pytest.raises(ChildLost):
            instance.embed_tokens([np.array([DEADLY], np.int32)])
        assert back.wait(60)
        assert instance.embed_tokens(IDS).shape == (3, 8)
    written = capfd.readouterr().err
    assert "illegal memory access" in written and "Traceback" not in written


@pytest.mark.long
def test_the_pair_is_measured(path: Path, hardware: HardwareSpec) -> None:
    found = capacity.measure_artifact(path, 8, 0.02, device=TORCH, repeats=1)
    assert found.accelerator.startswith("torch:cpu: ")
    assert found.together.keys() == {"npu", "cpu"}
    assert found.gain is not None and found.cpu_share is not None


def test_without_an_accelerator_the_cpu_is_measured_alone(path: Path) -> None:
    found = capacity.measure_artifact(path, 8, 0.02, device="cpu", repeats=1)
    assert found.accelerator.startswith("none")
    assert found.together.keys() == found.alone.keys() == {"cpu"}
    assert found.gain is None and found.saving is None


def test_torch_keeps_half_of_the_cpus_and_our_kernels_the_others() -> None:
    x86 = read_synthetic("package:1 numa:1 core:48 pu:2")
    every = set(devices.host_pus(x86))
    for threads, ours in ((None, 24), (8, 8), (47, 47)):
        chosen = devices.choose_accelerators(x86, TORCH, threads)
        plan = devices.detect_devices(chosen)
        torch, cpu = plan.devices
        assert (torch.name, torch.kind) == (TORCH, TORCH) and plan.heterogeneous
        assert len(cpu.pus[0]) == ours and set(cpu.pus[0]) == every - set(torch.pus[0])
        assert torch.accelerator and not cpu.accelerator
