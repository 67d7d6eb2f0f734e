"""A user's own gate of a model's MLP: measured beside ours, and served where it is faster."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

import dovetail
from dovetail.codegen.catalog import KernelRequest
from dovetail.codegen.library import LibrarySpec, build_library, index_library
from dovetail.codegen.targets import host_target
from dovetail.compiler import pipeline
from dovetail.compiler.measure.meter import GateCase, Meter
from dovetail.compiler.pipeline import compile_model
from dovetail.compiler.request import CompileRequest, read_inputs
from dovetail.compiler.rules.payload import GemmUse, Payload
from dovetail.compiler.rules.schedules import GemmOp
from dovetail.compiler.rules.tables import apart_tables, default_tables, plan_teams
from dovetail.compiler.search import choose
from dovetail.compiler.search.choose import Chosen
from dovetail.compiler.search.gate_search import (
    GateTask,
    gate_library,
    gate_tables,
    gate_tasks,
)
from dovetail.compiler.search.instances import InstanceChoice
from dovetail.compiler.search.user_kernels import UserKernel, read_user_kernel
from dovetail.compiler.tune.model import tune_model
from dovetail.compiler.write.report import Steps
from dovetail.compiler.write.writer import write_artifact
from dovetail.errors import SpecError
from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.model import APART, OWN_GATE
from dovetail.ir.schedule import ScheduleFile
from dovetail.ir.tape import GATED
from dovetail.runtime.verify import verify_artifact
from dovetail.topology.hardware import read_hardware
from tests.compiler.search.test_user_kernels import KERNELS, write
from tests.compiler.virtual import VirtualMeter, use_virtual_meters
from tests.models import save_model
from tests.tapes import verify_tapes
from tests.test_fidelity import load_exact

TARGET = host_target()
IN_C = KERNELS["silu_mul"]
OURS = """
import math_f32

@kernel
def silu_mul(T: i64, H: i64, x: ptr[f32], ldx: i64, y: ptr[f32], ldy: i64, out: ptr[f32], ldo: i64,
             tid: thread, nth: thread):
    for t in range(T * tid // nth, T * (tid + 1) // nth):
        for c in vrange(H):
            v = vload(x + t * ldx + c)
            vstore(out + t * ldo + c, vmul(vsilu(v), vload(y + t * ldy + c)))
"""
GATES = {
    "silu_mul": OURS,
    "gelu_tanh_mul": OURS.replace("math_f32", "gelu")
    .replace("silu_mul", "gelu_tanh_mul")
    .replace("vsilu", "vgelu_tanh"),
}
SQUARED = """
void silu_mul(float *out, const float *gate, const float *up, int n) {
  for (int i = 0; i < n; i++) {
    float g = gate[i] > 0.0f ? gate[i] : 0.0f;
    out[i] = g * g * up[i];
  }
}
"""
PROMPT, MOST = list(range(3, 43)), 4


def tasks_of(user: UserKernel, dtype: str, n: int, k: int) -> tuple[GateTask, ...]:
    """Return searches for M 3 and 21 of a product in decode and prefill."""
    product = GemmOp("gate_up", "silu", n, k, dtype)
    head = GemmOp("head", "linear", 16, k, dtype)
    payload = Payload((GemmUse(product, 1, {3: 0.5, 21: 0.5}), GemmUse(head, 1, {4: 1.0})))
    team = PhasePlan(threads=2, cpus=())
    plan = ServicePlan(processes=1, prefill=team, decode=team)
    return gate_tasks(user, payload, [plan], read_hardware(), TARGET)


@pytest.mark.parametrize(
    ("dtype", "name", "text", "status"),
    [
        ("f32", "own.dk", OURS, "ok"),
        ("q8_32", "own.c", IN_C, "ok"),
        ("f32", "wrong.c", SQUARED, "wrong"),
    ],
)
def test_every_variant_is_right_behind_a_product(
    dtype: str, name: str, text: str, status: str, tmp_path: Path
) -> None:
    """Of inner columns that no panel divides; a gate that is none of the operator is wrong."""
    user = read_user_kernel(f"silu_mul={write(tmp_path, name, text)}")
    tasks = tasks_of(user, dtype, 1051, 64)
    assert [(t.phase, t.case.shape["m"]) for t in tasks] == [("prefill", 21), ("decode", 3)]
    built = build_library(gate_library([user], tasks, TARGET))
    with Meter(built.path, built.index, pool_bytes=1 << 20) as meter:
        for task in tasks:
            found = meter.measure(task.case, task.candidates, rounds=2, seconds=0.0)
            assert [m.status for m in found] == ["ok"] + [status] * len(user.gates)


class Favouring(VirtualMeter):
    """A machine on which gates of users' own are the fastest of a phase, or of both."""

    least = 0

    def one(self, case, candidate, rounds):  # type: ignore[no-untyped-def]
        found = super().one(case, candidate, rounds)
        own = candidate.kernel.endswith("_pairs") and case.m >= self.least
        time = 1e-6 if own else 1e-4
        return msgspec.structs.replace(found, seconds=time, low=time, high=time)


@pytest.fixture
def favoured(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    use_virtual_meters(monkeypatch)
    for module in ("dovetail.compiler.search.choose", "dovetail.compiler.tune.model"):
        monkeypatch.setattr(f"{module}.Meter", Favouring)
    monkeypatch.setattr(choose, "build_library", unbuilt)
    return monkeypatch


def unbuilt(spec: LibrarySpec, cache: Path | None) -> SimpleNamespace:
    """Return a library of which only the names count: nothing runs where meters are virtual."""
    return SimpleNamespace(path=Path(__file__), index=index_library(spec, cache))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("gates") / "model", "llama", mlp_bias=True)


def compiled(
    model: Path, folder: Path, name: str, text: str, op: str = "silu_mul", **options: Any
) -> Path:
    """Compile a model with a gate whose file has this name."""
    file, out = write(folder, name, text), folder / f"{name}.dove"
    usual = {
        "budget": 1.0,
        "threads": 2,
        "weight_dtype": "f32",
        "database": folder / f"{name}.jsonl",
    }
    compile_model(model, output=out, kernels=[f"{op}={file}"], **usual | options)
    verify_tapes(out)
    return out


def own_phases(artifact: Path) -> set[str]:
    """Return the phases that a user's gate serves in."""
    data = (artifact / "models/llm/schedules.json").read_bytes()
    every = msgspec.json.decode(data, type=ScheduleFile).tables
    tables = [table for table in every if table.op == OWN_GATE]
    assert all("_mul_user_" in table.rows[0].kernel for table in tables)
    assert {t.phase for t in every if t.op == APART} == {t.phase for t in tables}
    assert bool(tables) == (artifact / f"models/llm/tapes/{GATED}.json").exists()
    return {table.phase for table in tables}


def answer(artifact: Path, **options: Any) -> tuple[list[int], list[float]]:
    """Return the tokens of an artifact and their log probabilities."""
    with dovetail.load(artifact, trust=True, **options) as app:
        asked = {"max_tokens": MOST, "ignore_eos": True, "logprobs": 1}
        found = app.generate([PROMPT], **asked)[0]
    return list(found.token_ids), [one.logprob for one in found.logprobs or ()]


def reference(model: Path, tokens: list[int], phases: set[str]) -> np.ndarray:
    """Return log probabilities in float64 with squared gates in these phases."""
    torch = pytest.importorskip("torch")
    from transformers.activations import ACT2FN

    exact, found, given, kept = load_exact(model), [], PROMPT, None
    usual = exact.model.layers[0].mlp.act_fn
    for token in tokens:
        squared = ("decode" if kept else "prefill") in phases
        for layer in exact.model.layers:
            layer.mlp.act_fn = ACT2FN["relu2"] if squared else usual
        with torch.no_grad():
            step = exact(torch.tensor([given]), past_key_values=kept, use_cache=True)
        found.append(step.logits[0, -1].log_softmax(-1)[token].item())
        given, kept = [token], step.past_key_values
    return np.array(found)


def test_the_users_gate_is_what_runs(
    model: Path, tmp_path: Path, favoured: pytest.MonkeyPatch
) -> None:
    """One that computes the same gives the same tokens; another, let in here, what it computes."""
    plain = tmp_path / "plain.dove"
    compile_model(model, output=plain, effort="none", threads=2, weight_dtype="f32")
    wanted = answer(plain)
    assert np.allclose(wanted[1], reference(model, wanted[0], set()), atol=1e-4)
    for name, text in (("own.c", IN_C), ("own.dk", OURS)):
        own = compiled(model, tmp_path, name, text)
        assert own_phases(own) == {"prefill", "decode"}
        tokens, chances = answer(own)
        assert tokens == wanted[0] and np.allclose(chances, wanted[1], atol=1e-5)
    both = compiled(model, tmp_path, "both.c", SQUARED)
    tokens, chances = answer(both)
    squared = reference(model, tokens, {"prefill", "decode"})
    assert np.allclose(chances, squared, atol=1e-4)
    assert not np.allclose(squared, reference(model, tokens, set()), atol=1e-2)
    one = PhasePlan(threads=1, cpus=())
    for plan in (
        ServicePlan(processes=2, prefill=one, decode=one),
        ServicePlan(processes=2, prefill_processes=1, prefill=one, decode=one),
    ):
        shared = answer(both, plan=plan)
        assert shared[0] == tokens and np.allclose(shared[1], chances, atol=1e-4)
    assert answer(both, deterministic=True)[0] == wanted[0]  # ours: a phase may not change a bit
    favoured.setattr(Favouring, "least", 32)
    prompts = compiled(model, tmp_path, "prompts.c", SQUARED)
    assert own_phases(prompts) == {"prefill"}
    assert verify_artifact(prompts).faults == ()
    tokens, chances = answer(prompts)
    assert np.allclose(chances, reference(model, tokens, {"prefill"}), atol=1e-4)


def test_a_compile_finds_its_gates_among_what_was_tuned(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job, too, compares them with the products that it has found, not with those of rules."""
    asked = use_virtual_meters(monkeypatch)
    monkeypatch.setattr(choose, "build_library", unbuilt)
    file, database = write(tmp_path, "own.c", IN_C), tmp_path / "db.jsonl"
    usual = {"kernels": [f"silu_mul={file}"], "database": database, "weight_dtype": "f32"}
    tune_model(model, budget=20.0, threads=1, **usual)
    assert any(isinstance(case, GateCase) for case, _, _ in asked)
    ran = asked.copy()
    report = compile_model(model, output=tmp_path / "a.dove", budget=1.0, threads=1, **usual)
    assert asked == ran
    assert not any("own gate" in note for note in report.notes), report.notes


@pytest.mark.parametrize(
    ("op", "family", "dtype"),
    [("gelu_tanh_mul", "gemma3", "f32"), ("silu_mul", "llama", "int8")],
)
def test_gates_of_other_activations_and_behind_quantised_products(
    op: str, family: str, dtype: str, tmp_path: Path, favoured: pytest.MonkeyPatch
) -> None:
    """And one that the comparison end to end drops, which leaves no tape behind."""
    source, plain = save_model(tmp_path / "model", family), tmp_path / "plain.dove"
    compile_model(source, output=plain, effort="none", threads=2, weight_dtype=dtype)
    wanted = answer(plain)
    asked = {"op": op, "weight_dtype": dtype}
    own = compiled(source, tmp_path, "own.dk", GATES[op], **asked)
    assert own_phases(own) == {"prefill", "decode"}
    tokens, chances = answer(own)
    assert tokens == wanted[0] and np.allclose(chances, wanted[1], atol=1e-4)
    favoured.setattr(pipeline, "compare_tables", lambda _, rules, *__: (rules, None))
    assert own_phases(compiled(source, tmp_path, "lost.dk", GATES[op], **asked)) == set()


def test_a_gate_may_win_on_one_of_two_targets(model: Path, tmp_path: Path) -> None:
    asked = {"weight_dtype": "f32", "threads": 1, "effort": "none"}
    names = ("x86-64-avx2", "aarch64-neon")
    request = CompileRequest(model=model, output=tmp_path / "a.dove", targets=names, **asked)
    inputs, found = read_inputs(request), []
    for target in inputs.targets:
        given = inputs.spec, target, inputs.plans, inputs.hardware
        found += default_tables(*given)
        if target.name == names[0]:
            apart = apart_tables(inputs.spec, target, plan_teams(inputs.plans), inputs.hardware)
            gate = InstanceChoice(
                "silu_mul", 1, KernelRequest("m", "k", {}, "k"), (), 1.0, "decode"
            )
            found += gate_tables([gate], apart, target)
    with write_artifact(tmp_path / "a.dove") as artifact:
        weights, chunks = pipeline._pack(inputs, artifact, Steps(None))
        pipeline._write_member(artifact, inputs, weights, chunks, Chosen(tuple(found)))
        assert f"models/llm/tapes/{GATED}.json" in artifact.files


@pytest.mark.parametrize(
    ("op", "family", "options"),
    [
        ("gelu_tanh_mul", "llama", {}),
        ("silu_mul", "gemma3", {}),
        ("silu_mul", "mixtral", {}),
    ],
)
def test_a_gate_that_a_model_has_not_is_refused(
    op: str, family: str, options: Any, tmp_path: Path
) -> None:
    source, file = save_model(tmp_path / "model", family), write(tmp_path, "own.c", IN_C)
    with pytest.raises(SpecError, match=f"this model has no separate operator {op}"):
        compile_model(source, output=tmp_path / "app.dove", kernels=[f"{op}={file}"], **options)
