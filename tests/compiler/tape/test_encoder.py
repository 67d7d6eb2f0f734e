"""Tapes of encoders: what every schedule serves, what is fused, what is searched."""

from __future__ import annotations

from msgspec.structs import replace

from dovetail.compiler.families.encoder_tensors import encoder_sources
from dovetail.compiler.files.checkpoint import open_checkpoint
from dovetail.compiler.models.encoder_spec import read_encoder_spec
from dovetail.compiler.rules.payload import make_encoder_payload
from dovetail.compiler.rules.schedules import gemm_kernels, gemm_kinds
from dovetail.compiler.rules.tables import default_tables
from dovetail.compiler.search.tables import tuning_library
from dovetail.compiler.tape.encoder import build_encode_tape
from dovetail.compiler.write.weights import plan_sources
from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.tiny_world import ENCODER
from dovetail.topology.hardware import read_hardware
from tests.codegen.float_targets import FLOAT_TARGETS
from tests.tapes import table_key, verify_tape

SPEC = read_encoder_spec(ENCODER)
WEIGHTS = plan_sources(encoder_sources(SPEC, open_checkpoint(ENCODER)), lambda _: "f32")
PHASE = PhasePlan(threads=2, cpus=())
PLAN = ServicePlan(prefill=PHASE, decode=PHASE)


def test_every_entry_has_a_table_and_every_row_a_kernel() -> None:
    tape = build_encode_tape(SPEC, WEIGHTS, 512, 8)
    for target in FLOAT_TARGETS.values():
        tables = default_tables(SPEC, target, [PLAN], read_hardware())
        verify_tape(tape, WEIGHTS, tables)
        built = {request.name for request in gemm_kernels(SPEC, target, tables)}
        searched = {request.name for request in tuning_library(SPEC, target).kernels}
        named = {row.kernel for table in tables if table.n for row in table.rows}
        assert named <= built <= searched


def test_a_layer_is_seven_kernels() -> None:
    """Biases, GELU and residuals are ends of products."""
    ops = [entry.op for entry in build_encode_tape(SPEC, WEIGHTS, 512, 8).entries]
    layer = ["qkv", "packed_attention", "o", "layernorm", "up", "down", "layernorm"]
    assert ops == ["embed_sum", *layer * SPEC.n_layers, "mean_rows", "unit_rows"]


def test_the_end_follows_pooling() -> None:
    for spec, end in (
        (replace(SPEC, unit=False), ["mean_rows"]),
        (replace(SPEC, pooling="cls"), ["unit_rows"]),
        (replace(SPEC, pooling="last", unit=False), ["gather_rows"]),
    ):
        ops = [entry.op for entry in build_encode_tape(spec, WEIGHTS, 512, 8).entries]
        assert ops[-len(end) :] == end
        assert ops[-len(end) - 1] == "layernorm"


def test_after_the_last_attention_only_rows_that_are_read_go_on() -> None:
    """A text that one row stands for needs one row of the last layer's products."""
    entries = build_encode_tape(replace(SPEC, pooling="cls"), WEIGHTS, 512, 8).entries
    last = max(i for i, entry in enumerate(entries) if entry.op == "packed_attention")
    assert {entry.m for entry in entries[:last] if entry.op != "packed_attention"} == {"n_tokens"}
    rest = entries[last + 1 :]
    layer = ["o", "layernorm", "up", "down", "layernorm", "unit_rows"]
    assert [entry.op for entry in rest] == ["gather_rows", "gather_rows", *layer]
    assert {entry.m for entry in rest} == {"n_sequences"}


def test_the_search_weighs_all_products_of_a_pass() -> None:
    payload = make_encoder_payload(SPEC, 512)
    keys = {table_key(e) for e in build_encode_tape(SPEC, WEIGHTS, 512, 8).entries}
    uses = {(use.gemm.op, use.gemm.n, use.gemm.k): use for use in payload.uses}
    assert uses.keys() == {key for key in keys if key[1]}
    assert all(use.calls == SPEC.n_layers for use in uses.values())
    assert sorted(payload.uses[0].sizes) == [8, 16, 32, 64, 128, 256, 512]
    assert gemm_kinds(SPEC) == ("linear", "gelu")
