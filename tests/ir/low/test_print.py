"""print_low and parse_low are inverse: on drawn trees, sensible or not, and on kernels."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.ir.diagnostics import Source
from dovetail.ir.expr import (
    ArrayType,
    Binary,
    Call,
    Cast,
    Expr,
    Float,
    Index,
    Int,
    Name,
    NamedType,
    PointerType,
    Ternary,
    Type,
    Unary,
)
from dovetail.ir.low import nodes as low
from dovetail.ir.low.parse import parse_low, parse_low_expr
from dovetail.ir.low.print import print_low
from dovetail.ir.printer import C_SPELLING

NAMES = st.sampled_from(["x", "y", "acc0", "w_1", "NULL"])
TYPE_NAMES = st.sampled_from(
    [
        "float",
        "int",
        "unsigned",
        "unsigned long long",
        "size_t",
        "__m256",
        "float32x4x2_t",
        "struct p",
    ]
)
ASSIGNMENTS = st.sampled_from(["=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "^=", "|="])


def _base() -> st.SearchStrategy[Type]:
    return st.builds(lambda n, c: NamedType(name=n, const=c), TYPE_NAMES, st.booleans())


def _pointer(of: st.SearchStrategy[Type]) -> st.SearchStrategy[Type]:
    flag = st.booleans()
    return st.builds(
        lambda t, c, r: PointerType(of=t, const=c, restrict=r), of, flag, flag
    ) | st.builds(lambda t, n: ArrayType(of=t, size=Int(value=n)), of, st.integers(1, 64))


TYPES: st.SearchStrategy[Type] = st.recursive(_base(), _pointer, max_leaves=3)

LEAVES: st.SearchStrategy[Expr] = st.one_of(
    st.builds(lambda i: Name(id=i), NAMES),
    st.builds(lambda v: Int(value=v), st.integers(0, 2**40)),
    st.sampled_from(
        [Int(value=255, text="0xff"), Int(value=4, text="4u"), Int(value=8, text="010")]
    ),
    st.builds(
        lambda v: Float(value=v), st.floats(0, allow_nan=False, allow_infinity=False, width=32)
    ),
    st.sampled_from([Float(value=1e-5, text="1e-5f"), Float(value=0.5, text="0.5")]),
)


def _grow(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    no_number = inner.filter(lambda e: not isinstance(e, Int | Float))
    several = st.lists(inner, min_size=2, max_size=3).map(tuple)
    return st.one_of(
        st.builds(
            lambda o, a, b: Binary(op=o, left=a, right=b),
            st.sampled_from(sorted(C_SPELLING.precedence)),
            inner,
            inner,
        ),
        st.builds(lambda o, a: Unary(op=o, operand=a), st.sampled_from("-+!~*&"), inner),
        st.builds(lambda a, b, c: Ternary(cond=a, then=b, other=c), inner, inner, inner),
        st.builds(lambda a, n: Call(name="f", args=(a,) * n), inner, st.integers(0, 2)),
        st.builds(lambda a, b: Index(base=a, indices=(b,)), inner, inner),
        st.builds(lambda t, a: Cast(type=t, operand=a), TYPES, inner),
        st.builds(lambda a, w: low.Member(base=a, field="val", arrow=w), no_number, st.booleans()),
        st.builds(lambda o, a, b: low.Assign(op=o, target=a, value=b), ASSIGNMENTS, inner, inner),
        st.builds(
            lambda o, a, p: low.Step(op=o, target=a, prefix=p),
            st.sampled_from(["++", "--"]),
            inner,
            st.booleans(),
        ),
        st.builds(lambda a: low.Comma(items=a), several),
        st.builds(lambda a: low.SizeOf(of=a), inner | TYPES),
    )


EXPRESSIONS: st.SearchStrategy[Expr] = st.recursive(LEAVES, _grow, max_leaves=10)
INITIALISERS = EXPRESSIONS | st.lists(EXPRESSIONS, max_size=4).map(
    lambda items: low.InitList(items=tuple(items))
)

DECLARATIONS = st.builds(
    lambda t, n, i, s: low.Declare(type=t, name=n, init=i, static=s),
    TYPES,
    NAMES,
    st.none() | INITIALISERS,
    st.booleans(),
)
_SIMPLE: st.SearchStrategy[low.Stmt] = st.one_of(
    DECLARATIONS,
    st.builds(lambda e: low.ExprStmt(expr=e), EXPRESSIONS),
    st.builds(lambda e: low.Return(value=e), st.none() | EXPRESSIONS),
    st.sampled_from([low.Break(), low.Continue(), low.Pragma(text="omp simd")]),
)


def _nest(inner: st.SearchStrategy[low.Stmt]) -> st.SearchStrategy[low.Stmt]:
    block = st.lists(inner, max_size=3).map(lambda body: low.Block(body=tuple(body)))
    init = st.one_of(
        st.just(()),
        st.builds(lambda e: (low.ExprStmt(expr=e),), EXPRESSIONS),
        st.builds(lambda d: (d,), DECLARATIONS),
    )
    maybe = st.none() | EXPRESSIONS
    return st.one_of(
        block,
        st.builds(
            lambda c, t, o: low.If(cond=c, then=t, other=o), EXPRESSIONS, block, st.none() | block
        ),
        st.builds(
            lambda i, c, s, b: low.For(init=i, cond=c, step=s, body=b), init, maybe, maybe, block
        ),
        st.builds(
            lambda c, b, d: low.While(cond=c, body=b, do=d), EXPRESSIONS, block, st.booleans()
        ),
    )


STATEMENTS = st.recursive(_SIMPLE, _nest, max_leaves=6)

PARAMETERS = st.builds(lambda t, n: low.Param(type=t, name=n), TYPES, NAMES)
FUNCTIONS = st.builds(
    lambda r, p, b, s, i: low.Function(
        name="k", returns=r, params=tuple(p), body=low.Block(body=tuple(b)), static=s, inline=i
    ),
    _base(),
    st.lists(PARAMETERS, max_size=3),
    st.lists(STATEMENTS, max_size=4),
    st.booleans(),
    st.booleans(),
)
STRUCTS = st.builds(
    lambda k, f: low.StructDef(kind=k, name="p", fields=tuple(f)),
    st.sampled_from(["struct", "union"]),
    st.lists(PARAMETERS, min_size=1, max_size=3),
)
UNITS = st.lists(FUNCTIONS | STRUCTS | DECLARATIONS, max_size=3).map(
    lambda items: low.Unit(items=tuple(items))
)


LIFTED = Path(__file__).parents[2] / "codegen" / "lift" / "kernels"  # in the style of others
KERNELS = sorted([*(Path(__file__).parent / "kernels").glob("*.c"), *LIFTED.glob("*.c")])
PRELUDE = (LIFTED / "prelude.h").read_text()


@settings(max_examples=200, deadline=None)
@given(EXPRESSIONS)
def test_printed_expressions_parse_back(expr):
    assert parse_low_expr(print_low(expr)) == expr


@settings(max_examples=100, deadline=None)
@given(UNITS)
def test_printed_units_parse_back(unit):
    assert parse_low(Source("printed.c", print_low(unit))) == unit


@pytest.mark.parametrize("path", KERNELS, ids=lambda p: f"{p.parts[-3]}-{p.stem}")
def test_kernels_print_and_parse_back(path):
    unit = parse_low(Source(path.name, path.read_text()), defines=PRELUDE)
    text = print_low(unit)
    assert parse_low(Source("printed.c", text)) == unit
    assert print_low(parse_low(Source("printed.c", text))) == text
