"""A real device's memory is divided between KV and hot clusters, by what was measured on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from dovetail.compiler.pipeline import compile_model
from dovetail.runtime.accel.device import TorchDevice
from dovetail.runtime.accel.profile import describe_device
from dovetail.runtime.app import load
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.flows import gpu_memory
from dovetail.runtime.flows.gpu_memory import GpuShare, ask_device
from dovetail.runtime.flows.service import FlowSettings
from dovetail.runtime.native.encoder import device_bytes
from dovetail.runtime.native.forward import find_tape
from dovetail.runtime.schedule.request import Home
from dovetail.tiny_world import ENCODER
from dovetail.topology.hardware import read_hardware
from tests.models import save_model
from tests.runtime.flows.conftest import COUNT, DIM, NPROBE, embed

VECTOR = 4 * DIM
USED = 2 << 30
"""Bytes of a device to use, whatever it has: a small model and what a GPU computes in."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and an encoder."""
    folder = tmp_path_factory.mktemp("device")
    save_model(folder / "model", "llama")
    options = {"effort": "none", "max_step_tokens": 64, "max_context": 256, "weight_dtype": "f32"}
    models = {"model": folder / "model", "embedder": ENCODER}
    compile_model(models, output=folder / "app.dove", **options)
    return folder / "app.dove"


def test_a_device_is_asked_once_and_its_tables_are_kept(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, accelerator: str
) -> None:
    """Its room less the encoder's: KV and clusters have it, and the app's pools are as planned."""
    artifact = open_artifact(path, read_hardware())
    share = GpuShare(index=folder, rate=1e6, nprobe=NPROBE, prompt=32, reply=32)
    utilization = min(0.9, USED / TorchDevice(accelerator).free_bytes())
    small: dict[str, Any] = {
        "gpu_memory_utilization": utilization,
        "max_num_batched_tokens": 64,
    }
    options = EngineOptions(device=accelerator, **small)
    found = ask_device(artifact, options)
    assert found.gpu == options.device
    assert found.origin == f"measured on {describe_device(TorchDevice(accelerator))}"
    rows = found.tables.profile.tables["gpu_decode"]
    assert {row.origin for row in rows} == {"measured"}
    (part,) = artifact.encoders.values()
    bare = ask_device(replace(artifact, encoders={}), options)
    assert bare.tables.profile == found.tables.profile, "it was kept"
    more = bare.budget - found.budget
    held = sum(device_bytes(part.file, find_tape(part, "encode")))
    assert abs(more - held) < found.budget // 4, "free memory is not the same twice"

    monkeypatch.setattr(
        gpu_memory, "ask_device", lambda *_: replace(found, budget=64 * found.block_bytes)
    )
    workflows = FlowSettings(share=share)
    with load(path, workflows=workflows, device=accelerator, embedding=None) as app:
        plan = app.gpu_memory
        assert plan is not None
        assert plan.kv_bytes + plan.cluster_bytes == 64 * found.block_bytes
        assert app.engine.scheduler.pools[Home.GPU].n_blocks == plan.kv_bytes // found.block_bytes
        app.add_index(folder, nprobe=NPROBE, embed=embed)
        room = sum(held.room_bytes for held in app.flows.hot.values())
        assert room == min(plan.cluster_bytes, COUNT * VECTOR)
