"""Two pools give the tokens of one: a tiny Llama on the CPU and an emulated accelerator."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail.compiler.pipeline import compile_model
from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.errors import DeviceError, DovetailError, SpecError
from dovetail.runtime import kv_parts, neo
from dovetail.runtime.app import App, load
from dovetail.runtime.device import Segment
from dovetail.runtime.emulated import Emulation
from dovetail.runtime.memory import allocate
from dovetail.runtime.neo import NeoScheduler
from dovetail.runtime.orders import LaneSizes
from dovetail.runtime.pair import KvLink, Lane
from dovetail.runtime.pipelined import PipelinedEngine, StepLane
from dovetail.runtime.plan import Batch, Move, SchedulerSettings, StepPlan
from dovetail.runtime.request import Home, Request, SamplingParams
from dovetail.runtime.scheduler import Draft
from dovetail.runtime.sim.machines import find_machine
from dovetail.runtime.steady import OffloadVerdict
from dovetail.runtime.step import StepBuffers, StepShape
from dovetail.topology.parameters import Figure
from tests.models import save_model

RNG = random.Random(6)
PROMPTS = [
    [RNG.randrange(3, 100) for _ in range(n)] for n in (1, 15, 16, 17, 40, 75, 100, 9, 33, 64)
]
PROMPTS += [[*PROMPTS[6][:64], 7, 8], [*PROMPTS[6][:48], 9]]  # share blocks
HOMES = ("gpu_decode", "cpu_decode")
ASKED = {"max_tokens": 24, "ignore_eos": True}
SLOW = Figure(6e7, "of this test: products and attention of a layer take milliseconds")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelined")
    save_model(folder / "model", "llama")
    options = {
        "effort": "none",
        "max_step_tokens": 64,
        "max_context": 256,
        "weight_dtype": "f32",
    }
    compile_model(folder / "model", output=folder / "app.dove", **options)
    return folder / "app.dove"


@pytest.fixture(scope="module")
def alone(artifact: Path) -> list[tuple[int, ...]]:
    """What the one-device engine generates."""
    with load(artifact, kv_blocks=200) as app:
        return [done.token_ids for done in app.generate(PROMPTS, **ASKED)]


@contextmanager
def emulate(
    path: Path, gpu: int, cpu: int, threads: int = 1, slow: bool = False, **options: object
) -> Iterator[tuple[App, list[StepPlan]]]:
    """Load with pools of so many blocks; also give the plans that ran. Pools stay sound."""
    machine = find_machine("t4").with_gpu_blocks(gpu)
    if slow:
        machine = replace(machine.with_cpu(SLOW.value / 4 / 60e9), bandwidth=SLOW)
    chosen = SchedulerSettings(**options)  # type: ignore[arg-type]
    emulation = Emulation(machine, chosen)
    with load(path, kv_blocks=cpu, threads=threads, emulation=emulation) as app:
        engine = app.engine
        assert isinstance(engine, PipelinedEngine)
        plans: list[StepPlan] = []
        execute = engine._execute
        shape = engine.spec.n_layers, gpu + cpu, -1
        held = engine.link.gpu
        landing = [pool.reshape(shape)[:, gpu:] for pool in (held.k, held.v)]

        def follow(plan: StepPlan) -> object:
            plans.append(plan)
            touched = execute(plan)
            engine.scheduler.check_integrity()
            for landed in landing:
                landed[:] = 0xFF  # NaN: the next step may not count on what it finds there
            return touched

        engine._execute = follow  # type: ignore[method-assign, assignment]
        yield app, plans
        for pool in engine.scheduler.pools.values():
            pool.check_integrity()
            assert pool.free_blocks == pool.n_blocks


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
) -> None:
    settings = {"offload": offload, "chunked": chunked, "min_gain": 0.0, "patience": 4}
    with emulate(artifact, gpu, cpu, **settings) as (app, plans):
        assert [done.token_ids for done in app.generate(PROMPTS, **ASKED)] == alone
    decoded = {name: any(getattr(b, name) for p in plans for b in p.batches) for name in HOMES}
    if offload != "auto":
        assert decoded == {"gpu_decode": offload == "off", "cpu_decode": offload == "full"}
    if max(gpu, cpu) < 13:
        assert any(plan.preempt for plan in plans)


@pytest.mark.parametrize("offload", ["off", "full", "auto"])
def test_scores_are_those_of_one_device(
    artifact: Path, alone: list[tuple[int, ...]], offload: str
) -> None:
    with load(artifact, kv_blocks=200) as app:
        wanted = app.score(PROMPTS)
    with emulate(artifact, 20, 30, offload=offload, min_gain=0.0) as (app, plans):
        jobs = app.submit_all(PROMPTS, **ASKED)
        for found, expected in zip(app.score(PROMPTS), wanted, strict=True):
            assert found.sum == pytest.approx(expected.sum, abs=1e-3)
            assert found.logprobs[1:] == pytest.approx(expected.logprobs[1:], abs=1e-4)
        assert [job.result().token_ids for job in jobs] == alone
    assert sum(len(c.scores) for p in plans for b in p.batches for c in b.prefill) >= sum(
        len(prompt) - 1 for prompt in PROMPTS
    )


@pytest.mark.parametrize(("offload", "splits"), [("off", (1, 1)), ("full", (1, 2))])
def test_threads_share_long_keys_with_all_heads_and_warps_do_not(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, offload: str, splits: tuple[int, int]
) -> None:
    monkeypatch.setattr(kv_parts, "LONG_TOKENS", 32)
    found: set[tuple[int, int]] = set()
    set_args = Lane.set_args

    def note(lane: Lane, sizes: LaneSizes) -> None:
        found.add((sizes.gpu_splits, sizes.cpu_splits))
        set_args(lane, sizes)

    monkeypatch.setattr(Lane, "set_args", note)
    with emulate(artifact, 9, 9, threads=2, offload=offload) as (app, _):
        assert app.engine.model.spec.n_kv_heads == 2
        app.generate([PROMPTS[6]], max_tokens=2)
    assert found == {(1, 1), splits}  # of the prompt, and of the decode behind it


def test_each_device_cuts_keys_for_its_own_decodes(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, int]] = []
    wanted: list[tuple[int, int]] = []
    monkeypatch.setattr(neo, "weigh_offload", lambda *_: OffloadVerdict(2.0, len(PROMPTS), 2.0))
    with emulate(artifact, 8, 60, min_gain=0.0, patience=4) as (app, _):
        engine = app.engine
        assert isinstance(engine, PipelinedEngine)
        prepare, split = engine._prepare, engine.kv_splits

        def look(lane: StepLane, batch: Batch) -> StepShape:
            for numbers in (batch.gpu_decode, batch.cpu_decode):
                lengths = [len(engine.scheduler.requests[n].tokens) for n in numbers]
                wanted.append((len(lengths), max(lengths, default=0)))
            return prepare(lane, batch)

        def note(shape: StepShape, *args: Any, **how: Any) -> int:
            found.append((shape.n_decode, shape.longest_decode))
            return split(shape, *args, **how)

        monkeypatch.setattr(engine, "_prepare", look)
        monkeypatch.setattr(engine, "kv_splits", note)
        app.generate(PROMPTS, **ASKED)
    assert found == wanted
    pairs = zip(wanted[::2], wanted[1::2], strict=True)
    assert any(0 < gpu[1] != cpu[1] > 0 for gpu, cpu in pairs)


@pytest.mark.parametrize("lost", ["send", "bring", "attend_on"])
def test_b6_7_fails_where_a_part_of_the_pipeline_is_left_out(
    artifact: Path, alone: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """B6.7 is the test above; tokens must tell when KV is not sent, or not brought, or not read."""
    attend = Lane.attend_on

    def attend_on_the_accelerator(lane: Lane, home: Home, layer: int) -> None:
        if home is Home.GPU:
            attend(lane, home, layer)

    if lost == "attend_on":
        monkeypatch.setattr(Lane, lost, attend_on_the_accelerator)
    else:
        monkeypatch.setattr(KvLink, lost, lambda *_: None)
    options = {"offload": "full", "chunked": True}
    with emulate(artifact, 1, 200, **options) as (app, _):
        try:
            found = [done.token_ids for done in app.generate(PROMPTS, **ASKED)]
        except DovetailError:  # what is read in its place is no number
            return
    assert found != alone


def test_b6_8_fails_where_a_layer_of_what_moves_is_left_out(
    artifact: Path, alone: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B6.8 is the test below."""
    pays, move = OffloadVerdict(2.0, len(PROMPTS), 2.0), KvLink.move

    def skip(link: KvLink, layer: int, moved: Move, target: Home) -> None:
        if layer != 1:
            move(link, layer, moved, target)

    monkeypatch.setattr(neo, "weigh_offload", lambda *_: pays)
    monkeypatch.setattr(KvLink, "move", skip)
    moved, different = 0, False
    for gpu, cpu, gain in ((8, 60, 0.0), (9, 30, 9.0), (6, 12, 9.0)):
        with emulate(artifact, gpu, cpu, min_gain=gain, patience=4) as (app, plans):
            different |= [done.token_ids for done in app.generate(PROMPTS, **ASKED)] != alone
        moved += sum(len(plan.moves) for plan in plans)
    assert moved and different


def test_swaps_both_ways_and_two_batches_are_run(
    artifact: Path, alone: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pays = OffloadVerdict(2.0, len(PROMPTS), 2.0)  # as with a long queue: not all start at once
    monkeypatch.setattr(neo, "weigh_offload", lambda *_: pays)
    seen = {"out": 0, "in": 0, "two": 0, "later": 0}
    for gpu, cpu, slow in ((8, 60, False), (9, 30, False), (12, 40, True), (6, 12, False)):
        with emulate(artifact, gpu, cpu, slow=slow, min_gain=0.0, patience=4) as (app, plans):
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
) -> None:
    options = {"offload": offload, "chunked": chunked, "min_gain": gain, "patience": patience}
    with emulate(artifact, gpu, cpu, swap_in_share=share, **options) as (app, _):
        assert [done.token_ids for done in app.generate(PROMPTS, **ASKED)] == alone


def test_every_eviction_may_be_a_swap(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        with emulate(artifact, gpu, 80, min_gain=9.0, swap_in_share=share) as (app, plans):
            assert [done.token_ids for done in app.generate(prompts, **asked)] == alone
        swapped += sum(len(plan.swap_out) for plan in plans)
    assert swapped >= 6


def test_deterministic_logits_are_the_bits_of_one_device(artifact: Path) -> None:
    def bits(app: App) -> dict[int, list[bytes]]:
        engine, params = app.engine, SamplingParams(max_tokens=6, ignore_eos=True)
        found: dict[int, list[bytes]] = {}
        sample = engine._sample

        def follow(shape: StepShape, buffers: StepBuffers) -> None:
            for row, request in enumerate(shape.outputs):
                found.setdefault(request.id, []).append(buffers.logits(row).tobytes())
            sample(shape, buffers)

        engine._sample = follow  # type: ignore[method-assign]
        for prompt in PROMPTS:
            engine.submit(prompt, params)
        while engine.scheduler.busy:
            engine.step()
        return found

    with load(artifact, kv_blocks=200, deterministic=True) as app:
        alone = bits(app)
    machine = find_machine("t4").with_gpu_blocks(9)
    made = Emulation(machine, SchedulerSettings(min_gain=0.0, patience=4))
    with load(artifact, kv_blocks=40, threads=1, deterministic=True, emulation=made) as app:
        beside = bits(app)
    assert beside == alone


def test_the_clock_is_the_tables(artifact: Path) -> None:
    with emulate(artifact, 60, 20, offload="off") as (app, plans):
        app.generate(PROMPTS[:2], **ASKED)
        launch = app.engine.scheduler.predictor.launch().seconds * app.engine.spec.n_layers
        predicted = sum(plan.predicted_seconds - launch for plan in plans)
        assert app.engine.device.now() == pytest.approx(predicted)
        assert predicted > 0


def test_recordings_show_emulated_time(artifact: Path, tmp_path: Path) -> None:
    with emulate(artifact, 12, 40) as (app, _), app.record(tmp_path / "t.json"):
        app.generate(PROMPTS[:4], **ASKED)
        seconds = app.engine.device.now()
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = [event for event in events if event.get("name") == "forward"]
    assert sum(span["dur"] for span in spans) / 1e6 == pytest.approx(seconds, rel=1e-2)
    assert sum(event["ph"] == "s" for event in events) == 4


def break_kernel() -> None:
    raise DeviceError("broken")


def take_all_memory() -> None:
    allocate(1 << 62)


@pytest.mark.parametrize(
    ("fault", "words"), [(break_kernel, "broken"), (take_all_memory, "memory ran out")]
)
def test_a_failed_step_ends_its_requests_and_those_it_moved(
    artifact: Path, alone: list[tuple[int, ...]], fault: Callable[[], None], words: str
) -> None:
    with emulate(artifact, 9, 30) as (app, _):
        device = app.engine.device
        run, left = device.run, [40]

        def fail_once(segment: Segment, stream: int = 0) -> None:
            left[0] -= 1
            if left[0] == 0:
                fault()
            run(segment, stream)

        device.run = fail_once  # type: ignore[method-assign]
        jobs = [app.submit(prompt, **ASKED) for prompt in PROMPTS]
        results = []
        for job, tokens in zip(jobs, alone, strict=True):
            try:
                results.append(job.result().token_ids == tokens)
            except DeviceError as error:
                assert words in str(error)
                results.append(None)
        assert None in results and False not in results and True in results


def test_groups_of_processes_have_no_timed_mode(artifact: Path) -> None:
    phase = PhasePlan(threads=1, cpus=())
    plan = ServicePlan(processes=2, prefill=phase, decode=phase, kv_blocks=8)
    with pytest.raises(SpecError, match="one process"):
        load(artifact, plan=plan, emulation=Emulation(find_machine("t4"), timed=True))
