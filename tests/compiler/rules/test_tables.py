"""Default tables: one for every operator, phase and team, of kernels that are built."""

from __future__ import annotations

import pytest

from dovetail.codegen.targets import TARGETS
from dovetail.compiler.rules.schedules import gemm_kernels, gemm_requests
from dovetail.compiler.rules.tables import default_tables
from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.model import ModelSpec, RopeSpec
from dovetail.ir.tape import FORWARD_ARGS
from dovetail.topology.hardware import read_hardware
from tests.codegen.float_targets import FLOAT_TARGETS

SPEC = ModelSpec(
    family="llama",
    vocab_size=1000,
    hidden_size=192,
    intermediate_size=500,
    n_layers=2,
    n_heads=6,
    n_kv_heads=2,
    head_dim=32,
    max_position=256,
    max_context=256,
    norm_eps=1e-5,
    rope=RopeSpec(rotary_dim=32),
    weight_dtype="bf16",
    checkpoint_dtype="bf16",
)


def plan(prefill: int, decode: int) -> ServicePlan:
    return ServicePlan(
        prefill=PhasePlan(threads=prefill, cpus=()), decode=PhasePlan(threads=decode, cpus=())
    )


@pytest.mark.parametrize("target", FLOAT_TARGETS.values(), ids=lambda t: t.name)
def test_every_operator_has_one_table_per_phase(target):
    tables = default_tables(SPEC, target, [plan(4, 2)], read_hardware())
    keys = [(t.op, t.phase, t.threads) for t in tables]
    assert len(set(keys)) == len(keys)
    ops = {"embed", "rmsnorm", "qkv", "rope_store", "prefill_attention", "decode_attention", "o"}
    ops |= {"gate_up", "down", "gather_rows", "head", "sample"}
    for phase, threads in (("prefill", 4), ("decode", 2)):
        assert {t.op for t in tables if (t.phase, t.threads) == (phase, threads)} == ops
    assert "kv_splits" in FORWARD_ARGS  # why decode attention has a second phase
    merge = [t.rows[0].reduce_kernel for t in tables if t.op == "decode_attention"]
    assert merge == ["decode_attention_merge_f32"] * 2


def test_equal_phases_share_tables():
    tables = default_tables(SPEC, TARGETS["generic"], [plan(3, 3)], read_hardware())
    assert {(t.phase, t.threads) for t in tables} == {("any", 3)}


@pytest.mark.parametrize("target", FLOAT_TARGETS.values(), ids=lambda t: t.name)
def test_rows_name_kernels_that_are_built(target):
    """And no others: the library holds what its tables use."""
    tables = default_tables(SPEC, target, [plan(2, 1)], read_hardware())
    named = {row.kernel for table in tables if table.n for row in table.rows}
    assert {request.name for request in gemm_kernels(SPEC, target, tables)} == named
    assert named < {request.name for request in gemm_requests(("bf16",), target)}
