"""What a compile is asked for: its targets, how its budget is shared out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from dovetail.codegen.targets import get_target, host_target
from dovetail.compiler import pipeline
from dovetail.compiler.encoder_pipeline import read_encoder_inputs
from dovetail.compiler.pipeline import compile_model
from dovetail.compiler.plan.service import service_plans
from dovetail.compiler.request import CompileRequest, Inputs, choose_targets, read_inputs
from dovetail.compiler.search.choose import Chosen
from dovetail.compiler.search.tables import EFFORTS, search_tasks
from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.errors import SpecError
from dovetail.ir.plans import ASKED
from dovetail.ir.ragraph import RAGraph
from dovetail.tiny_world import ENCODER
from dovetail.topology.hardware import read_hardware
from dovetail.workflows import one_shot
from tests.compiler.plan.test_replay import make_choice
from tests.models import save_model

TARGETS = ("generic", host_target().name, "aarch64-neon")
"""Two that are measured here, and one that is not."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("request") / "model", "llama")


def inputs_of(model: Path, **options: object) -> Inputs:
    request = CompileRequest(model=model, output="x", threads=1, targets=TARGETS, **options)  # type: ignore[arg-type]
    return replace(read_inputs(request), choice=make_choice((0, 0), (0, 1)))


def test_a_machine_gets_the_target_that_is_fast_on_it() -> None:
    dots, plain = get_target("x86-64-avx512bf16"), get_target("x86-64-avx512vnni")

    def chosen(*flags: str) -> str:
        machine = msgspec.structs.replace(read_hardware(), arch="x86_64", isa_flags=flags)
        (target,) = choose_targets((), machine)
        return target.name

    assert chosen(*dots.cpu_features) == dots.name
    assert chosen(*dots.cpu_features, *dots.slow_flags) == plain.name


@pytest.mark.parametrize("budget", [0.0, 1.0, 60.0, 3600.0])
@pytest.mark.parametrize("effort", ["fast", "full"])
def test_a_budget_is_for_all_targets_and_the_replay(
    model: Path, budget: float, effort: str
) -> None:
    inputs = inputs_of(model, budget=budget, effort=effort)
    whole = inputs.replay_seconds + inputs.compare_seconds + 2 * inputs.search_seconds
    assert whole == pytest.approx(budget)
    assert (inputs.compare_seconds > 0) == (budget > 0)
    assert inputs.search_seconds >= 0.349 * budget and (inputs.replay_seconds > 0) == (budget > 0)


def test_the_command_that_compiles_again_has_every_workflow(tmp_path: Path) -> None:
    file, mine = tmp_path / "w.py", RAGraph("mine")
    flows = [one_shot(), file, mine]
    request = CompileRequest(model="m", output="o", workflows=flows)
    words = [word for word in request.command if word.startswith("--workflow")]
    assert words == ["--workflow=one-shot", f"--workflow={file}", "--workflow=mine"]


def test_without_a_budget_the_effort_is_for_all_targets(model: Path) -> None:
    assert 2 * inputs_of(model, effort="fast").search_seconds == 36.0
    assert inputs_of(model, effort="none").search_seconds == 0.0


def test_an_encoder_shares_its_budget_among_the_targets_that_are_measured() -> None:
    request = CompileRequest(model=ENCODER, output="x", threads=1, targets=TARGETS, budget=10.0)
    assert 2 * read_encoder_inputs(request).search_seconds == 10.0
    assert read_encoder_inputs(replace(request, effort="none")).search_seconds == 0.0


def test_a_compile_hands_each_target_its_share(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets = {}

    def choose(scope, request, progress) -> Chosen:  # type: ignore[no-untyped-def]
        budgets[scope.target.name] = request.budget
        if len(budgets) == len(TARGETS):
            raise SpecError("enough")
        return Chosen(())

    monkeypatch.setattr(pipeline, "choose_schedules", choose)
    options = {"threads": 1, "targets": TARGETS, "budget": 8.0}
    with pytest.raises(SpecError, match="enough"):
        compile_model(model, output=tmp_path / "a.dove", **options)
    assert budgets == dict.fromkeys(TARGETS, 3.6)  # a tenth is for what is found


def test_schedules_are_for_the_shards_of_the_plan_that_is_asked_for(tmp_path: Path) -> None:
    """Not for the whole weights: a shard would take the nearest table of these."""
    model = save_model(tmp_path / "model", "llama", num_key_value_heads=4, intermediate_size=128)
    phase = PhasePlan(threads=1, cpus=(0, 0))
    plan = ServicePlan(processes=2, nodes=(), prefill=phase, decode=phase)
    inputs = read_inputs(CompileRequest(model=model, output="x", plan=plan))
    assert inputs.plans[0] == plan and [p.processes for p in inputs.plans] == [2, 1]
    assert service_plans(inputs.searched) == (plan,) and inputs.choice.source == ASKED
    assert inputs.replay_seconds == 0.0
    tasks = search_tasks(
        inputs.payload,
        service_plans(inputs.searched),
        inputs.hardware,
        host_target(),
        EFFORTS["fast"],
    )
    shapes = {(task.op.op, task.op.n, task.op.k) for _, task in tasks}
    assert {shape for shape in shapes if shape[0] in ("qkv", "down")} == {
        ("qkv", 32, 64),
        ("down", 64, 64),
    }
    report = compile_model(model, output=tmp_path / "x", plan=plan, effort="none")
    assert report.plan.startswith(
        "2 processes"
    )  # with tables of the whole model beside the shards'
    for wrong in ({"threads": 1}, {"plan": msgspec.structs.replace(plan, processes=3)}):
        with pytest.raises(SpecError, match=r"give either|split evenly"):
            read_inputs(CompileRequest(**{"model": model, "output": "x", "plan": plan, **wrong}))
