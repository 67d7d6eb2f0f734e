"""NEO's acceptance tests by number, each also with its mechanism taken away: then it must fail.

| test | what must hold | where |
|---|---|---|
| B6.1 | CPU paged attention within 2e-3 of float64, bits do not depend on where blocks lie | here, `tests/codegen/kernels/test_attention_decode.py` |
| B6.2 | keys cut over parts and threads merge to the softmax of all | here, same file |
| B6.3 | predictor: exact at points, in the hull between, flagged outside, cache refused | here, `test_cost_tables.py` |
| B6.4 | both inequalities, nobody twice, budgets, the best rate of the schedules | here, `test_neo.py` |
| B6.5 | any arrivals on any pools: nothing lost, all end in time | here, `test_queues.py` |
| B6.6 | where the CPU is slow the plans are those without it; where memory is short it pays | here, `test_neo.py` |
| B6.7 | tokens of two batches are those of one device | `test_pipelined.py: test_b6_7` |
| B6.8 | KV that moves or is staged is read where it was stored | `test_pipelined.py: test_b6_8`, B6.7 |
| B6.9 | a step takes the two maxima, not the sum, and the accelerator is not idle | `test_timed.py: test_b6_9` |
"""  # noqa: E501

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dovetail.ir.errors import ArtifactError, CapacityError
from dovetail.ir.profile import CostRow, ProfileFile, ProfileKey
from dovetail.runtime.schedule import cost_tables, neo
from dovetail.runtime.schedule.cost_tables import (
    Curve,
    Predictor,
    Surface,
    TablePredictor,
    keep_profile,
    read_profile,
)
from dovetail.runtime.schedule.neo import NeoScheduler
from dovetail.runtime.schedule.offload import OffloadDecision
from dovetail.runtime.schedule.pipeline import LayerTimes, Pipeline
from dovetail.runtime.schedule.plan import StepPlan
from dovetail.runtime.schedule.request import Home, SamplingParams
from tests.codegen.kernels.harness import NATIVE, Runner, native_runner
from tests.codegen.kernels.reference import attention, paged
from tests.runtime.schedule.integrity import check_integrity
from tests.runtime.two_pools import (
    T4,
    Memory,
    Noise,
    Roofline,
    check_plan,
    make,
    report,
    submit,
)

Mutate = Callable[[pytest.MonkeyPatch], None]
SLOW = Roofline(T4.weights, T4.kv, T4.gpu_bytes, T4.gpu_flops, T4.cpu_bytes / 1000)


def replace(target: object, name: str, value: Any) -> Mutate:
    """Return what puts `value` in place of a mechanism."""
    return lambda monkeypatch: monkeypatch.setattr(target, name, value)


# ---- 1 and 2: attention over the CPU's pages ----


def attend(run: Runner, group: int, hd: int, splits: int, nth: int, *, merge: bool = True) -> None:
    """Decode over scattered float16 blocks, and again with these somewhere else."""
    lengths, n_kv = [1, 15, 16, 17, 63, 64, 65, 200], 2
    n, n_q = len(lengths), n_kv * group
    pool = paged(np.random.default_rng(group), lengths, n_kv, hd, "f16")
    true = paged(np.random.default_rng(group), lengths, n_kv, hd, "f32")
    q = np.random.default_rng(0).standard_normal((n, n_q * hd)).astype(np.float32)
    scale = 1 / np.sqrt(hd)
    order = np.random.default_rng(1).permutation(len(pool.k)).astype(np.int32)
    moved_k, moved_v = np.empty_like(pool.k), np.empty_like(pool.v)
    moved_k[order], moved_v[order] = pool.k, pool.v
    places = ((pool.tables, pool.k, pool.v), (order[pool.tables], moved_k, moved_v))
    found = []
    for tables, keys, values in places:
        out = np.zeros((n, n_q * hd), np.float32)
        partial = np.full((n, n_q, splits, hd + 16), np.nan, np.float32)
        heads = (0, n, n_q, n_kv, hd, scale, 0, None, splits, q, n_q * hd)
        where = (np.array([0], np.int32), np.array(lengths, np.int32), tables, tables.shape[1])
        args = (*heads, *where, keys, values, partial, out, n_q * hd)
        for name in ("decode_attention_f16", "decode_attention_merge_f16")[: 1 + merge]:
            run(name, *args, nth=nth)
        found.append(out)
    np.testing.assert_array_equal(found[0], found[1])
    for d in range(n):
        want = attention(q[d].reshape(1, n_q, hd), true.keys[d], true.values[d], scale, 0)[0]
        np.testing.assert_allclose(found[0][d].reshape(want.shape), want, rtol=0, atol=2e-3)


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("hd", [64, 128])
def test_b6_1_attention_over_pages(group: int, hd: int) -> None:
    for nth in (1, 2, 8):
        attend(native_runner(NATIVE[0]), group, hd, splits=1, nth=nth)


@pytest.mark.parametrize(("splits", "nth"), [(2, 1), (3, 2), (8, 8), (40, 3)])
def test_b6_2_parts_of_all_threads_merge(splits: int, nth: int) -> None:
    attend(native_runner(NATIVE[0]), 4, 64, splits=splits, nth=nth)


def test_b6_2_fails_without_its_merge() -> None:
    with pytest.raises(AssertionError):
        attend(native_runner(NATIVE[0]), 4, 64, splits=3, nth=2, merge=False)


# ---- 3: the predictor ----


def predict(folder: Path) -> None:
    key = ProfileKey(model="m", device="cpu", threads=2, tensor_parallel=1, kernels="k")

    def rows(*points: tuple[tuple[int, ...], float]) -> tuple[CostRow, ...]:
        return tuple(CostRow(at=at, seconds=s, origin="measured") for at, s in points)

    plane = [((s, s * n), 1.0 + s + 2 * s * n) for s in (1, 4, 16) for n in (1, 8, 32)]
    tables = {"linear": rows(((1,), 1.0), ((10,), 4.0)), "cpu_decode": rows(*plane)}
    profile = ProfileFile(key=key, created="", tables=tables)
    asked = TablePredictor(profile)
    assert [asked.linear(x) for x in (1, 10)] == [1.0, 4.0]
    assert 1.0 < asked.linear(5) < 4.0
    assert asked.linear(11) == 4.0
    assert asked.cpu_decode(7, 7 * 13) == pytest.approx(1 + 7 + 2 * 7 * 13)
    keep_profile(folder, profile)
    assert read_profile(folder, key) == profile
    for field, value in (("model", "n"), ("device", "g"), ("threads", 3), ("tensor_parallel", 2)):
        with pytest.raises(ArtifactError):
            read_profile(folder, msgspec.structs.replace(key, **{field: value}))


WITHOUT_PREDICTOR: dict[str, Mutate] = {
    "lines": replace(Curve, "at", lambda *_: 4.0),
    "surface": replace(Surface, "at", lambda *_: 1.0),
    "refusal": replace(cost_tables, "check_key", lambda *_: None),
}


def test_b6_3_predictor(tmp_path: Path) -> None:
    predict(tmp_path)


@pytest.mark.parametrize("name", WITHOUT_PREDICTOR)
def test_b6_3_fails_without(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    WITHOUT_PREDICTOR[name](monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        predict(tmp_path)


# ---- 4: both inequalities and the greedy choice ----


def rate_of(scheduler: NeoScheduler, plan: StepPlan, *, cpu: bool) -> float:
    """Return requests by the seconds of a layer, with or without the plan's CPU decodes."""
    requests, first = scheduler.requests, plan.batches[0]
    gpu = [len(requests[i].tokens) for i in first.gpu_decode]
    pipeline = Pipeline(LayerTimes(scheduler.predictor), first.prefill, gpu)
    for index, batch in enumerate(plan.batches if cpu else ()):
        stored = sum(len(requests[i].tokens) for i in batch.cpu_decode)
        pipeline.add(index, stored, len(batch.cpu_decode))
    return pipeline.requests / pipeline.layer_seconds


def holds(scheduler: NeoScheduler, plan: StepPlan) -> bool:
    """Tell whether Tca1 + l <= Tl0 and Tca0 + l <= Tl1 + Tga0, summed from the tables."""
    requests, asked, first = scheduler.requests, scheduler.predictor, plan.batches[0]
    linear = [asked.linear(batch.tokens) for batch in plan.batches] + [0.0]
    stored = sum(len(requests[i].tokens) for i in first.gpu_decode)
    times = LayerTimes(asked)
    hides = [linear[1] + times.prefill(first.prefill) + times.gpu_decode(stored), linear[0]]
    return all(
        times.cpu_decode(
            len(batch.cpu_decode), sum(len(requests[i].tokens) for i in batch.cpu_decode)
        )
        + times.launch
        <= hidden
        for batch, hidden in zip(plan.batches, hides, strict=False)
        if batch.cpu_decode
    )


def choose(predictor: Predictor = T4) -> None:
    scheduler, rng = make(54, predictor=predictor, sequences=64), random.Random(2)
    for _ in range(80):
        submit(scheduler, rng.randint(5, 250), rng.randint(5, 60))
    shared = 0
    for _ in range(60):
        plan = scheduler.plan()
        late = any(scheduler.overdue(r) for r in scheduler.running[Home.CPU])
        check_plan(scheduler, plan)
        assert plan.forced or holds(scheduler, plan)
        least = rate_of(scheduler, plan, cpu=False) * (1 - 1e-9)
        assert late or rate_of(scheduler, plan, cpu=True) >= least
        shared += any(batch.cpu_decode for batch in plan.batches)
        report(scheduler, plan)
    assert shared


LONG_QUEUE = OffloadDecision(2.0, 60, 2.0)
"""As of a queue that does not start all at once."""
WITHOUT_CHOICE: dict[str, tuple[Mutate, Predictor]] = {
    "inequalities": (replace(Pipeline, "slack", lambda *_: 1.0), T4),
    "rates": (replace(Pipeline, "rate", property(lambda self: -1 / self.layer_seconds)), Noise(3)),
    "decodes": (replace(NeoScheduler, "_find_ready", lambda *_: []), T4),
}


@pytest.mark.parametrize("predictor", [T4, Noise(3)], ids=["t4", "noise"])
def test_b6_4_inequalities_and_greedy_choice(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(predictor)
    monkeypatch.setattr(neo, "weigh_offload", lambda *_: LONG_QUEUE)
    choose(predictor)


@pytest.mark.parametrize("name", WITHOUT_CHOICE)
def test_b6_4_fails_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, predictor = WITHOUT_CHOICE[name]
    mutate(monkeypatch)
    monkeypatch.setattr(neo, "weigh_offload", lambda *_: LONG_QUEUE)
    with pytest.raises(AssertionError):
        choose(predictor)


# ---- 5: safety ----


def survive(steps: int = 2500) -> None:
    """Requests come for a while, some of them larger than the accelerator; all must end."""
    scheduler = make(6, 30, Roofline(cpu_bytes=1e6), 60, 8, 300, patience=4, min_tokens=8)
    memory, rng, begun = Memory(scheduler), random.Random(5), 0
    for step in range(steps):
        if step < 200 and rng.random() < 0.4:
            submit(scheduler, rng.randint(1, 180), rng.randint(1, 50))
            begun += 1
        plan = scheduler.plan()
        check_plan(scheduler, plan)
        first = next((r for r in scheduler.running[Home.CPU] if r.generated), None)
        passed = scheduler.plans - first.served if first else 0
        assert passed <= scheduler.settings.patience + 2, "passed over for ever"
        memory.run(plan)
        check_integrity(scheduler)
        if not scheduler.busy and step > 200:
            break
    assert begun and not scheduler.busy
    assert all(pool.free_blocks == pool.n_blocks for pool in scheduler.pools.values())


WITHOUT_SAFETY: dict[str, Mutate] = {
    "bounded wait": replace(NeoScheduler, "overdue", lambda *_: False),
    "room": replace(NeoScheduler, "make_room", lambda *_: True),
    "large requests": replace(NeoScheduler, "_belongs_to_cpu", lambda *_: False),
}


def test_b6_5_safety() -> None:
    survive()


@pytest.mark.parametrize("name", WITHOUT_SAFETY)
def test_b6_5_fails_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WITHOUT_SAFETY[name](monkeypatch)
    with pytest.raises((AssertionError, CapacityError)):
        survive(800)


# ---- 6: fallback ----


def serve(offload: str, predictor: Predictor, count: int) -> tuple[float, list[StepPlan]]:
    """Return the predicted seconds of a queue, and its plans."""
    scheduler, rng = make(predictor=predictor, offload=offload), random.Random(1)
    for _ in range(count):
        tokens = [rng.randrange(1000) for _ in range(rng.randint(297, 363))]
        scheduler.submit(tokens, SamplingParams(max_tokens=45 + rng.randint(-4, 4)))
    plans: list[StepPlan] = []
    while scheduler.busy:
        plans.append(scheduler.plan())
        report(scheduler, plans[-1])
    return sum(plan.predicted_seconds for plan in plans), plans


def fall_back() -> None:
    assert serve("auto", SLOW, 16)[1] == serve("off", SLOW, 16)[1]


def pay() -> None:
    (alone, _), (beside, plans) = serve("off", T4, 60), serve("auto", T4, 60)
    shared = sum(any(b.cpu_decode for b in plan.batches) for plan in plans) / len(plans)
    assert alone > 2 * beside and shared > 0.85


def test_b6_6_fallback() -> None:
    fall_back()
    pay()


@pytest.mark.parametrize(("gains", "check"), [(True, fall_back), (False, pay)])
def test_b6_6_fails_without_its_verdict(
    gains: bool, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NeoScheduler, "_gains", lambda *_: gains)
    monkeypatch.setattr(neo, "weigh_offload", lambda *_: LONG_QUEUE)
    with pytest.raises(AssertionError):
        check()
