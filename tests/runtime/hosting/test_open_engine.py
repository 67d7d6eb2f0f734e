"""Options of `load`: what is refused, what bounds a step on the CPU, how a device is shared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dovetail.ir.errors import DeviceError, LengthError, RequestError, SpecError
from dovetail.runtime.app import load
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.engine.executor import CpuExecutor
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.engine.step_watch import StepWatch
from dovetail.runtime.hosting.open_engine import open_engine
from dovetail.runtime.schedule.plan import ON_CPU, SchedulerSettings
from dovetail.topology.hardware import read_hardware

MakeArtifact = Callable[..., Path]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "gpu"}, "device is auto, cpu, cuda"),
        ({"offload": "some"}, "offload must be auto, off or full, not 'some'"),
        ({"gpu_memory_utilization": 0.0}, "must be above 0 and at most 1, not 0.0"),
        ({"gpu_memory_utilization": 1.5}, "must be above 0 and at most 1, not 1.5"),
        ({"gpu_memory_utilization": float("nan")}, "must be above 0 and at most 1, not nan"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, not 0"),
        ({"max_num_batched_tokens": -3}, "max_num_batched_tokens must be at least 1, not -3"),
        ({"max_model_len": 0}, "max_model_len must be at least 1, not 0"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "must be at least max_num_seqs"),
        ({"device": "cuda", "gpu_blocks": 0}, "gpu_blocks must be at least 1, not 0"),
        ({"gpu_blocks": 4}, "give the device, too"),
        ({"max_waiting": 0}, "max_waiting must be at least 1, not 0"),
        ({"threads": "2"}, "threads must be at least 1, not '2'"),
    ],
)
def test_what_no_engine_can_have_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        EngineOptions(**options)


def test_options_are_values_that_travel() -> None:
    options = EngineOptions(device="xpu:1", offload="full", max_num_seqs=3, gpu_blocks=9)
    packed = msgspec.msgpack.encode(options)
    assert msgspec.msgpack.decode(packed, type=EngineOptions) == options


def test_what_is_deterministic_is_not_taken_from_the_cpu_by_auto() -> None:
    machine = read_hardware()
    for name in ("cuda", "xpu", "npu"):
        gpu = {"kind": name, "name": f"{name}0"}
        found = msgspec.convert(
            {**msgspec.to_builtins(machine), "accelerators": [gpu]}, type(machine)
        )
        assert EngineOptions(device="auto", deterministic=True).settle(found).device == "cpu"
    bare = msgspec.structs.replace(machine, accelerators=())
    assert EngineOptions(device="auto").settle(bare) == EngineOptions(spare_cpu=True)
    blocks = EngineOptions(device="auto", gpu_blocks=9).settle(bare)
    assert blocks.gpu_blocks is None, "nobody asked for the CPU"
    with pytest.raises(DeviceError, match="no device npu:3"):
        EngineOptions(device="npu:3").settle(bare)


def test_kv_is_kept_in_a_file_where_auto_finds_no_device() -> None:
    bare = msgspec.structs.replace(read_hardware(), accelerators=())
    assert EngineOptions(device="auto", kv_file="kv").settle(bare).device == "cpu"
    with pytest.raises(RequestError, match="give the device cpu"):
        EngineOptions(device="cuda", kv_file="kv")


def test_a_device_that_torch_cannot_have_is_refused_or_left_to_auto(
    make_artifact: MakeArtifact, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("torch")
    machine, artifact = read_hardware(), open_artifact(make_artifact(), read_hardware())
    asked = EngineOptions(device="xpu:7")  # its driver was found, as far as this knows
    with pytest.raises(DeviceError, match=r"torch .* has no device xpu:7"):
        open_engine(artifact, machine, asked)
    engine = open_engine(artifact, machine, replace(asked, spare_cpu=True))
    assert type(engine.executor) is CpuExecutor and engine.scheduler.settings == ON_CPU
    assert "device xpu:7 is not used: torch" in caplog.text
    engine.close()


def test_a_device_is_shared_as_settings_and_offload_say() -> None:
    given = SchedulerSettings(chunked=False, max_waiting=5)
    assert EngineOptions().scheduling == ON_CPU
    assert EngineOptions(settings=given, max_waiting=7).scheduling == replace(given, max_waiting=7)
    beside = EngineOptions(device="torch:cpu", offload="full", settings=given).scheduling
    assert beside == replace(given, offload="full")
    assert EngineOptions(device="torch:cpu").scheduling == SchedulerSettings()


def test_steps_and_requests_on_the_cpu_are_bounded(make_artifact: MakeArtifact) -> None:
    path = make_artifact(kv_blocks=64)
    prompts = [[7 + i] * 30 for i in range(6)]
    with load(path) as app:
        wanted = [found.token_ids for found in app.generate(prompts, max_tokens=8)]
    bounds = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 48}
    with load(path, **bounds) as app:  # type: ignore[arg-type]
        watch = app.engine.watch = StepWatch(app.engine.spec.hidden_size, lambda _: None)
        limits = app.engine.scheduler.limits
        assert (limits.max_step_sequences, limits.max_step_tokens, limits.max_context) == (2, 8, 48)
        assert [found.token_ids for found in app.generate(prompts, max_tokens=8)] == wanted
        steps = watch.tokens.read()
        assert sum(steps.counts) >= 6 * 30 / 8 and steps.total <= 8 * sum(steps.counts)
        with pytest.raises(LengthError, match="the context holds 48"):
            app.generate([[1] * 48], max_tokens=8)
        (cut,) = app.generate([[1] * 40], max_tokens=30, ignore_eos=True)
        assert len(cut.token_ids) == 8


@pytest.mark.parametrize("apart", [False, True])
def test_more_than_an_artifact_holds_is_refused(make_artifact: MakeArtifact, apart: bool) -> None:
    path = make_artifact()
    for options, said in (
        ({"max_num_seqs": 1 << 20}, "compile with max_step_sequences 1048576"),
        ({"max_num_batched_tokens": 1 << 20}, "compile with max_step_tokens 1048576"),
        ({"max_model_len": 1 << 20}, "compile with --max-context 1048576"),
    ):
        with pytest.raises(SpecError, match=said):
            load(path, apart=apart, **options)  # type: ignore[arg-type]
