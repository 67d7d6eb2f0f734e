"""Models of one app are added up before any is opened, and leave each other room."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.compiler.pipeline import compile_model
from dovetail.ir.errors import CapacityError
from dovetail.runtime.app import load
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.embed.settings import EmbeddingSettings
from dovetail.runtime.engine.executor import CpuExecutor, memory_need
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.hosting import memory
from dovetail.runtime.hosting.memory import divide_memory
from dovetail.runtime.native.encoder import encoder_need
from dovetail.runtime.native.weights import Weights
from dovetail.runtime.schedule.device_limits import MemoryNeed
from dovetail.runtime.schedule.kv_pool import blocks_for
from dovetail.tiny_world import ENCODER, LLAMA
from dovetail.topology.hardware import read_hardware
from tests.dovetail.commands import assert_one_sentence, dovetail
from tests.encoders import save_encoder

FreeMemory = Callable[[int], None]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that generates, one that embeds and one that ranks."""
    folder = tmp_path_factory.mktemp("memory")
    options = {"vocab_size": 3000, "num_labels": 1}
    save_encoder(folder / "ranker", "bert", head="ForSequenceClassification", **options)
    shutil.copy(ENCODER / "tokenizer.json", folder / "ranker")
    beside = {"embedder": ENCODER, "ranker": folder / "ranker"}
    options = {"max_context": 256, "max_step_tokens": 64, "max_step_sequences": 8}
    compile_model(
        LLAMA, output=folder / "app.dove", effort="none", threads=1, beside=beside, **options
    )
    return folder / "app.dove"


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> FreeMemory:
    """Says how many bytes the models find free before they are opened."""
    return lambda count: monkeypatch.setattr(memory, "available_memory", lambda _: count)


def needs_of(path: Path, instances: int = 1, **options: Any) -> dict[str, MemoryNeed]:
    artifact = open_artifact(path, read_hardware())
    llm = memory_need(artifact.models["llm"], artifact.service, EngineOptions(**options))
    encoders = {n: encoder_need(part, instances) for n, part in artifact.encoders.items()}
    return {"llm": llm, **encoders}


def total(needs: dict[str, MemoryNeed]) -> int:
    return sum(need.total for need in needs.values())


@pytest.mark.parametrize("apart", [False, True])
def test_models_that_fit_alone_but_not_together_are_refused(
    path: Path, free_memory: FreeMemory, *, apart: bool
) -> None:
    needs = needs_of(path)
    free_memory(total(needs) - 1)
    assert max(need.total for need in needs.values()) < total(needs) - 1
    with pytest.raises(CapacityError, match="the models do not fit together") as refused:
        load(path, apart=apart)
    said = str(refused.value)
    names = re.findall(r"(\w+) \([\d.]+ of weights \+ (?:[\d.]+ of KV for 256 tokens \+ )?", said)
    assert names == ["llm", "embedder", "ranker"] and said.count("of KV") == 1
    assert "\n" not in said and "lower max_model_len" in said


def test_fewer_blocks_and_another_process_of_encoders_count(
    path: Path, free_memory: FreeMemory
) -> None:
    needs = needs_of(path, kv_blocks=4)
    assert total(needs) < total(needs_of(path))
    free_memory(total(needs))
    with load(path, kv_blocks=4) as app:
        assert app.engine.scheduler.pool.free_blocks == 4
    with pytest.raises(CapacityError, match="do not fit together"):
        load(path, kv_blocks=5)
    assert total(needs_of(path, instances=2)) > total(needs_of(path))
    free_memory(total(needs_of(path, instances=2)) - 1)
    with pytest.raises(CapacityError, match="do not fit together"):
        load(path, embedding=EmbeddingSettings(cpu_instances=2))


def test_the_pool_leaves_room_for_the_models_beside_it(path: Path, free_memory: FreeMemory) -> None:
    needs = needs_of(path)
    context = blocks_for(256)
    free_memory(total(needs) + 2 * context * needs["llm"].block)
    with load(path) as app:
        executor = app.engine.executor
        assert isinstance(executor, CpuExecutor)
        assert executor.blocks == 3 * context // 2  # half of what all models leave
        assert len(app.embed(["The harbour of Elm."])) == 1


def test_a_draft_model_counts(path: Path, free_memory: FreeMemory) -> None:
    free_memory(total(needs_of(path)))
    with pytest.raises(CapacityError, match=r"ranker \(.*\) \+ the draft model \(.* of KV"):
        load(path, draft=str(path))
    load(path).close()


def test_artifacts_behind_one_port_are_added_up_before_one_is_loaded(
    path: Path, tmp_path: Path, free_memory: FreeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong files for TLS end a server that has loaded its models."""
    for name in ("handlers", "propagate", "level"):  # which the command sets
        monkeypatch.setattr(log := logging.getLogger("dovetail"), name, getattr(log, name))
    tls = ("--ssl-keyfile", tmp_path / "key", "--ssl-certfile", tmp_path / "certificate")
    names = ("--served-model-name", "one", "--served-model-name", "two")
    command = ("serve", path, path, *names, *tls, "--port", 0, "--device", "cpu")
    free_memory(2 * total(needs_of(path)) - 1)
    refused = dovetail(*command)
    assert "TLS" not in refused.err and "the models do not fit together" in refused.err
    assert_one_sentence(refused)
    named = re.findall(r"(\w+: \w+) \(", refused.err)
    assert named == [f"{app}: {part}" for app in ("one", "two") for part in needs_of(path)]
    free_memory(2 * total(needs_of(path)))
    assert "the TLS files cannot be used" in dovetail(*command).err


def test_apps_have_like_parts_of_what_all_leave(path: Path, free_memory: FreeMemory) -> None:
    needs, context = needs_of(path), blocks_for(256)
    free_memory(2 * (total(needs) + 2 * context * needs["llm"].block))
    shares = divide_memory({"one": path, "two": path}, EngineOptions(), None)
    for share in shares.values():
        with load(path, memory=share) as app:
            executor = app.engine.executor
            assert isinstance(executor, CpuExecutor)
            assert executor.blocks == 3 * context // 2  # half of what its models leave
    with pytest.raises(CapacityError, match="do not fit together"):
        load(path, memory=total(needs) - 1)
    assert divide_memory({"alone": path}, EngineOptions(), None) == {"alone": None}


def test_an_app_of_encoders_has_no_bound(path: Path, tmp_path: Path) -> None:
    compile_model(ENCODER, output=tmp_path / "encoder.dove", effort="none")
    both = {"one": path, "encoder": tmp_path / "encoder.dove"}
    shares = divide_memory(both, EngineOptions(), None)
    assert shares["one"] is not None and shares["encoder"] is None
    load(both["encoder"], memory=shares["encoder"]).close()


def tensor_bytes(part: Any) -> int:
    """Return what torch's tensors of a model's weights take, as `torch:cpu` has them."""
    pytest.importorskip("torch")
    from dovetail.runtime.accel.device import TYPES, TorchDevice
    from dovetail.runtime.accel.weights import load_weights

    device = TorchDevice("torch:cpu")
    kind = TYPES[device.activations(part.file.spec.weight_dtype)]
    return sum(tensor.nbytes for tensor in load_weights(device, Weights(part), kind).values())


def test_what_torch_has_in_the_same_memory_counts(path: Path, free_memory: FreeMemory) -> None:
    artifact = open_artifact(path, read_hardware())
    (model,), block = artifact.models.values(), needs_of(path)["llm"].block
    own = memory_need(model, artifact.service, EngineOptions(), own_logits=True)
    tensors = {part.name: tensor_bytes(part) for part in artifact.parts}
    kv = blocks_for(256) * block
    free_memory(own.total + kv + sum(tensors.values()))  # but for torch's activations
    with pytest.raises(CapacityError, match="do not fit together") as refused:
        load(path, device="torch:cpu")
    found = re.findall(r"(\w+) on torch:cpu \(([\d.]+) of weights", str(refused.value))
    assert sorted(found) == sorted((n, f"{size / (1 << 30):.2f}") for n, size in tensors.items())


def test_torch_s_pool_leaves_room_for_others(path: Path) -> None:
    pytest.importorskip("torch")
    from dovetail.runtime.accel.executor import DeviceExecutor

    memory = 1 << 30
    with load(path, device="torch:cpu", offload="off", memory=memory) as app:
        executor = app.engine.executor
        assert isinstance(executor, DeviceExecutor)
        assert 0 < executor.sizes.room < memory / 2
        assert len(app.embed(["The harbour of Elm."])) == 1
