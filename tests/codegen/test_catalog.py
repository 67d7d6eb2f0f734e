from __future__ import annotations

import pytest
from msgspec.structs import replace

from dovetail.codegen.catalog import (
    DTYPE_PARAMETER,
    KERNELS,
    STANDALONE,
    TILES,
    kernel_request,
    load_kernel_module,
    model_kernels,
)
from dovetail.codegen.targets import ALL_TARGETS, TARGETS
from dovetail.ir.errors import SpecError
from dovetail.ir.model import ExpertSpec, ModelSpec, RopeSpec

SPEC = ModelSpec(
    family="llama",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=128,
    n_layers=1,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    max_position=128,
    max_context=128,
    norm_eps=1e-5,
    rope=RopeSpec(rotary_dim=16),
    weight_dtype="bf16",
    checkpoint_dtype="bf16",
)


def test_every_family_is_a_kernel_of_its_module() -> None:
    for family, module in {**KERNELS, **STANDALONE}.items():
        assert load_kernel_module(module).function(family).kind == "kernel"


def test_bindings_are_choices_the_kernel_offers() -> None:
    for family in (*KERNELS, *STANDALONE):
        tunables = {t.name: t.choices for t in kernel_function(family).tunables}
        dtype = tunables.get(DTYPE_PARAMETER.get(family, ""), (None,))[0]
        for target in ALL_TARGETS.values():
            request = kernel_request(family, target, dtype)
            for name, value in request.binding.items():
                assert value in tunables[name], (family, target.name, name)


def kernel_function(family: str):
    return load_kernel_module({**KERNELS, **STANDALONE}[family]).function(family)


def test_prefill_tiles_divide_each_other() -> None:
    for target in TARGETS.values():
        tiles = TILES["prefill_attention", target.isa]
        assert tiles["RV"] * target.lanes % tiles["RT"] == 0
        assert 64 % tiles["KT"] == 0


def test_imports_bring_inline_functions_along() -> None:
    names = [f.name for f in load_kernel_module("rope").functions]
    assert names.index("square_sum") < names.index("rope_store")
    assert "rmsnorm" not in names


def test_an_unknown_module_is_a_clear_error() -> None:
    with pytest.raises(SpecError, match="no kernel module 'nonesuch'"):
        load_kernel_module("nonesuch")


def test_a_model_gets_the_kernels_its_tapes_call() -> None:
    target = TARGETS["x86-64-avx2"]
    names = {r.name for r in model_kernels(SPEC, target)}
    assert {"embed_bf16", "rmsnorm", "rope_store_f32", "decode_attention_merge_f32"} <= names
    assert "embed_packed_bf16" not in names
    assert len(names) == 8
    normed = model_kernels(replace(SPEC, branch_norms=True), target)
    assert {r.name for r in normed} == names | {"rmsnorm_add"}
    scaled = model_kernels(replace(SPEC, branch_scale=0.5), target)
    assert {r.name for r in scaled} == names | {"scaled_add"}
    for of, more in (("heads", set()), ("rows", {"norm_rows"}), ("turned", {"rope_rows"})):
        over = model_kernels(replace(SPEC, qk_norm=True, qk_norm_of=of), target)
        assert {r.name for r in over} == names | more
    centred = model_kernels(replace(SPEC, layer_norm=True), target)
    assert {r.name for r in centred} == names - {"rmsnorm"} | {"layernorm"}
    experts = {"route", "sort_experts", "expert_rows", "combine_experts"}
    for gated, more in ((False, experts), (True, experts | {"row_gate"})):
        mixture = ExpertSpec(count=4, used=2, shared=32, gated=gated)
        mixed = model_kernels(replace(SPEC, experts=mixture), target)
        assert {r.name for r in mixed} == names | more
