"""Two pools give the tokens of one: a tiny Llama on the CPU and on torch's CPU device."""

from __future__ import annotations

import gc
import itertools
import os
import random
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

pytest.importorskip("torch")

import torch

from dovetail.cli.inspection import inspect_artifact
from dovetail.ir.cache import cache_directory
from dovetail.ir.errors import DeviceError, DovetailError, RequestError, SpecError
from dovetail.ir.tape import Tape
from dovetail.runtime.accel import attention_choice, device, executor, profile, step, sub_batch
from dovetail.runtime.accel.attention import PlainAttention
from dovetail.runtime.accel.device import TorchDevice
from dovetail.runtime.accel.executor import DeviceExecutor
from dovetail.runtime.accel.graph_cache import GraphCache
from dovetail.runtime.accel.orders import BatchSizes
from dovetail.runtime.accel.pair import DevicePair
from dovetail.runtime.accel.sub_batch import DeviceModel, SubBatch, attention_tape
from dovetail.runtime.accel.tape import TorchTape
from dovetail.runtime.app import App, load
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.engine import executor as cpu_executor
from dovetail.runtime.engine.engine import Engine
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.machine.seat import ENGINE_SLOT, SEARCH_SLOT, Board, Seat
from dovetail.runtime.native import step as native_step
from dovetail.runtime.schedule import neo, speculation
from dovetail.runtime.schedule.cost_tables import AXES, Predictor
from dovetail.runtime.schedule.neo import NeoScheduler
from dovetail.runtime.schedule.offload import OffloadDecision
from dovetail.runtime.schedule.plan import StepPlan
from dovetail.runtime.schedule.request import Home, Request, SamplingParams
from dovetail.runtime.schedule.scheduler import Draft
from dovetail.topology.division import DECODE, PREFILL, SEARCHES
from dovetail.topology.hardware import read_hardware
from tests.runtime.accel import engines
from tests.runtime.accel.apart import ApartDevice
from tests.runtime.accel.engines import ASKED, HOMES, LIMITS, PROMPTS, TwoPools, make_artifact

DRAWN = {"temperature": 0.8, "top_k": 7, "top_p": 0.9, "logprobs": 2, "frequency_penalty": 0.4}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("device"))


@pytest.fixture(scope="module")
def alone(artifact: Path) -> list[tuple[int, ...]]:
    """What the CPU's engine generates."""
    with load(artifact, kv_blocks=200) as app:
        return [done.token_ids for done in app.generate(PROMPTS, **ASKED)]


def test_attention_of_the_cpu_keeps_to_what_other_workers_leave_it(
    artifact: Path, alone: list[tuple[int, ...]]
) -> None:
    cpus, board = sorted(os.sched_getaffinity(0)), Board()
    board.divide({PREFILL: (cpus[0],), DECODE: (cpus[0],), SEARCHES: (cpus[-1],)})
    Seat(board, SEARCH_SLOT).take(SEARCHES)
    with engines.two_pools(artifact, 1, 200, offload="full") as (app, plans):
        app.engine.executor.cpu.seat = Seat(board, ENGINE_SLOT)
        assert [done.token_ids for done in app.generate(PROMPTS, **ASKED)] == alone
        assert app.engine.executor.model.team._active[1] in ((), (cpus[0],))
    assert board.used[DECODE] > 0 and any(b.cpu_decode for plan in plans for b in plan.batches)


@pytest.mark.parametrize(
    ("offload", "gpu", "cpu", "chunked"),
    [
        ("off", 200, 1, True),
        ("off", 9, 1, False),
        ("full", 1, 200, False),
        ("full", 1, 12, True),
        ("auto", 1, 40, False),
        ("auto", 3, 12, True),
        ("auto", 8, 8, False),
        ("auto", 12, 60, True),
    ],
)
def test_the_tokens_are_those_of_one_device(
    artifact: Path,
    alone: list[tuple[int, ...]],
    offload: str,
    gpu: int,
    cpu: int,
    chunked: bool,
    two_pools: TwoPools,
) -> None:
    settings = {"offload": offload, "chunked": chunked, "min_gain": 0.0, "patience": 4}
    with two_pools(artifact, gpu, cpu, **settings) as (app, plans):
        assert [done.token_ids for done in app.generate(PROMPTS, **ASKED)] == alone
    decoded = {name: any(getattr(b, name) for p in plans for b in p.batches) for name in HOMES}
    if offload != "auto":
        assert decoded == {"gpu_decode": offload == "off", "cpu_decode": offload == "full"}
    if max(gpu, cpu) < 13:
        assert any(plan.preempt or plan.moves for plan in plans)


@pytest.mark.parametrize(("offload", "gpu", "cpu"), [("off", 9, 1), ("auto", 12, 60)])
def test_all_that_a_device_of_its_own_memory_needs_is_copied(
    artifact: Path,
    alone: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    offload: str,
    gpu: int,
    cpu: int,
) -> None:
    monkeypatch.setattr(executor, "TorchDevice", ApartDevice)
    with load(artifact, kv_blocks=200) as app:
        wanted = app.score(PROMPTS[:4])
        drawn = [job.token_ids for job in app.generate(PROMPTS[:4], seed=3, **ASKED | DRAWN)]
    with engines.two_pools(artifact, gpu, cpu, offload=offload, min_gain=0.0) as (app, _):
        assert [done.token_ids for done in app.generate(PROMPTS, **ASKED)] == alone
        found = [job.token_ids for job in app.generate(PROMPTS[:4], seed=3, **ASKED | DRAWN)]
        scores = app.score(PROMPTS[:4])
    assert found == drawn
    assert [s.sum for s in scores] == pytest.approx([s.sum for s in wanted], abs=1e-3)


@pytest.mark.parametrize("whole", [True, False], ids=["attention too", "without attention"])
def test_padded_steps_of_decodes_give_the_same_tokens(
    artifact: Path, alone: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """As a GPU's graphs have them; what is under one name runs over the same shapes."""
    shapes: dict[Any, tuple[int, ...]] = {}
    run, padded = GraphCache.run, set[bool]()

    def note(recorder: GraphCache, name: Any, work: Any) -> None:
        step = work.args[1]
        rows = tuple(step.counts[n] for n in ("n_tokens", "n_stored", "n_out"))
        assert shapes.setdefault(name, rows) == rows == (name[1],) * 3
        padded.add(0 < step.counts["n_decode"] < rows[0])
        run(recorder, name, work)

    monkeypatch.setattr(TorchDevice, "records", True)
    monkeypatch.setattr(PlainAttention, "records", whole)
    monkeypatch.setattr(GraphCache, "run", note)
    for offload, gpu, cpu in (("off", 60, 1), ("auto", 8, 30), ("full", 1, 60)):
        with engines.two_pools(artifact, gpu, cpu, offload=offload, min_gain=0.0) as (app, _):
            assert [done.token_ids for done in app.generate(PROMPTS, **ASKED)] == alone
    entries = max(span.stop for _, _, span in shapes)
    pieces = {len(span) == entries for _, _, span in shapes}
    assert pieces == {False, whole} and True in padded


@pytest.mark.gpu
def test_decodes_of_a_gpu_are_recorded(artifact: Path, alone: list[tuple[int, ...]]) -> None:
    """Where recording fails steps go on without, and only the log says so."""
    with engines.two_pools(artifact, 60, 1, device="cuda", offload="off") as (app, _):
        for _ in range(2):
            assert [done.token_ids for done in app.generate(PROMPTS, **ASKED)] == alone
        graphs = app.engine.executor.pair.sub_batches[0]._graphs
        assert graphs.on and graphs._held


@pytest.mark.parametrize("offload", ["off", "full", "auto"])
def test_scores_are_those_of_one_device(
    artifact: Path, alone: list[tuple[int, ...]], offload: str, two_pools: TwoPools
) -> None:
    with load(artifact, kv_blocks=200) as app:
        wanted = app.score(PROMPTS)
    with two_pools(artifact, 20, 30, offload=offload, min_gain=0.0) as (app, plans):
        jobs = app.submit_all(PROMPTS, **ASKED)
        for found, expected in zip(app.score(PROMPTS), wanted, strict=True):
            assert found.sum == pytest.approx(expected.sum, abs=1e-3)
            assert found.logprobs[1:] == pytest.approx(expected.logprobs[1:], abs=1e-4)
        assert [job.result().token_ids for job in jobs] == alone
    assert sum(len(c.scores) for p in plans for b in p.batches for c in b.prefill) >= sum(
        len(prompt) - 1 for prompt in PROMPTS
    )


@pytest.mark.parametrize("lost", ["sent", "brought", "stored"])
def test_b6_7_fails_where_a_part_of_the_pipeline_is_left_out(
    artifact: Path,
    alone: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    lost: str,
    two_pools: TwoPools,
) -> None:
    """B6.7 is the test above; tokens must tell when KV is not sent, not brought or not stored."""
    copy = DeviceModel.copy_blocks

    def leave_out(model: DeviceModel, layer: int, blocks: Any, target: Home) -> None:
        if target is (Home.GPU if lost == "sent" else Home.CPU):
            copy(model, layer, blocks, target)

    if lost == "stored":
        monkeypatch.setattr(sub_batch, "attention_tape", attend_only)
    else:
        monkeypatch.setattr(DeviceModel, "copy_blocks", leave_out)
    with two_pools(artifact, 1, 200, offload="full", chunked=True) as (app, _):
        try:
            found = [done.token_ids for done in app.generate(PROMPTS, **ASKED)]
        except DovetailError:  # what is read in its place is no number
            return
    assert found != alone


def attend_only(tape: Tape, sequences: int) -> Tape:
    found = attention_tape(tape, sequences)
    return replace(found, entries=tuple(e for e in found.entries if e.op != "rope_store"))


def test_b6_8_fails_where_a_layer_of_what_moves_is_left_out(
    artifact: Path,
    alone: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    two_pools: TwoPools,
) -> None:
    """B6.8 is the test below."""
    pays, copy = OffloadDecision(2.0, len(PROMPTS), 2.0), DeviceModel.copy_blocks

    def skip(model: DeviceModel, layer: int, blocks: Any, target: Home) -> None:
        if layer != 1:
            copy(model, layer, blocks, target)

    monkeypatch.setattr(neo, "weigh_offload", lambda *_: pays)
    monkeypatch.setattr(DeviceModel, "copy_blocks", skip)
    moved, different = 0, False
    for gpu, cpu, gain in ((8, 60, 0.0), (9, 30, 9.0), (6, 12, 9.0)):
        with two_pools(artifact, gpu, cpu, min_gain=gain, patience=4) as (app, plans):
            try:
                different |= [done.token_ids for done in app.generate(PROMPTS, **ASKED)] != alone
            except DovetailError:  # what is read in its place is no number
                different = True
        moved += sum(len(plan.moves) for plan in plans)
    assert moved and different


def test_swaps_both_ways_and_two_batches_are_run(
    artifact: Path,
    alone: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    two_pools: TwoPools,
) -> None:
    pays = OffloadDecision(2.0, len(PROMPTS), 2.0)  # as with a long queue: not all start at once
    monkeypatch.setattr(neo, "weigh_offload", lambda *_: pays)
    seen = {"out": 0, "in": 0, "two": 0, "later": 0}
    for gpu, cpu, slow in ((8, 60, False), (9, 30, False), (12, 40, True), (6, 12, False)):
        with two_pools(artifact, gpu, cpu, slow=slow, min_gain=0.0, patience=4) as (app, plans):
            assert [done.token_ids for done in app.generate(PROMPTS, **ASKED)] == alone
        seen["out"] += sum(len(plan.swap_out) for plan in plans)
        seen["in"] += sum(len(plan.swap_in) for plan in plans)
        seen["two"] += sum(len(plan.batches) == 2 for plan in plans)
        seen["later"] += sum(c.start > 0 for p in plans for b in p.batches for c in b.prefill)
    assert min(seen.values()) > 0, seen


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    gpu=st.integers(1, 14),
    cpu=st.integers(13, 40),  # the longest request needs 8
    offload=st.sampled_from(["auto", "auto", "full"]),
    chunked=st.booleans(),
    gain=st.sampled_from([0.0, 1.05]),
    patience=st.integers(1, 8),
    share=st.sampled_from([0.5, 1.0]),
)
def test_no_pools_or_settings_change_the_tokens(
    artifact: Path,
    alone: list[tuple[int, ...]],
    gpu: int,
    cpu: int,
    offload: str,
    chunked: bool,
    gain: float,
    patience: int,
    share: float,
    two_pools: TwoPools,
) -> None:
    options = {"offload": offload, "chunked": chunked, "min_gain": gain, "patience": patience}
    with two_pools(artifact, gpu, cpu, swap_in_share=share, **options) as (app, _):
        assert [done.token_ids for done in app.generate(PROMPTS, **ASKED)] == alone


@pytest.mark.parametrize("offload", ["full", "auto"])
@pytest.mark.parametrize("pipelining", ["none", "symmetric"])
def test_simpler_pipelines_give_the_same_tokens(
    artifact: Path, alone: list[tuple[int, ...]], pipelining: str, offload: str, two_pools: TwoPools
) -> None:
    given = {"offload": offload, "pipelining": pipelining, "min_gain": 0.0, "patience": 4}
    with two_pools(artifact, 8, 60, slow=True, **given) as (app, plans):
        assert [done.token_ids for done in app.generate(PROMPTS, **ASKED)] == alone
    assert any(b.cpu_decode for p in plans for b in p.batches)
    two = [plan.batches for plan in plans if len(plan.batches) == 2]
    assert bool(two) == (pipelining == "symmetric")
    for first, second in two:
        assert not first.prefill and not second.prefill
        for name in HOMES:
            assert len(getattr(first, name)) - len(getattr(second, name)) in (0, 1)


def test_every_eviction_may_be_a_swap(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, two_pools: TwoPools
) -> None:
    """Long answers to many short prompts do not fit beside each other: those that give way move."""
    evict = NeoScheduler.evict

    def move(scheduler: NeoScheduler, draft: Draft, victim: Request) -> None:
        with monkeypatch.context() as always:
            always.setattr(NeoScheduler, "_belongs_to_cpu", lambda *_: True)
            evict(scheduler, draft, victim)

    monkeypatch.setattr(NeoScheduler, "evict", move)
    prompts, swapped = [prompt[:8] for prompt in PROMPTS], 0
    asked = ASKED | {"max_tokens": 60}
    with load(artifact, kv_blocks=200) as app:
        alone = [done.token_ids for done in app.generate(prompts, **asked)]
    for gpu, share in ((8, 1.0), (12, 0.5)):
        with two_pools(artifact, gpu, 80, min_gain=9.0, swap_in_share=share) as (app, plans):
            assert [done.token_ids for done in app.generate(prompts, **asked)] == alone
        swapped += sum(len(plan.swap_out) for plan in plans)
    assert swapped >= 6


def test_a_move_that_memory_cut_off_is_made_when_the_step_is_tried_again(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, two_pools: TwoPools
) -> None:
    """In its second layer; who is given up for it has not moved."""
    evict, move, copy = NeoScheduler.evict, DevicePair._move, DeviceModel.copy_blocks
    moving, failed = [False], list[int]()

    def swap(scheduler: NeoScheduler, draft: Draft, victim: Request) -> None:
        with monkeypatch.context() as always:
            always.setattr(NeoScheduler, "_belongs_to_cpu", lambda *_: True)
            evict(scheduler, draft, victim)

    def follow(pair: DevicePair, layer: int, moves: Any, *given: Any) -> bool:
        moving[0] = bool(moves) and layer == 1 and not failed
        return move(pair, layer, moves, *given)

    def copy_once(model: DeviceModel, layer: int, *given: Any) -> None:
        if moving[0]:
            moving[0] = False
            failed.append(layer)
            take_all_memory()
        copy(model, layer, *given)

    def stays(plan: StepPlan) -> int:
        moved = {move.request for move in plan.moves}
        return next(number for number in plan.members if number not in moved)

    monkeypatch.setattr(NeoScheduler, "evict", swap)
    monkeypatch.setattr(DevicePair, "_move", follow)
    monkeypatch.setattr(DeviceModel, "copy_blocks", copy_once)
    monkeypatch.setattr(StepPlan, "largest", property(stays))
    prompts, asked = [prompt[:8] for prompt in PROMPTS], ASKED | {"max_tokens": 60}
    with load(artifact, kv_blocks=200) as app:
        alone = [done.token_ids for done in app.generate(prompts, **asked)]
    with two_pools(artifact, 8, 80, min_gain=9.0, swap_in_share=1.0) as (app, _):
        jobs, lost = [app.submit(prompt, **asked) for prompt in prompts], 0
        for job, tokens in zip(jobs, alone, strict=True):
            try:
                assert job.result().token_ids == tokens
            except DeviceError:
                lost += 1
    assert failed == [1] and lost == 1


def recording() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def break_down() -> None:
    raise DeviceError("broken")


def take_all_memory() -> None:
    raise torch.OutOfMemoryError("no page is left")


def test_a_failed_step_ends_its_requests_and_those_it_moved(
    artifact: Path,
    alone: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    two_pools: TwoPools,
) -> None:
    results = run_with_a_fault(artifact, alone, monkeypatch, break_down, "broken", two_pools)
    assert None in results and False not in results and True in results


def test_what_finds_no_memory_ends_alone(
    artifact: Path,
    alone: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    two_pools: TwoPools,
) -> None:
    words = "ran out of memory for a request .*no page is left"
    results = run_with_a_fault(artifact, alone, monkeypatch, take_all_memory, words, two_pools)
    assert results.count(None) == 1 and False not in results


def fail_after(runs: int, fault: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the last of so many runs of a tape fail; all after it are as they were."""
    run, left = TorchTape.run, [runs]

    def fail_once(tape: TorchTape, *values: Any) -> None:
        left[0] -= not recording()  # what fails there is run without
        if left[0] == 0:
            left[0] = -1
            fault()
        run(tape, *values)

    monkeypatch.setattr(TorchTape, "run", fail_once)


def run_with_a_fault(
    path: Path,
    alone: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[], None],
    words: str,
    two_pools: TwoPools,
) -> list[bool | None]:
    """Return whether each answer was as it should be, None for those that failed with `words`."""
    fail_after(40, fault, monkeypatch)
    with two_pools(path, 9, 30) as (app, _):
        jobs = [app.submit(prompt, **ASKED) for prompt in PROMPTS]
        results: list[bool | None] = []
        for job, tokens in zip(jobs, alone, strict=True):
            try:
                results.append(job.result().token_ids == tokens)
            except DeviceError as error:
                assert re.search(words, str(error))
                results.append(None)
    return results


def test_threads_share_long_keys_with_all_heads(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, two_pools: TwoPools
) -> None:
    monkeypatch.setattr(native_step, "LONG_TOKENS", 32)
    found: set[int] = set()
    set_args = SubBatch.set_args

    def note(lane: SubBatch, sizes: BatchSizes, **more: bool) -> None:
        found.add(sizes.cpu_splits)
        set_args(lane, sizes, **more)

    monkeypatch.setattr(SubBatch, "set_args", note)
    with two_pools(artifact, 9, 9, threads=2, offload="full") as (app, _):
        threads = app.engine.executor.model.decode.plan.threads
        app.generate([PROMPTS[6]], max_tokens=2)
    assert max(found) == threads


def test_the_cpu_has_the_threads_that_are_asked_for_beside_a_gpu(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Seen(Exception):
        pass

    def stop(*given: Any, **_: object) -> None:
        raise Seen(given[-1].threads)

    monkeypatch.setattr(executor, "TorchDevice", lambda *_: TorchDevice("torch:cpu"))
    monkeypatch.setattr(executor, "CpuExecutor", stop)
    hardware = read_hardware()
    opened = open_artifact(artifact, hardware)
    (part,) = opened.models.values()
    with pytest.raises(Seen, match="3"):
        DeviceExecutor(opened, part, hardware, EngineOptions(device="cuda:0", threads=3))


def test_mixed_loads_give_the_tokens_of_the_cpu(
    artifact: Path, two_pools: TwoPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """120 requests of all kinds; some are cancelled under way; prefixes are shared.

    Where KV moves between the pools, memory is at its end once, too.
    """
    rng = random.Random(23)
    shared = [[rng.randrange(3, 100) for _ in range(80)] for _ in range(3)]
    prompts, params = [], []
    for i in range(120):
        own = [rng.randrange(3, 100) for _ in range(rng.randint(1, 40))]
        prompts.append(own if i % 3 else [*shared[i % 9 // 3], *own])
        drawn = {"temperature": 0.8, "seed": i, "top_p": 0.9, "top_k": 7 if i % 4 else 0}
        ruled = {"frequency_penalty": 0.4, "logprobs": 2} if i % 10 == 9 else {}
        params.append({"max_tokens": rng.randint(1, 40), **(drawn if i % 5 == 0 else {}), **ruled})

    def run(app: App, cancelled: bool) -> list[Any]:
        jobs = [app.submit(p, ignore_eos=True, **q) for p, q in zip(prompts, params, strict=True)]
        for job in jobs[7::16] if cancelled else ():
            app.cancel(job)
        found: list[Any] = []
        for job in jobs:
            try:
                found.append(job.result())
            except DovetailError as error:
                assert "ran out of memory for a request" in str(error)
                found.append(None)
        return found

    with load(artifact, kv_blocks=900) as app:
        wanted = run(app, False)
    for offload, gpu, cpu in (("off", 12, 1), ("auto", 20, 60), ("full", 1, 60)):
        with monkeypatch.context() as once:
            if offload == "auto":
                fail_after(400, take_all_memory, once)
            with two_pools(artifact, gpu, cpu, offload=offload, min_gain=0.0) as (app, plans):
                found = run(app, True)
        assert (offload == "auto") == any(plan.moves for plan in plans)
        assert found.count(None) == (offload == "auto")
        for one, other in zip(found, wanted, strict=True):
            if one is None:
                continue
            count = len(one.token_ids)
            whole = one.finish_reason == "length"
            assert one.token_ids == other.token_ids[:count] and (whole or count < 40)
        assert sum(one is not None and one.finish_reason == "length" for one in found) >= 109
        assert offload != "off" or any(plan.preempt for plan in plans)


@pytest.mark.parametrize("late", range(18, 24))
def test_a_prompt_may_begin_like_a_request_that_moves_in_its_step(
    artifact: Path, late: int, two_pools: TwoPools
) -> None:
    """What leaves is on the CPU before a prompt brings it back to the landing."""
    rng = random.Random(3)
    first = [rng.randrange(3, 100) for _ in range(60)]
    second = [*first[:48], *[rng.randrange(3, 100) for _ in range(50)]]
    params = SamplingParams(max_tokens=60)

    def run(engine: Engine) -> list[list[int]]:
        (one,) = engine.submit(first, params)
        other: Request | None = None
        while engine.scheduler.busy:
            if other is None and one.generated >= late:
                (other,) = engine.submit(second, params)
            engine.step()
        assert other is not None
        return [one.tokens, other.tokens]

    with load(artifact, kv_blocks=200) as app:
        wanted = run(app.engine)
    with two_pools(artifact, 5, 60, min_gain=9.0, patience=4) as (app, _):
        assert run(app.engine) == wanted


def test_a_closed_app_holds_nothing_on_the_device(artifact: Path, two_pools: TwoPools) -> None:
    gc.collect()
    gc.disable()
    try:
        with two_pools(artifact, 8, 20) as (app, _):
            engine = app.engine
            assert isinstance(engine.executor, DeviceExecutor)
            weight = weakref.ref(next(iter(engine.executor.pair.model.weights.values())))
            lane = weakref.ref(engine.executor.pair.sub_batches[0])
            app.generate(PROMPTS[:2], **ASKED)
        assert weight() is None and lane() is None
    finally:
        gc.enable()


def test_memory_is_counted_once(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the CPU's KV takes is not torch's, too, and what steps take for a moment is no KV's."""
    there, room, taken = 1 << 30, [], []
    monkeypatch.setattr(executor, "predict", lambda *_: Predictor())
    for module in (device, cpu_executor):
        monkeypatch.setattr(module, "available_memory", lambda _: there)
    few, more = 1 << 20, 1 << 24
    for kv_blocks, moment, panels in (
        (100, few, 0),
        (60_000, few, 0),
        (100, more, 0),
        (100, few, 1 << 26),
    ):
        monkeypatch.setattr(executor, "panel_bytes", lambda *_, panels=panels: panels)
        monkeypatch.setitem(step.MOMENT, "cpu", moment)
        given: dict[str, Any] = {"device": "torch:cpu", "offload": "full", **LIMITS}
        with load(artifact, kv_blocks=kv_blocks, **given) as app:
            assert isinstance(app.engine.executor, DeviceExecutor)
            room.append(app.engine.executor.sizes.room)
            held = app.engine.scheduler.limits.block_bytes * kv_blocks
        made = PlainAttention.workspace(torch.device("cpu"), 64, 256, 0.0) + moment
        taken.append((held, made))
    assert max(room) < 0.45 * there
    assert room[0] - room[1] == pytest.approx(0.45 * (taken[1][0] - taken[0][0]), rel=0.01)
    assert room[0] - room[2] == pytest.approx(taken[2][1] - taken[0][1], rel=0.01)
    assert room[0] - room[3] == 1 << 26, "what generated products keep is no KV's"


def test_activations_have_the_type_that_is_asked_for(artifact: Path, two_pools: TwoPools) -> None:
    for dtype in ("auto", "f32", "bf16"):
        with two_pools(artifact, 8, 8, offload="off", given={"dtype": dtype}) as (app, _):
            assert isinstance(app.engine.executor, DeviceExecutor)
            name = app.engine.executor.accelerator.activations("f32") if dtype == "auto" else dtype
            assert app.engine.executor.pair.model.dtype is device.TYPES[name]
            assert app.generate(PROMPTS[:1], max_tokens=2)[0].finish_reason == "length"
    with pytest.raises(RequestError, match="dtype"):
        load(artifact, device="torch:cpu", dtype="int4")


def test_costs_are_measured_once_kept_and_shown(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, accelerator: str
) -> None:
    (tmp_path / "kernels").symlink_to(cache_directory() / "kernels")
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    monkeypatch.setattr(profile, "BUDGET", 0.2)
    monkeypatch.setattr(attention_choice, "BACKENDS", ())
    found = []
    for _ in range(2):
        with load(artifact, device=accelerator, kv_blocks=20, gpu_blocks=20, **LIMITS) as app:
            assert isinstance(app.engine.executor, DeviceExecutor)
            found.append(app.engine.executor.profile)
    assert found[0] == found[1] and found[0] is not None
    tables = found[0].tables
    assert set(AXES) == set(tables)
    assert all(row.origin == "measured" for rows in tables.values() for row in rows)
    (shown,) = inspect_artifact(artifact).devices
    assert shown == found[0]
    assert profile.describe_device(TorchDevice(accelerator)) in shown.key.device


def test_rows_that_are_measured_differ_as_they_may_choose_experts(
    artifact: Path, two_pools: TwoPools
) -> None:
    with two_pools(artifact, 20, 1, offload="off") as (app, _):
        pair = app.engine.executor.pair
        with pair.device.working():
            pair.sub_batches[0].rehearse([], [1] * 8)
        ids = pair.sub_batches[0].buffers.arrays["token_ids"][:8]
        assert len(set(ids.tolist())) == 8


def test_devices_refuse_what_they_cannot_do(artifact: Path) -> None:
    with pytest.raises(SpecError, match="deterministic"):
        load(artifact, device="torch:cpu", deterministic=True)
    with pytest.raises(DeviceError, match=r"cuda:99|no device|not here"):
        load(artifact, device="cuda:99")


@pytest.mark.parametrize(
    ("offload", "model"), [("off", False), ("auto", False), ("full", False), ("auto", True)]
)
def test_drafts_give_the_same_tokens_wherever_kv_lives(
    artifact: Path, offload: str, model: bool, monkeypatch: pytest.MonkeyPatch, two_pools: TwoPools
) -> None:
    """On a clock on which steps with drafts take no longer, so that all are tried."""
    prompts = [prompt * 2 for prompt in PROMPTS if len(prompt) < 60]
    asked = {**ASKED, "max_tokens": 60}
    with load(artifact, kv_blocks=900) as app:
        wanted = [done.token_ids for done in app.generate(prompts, **asked)]
    pools = 20 if offload != "full" else 1, 60
    given = {}
    if model:  # its own, on the CPU alone
        monkeypatch.setattr(speculation, "SHORT", 1000)
        given["draft"] = str(artifact)
    options: dict[str, Any] = {"offload": offload, "num_speculative_tokens": 6, "given": given}
    with two_pools(artifact, *pools, **options) as (app, plans):
        clock, scheduler = itertools.count(), app.engine.scheduler
        scheduler.clock = lambda: float(next(clock))
        if model:  # of random weights, whose every token is unlikely
            drafter = scheduler.speculation.drafter
            read = drafter._read
            drafter._read = lambda *batch: [(token, 0.0) for token, _ in read(*batch)]
        for some in (prompts[:1], prompts):
            found = [done.token_ids for done in app.generate(some, **asked)]
            assert found == wanted[: len(some)]
        assert scheduler.speculation is not None
        assert scheduler.speculation.counts["accepted_tokens"] > 10
    batches = [batch for plan in plans for batch in plan.batches]
    home = "cpu_decode" if offload == "full" else "gpu_decode"
    assert any(len(set(getattr(b, home))) < len(getattr(b, home)) for b in batches)
