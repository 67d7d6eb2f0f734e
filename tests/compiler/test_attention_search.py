"""Attention kernels are chosen by measured time, and only where their numbers are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.codegen.targets import host_target
from dovetail.compiler import attention_search as module
from dovetail.compiler.attention_search import (
    DECODE,
    PREFILL,
    AttentionJob,
    apply_choices,
    attention_case,
    attention_kernels,
    choose,
    measure_attention,
    search_attention,
    variant_requests,
)
from dovetail.compiler.schedules import other_tables
from dovetail.ir.artifact import KernelIndex, PhasePlan
from dovetail.ir.model import ModelSpec, RopeSpec

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
    monkeypatch.setattr(module, "VARIANTS", table)


@pytest.mark.usefixtures("variants")
def test_right_kernels_are_timed_and_the_winner_serves() -> None:
    found = search_attention(SPEC, TARGET, [PLAN], None)
    assert [choice.family for choice in found] == [DECODE, PREFILL]
    assert all(0 < choice.seconds < 1 for choice in found)
    tables = apply_choices(list(other_tables(SPEC, TARGET, "any", 1)), found)
    rows = {table.op: table.rows[0] for table in tables}
    for choice in found:
        assert rows[choice.family].kernel == choice.request.name
        assert rows[choice.family].source == "measured"
    assert rows[DECODE].reduce_kernel == "decode_attention_merge_bf16"
    assert rows["rmsnorm"].source == "default"
    default = {variant_requests(f, TARGET, "bf16")[0].name for f in (DECODE, PREFILL)}
    chosen = {choice.request.name for choice in found}
    needed = {request.name for request in attention_kernels(SPEC, TARGET, tables)}
    assert needed == chosen - default


@pytest.mark.usefixtures("variants")
def test_a_variant_must_beat_the_default_by_more_than_noise() -> None:
    case = attention_case(SPEC, DECODE, PLAN)
    rivals = variant_requests(DECODE, TARGET, "bf16")
    assert choose(case, rivals, (1.0, 0.98)).request == rivals[0]
    assert choose(case, rivals, (1.0, 0.9)).request == rivals[1]
    assert choose(case, rivals, (1.0, float("inf"))).request == rivals[0]


def test_a_child_that_dies_changes_nothing(tmp_path: Path) -> None:
    index = KernelIndex(
        target=TARGET.name, abi=1, library="no.so", source="no.c", compiler="", flags=(), kernels=()
    )
    job = AttentionJob(library=str(tmp_path / "no.so"), index=index, cases=())
    assert measure_attention(job) == ()
