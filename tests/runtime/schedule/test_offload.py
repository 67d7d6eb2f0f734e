"""Whether offloading pays, by tables alone: NEO's settings, and machines where it cannot."""

from __future__ import annotations

import msgspec
import pytest

from dovetail.ir.model import KV_BLOCK
from dovetail.runtime.schedule.cost_tables import Predictor, TablePredictor
from dovetail.runtime.schedule.offload import Demand, OffloadDecision, weigh_offload
from dovetail.runtime.schedule.pipeline import LayerTimes
from dovetail.runtime.schedule.plan import Limits
from dovetail.runtime.sim.machines import assumed_profile, find_machine
from dovetail.topology.presets import preset_model


def weigh(
    name: str,
    prompt: int,
    answer: int,
    *,
    requests: int = 400,
    started: int = 0,
    on_gpu: int = 0,
    blocks: int | None = None,
    cpu: float = 1.0,
    cpu_blocks: int | None = None,
    min_gain: float = 1.05,
) -> OffloadDecision:
    machine = find_machine(name).with_cpu(cpu)
    spec = preset_model(machine.model, kv_dtype="bf16")
    profile = assumed_profile(machine, spec)
    tables = {name: rows for name, rows in profile.tables.items() if name != "launch"}
    limits = Limits(
        machine.step_tokens, 1024, spec.max_context, spec.vocab_size, n_layers=spec.n_layers
    )
    demand = Demand(
        requests=requests,
        left=tuple(1 + i * answer // started for i in range(started)),
        prompt=prompt,
        answer=answer,
        on_gpu=on_gpu,
        gpu_tokens=KV_BLOCK * (blocks or machine.gpu_blocks),
        cpu_tokens=KV_BLOCK * (machine.cpu_blocks if cpu_blocks is None else cpu_blocks),
    )
    told = TablePredictor(msgspec.structs.replace(profile, tables=tables))
    return weigh_offload(demand, limits, LayerTimes(told), min_gain)


@pytest.mark.parametrize(
    ("name", "prompt", "answer", "blocks", "low", "high"),
    [
        ("t4", 330, 45, None, 4.0, 8.0),  # NEO: 7.5
        ("a10g", 1000, 100, None, 1.2, 1.4),  # NEO: 1.26
        ("h100", 2000, 100, None, 1.1, 1.3),  # NEO: 1.14
        ("h200", 1000, 50, 200, 1.3, 2.0),
        ("h200", 1000, 50, 1650, 1.0, 1.02),
    ],
)
def test_gains_are_those_of_the_settings(
    name: str, prompt: int, answer: int, blocks: int | None, low: float, high: float
) -> None:
    found = weigh(name, prompt, answer, blocks=blocks)
    assert low <= found.gain <= high
    assert (found.cpu_requests > 0) == (found.gain > 1)


def test_more_bandwidth_of_the_cpu_pays_more() -> None:
    gains = [weigh("a10g", 1000, 200, cpu=cpu).gain for cpu in (0.25, 1, 2, 4)]
    assert gains[0] < 1.05 < gains[1] < 1.4 < gains[2] < 1.1 * gains[3]


def test_running_all_at_once_is_held_against_the_gpu_alone_played_in_the_same_way() -> None:
    found = weigh("t4", 212, 28, requests=144, blocks=409, cpu=0.5)
    assert found.at_once and found.gain > 1.1
    assert found.doubted  # the steady end of the GPU alone is sooner, and wrong
    steady = weigh("t4", 212, 28, requests=144, blocks=409, cpu=0.5, min_gain=1.5)
    assert not steady.at_once and 1.0 < steady.gain < 1.05  # what both estimates can agree on
    little = weigh("a10g", 248, 22, requests=141, blocks=531, cpu=0.5)
    assert little.doubted and 1.0 < little.gain < 1.02  # who has begun must be told
    cut = weigh("t4", 499, 26, requests=146, blocks=1020, cpu=4.0)
    assert cut.at_once and cut.cpu_only and cut.gain > 1.02  # steps are full of parts of prompts
    agreed = weigh("t4", 330, 45, requests=60)
    assert agreed.at_once and not agreed.doubted


@pytest.mark.parametrize("started", [0, 65])
def test_prompts_are_spread_where_that_ends_sooner_than_all_at_once(started: int) -> None:
    found = weigh("h100", 840, 99, requests=140, started=started, blocks=129, cpu=4.0)
    assert found.cpu_requests > 0 and not found.at_once


def test_the_cpu_takes_all_where_the_accelerator_has_no_time_to_spare() -> None:
    found = weigh("a10g", 767, 182, requests=100, blocks=1813, cpu=4.0)
    assert found.at_once and found.cpu_only


def test_a_full_accelerator_is_still_refilled_where_it_has_time_to_spare() -> None:
    """On the CPU alone nobody follows those that it holds: that is what is played."""
    found = weigh("t4", 389, 97, requests=134, started=45, on_gpu=45, blocks=1335, cpu=2.0)
    assert found.at_once and not found.cpu_only


@pytest.mark.parametrize(
    "options",
    [{"cpu": 0.001}, {"cpu_blocks": 0}, {"requests": 2}],
    ids=["slow CPU", "no memory", "all fit the GPU"],
)
def test_nothing_is_sent_where_it_cannot_pay(options: dict[str, float]) -> None:
    found = weigh("t4", 330, 45, **options)  # type: ignore[arg-type]
    assert found == OffloadDecision(1.0, 0)


def test_a_short_queue_gains_less_and_what_is_begun_counts_no_more() -> None:
    gains = [weigh("h100", 2000, 100, requests=count).gain for count in (30, 240, 4000)]
    assert gains == sorted(set(gains))
    assert weigh("h100", 2000, 100, requests=240, started=60).gain > gains[1]
    assert weigh("h100", 2000, 100, requests=14) == OffloadDecision(1.0, 0)


def test_the_end_of_a_queue_alone_begins_nothing() -> None:
    """What is predicted of the last requests in flight is rough: the steady rate must gain too."""
    found = weigh("h200", 1000, 51, requests=40, started=25, blocks=1650)
    assert found.gain > 1.05 > found.steady
    both = weigh("a10g", 1000, 100)
    assert both.steady > 1.2


def test_requests_that_the_gpu_cannot_hold_are_weighed_without_an_error() -> None:
    assert weigh("t4", 2000, 45).cpu_requests > 0
    assert weigh("t4", 1, 1, requests=1) == OffloadDecision(1.0, 0)


def test_tables_that_know_nothing_give_a_verdict() -> None:
    demand = Demand(requests=10, prompt=100, answer=10, gpu_tokens=500, cpu_tokens=5000)
    times, limits = LayerTimes(Predictor()), Limits(512, 64, 4096, 100)
    assert weigh_offload(demand, limits, times, 1.05).gain >= 1
