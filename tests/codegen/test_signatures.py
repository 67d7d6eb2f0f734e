"""Intrinsic tables give the verifier what it needs: preludes pass, misuse is found."""

from importlib.resources import files

import pytest

from dovetail.codegen.isa.signatures import known_constants, known_functions
from dovetail.codegen.targets import ALL_TARGETS, TARGETS
from dovetail.ir.diagnostics import Source
from dovetail.ir.errors import SyntaxDiagnostic
from dovetail.ir.low.parse import parse_low
from dovetail.ir.low.verify import verify_low


def check(text, targets):
    source = Source("k.c", text)
    unit = parse_low(source)
    verify_low(unit, source, functions=known_functions(targets), constants=known_constants(targets))


@pytest.mark.parametrize("target", ALL_TARGETS.values(), ids=lambda t: t.name)
def test_each_prelude_uses_only_its_own_instruction_set(target):
    folder = files("dovetail.codegen.isa")
    text = "".join((folder / name).read_text() for name in target.prelude_files)
    check(text, [target])


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("_mm256_lodu_ps(x)", "low-unknown-function"),
        ("_mm256_loadu_ps(x, 1)", "low-arity"),
        ("_mm256_set1_ps(x)", "low-type-mismatch"),
        ("_mm512_loadu_ps(x)", "low-unknown-function"),
        ("_mm256_cmp_ps(_mm256_loadu_ps(x), _mm256_loadu_ps(x), _CMP_NO_OQ)", "low-unknown-name"),
    ],
)
def test_misused_intrinsics_are_found(call, code):
    with pytest.raises(SyntaxDiagnostic) as caught:
        check(f"void f(const float *x) {{ {call}; }}", [TARGETS["x86-64-avx2"]])
    assert [d.code for d in caught.value.diagnostics] == [code]
