"""The truth about a step: the two-max formula exactly, and what noise and hidden costs add."""

from __future__ import annotations

import pytest

from dovetail.ir.model import ModelSpec
from dovetail.runtime.schedule.cost_tables import TablePredictor
from dovetail.runtime.schedule.plan import Batch, Move, PrefillChunk, StepPlan
from dovetail.runtime.schedule.request import Home, Metrics, Request, SamplingParams
from dovetail.runtime.sim.machines import MACHINES, assumed_profile, kv_token_bytes
from dovetail.runtime.sim.simulated_step import Truth
from dovetail.topology.presets import preset_model

MACHINE = MACHINES["a10g"]
SPEC: ModelSpec = preset_model(MACHINE.model, kv_dtype="bf16")
TABLES = TablePredictor(assumed_profile(MACHINE, SPEC))
LAYERS = SPEC.n_layers


def request(number: int, length: int, home: Home) -> Request:
    return Request(
        id=number,
        tokens=[1] * length,
        prompt_length=length,
        max_tokens=9,
        params=SamplingParams(),
        metrics=Metrics(0.0),
        home=home,
    )


REQUESTS = {
    0: request(0, 500, Home.GPU),  # prefilled
    1: request(1, 300, Home.CPU),  # prefilled, bound for the CPU
    2: request(2, 1000, Home.GPU),
    3: request(3, 2000, Home.CPU),
    4: request(4, 700, Home.CPU),
}
BATCHES = (
    Batch((PrefillChunk(0, 0, 500), PrefillChunk(1, 0, 300)), (2,), (4,)),
    Batch(cpu_decode=(3,)),
)


def test_two_batches_take_the_two_maxima_of_the_tables() -> None:
    taken = Truth(TABLES, SPEC).step(StepPlan(BATCHES), REQUESTS)
    linear = [TABLES.linear(rows) for rows in (802, 1)]
    attention = TABLES.prefill([500, 300]) + TABLES.gpu_decode(1000)
    decode = [TABLES.cpu_decode(1, tokens) for tokens in (700, 2000)]
    layer = max(linear[0], decode[1]) + max(linear[1] + attention, decode[0])
    assert taken.seconds == pytest.approx(LAYERS * layer)
    assert taken.gpu == pytest.approx(LAYERS * (sum(linear) + attention))
    assert taken.cpu == pytest.approx(LAYERS * sum(decode))
    copied = 300 * kv_token_bytes(SPEC) * LAYERS
    assert taken.link_out == pytest.approx(TABLES.swap(copied))
    assert taken.link_in == taken.head == 0


def test_one_batch_takes_the_sum_of_its_parts() -> None:
    batch = Batch((PrefillChunk(0, 0, 500),), (2,))
    taken = Truth(TABLES, SPEC).step(StepPlan((batch,)), REQUESTS)
    parts = TABLES.linear(501), TABLES.prefill([500]), TABLES.gpu_decode(1000)
    assert taken.seconds == pytest.approx(LAYERS * sum(parts))
    assert taken.cpu == 0


def test_a_later_chunk_pays_for_the_keys_before_it() -> None:
    truth = Truth(TABLES, SPEC)
    halves = [
        truth.step(StepPlan((Batch((PrefillChunk(0, start, 250),)),)), REQUESTS).stages[1].gpu
        for start in (0, 250)
    ]
    assert halves[1] > 2 * halves[0]
    assert sum(halves) == pytest.approx(TABLES.prefill([500]))


def test_copies_longer_than_compute_are_what_a_step_takes() -> None:
    blocks = tuple(range(1000))
    moves = (Move(2, blocks, blocks), Move(3, blocks[:10], blocks[:10]))
    plan = StepPlan((Batch(cpu_decode=(4,)),), swap_out=(2,), swap_in=(3,), moves=moves)
    taken = Truth(TABLES, SPEC).step(plan, REQUESTS)
    assert taken.seconds == taken.link_out == pytest.approx(100 * taken.link_in)


def test_hidden_costs_lengthen_the_cpu_and_add_the_logits() -> None:
    plan = StepPlan(BATCHES)
    plain = Truth(TABLES, SPEC).step(plan, REQUESTS)
    full = Truth(TABLES, SPEC, hidden=True).step(plan, REQUESTS)
    assert full.head == pytest.approx(sum(TABLES.head(b.sequences) for b in BATCHES))
    for stage, other in zip(plain.stages, full.stages, strict=True):
        assert other.gpu == stage.gpu
        assert other.cpu > stage.cpu + TABLES.launch()
    quiet = StepPlan((Batch((PrefillChunk(0, 0, 500),)), Batch(cpu_decode=(3,))))
    alone = Truth(TABLES, SPEC, hidden=True).step(quiet, REQUESTS)
    assert full.stages[0].cpu > alone.stages[0].cpu  # its rows meet KV on the link


def test_noise_is_seeded_and_within_its_bound() -> None:
    plan, plain = StepPlan(BATCHES), Truth(TABLES, SPEC).step(StepPlan(BATCHES), REQUESTS)
    one, two, other = (Truth(TABLES, SPEC, noise=0.1, seed=seed) for seed in (1, 1, 2))
    first = [one.step(plan, REQUESTS).seconds for _ in range(200)]
    assert first == [two.step(plan, REQUESTS).seconds for _ in range(200)]
    assert first != [other.step(plan, REQUESTS).seconds for _ in range(200)]
    assert all(0.9 <= seconds / plain.seconds <= 1.1 for seconds in first)
    assert max(first) - min(first) > 0.1 * plain.seconds
    assert sum(first) / 200 == pytest.approx(plain.seconds, rel=0.02)


def test_an_empty_plan_takes_no_time() -> None:
    assert Truth(TABLES, SPEC, noise=0.1).step(StepPlan(()), REQUESTS).seconds == 0
