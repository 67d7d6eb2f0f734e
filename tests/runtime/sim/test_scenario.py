"""Settings of NEO in the simulator: where the CPU pays, where it must not cost, and arrivals."""

from __future__ import annotations

import pytest

from dovetail.ir.errors import SpecError
from dovetail.runtime.sim.scenario import make_scenario, schedule, synthesize
from dovetail.runtime.sim.simulator import Arrival, Simulation


def run(machine: str, offload: str, arrivals: list[Arrival], **options: float) -> Simulation:
    return make_scenario(machine, None, offload, **options).run(arrivals)  # type: ignore[arg-type]


def test_a_starved_accelerator_gains_several_times() -> None:
    arrivals = synthesize(330, 45, 120)
    off, auto = (run("t4", policy, arrivals) for policy in ("off", "auto"))
    assert (off.two_batch, off.cpu) == (0, 0)
    assert auto.two_batch > 0.5
    assert auto.rate > 2.5 * off.rate
    assert auto.requests == off.requests == 120
    assert auto.output_tokens == off.output_tokens


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_cpu_that_is_a_thousand_times_slower_changes_nothing(noise: float) -> None:
    arrivals = synthesize(330, 45, 60)
    off = run("t4", "off", arrivals, noise=noise)
    auto = run("t4", "auto", arrivals, noise=noise, cpu=0.001)
    assert auto.rate >= 0.98 * off.rate
    assert auto.cpu == 0


def test_a_small_gain_is_taken_where_all_run_at_once() -> None:
    arrivals = synthesize(245, 22, 108, seed=11)
    off, auto, full = (run("t4", p, arrivals, gpu_blocks=545) for p in ("off", "auto", "full"))
    assert auto.rate >= full.rate > 1.02 * off.rate


def test_the_same_seed_gives_the_same_result() -> None:
    arrivals = synthesize(330, 45, 30)
    one, two, other = (run("t4", "auto", arrivals, seed=seed).seconds for seed in (3, 3, 4))
    assert one == two != other


def test_synthetic_lengths_are_within_a_tenth() -> None:
    arrivals = synthesize(1000, 100, 500, seed=1)
    assert {arrival.at for arrival in arrivals} == {0.0}
    for lengths, middle in (
        ([a.prompt for a in arrivals], 1000),
        ([a.output for a in arrivals], 100),
    ):
        assert 0.9 * middle <= min(lengths) < 0.92 * middle
        assert 1.08 * middle < max(lengths) <= 1.1 * middle


def test_poisson_arrivals_have_the_rate_asked_for() -> None:
    arrivals = synthesize(10, 10, 4000, rate=5.0)
    times = [arrival.at for arrival in arrivals]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(800, rel=0.05)


def test_recorded_arrivals_are_passed_through_faster() -> None:
    arrivals = schedule([(5, 0), (6, 2)], times=(100.0, 103.0), speed=2.0)
    assert arrivals == [Arrival(0.0, 5, 1), Arrival(1.5, 6, 2)]


@pytest.mark.parametrize("options", [{"rate": 0.0}, {"rate": -1.0}, {"speed": 0.0}])
def test_rates_that_make_no_sense_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(SpecError, match="positive"):
        schedule([(1, 1)], times=(0.0,), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("machine", "model", "policy", "said"),
    [
        ("b300", None, "auto", "unknown machine class"),
        ("t4", "gpt-5", "auto", "unknown model"),
        ("t4", None, "sometimes", "offload must be"),
    ],
)
def test_unknown_settings_are_refused(
    machine: str, model: str | None, policy: str, said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        make_scenario(machine, model, policy)
