"""parse_high(print_high(unit)) is the unit: generated trees and every kernel of the product."""

from importlib.resources import files

import pytest
from hypothesis import given, settings

from dovetail.ir.diagnostics import Source
from dovetail.ir.expr import Binary, Float, Int, Name, Unary
from dovetail.ir.high.parse import parse_high
from dovetail.ir.high.print import print_high
from tests.ir.high.trees import UNITS

KERNELS = sorted(
    item.name
    for item in (files("dovetail.codegen") / "kernels").iterdir()
    if item.name[-3:] == ".dk"
)


def again(unit):
    return parse_high(Source("printed", print_high(unit)))


@settings(max_examples=150, deadline=None)
@given(UNITS)
def test_printed_units_parse_back(unit):
    assert again(unit) == unit


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_the_product_survive_printing(name):
    text = (files("dovetail.codegen") / "kernels" / name).read_text(encoding="utf-8")
    unit = parse_high(Source(name, text))
    assert again(unit) == unit
    assert print_high(again(unit)) == print_high(unit)


def test_parts_print_alone():
    assert print_high(Binary(op="//", left=Name(id="a"), right=Int(value=2))) == "a // 2"
    assert print_high(Unary(op="!", operand=Name(id="a"))) == "not a"
    assert print_high(Float(value=1e-5)) == "1e-05"


def test_text_is_python_as_one_would_write_it():
    text = '''"""Doc."""

import math_f32


@kernel
def k(n: i64, p: ptr[W], tid: thread):
    """Twice."""
    W: param = choice("f32", "bf16", default="f32")
    MR: param = choice(range(1, 7), default=4)
    acc = regs((MR, 2), f32)
    for i in vrange(n):
        if i == 0 and not (n > 3 or W == "bf16"):
            acc[0, 1] = vfma(vload(p + i), vzero(), acc[0, 1])
        elif n < 2:
            return
        else:
            n += 1
'''
    assert print_high(parse_high(Source("k.dk", text))) == text
