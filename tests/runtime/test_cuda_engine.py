"""The executor for a GPU gives the tokens of the CPU's, its work ordered by events alone.

The GPU is emulated (`tests/lazy_gpu.py`): generated kernels as C++, torch's products on the CPU.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dovetail.codegen.targets import host_target
from dovetail.compiler.pipeline import compile_model
from dovetail.ir.errors import ArtifactError, CapacityError, DeviceError, SpecError
from dovetail.runtime.app import load
from dovetail.runtime.cuda import CudaError
from dovetail.runtime.cuda_engine import CudaOptions
from dovetail.runtime.kv_parts import WARP_TOKENS
from dovetail.runtime.machines import assumed_profile, find_machine
from dovetail.runtime.meeting import RankOptions
from dovetail.runtime.neo import NeoScheduler
from dovetail.runtime.plan import SchedulerSettings, StepPlan
from dovetail.runtime.request import Request
from dovetail.runtime.scheduler import Draft
from tests.gpus import count_devices
from tests.lazy_gpu import Race
from tests.models import save_model
from tests.runtime.cuda_gpu import ASKED, PROMPTS, Gpu
from tests.runtime.test_pipelined import HOMES

MORE = pytest.mark.long


@pytest.mark.parametrize(
    ("offload", "blocks", "cpu", "chunked", "eager"),
    [
        ("off", 9, 1, False, True),
        ("full", 1, 7, True, False),
        ("auto", 7, 7, False, False),
        pytest.param("off", 200, 1, True, False, marks=MORE),
        pytest.param("full", 1, 200, False, False, marks=MORE),
        pytest.param("auto", 3, 12, True, True, marks=MORE),
        pytest.param("auto", 12, 60, True, False, marks=MORE),
    ],
)
def test_the_tokens_are_those_of_the_cpu(
    gpu: Gpu,
    alone: list[tuple[int, ...]],
    offload: str,
    blocks: int,
    cpu: int,
    chunked: bool,
    eager: bool,
) -> None:
    settings = {"offload": offload, "chunked": chunked, "min_gain": 0.0, "patience": 4}
    with gpu.load(blocks, cpu, eager=eager, **settings) as running:
        assert running.tokens(PROMPTS) == alone
    plans = running.plans
    decoded = {name: any(getattr(b, name) for p in plans for b in p.batches) for name in HOMES}
    if offload != "auto":
        assert decoded == {"gpu_decode": offload == "off", "cpu_decode": offload == "full"}
    if offload == "full":
        assert any(len(plan.batches) == 2 for plan in plans)
    if (offload, blocks) == ("off", 9):
        assert any(plan.preempt for plan in plans)
    assert running.driver.ledger.checked > 1000


def test_scores_are_those_of_the_cpu(gpu: Gpu, alone: list[tuple[int, ...]]) -> None:
    with load(gpu.artifact.path, kv_blocks=200) as app:
        wanted = app.score(PROMPTS)
    with gpu.load(20, 30) as running:
        for found, expected in zip(running.app.score(PROMPTS), wanted, strict=True):
            assert found.logprobs[1:] == pytest.approx(expected.logprobs[1:], abs=1e-4)
        assert running.tokens(PROMPTS) == alone


def test_swaps_both_ways_and_graphs_are_run(
    gpu: Gpu, alone: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    evict = NeoScheduler.evict

    def move(scheduler: NeoScheduler, draft: Draft, victim: Request) -> None:
        with monkeypatch.context() as always:
            always.setattr(NeoScheduler, "_belongs_to_cpu", lambda *_: True)
            evict(scheduler, draft, victim)

    monkeypatch.setattr(NeoScheduler, "evict", move)  # those that give way move
    seen = dict.fromkeys(("out", "in", "later", "graphs"), 0)
    for blocks, cpu, gain in ((8, 60, 0.0), (9, 30, 9.0)):
        with gpu.load(blocks, cpu, min_gain=gain, patience=4) as running:
            assert running.tokens(PROMPTS) == alone
        plans = running.plans
        seen["out"] += sum(len(plan.swap_out) for plan in plans)
        seen["in"] += sum(len(plan.swap_in) for plan in plans)
        seen["later"] += sum(c.start > 0 for p in plans for b in p.batches for c in b.prefill)
        seen["graphs"] += running.driver.counts.get("cuGraphLaunch", 0)
    assert min(seen.values()) > 0, seen


def test_the_gpu_cuts_keys_by_a_measure_of_its_own(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the CPU's schedule cuts none; graphs and lanes alike."""
    prompt = [(7 * n) % 50 for n in range(3 * WARP_TOKENS)]
    cuts: dict[bool, set[int]] = {}
    for graphs in (True, False):
        with gpu.load(30, 1, graphs=graphs, offload="off") as running:
            split = running.engine.kv_splits
            found = cuts.setdefault(graphs, set())

            def note(*args: Any, split: Any = split, found: set[int] = found, **how: Any) -> int:
                parts: int = split(*args, **how)
                found.add(parts if args[0].n_decode else 0)
                return parts

            running.engine.part_tokens = [0, 0]
            monkeypatch.setattr(running.engine, "kv_splits", note)
            running.tokens([prompt], max_tokens=4)
    assert cuts[True] == cuts[False] and max(cuts[False]) > 1, cuts


def test_the_cpu_cuts_keys_as_the_decode_phase_does(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside prompts, too: a lane binds its attention on the CPU to that phase alone."""
    found: set[int] = set()
    with gpu.load(1, 60, offload="full", chunked=True) as running:
        engine = running.engine
        split, engine.threshold, engine.part_tokens = engine.kv_splits, 1, [48, 0]

        def note(*args: Any, apart: bool) -> int:
            if not apart:
                found.add(args[2])
            return split(*args, apart=apart)

        monkeypatch.setattr(engine, "kv_splits", note)
        running.tokens(PROMPTS)
    assert any(b.prefill and b.cpu_decode for plan in running.plans for b in plan.batches)
    assert found == {48}


def test_prompts_of_the_cpu_land_in_turns_where_room_is_short(
    gpu: Gpu, alone: list[tuple[int, ...]]
) -> None:
    with gpu.load(1, 60, offload="full", landing=6) as running:
        rounds: list[int] = []
        split = running.engine._rounds

        def follow(plan: StepPlan) -> Any:
            found = split(plan)
            rounds.append(len(found))
            return found

        running.engine._rounds = follow  # type: ignore[method-assign]
        assert running.tokens(PROMPTS, max_tokens=2) == [t[:2] for t in alone]
    assert max(rounds) > 1


def test_work_that_no_event_orders_is_found(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the events between streams, or without waiting for a copy, the ledger objects."""
    settings = {"offload": "full", "chunked": False}
    with gpu.load(1, 60, **settings) as running:
        streams = running.engine.gpu.streams
        monkeypatch.setattr(type(streams), "follow", lambda *_: None)
        with pytest.raises((Race, RuntimeError, DeviceError)):
            running.tokens(PROMPTS[:3])
        monkeypatch.undo()


def test_a_request_that_the_gpu_has_no_memory_for_fails_alone(
    gpu: Gpu, alone: list[tuple[int, ...]]
) -> None:
    longest = max(range(len(PROMPTS)), key=lambda i: len(PROMPTS[i]))
    most = len(PROMPTS[longest])
    with gpu.load(60, 40, min_gain=0.0, chunked=False) as running:

        def refuse(rows: int) -> Exception | None:
            requests = running.engine.scheduler.requests
            for batch in running.plans[-1].batches:
                found = (requests.get(chunk.request) for chunk in batch.prefill)
                if any(r and len(r.tokens) == most for r in found) and rows == batch.tokens:
                    return CapacityError("no room")
            return None

        running.products.fail = refuse
        jobs = [running.app.submit(prompt, **ASKED) for prompt in PROMPTS]
        with pytest.raises(DeviceError, match="out of memory for a request"):
            jobs[longest].result()
        for i, job in enumerate(jobs):
            if i != longest:
                assert job.result().token_ids == alone[i]


def test_logprobs_and_samples_are_those_of_the_cpu(gpu: Gpu) -> None:
    asked = {"max_tokens": 4, "logprobs": 3, "temperature": 0.8, "seed": 5, "top_k": 20}
    with load(gpu.artifact.path, kv_blocks=40) as app:
        (want,) = app.generate([PROMPTS[3]], **asked)
    with gpu.load(20, 20) as running:
        (got,) = running.app.generate([PROMPTS[3]], **asked)
    assert got.token_ids == want.token_ids
    for mine, theirs in zip(got.logprobs, want.logprobs, strict=True):
        assert [t for t, _ in mine.top] == [t for t, _ in theirs.top]
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_what_cannot_be_put_on_a_gpu(gpu: Gpu) -> None:
    chosen = CudaOptions(find_machine("t4"))
    with pytest.raises(SpecError, match="deterministic"):
        load(gpu.artifact.path, cuda=chosen, deterministic=True)
    with pytest.raises(SpecError, match="nccl"):
        load(gpu.artifact.path, cuda=chosen, ranks=RankOptions())
    with pytest.raises(ArtifactError, match="--target cuda"):
        load(gpu.artifact.path, cuda=chosen)
    with pytest.raises(CapacityError, match="out of memory"), gpu.load(1 << 40, 4):
        pass
    gc.collect()


def test_nothing_stays_on_the_gpu_after_a_load_that_failed_late(gpu: Gpu) -> None:
    left = ctypes.CDLL(str(gpu.library)).dt_left
    before = left()
    profile = assumed_profile(find_machine("t4"), gpu.part.file.spec)
    bad = msgspec.structs.replace(profile, tables={"nonsense": ()})
    with pytest.raises(ArtifactError, match="no table is called"), gpu.load(4, 4, profile=bad):
        pass
    assert left() == before


@pytest.mark.parametrize("call", ["cuCtxSetCurrent", "cuMemFree_v2"])
def test_all_but_its_memory_is_given_back_where_a_gpu_is_lost(gpu: Gpu, call: str) -> None:
    def refuse(*_: Any) -> None:
        raise CudaError(call, 700, "the device is lost")

    with pytest.raises(CudaError, match=call), gpu.load(4, 4) as running:
        setattr(running.driver, f"_{call}", refuse)
    assert running.driver.counts["cuMemHostUnregister"] == 2
    with pytest.raises(RuntimeError, match="shutdown"):
        running.engine.pair.worker.submit(int)
    assert not running.engine.model.device._team._end.alive


@pytest.mark.skipif(not count_devices(), reason="no NVIDIA GPU is at hand")
def test_a_real_gpu_gives_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama")
    options = {
        "effort": "none",
        "max_step_tokens": 64,
        "max_context": 256,
        "weight_dtype": "f32",
    }
    targets = ("cuda", host_target().name)
    path = tmp_path / "app.dove"
    compile_model(tmp_path / "model", output=path, targets=targets, **options)
    with load(path, kv_blocks=200) as app:
        want = [done.token_ids for done in app.generate(PROMPTS, **ASKED)]
    for offload, blocks in (("off", 40), ("auto", 9), ("full", 1)):
        chosen = CudaOptions(
            find_machine("h200").with_gpu_blocks(blocks), SchedulerSettings(offload=offload)
        )
        with load(path, kv_blocks=60, cuda=chosen) as app:
            assert [done.token_ids for done in app.generate(PROMPTS, **ASKED)] == want
