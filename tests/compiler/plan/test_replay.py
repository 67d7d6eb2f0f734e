"""Plans measured: which run, what is made of their times, and once for real."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.compiler.pipeline import compile_model
from dovetail.compiler.plan import replay
from dovetail.compiler.plan.replay import (
    STEPS,
    ReplayJob,
    ReplayTimes,
    apply_times,
    choose_prompts,
    cover_pairs,
    measure_choice,
    run_replay,
)
from dovetail.compiler.plan.replay_child import SETTINGS, Round
from dovetail.compiler.plan.service import choose_plans, service_plan
from dovetail.ir.artifact import ServicePlan
from dovetail.ir.model import ModelFile
from dovetail.ir.place import read_plan
from dovetail.ir.plans import MEASURED, SIMULATED, PairChoice, PlanCandidate, PlanChoice
from dovetail.runtime.app import load
from dovetail.runtime.native.step import StepShape
from dovetail.topology.hardware import read_hardware
from dovetail.topology.replay import Trace
from tests.compiler.virtual import use_virtual_meters
from tests.ir.live import read_graph
from tests.models import save_model

TRACE = Trace("test", ((100, 10), (300, 30)), (1, 4))
PROMPTS = [[1 + (i * 7 + j * 3) % 97 for j in range(n)] for i, n in enumerate((1, 5, 40, 17, 90))]


def make_choice(*pairs: tuple[int, int]) -> PlanChoice:
    phase = tuple(
        PlanCandidate(processes=1, threads=i + 1, cpus=(), nodes=((0,),), levels="", simulated=i)
        for i in range(4)
    )
    found = tuple(
        PairChoice(prefill=p, decode=d, simulated=float(i)) for i, (p, d) in enumerate(pairs)
    )
    return PlanChoice(source=SIMULATED, prefill=phase, decode=phase, pairs=found)


@given(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1))
def test_every_candidate_runs_in_few_pairs(places: set[tuple[int, int]]) -> None:
    pairs = [PairChoice(prefill=p, decode=d) for p, d in sorted(places)]
    covers = cover_pairs(pairs)
    assert set(covers) <= set(pairs)
    for side in ("prefill", "decode"):
        assert {getattr(p, side) for p in covers} == {getattr(p, side) for p in pairs}
    assert len(covers) <= len({p for p, _ in places}) + len({d for _, d in places})


def test_the_fastest_pair_is_chosen_unless_the_simulators_is_as_fast() -> None:
    choice = make_choice((0, 0), (0, 1), (1, 1))
    prefill, tie = {0: 1.0, 1: 2.0}, {0: 1.01, 1: 1.0}
    assert apply_times(choice, prefill, tie).pairs[0].decode == 0
    found = apply_times(choice, prefill, {0: 1.2, 1: 1.0})
    assert [(p.prefill, p.decode, p.measured) for p in found.pairs] == [
        (0, 1, 2.0),
        (0, 0, 2.2),
        (1, 1, 3.0),
    ]
    assert found.source == MEASURED and found.decode[1].measured == 1.0
    assert found.decode[2].measured is None


def test_rounds_beside_other_work_do_not_count() -> None:
    times = ReplayTimes(
        prefill=((1.0, 9.0, 2.0),), decode=((0.1, 0.9, 0.2),), others=(0.0, 1.5, 0.3)
    )
    quiet = times.quiet()
    assert quiet.prefill == ((1.0, 2.0),) and quiet.decode == ((0.1, 0.2),)
    assert times.quiet().quiet() == quiet


def test_prompts_are_spread_as_the_trace_and_cut_to_the_time_there_is() -> None:
    choice, trace = make_choice((1, 1)), Trace("t", tuple((n, 10) for n in range(100, 700)))
    assert choice.prefill[1].simulated == choice.decode[1].simulated == 1.0  # s per request
    found = [choose_prompts(choice, choice.pairs, trace, s, 4096) for s in (1e9, 20.0, 8.0, 0.0)]
    assert found[0] == (200, 400, 600)  # 3 s a round of prompts, 0.4 s of decoding
    assert found[1:] == [(200, 400, 600), (100, 200, 300), (12, 25, 38)]
    assert choose_prompts(choice, choice.pairs, trace, 1e9, 512) == (200, 256, 256)
    empty = Trace("t", ((0, 0),))
    assert choose_prompts(choice, choice.pairs, empty, 1.0, 4096) == (1,)


def test_a_round_serves_each_prompt_once_and_each_batch_alone(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ReplayJob(
        artifact="", plans=(), prompts=(40, 5, 33), batches=(1, 2, 8), vocab_size=100, seconds=0.0
    )
    steps: list[tuple[int, int]] = []
    with load(artifact, kv_blocks=64, settings=SETTINGS) as app:
        engine, forward = app.engine, app.engine.executor.forward

        def record(shape: StepShape) -> None:
            steps.append((shape.prefill_tokens, shape.n_decode))
            forward(shape)

        monkeypatch.setattr(engine.executor, "forward", record)
        prefill, decode = Round(engine, job, random.Random(0)).serve()
        assert engine.scheduler.pool.free_blocks == 64 and not engine.scheduler.busy
    assert prefill > 0 and decode > 0
    # five more go on from the prompts' full blocks: one token each, the short prompt has none
    assert steps[:2] == [(78, 0), (5, 3)]
    assert steps[2:] == [(0, batch) for batch in (8, 2, 1) for _ in range(STEPS + 1)]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    sizes = {"num_key_value_heads": 4, "intermediate_size": 128}
    save_model(folder / "model", "llama", **sizes)
    with pytest.MonkeyPatch.context() as patch:
        use_virtual_meters(patch)  # the search: the replay of the plans is real
        options = {"budget": 3.0, "database": folder / "tuning.jsonl"}
        report = compile_model(folder / "model", output=folder / "app.dove", **options)
    assert report.rows["measured"] > 0
    return folder / "app.dove"


def read(path: Path, kind: type[msgspec.Struct]) -> msgspec.Struct:
    return msgspec.json.decode(path.read_bytes(), type=kind)


def pairs_of(choice: PlanChoice) -> list[ServicePlan]:
    return [service_plan(choice, pair) for pair in choice.pairs]


def planned(artifact: Path) -> ServicePlan:
    return read_plan(read_graph((artifact / "graph/serve.json").read_bytes()), "llm")


def test_a_compile_measures_every_plan_of_this_machine(artifact: Path) -> None:
    choice = read(artifact / "plans/choice.json", PlanChoice)
    plan = planned(artifact)
    assert isinstance(choice, PlanChoice) and service_plan(choice) == plan
    assert choice.batches == (1, 2, 4, 8, 16)  # as the payload of the search has them
    if len(os.sched_getaffinity(0)) == 1:
        return
    assert {c.processes for c in choice.decode} >= {1, 2}
    if choice.source == SIMULATED:  # the machine is busy
        assert "busy with other work" in choice.notes[-1]
    else:
        assert "quiet rounds" in choice.replay and all(c.measured for c in choice.decode)
        totals = [pair.measured or 0 for pair in choice.pairs]
        assert 0 < totals[0] <= 1.02 * min(totals)
    tables = json.loads((artifact / "models/llm/schedules.json").read_bytes())["tables"]
    assert {(t["n"], t["k"]) for t in tables if t["op"] == "down"} == {(64, 128), (64, 64)}
    assert {(t["n"], t["k"]) for t in tables if t["op"] == "qkv"} == {(192, 64), (32, 64)}


def test_every_plan_of_a_compile_gives_the_same_tokens(artifact: Path) -> None:
    choice = read(artifact / "plans/choice.json", PlanChoice)
    assert isinstance(choice, PlanChoice)
    found = []
    for plan in (None, *(service_plan(choice, pair) for pair in choice.pairs)):
        with load(artifact, plan=plan) as app:
            done = app.generate(PROMPTS, max_tokens=24, ignore_eos=True)
            found.append([d.token_ids for d in done])
    assert len(set(found[0])) > 1
    assert all(tokens == found[0] for tokens in found)


def test_plans_for_another_machine_give_the_same_tokens(
    artifact: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its CPUs are not here: one process runs, and four where the plan is insisted on."""
    folder = tmp_path_factory.mktemp("other")
    options = {"hardware": "package:4 core:2", "effort": "none", "kv_dtype": "f32"}
    options |= {"targets": host_targets(artifact)}
    compile_model(artifact.parent / "model", output=folder / "app.dove", **options)
    choice = read(folder / "app.dove/plans/choice.json", PlanChoice)
    assert isinstance(choice, PlanChoice) and choice.source == SIMULATED
    plans = {plan.processes_of("prefill"): plan for plan in pairs_of(choice)}
    assert plans.keys() >= {1, 2, 4}
    found = []
    for plan in (None, *plans.values()):
        with load(folder / "app.dove", plan=plan) as app:
            done = app.generate(PROMPTS, max_tokens=12, ignore_eos=True)
            found.append([d.token_ids for d in done])
    assert all(tokens == found[0] for tokens in found)


def host_targets(artifact: Path) -> tuple[str, ...]:
    return tuple(json.loads((artifact / "manifest.json").read_bytes())["targets"])


def test_a_replay_that_fails_leaves_the_simulated_choice(artifact: Path, tmp_path: Path) -> None:
    file = read(artifact / "models/llm/model.json", ModelFile)
    assert isinstance(file, ModelFile)
    choice = choose_plans(read_hardware(), file.spec, TRACE)
    failed = measure_choice(choice, tmp_path, file.spec, TRACE, 1.0)
    assert failed.pairs == choice.pairs and failed.source == SIMULATED
    assert "plans could not be measured" in failed.notes[-1]


def test_plans_are_ranked_by_what_real_processes_take(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else the machine does: its rounds are taken for quiet here."""
    file, choice = (
        read(artifact / "models/llm/model.json", ModelFile),
        read(artifact / "plans/choice.json", PlanChoice),
    )
    assert isinstance(file, ModelFile) and isinstance(choice, PlanChoice)
    ran: list[ReplayTimes] = []
    jobs: list[ReplayJob] = []

    def quiet(job: ReplayJob) -> ReplayTimes:
        jobs.append(job)
        times = run_replay(job)
        assert times is not None
        ran.append(msgspec.structs.replace(times, others=(0.0,) * len(times.others)))
        return ran[-1]

    monkeypatch.setattr(replay, "run_replay", quiet)
    found = measure_choice(choice, artifact, file.spec, TRACE, 0.0)
    assert jobs[0].batches == (1, 4) and len(jobs[0].prompts) == 2
    assert "4 decode steps of 1, 4 sequences" in found.replay
    assert found.source == MEASURED and len(ran) == 1
    totals = [pair.measured or 0.0 for pair in found.pairs]
    assert 0 < totals[0] <= 1.02 * min(totals) and len(totals) == len(choice.pairs)
    runs = zip(ran[0].prefill, cover_pairs(choice.pairs), strict=True)
    fastest = min(rounds[0] for rounds, pair in runs if pair.prefill == 0)
    assert found.prefill[0].measured == pytest.approx(fastest * 200)


def test_a_replay_runs_each_plan_at_least_once(artifact: Path) -> None:
    plan = planned(artifact)
    job = ReplayJob(
        artifact=str(artifact), plans=(plan, plan), prompts=(5, 40, 20), batches=(1, 2, 8),
        vocab_size=100, seconds=0.0,
    )  # fmt: skip
    times = run_replay(job)
    assert times is not None
    assert [len(rounds) for rounds in (*times.prefill, *times.decode, times.others)] == [1] * 5
    assert all(seconds > 0 for rounds in (*times.prefill, *times.decode) for seconds in rounds)
