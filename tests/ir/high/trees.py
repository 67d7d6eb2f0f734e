"""Hypothesis strategies for high-IR trees, as the parser builds them."""

from hypothesis import strategies as st

from dovetail.ir import expr as ex
from dovetail.ir.high import nodes as high

NAMES = st.sampled_from(["a", "b", "count", "x1", "VL", "inf"])
TYPES = st.recursive(
    st.sampled_from(["f32", "i64", "vec[f32]", "W"]).map(lambda n: ex.NamedType(name=n)),
    lambda inner: inner.filter(lambda t: "[" not in getattr(t, "name", "")).map(
        lambda t: ex.PointerType(of=t)
    ),
    max_leaves=2,
)
BINARY = st.sampled_from("+ - * / // % << >> & | ^ && || == != < <= > >=".split())
FINITE = st.floats(0, 1e30, allow_nan=False)


def compound(inner):
    args = st.lists(inner, max_size=3).map(tuple)
    return st.one_of(
        st.builds(ex.Unary, op=st.sampled_from("-+!~"), operand=inner),
        st.builds(ex.Binary, op=BINARY, left=inner, right=inner),
        st.builds(ex.Ternary, cond=inner, then=inner, other=inner),
        st.builds(ex.Call, name=st.sampled_from(["vload", "f", "min"]), args=args),
        st.builds(ex.Cast, type=TYPES, operand=inner),
        st.builds(
            ex.Index,
            base=st.builds(ex.Name, id=NAMES),
            indices=st.lists(inner, min_size=1, max_size=2).map(tuple),
        ),
    )


EXPRS = st.recursive(
    st.one_of(
        st.builds(ex.Int, value=st.integers(0, 2**70)),
        st.builds(ex.Float, value=FINITE),
        st.builds(ex.Name, id=NAMES),
        st.builds(high.Text, value=st.sampled_from(["bf16", "silu"])),
    ),
    compound,
    max_leaves=12,
)
CALLS = st.builds(
    ex.Call, name=st.sampled_from(["vstore", "g"]), args=st.lists(EXPRS, max_size=3).map(tuple)
)
TARGETS = st.one_of(
    st.builds(ex.Name, id=NAMES),
    st.builds(ex.Index, base=st.builds(ex.Name, id=NAMES), indices=st.tuples(EXPRS)),
)
SIMPLE = st.one_of(
    st.builds(
        high.Assign, target=TARGETS, value=EXPRS, op=st.sampled_from(["=", "+=", "//=", "<<="])
    ),
    st.builds(high.Assign, target=st.builds(ex.Name, id=NAMES), value=EXPRS, type=TYPES),
    st.builds(
        high.Regs,
        name=NAMES,
        shape=st.lists(EXPRS, min_size=1, max_size=3).map(tuple),
        elem=st.just("f32"),
    ),
    st.builds(high.Local, name=NAMES, size=EXPRS, elem=st.just("f32")),
    st.builds(high.ExprStmt, expr=CALLS),
    st.builds(high.Return, value=st.none() | EXPRS),
    st.builds(high.Break),
    st.builds(high.Continue),
)


def nested(inner):
    body = st.lists(inner, max_size=2).map(tuple)
    loop = {"var": NAMES, "start": EXPRS, "stop": EXPRS, "body": body}
    one = st.just(ex.Int(value=1))
    return st.one_of(
        st.builds(high.If, cond=EXPRS, then=body, other=body),
        st.builds(high.While, cond=EXPRS, body=body),
        st.builds(high.For, kind=st.sampled_from(["range", "unroll"]), step=EXPRS, **loop),
        st.builds(high.For, kind=st.just("vrange"), step=one, **loop),
    )


STATEMENTS = st.recursive(SIMPLE, nested, max_leaves=4)
DOCS = st.sampled_from(
    ["", "One line.", "Two.\n\nMore: x.", 'Quotes """ and \\n.', 'Ends in "', "a\n  indented\nb"]
)
TUNABLES = st.builds(
    lambda name, choices, at: high.Tunable(
        name=name, choices=tuple(choices), default=choices[at % len(choices)]
    ),
    st.sampled_from(["MR", "W"]),
    st.one_of(
        st.lists(st.integers(-3, 20), min_size=1, max_size=6),
        st.integers(-3, 9).map(lambda n: list(range(n, n + 5))),
        st.lists(st.sampled_from(["f32", "bf16"]), min_size=1, max_size=2),
    ),
    st.integers(0, 5),
)
FUNCTIONS = st.builds(
    high.Function,
    kind=st.sampled_from(["kernel", "inline"]),
    name=st.sampled_from(["k", "tile"]),
    params=st.lists(
        st.builds(high.Param, name=NAMES, type=TYPES), max_size=3, unique_by=lambda p: p.name
    ).map(tuple),
    returns=st.none() | TYPES,
    tunables=st.lists(TUNABLES, max_size=2).map(tuple),
    body=st.lists(STATEMENTS, max_size=3).map(tuple),
    doc=DOCS,
)
UNITS = st.builds(
    high.Unit,
    functions=st.lists(FUNCTIONS, max_size=2).map(tuple),
    imports=st.lists(st.sampled_from(["math_f32", "b"]), max_size=2).map(tuple),
    doc=DOCS,
    notes=st.lists(st.sampled_from(["VL is pinned at 8", "x"]), max_size=2).map(tuple),
)
