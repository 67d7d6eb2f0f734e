"""Attention kernels are chosen by measured time, and only where their numbers are right."""

from __future__ import annotations

import msgspec
import pytest

from dovetail.codegen.library import build_library, lower_request
from dovetail.codegen.targets import TARGETS, host_target
from dovetail.compiler.measure.meter import DECODE, PREFILL, Measurement, Meter
from dovetail.compiler.measure.paired import PairedRatio
from dovetail.compiler.measure.recorder import Identity, NoMachine, Recorder
from dovetail.compiler.rules.schedules import make_schedule
from dovetail.compiler.rules.tables import other_tables
from dovetail.compiler.search import attention_search as module
from dovetail.compiler.search.attention_search import (
    STEPS,
    attention_kernels,
    attention_library,
    attention_tasks,
    single_steps,
    variant_requests,
)
from dovetail.compiler.search.instances import InstanceTask, apply_choices, search_instances
from dovetail.ir.artifact import PhasePlan
from dovetail.ir.errors import ScheduleError
from dovetail.ir.model import ModelSpec, RopeSpec
from dovetail.ir.schedule import SCHEDULE_VALUES
from dovetail.topology.hardware import read_hardware
from tests.codegen.float_targets import FLOAT_TARGETS
from tests.compiler.measure.test_recorder import Script
from tests.compiler.records import TrustingRecords

TARGET = host_target()
PLAN = PhasePlan(threads=1, cpus=())
SPEC = ModelSpec(
    family="llama",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=64,
    n_layers=1,
    n_heads=6,
    n_kv_heads=2,
    head_dim=16,
    max_position=128,
    max_context=70,
    norm_eps=1e-5,
    rope=RopeSpec(rotary_dim=16),
    weight_dtype="f32",
    checkpoint_dtype="f32",
    kv_dtype="bf16",
)


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """One variant of each kernel, whatever this machine is."""
    table = {(DECODE, TARGET.isa): ({"CHUNK": 16},), (PREFILL, TARGET.isa): ({"KB": 32},)}
    monkeypatch.setattr(module, "COMBINATIONS", table)
    monkeypatch.setattr(module, "STEPS", {DECODE: (), PREFILL: ()})


@pytest.mark.usefixtures("variants")
def test_right_kernels_are_timed_recorded_and_the_winner_serves() -> None:
    tasks, records = attention_tasks(SPEC, TARGET, [PLAN, PLAN]), TrustingRecords()
    built = build_library(attention_library(SPEC, TARGET))
    with Meter(built.path, built.index, pool_bytes=1 << 20) as meter:
        recorder = Recorder(meter, Identity.of(read_hardware(), built.index), records)
        found = search_instances(tasks, recorder, 10.0)
        assert recorder.measured == len(records.known) == 6
        assert search_instances(tasks, recorder, 10.0) == found
        assert recorder.measured == 6  # the second time all were on record
    assert {(r.kind, r.shape["rows"], r.shape["context"]) for r in records.known.values()} == {
        (DECODE, 1, 70), (PREFILL, 64, 64), (PREFILL, 70, 70)
    }  # fmt: skip
    assert {r.work for r in records.known.values()} == {task.work for task in tasks}
    assert [choice.family for choice in found] == [DECODE, PREFILL]
    assert all(0 < choice.seconds < 1 for choice in found)
    tables = apply_choices(list(other_tables(SPEC, TARGET, "any", 1)), found)
    rows = {table.op: table.rows[0] for table in tables}
    for choice in found:
        assert rows[choice.family].kernel == choice.request.name
        assert rows[choice.family].source == "measured"
    assert rows[DECODE].reduce_kernel == "decode_attention_merge_bf16"
    assert rows["rmsnorm"].source == "default"
    default = {variant_requests(f, TARGET, SPEC)[0].name for f in (DECODE, PREFILL)}
    chosen = {choice.request.name for choice in found}
    needed = {request.name for request in attention_kernels(SPEC, TARGET, tables)}
    assert needed == chosen - default


LEAST_ROOM = ("x86-64-avx2", "aarch64-neon")
"""Targets with the fewest registers, and with the shortest ones: what these take the others do."""
QUICK = PREFILL
"""The family whose variants are lowered for the other targets, too, in every run: it is cheaper."""


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(f, n, marks=() if n in LEAST_ROOM or f == QUICK else pytest.mark.long)
        for f in (DECODE, PREFILL)
        for n in FLOAT_TARGETS
    ],
)
def test_every_target_has_variants_of_the_kernels_own_choices(family: str, name: str) -> None:
    target = TARGETS[name]
    default, *others = variant_requests(family, target, SPEC)
    assert len(others) >= 5 and len({r.name for r in others}) == len(others)
    assert all(r.binding != default.binding and r.kernel == family for r in others)
    for request in others:
        lower_request(request, target)  # or ScheduleError
    steps = [dict(tiles) for tiles in single_steps(default)]
    assert {name for tiles in steps for name in tiles} <= {*STEPS[family]}
    assert all(len(tiles) == 1 and tiles.items() - default.binding.items() for tiles in steps)


class ByContext(Script):
    """A measurer on which a kernel's ratio to the default depends on the context."""

    def __init__(self, ratios, bound=1.0) -> None:
        super().__init__()
        self.ratios, self.bound = ratios, bound

    def measure(self, case, candidates, *, rounds, seconds):
        ratios = (1.0, self.ratios[case.context])
        return tuple(
            Measurement(
                candidate=c, status="ok", seconds=r, low=r, high=r, runs=rounds,
                ratio=PairedRatio(r, r * self.bound),
            )
            for c, r in zip(candidates, ratios, strict=True)
        )  # fmt: skip


@pytest.mark.usefixtures("variants")
@pytest.mark.parametrize(
    ("ratios", "bound", "wins"),
    [
        ((0.9, 0.9, 0.9), 1.0, True),
        ((0.98, 0.98, 0.98), 1.0, False),  # not worth it
        ((0.9, 0.9, 0.9), 1.2, False),  # not sure
        ((0.5, 0.9, 1.1), 1.0, False),  # clearly slower in one context
        ((0.8, 0.9, 1.01), 1.0, True),
    ],
)
def test_a_variant_must_surely_beat_the_default_over_all_contexts(ratios, bound, wins) -> None:
    spec = msgspec.structs.replace(SPEC, max_context=8192)
    tasks = [t for t in attention_tasks(spec, TARGET, [PLAN]) if t.case.kind == DECODE]
    contexts = [task.case.context for task in tasks]
    assert contexts == [256, 1024, 4096]
    land = ByContext(dict(zip(contexts, ratios, strict=True)), bound)
    (choice,) = search_instances(tasks, land, 1.0)
    assert (choice.request == tasks[0].rivals[1]) == wins


def one_kv_head(threads: int) -> list[InstanceTask]:
    spec = msgspec.structs.replace(SPEC, n_heads=2, n_kv_heads=1, max_context=4096)
    plan = PhasePlan(threads=threads, cpus=())
    return [t for t in attention_tasks(spec, TARGET, [plan]) if t.case.kind == DECODE]


def test_schedules_are_tried_that_cut_keys_into_other_parts() -> None:
    whole, alone = one_kv_head(2)[0].schedules, one_kv_head(1)[0].schedules
    block_k = SCHEDULE_VALUES.index("block_k")
    assert [schedule[block_k] for schedule in whole] == [64, 512]  # 256 keys stay whole
    assert alone == whole[:1]  # there is nothing to share
    assert len(one_kv_head(32)[0].schedules) > 2


class ByParts(Script):
    """A measurer on which keys cut as `best` says take half the time."""

    def __init__(self, best: int) -> None:
        super().__init__()
        self.best = make_schedule(block_k=best)

    def measure(self, case, candidates, *, rounds, seconds):
        ratios = (0.5 if c.schedule == self.best else 1.0 for c in candidates)
        return tuple(
            Measurement(
                candidate=c, status="ok", seconds=r, low=r, high=r, runs=rounds,
                ratio=PairedRatio(r, r),
            )
            for c, r in zip(candidates, ratios, strict=True)
        )  # fmt: skip


@pytest.mark.usefixtures("variants")
def test_the_best_parts_go_into_the_table() -> None:
    (choice,) = search_instances(one_kv_head(2), ByParts(512), 1.0)
    assert choice.request == one_kv_head(2)[0].rivals[0]
    (default,) = [t for t in other_tables(SPEC, TARGET, "any", 2) if t.op == DECODE]
    (table,) = apply_choices([default], [choice])
    assert default.rows[0].schedule == make_schedule(block_k=64)
    assert table.rows[0].schedule == make_schedule(block_k=512)


@pytest.mark.usefixtures("variants")
def test_keys_in_parts_are_measured_as_right() -> None:
    spec = msgspec.structs.replace(SPEC, n_heads=3, n_kv_heads=1, max_context=600)
    built = build_library(attention_library(spec, TARGET))
    plan = PhasePlan(threads=2, cpus=())
    tasks = [t for t in attention_tasks(spec, TARGET, [plan]) if t.case.kind == DECODE]
    with Meter(built.path, built.index, pool_bytes=1 << 20) as meter:
        for task in tasks:
            found = meter.measure(task.case, task.candidates, rounds=1, seconds=60.0)
            assert len(found) > 2 and {m.status for m in found} == {"ok"}


@pytest.mark.usefixtures("variants")
def test_wrong_crashed_and_missing_instances_are_not_chosen() -> None:
    task, *_ = attention_tasks(SPEC, TARGET, [PLAN])
    default, variant = (request.name for request in task.rivals)

    def chosen(**seconds):
        return [c.request.name for c in search_instances([task], Script(**seconds), 1.0)]

    assert chosen(**{default: 1.0, variant: 0.0}) == [default]
    assert chosen(**{default: 0.0, variant: 1.0}) == [variant]
    assert chosen(**{default: 1.0, variant: 0.5}) == [variant]
    with pytest.raises(ScheduleError, match=f"{default} crash, {variant} crash"):
        chosen(**{default: 0.0, variant: 0.0})
    assert search_instances([task], NoMachine(), 1.0) == ()
