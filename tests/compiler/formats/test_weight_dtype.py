"""How weights are stored where that is left to `auto`, on every target."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.codegen.targets import TARGETS
from dovetail.compiler.formats.weight_dtype import describe_weight_dtype, resolve_weight_dtype
from dovetail.compiler.request import CompileRequest, read_inputs
from dovetail.ir.errors import SpecError
from dovetail.ir.formats import FORMATS, is_quantised
from tests.encoders import save_encoder
from tests.models import save_model

ROUNDING = [name for name, target in TARGETS.items() if target.rounds_rows]


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("stored", ["f32", "bf16", "f16", "f64"])
@pytest.mark.parametrize("wanted", ["auto", None])
def test_floats_are_bfloat16_where_that_is_multiplied(wanted, stored, target) -> None:  # type: ignore[no-untyped-def]
    found = resolve_weight_dtype(wanted, stored, target)
    assert found == ("bf16" if target.rounds_rows or stored == "bf16" else "f32")
    line = describe_weight_dtype("llm", found, stored, target)
    assert f"weights of llm are {found}" in line and "auto" in line
    assert (target.name in line) == (found != stored)


def test_what_is_asked_for_is_taken() -> None:
    for name, form in {"f32": "f32", "bf16": "bf16", "int8": "q8_32", "int4": "q4_32"}.items():
        assert resolve_weight_dtype(name, "f32", TARGETS["generic"]) == form
        assert resolve_weight_dtype(name, "bf16", TARGETS[ROUNDING[0]]) == form
    with pytest.raises(SpecError, match="weight dtype 'f64' is not supported; choose one of auto"):
        resolve_weight_dtype("f64", "f32", None)


def test_what_is_quantised_keeps_its_format() -> None:
    for name in filter(is_quantised, FORMATS):
        for target in (None, *TARGETS.values()):
            assert resolve_weight_dtype("auto", name, target) == name
        assert resolve_weight_dtype("f32", name, TARGETS["generic"]) == "f32"


def test_the_first_target_of_a_compile_decides(tmp_path: Path) -> None:
    llama = save_model(tmp_path / "llama", "llama")
    encoder = save_encoder(tmp_path / "bert", "bert")
    for targets, dtype in (((ROUNDING[0], "generic"), "bf16"), (("generic", ROUNDING[0]), "f32")):
        request = CompileRequest(
            model=llama, output="x", effort="none", targets=targets, beside={"e": encoder}
        )
        inputs = read_inputs(request)
        assert inputs.spec.weight_dtype == dtype and f"are {dtype}" in inputs.notes[-1]
    named = CompileRequest(
        model=llama, output="x", effort="none", targets=targets, weight_dtype="f32"
    )
    assert not any("auto" in note for note in read_inputs(named).notes)
