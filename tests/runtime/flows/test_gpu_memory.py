"""One plan of a GPU's memory: what generations and searches gain by bytes, and how they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dovetail.ir.errors import CapacityError, SpecError
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.flows.gpu_memory import (
    Accelerator,
    GpuShare,
    Survey,
    describe,
    generation_throughput,
    retrieval_throughput,
)
from dovetail.runtime.flows.service import FlowSettings
from dovetail.runtime.retrieval.budget import ScanCost
from dovetail.runtime.retrieval.memory_plan import MemoryProblem, plan_gpu_memory
from dovetail.runtime.schedule.cost_tables import TablePredictor
from dovetail.runtime.sim.machines import assumed_profile, find_machine
from dovetail.topology.hardware import read_hardware
from tests.runtime.conftest import SPEC

SHARE = GpuShare(index="idx", rate=20.0, prompt=64, reply=32, nprobe=8)
MANY = replace(SHARE, rate=1e9)
MACHINE = replace(find_machine("h100"), gpu_blocks=256)
SIZES = [400, 100, 300, 200]
BYTES = [4 * size for size in SIZES]
HOST, DEVICE = ScanCost(1e-5, 1e-5, threads=2), ScanCost(1e-5, 1e-6)


def accelerator() -> Accelerator:
    """A device with the times that are assumed of a machine class."""
    tables = TablePredictor(assumed_profile(MACHINE, SPEC))
    gpu = Accelerator("cuda:0", 0, tables, SPEC, "")
    return replace(gpu, budget=256 * gpu.block_bytes)


def test_a_device_is_what_it_told_less_its_encoders() -> None:
    profile = assumed_profile(MACHINE, SPEC)
    told = Survey(device="some GPU", room=1000, profile=profile)
    found = Accelerator.measured("cuda:1", told, 300, SPEC)
    assert (found.gpu, found.budget) == ("cuda:1", 700)
    assert found.tables.linear(1) == TablePredictor(profile).linear(1) > 0
    assert found.origin == "measured on some GPU"
    with pytest.raises(CapacityError, match="encoders take 1000"):
        Accelerator.measured("cuda:1", told, 1000, SPEC)


def test_more_kv_serves_more_generations_up_to_those_that_come() -> None:
    gpu = accelerator()
    budget = gpu.budget
    done = list(generation_throughput(MANY, gpu).done)
    assert done[0] == 0 and done == sorted(done) and done[-1] > 0
    few = generation_throughput(replace(SHARE, rate=0.5), gpu)
    assert few.at(budget) == 0.5
    # one at a time: its steps and its prompt, one after the other
    one = gpu.token_bytes * (SHARE.prompt + SHARE.reply)
    tables, layers = gpu.tables, SPEC.n_layers
    step = layers * (tables.linear(1) + tables.gpu_decode(80))
    step += tables.head(1)
    prompt = layers * (tables.linear(64) + tables.prefill([64]))
    prompt += tables.head(1)
    alone = generation_throughput(
        MANY, replace(gpu, budget=-(-one // gpu.block_bytes) * gpu.block_bytes)
    )
    assert alone.at(one) == pytest.approx(1 / (32 * step + prompt), rel=1e-9)


def test_more_hot_clusters_serve_more_searches() -> None:
    table = retrieval_throughput(MANY, SIZES, BYTES, HOST, DEVICE)
    done = list(table.done)
    vectors = 4 * sum(n * n for n in SIZES) / sum(SIZES)  # all four are probed
    assert done[0] == pytest.approx(1 / (1e-5 + 1e-5 * vectors / 2))
    hits = 400**2 / sum(n * n for n in SIZES)
    at = table.at(1600)  # the largest cluster and no other
    assert at == pytest.approx(1 / (1e-5 + 1e-5 * vectors * (1 - hits) / 2))
    some = 1 - (200**2 + 100**2) / sum(n * n for n in SIZES)  # then the GPU is the slower one
    assert done == sorted(done) and done[-1] == done[2]
    assert done[2] == pytest.approx(1 / (1e-5 + 1e-6 * vectors * some))
    cold = retrieval_throughput(MANY, SIZES, BYTES, HOST, None)
    assert cold.at(4000) == done[0]


def test_the_side_that_lags_gets_the_memory() -> None:
    gpu = accelerator()
    budget = gpu.budget
    generation = generation_throughput(MANY, gpu)
    slow, quick = (
        plan_gpu_memory(
            MemoryProblem(
                budget=budget,
                generation=generation,
                retrieval=retrieval_throughput(MANY, SIZES, BYTES, ScanCost(0.0, cost), DEVICE),
                generations=1,
                retrievals=1,
                rate=MANY.rate,
                most_clusters=sum(BYTES),
            ),
            step=gpu.block_bytes,
        )
        for cost in (1e-2, 1e-9)
    )
    assert slow.cluster_bytes > 0 and slow.limited_by == "retrieval"
    assert quick.cluster_bytes == 0 and quick.limited_by == "generation"
    assert "0.0 MiB for hot clusters; generation limits" in describe(quick)


def test_what_cannot_be_shared_is_refused(make_artifact: Callable[..., Path]) -> None:
    with pytest.raises(SpecError, match="must be positive"):
        GpuShare(index="idx", rate=0)
    settings = FlowSettings(share=replace(SHARE, index=None))
    options = EngineOptions(device="torch:cpu")
    artifact = open_artifact(make_artifact(), read_hardware())
    with pytest.raises(SpecError, match=r"name the index .* has none"):
        settings.share_gpu(artifact, options)
    with pytest.raises(SpecError, match="gpu_blocks or a share of the GPU's memory, not both"):
        settings.share_gpu(artifact, replace(options, gpu_blocks=9))
    assert settings.share_gpu(artifact, EngineOptions()) == (settings, None, EngineOptions())
