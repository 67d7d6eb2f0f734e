"""Parsing the high IR: trees, spans, and every kind of text that is refused."""

import pytest

from dovetail.ir.diagnostics import Source, Span
from dovetail.ir.errors import SyntaxDiagnostic
from dovetail.ir.expr import Binary, Call, Cast, Index, Int, Name, NamedType, PointerType, Ternary
from dovetail.ir.high.nodes import Assign, ExprStmt, For, If, Regs, Text, Tunable
from dovetail.ir.high.parse import parse_high


def parse(text):
    return parse_high(Source("k.dk", text))


def kernel(body):
    lines = "".join(f"    {line}\n" for line in body.strip("\n").split("\n"))
    return f"@kernel\ndef k(n: i64, p: ptr[f32]):\n{lines}"


def statement(line):
    return parse(kernel(line)).functions[0].body[0]


def faults(text):
    with pytest.raises(SyntaxDiagnostic) as caught:
        parse(text)
    return caught.value.diagnostics


def test_module_parts():
    unit = parse('"""Doc."""\n# note: pinned\nimport a, b\nimport c\n')
    assert (unit.doc, unit.imports, unit.notes) == ("Doc.", ("a", "b", "c"), ("pinned",))


def test_function_head_doc_and_tunables():
    unit = parse(
        '@kernel\ndef k(x: ptr[W], tid: thread):\n    """Doc.\n\n    More.\n    """\n'
        '    W: param = choice("f32", "bf16", default="bf16")\n'
        "    MR: param = choice(range(1, 4), 6)\n"
    )
    function = unit.function("k")
    assert function.doc == "Doc.\n\nMore."
    assert function.params[0].type == PointerType(of=NamedType(name="W"))
    assert function.tunables == (
        Tunable(name="W", choices=("f32", "bf16"), default="bf16"),
        Tunable(name="MR", choices=(1, 2, 3, 6), default=1),
    )
    assert function.span == Span(2, 1, 2, 31)


def test_operators_keep_pythons_meaning():
    stmt = statement("x = not a == 1 and b | 2 < c // 3")
    not_a = stmt.value.left
    assert stmt.value.op == "&&"
    assert (not_a.op, not_a.operand.op) == ("!", "==")
    assert stmt.value.right == Binary(
        op="<",
        left=Binary(op="|", left=Name(id="b"), right=Int(value=2)),
        right=Binary(op="//", left=Name(id="c"), right=Int(value=3)),
    )


def test_expressions():
    assert statement("x = 1 if a else p[2]").value == Ternary(
        cond=Name(id="a"),
        then=Int(value=1),
        other=Index(base=Name(id="p"), indices=(Int(value=2),)),
    )
    assert statement("x = cast(ptr[i32], p)").value == Cast(
        type=PointerType(of=NamedType(name="i32")), operand=Name(id="p")
    )
    assert statement('x = W == "bf16"').value.right == Text(value="bf16")


def test_statements():
    assert statement("acc = regs((2, n), f32)") == Regs(
        name="acc", shape=(Int(value=2), Name(id="n")), elem="f32"
    )
    assert statement("x: i64 = 1").type == NamedType(name="i64")
    assert statement("acc[0, 1] += 1").op == "+="
    loop = statement("for i in unroll(n): prefetch(p)")
    assert (loop.kind, loop.start, loop.step) == ("unroll", Int(value=0), Int(value=1))
    assert loop.body == (ExprStmt(expr=Call(name="prefetch", args=(Name(id="p"),))),)
    chain = statement("if a: pass\nelif b: pass\nelse: x = 1")
    assert isinstance(chain.other[0], If)
    assert isinstance(chain.other[0].other[0], Assign)


def test_spans_count_characters_not_bytes():
    text = kernel('"""ä"""\nx = p[0]  # ä\nfor i in range(n): y = "ä" < p[1]')
    bad = faults(text.replace('"ä" <', '"ä ö" <'))
    assert bad[0].span == Span(5, 28, 5, 33)
    assert isinstance(parse(text).functions[0].body[1], For)


REFUSED = [
    ("high-syntax", "@kernel\ndef k(:\n    pass\n", (2, 7)),
    ("high-syntax", "@kernel\ndef k():\npass\n", (3, 1)),
    ("high-syntax", "x = 1\0", (1, 1)),
    ("high-unsupported-statement", "x = 1\n", (1, 1)),
    ("high-unsupported-statement", "from a import b\n", (1, 1)),
    ("high-bad-import", "import a as b\n", (1, 8)),
    ("high-bad-decorator", "def k():\n    pass\n", (1, 1)),
    ("high-bad-decorator", "@other\ndef k():\n    pass\n", (1, 2)),
    ("high-bad-parameter", "@kernel\ndef k(n):\n    pass\n", (2, 7)),
    ("high-bad-parameter", "@kernel\ndef k(n: i64 = 3):\n    pass\n", (2, 16)),
    ("high-bad-parameter", "@kernel\ndef k(*a: i64):\n    pass\n", (2, 8)),
    ("high-bad-type", "@kernel\ndef k(n: list[i64]):\n    pass\n", (2, 10)),
    ("high-bad-choice", kernel("M: param = 3"), (3, 5)),
    ("high-bad-choice", kernel("M: param = choice()"), (3, 16)),
    ("high-bad-choice", kernel("M: param = choice(1.5)"), (3, 23)),
    ("high-bad-choice", kernel("M: param = choice(range(n))"), (3, 29)),
    ("high-bad-choice", kernel("M: param = choice(1, best=1)"), (3, 26)),
    ("high-bad-choice", kernel("x = 1\nM: param = choice(1)"), (4, 5)),
    ("high-bad-choice", kernel("M: param = choice(range(1000000000))"), (3, 23)),
    ("high-bad-choice", kernel(f"M: param = choice(range({10**30}))"), (3, 23)),
    ("high-bad-choice", kernel("M: param = choice({[1]})"), (3, 23)),
    ("high-unsupported-statement", kernel("with p: pass"), (3, 5)),
    ("high-unsupported-statement", kernel("def f(): pass"), (3, 5)),
    ("high-unsupported-expression", kernel("x = n ** 2"), (3, 9)),
    ("high-unsupported-expression", kernel("x = [n]"), (3, 9)),
    ("high-unsupported-expression", kernel("x = a.b(n)"), (3, 9)),
    ("high-unsupported-expression", kernel("x = n is n"), (3, 9)),
    ("high-unsupported-expression", kernel("x = None"), (3, 9)),
    ("high-chained-comparison", kernel("x = 0 < n < 3"), (3, 9)),
    ("high-keyword-argument", kernel("x = vload(p, n=3)"), (3, 18)),
    ("high-misplaced-form", kernel("x = vadd(regs((1,), f32), n)"), (3, 14)),
    ("high-bad-target", kernel("x = y = 1"), (3, 5)),
    ("high-bad-target", kernel("x, y = 1"), (3, 5)),
    ("high-bad-target", kernel("x: i64"), (3, 5)),
    ("high-bad-regs", kernel("acc = regs(4, f32)"), (3, 11)),
    ("high-bad-regs", kernel("acc = regs((4, 2), f32, fill=1)"), (3, 11)),
    ("high-bad-local", kernel("s = local(4)"), (3, 9)),
    ("high-bad-local", kernel("s = local(4, f32, fill=1)"), (3, 9)),
    ("high-unused-value", kernel("n + 1"), (3, 5)),
    ("high-bad-loop", kernel("for i in p: pass"), (3, 14)),
    ("high-bad-loop", kernel("for i in vrange(0, n, 2): pass"), (3, 14)),
    ("high-bad-loop", kernel("for i in range(n): pass\nelse: x = 1"), (4, 11)),
]


@pytest.mark.parametrize(("code", "text", "at"), REFUSED, ids=[c + str(a) for c, _, a in REFUSED])
def test_refused_text_says_where(code, text, at):
    found = faults(text)
    assert [(d.code, (d.span.line, d.span.column)) for d in found] == [(code, at)]


def test_all_faults_are_reported_at_once():
    found = faults(kernel("x = n ** 2\ny = [1]\nwith p: pass"))
    assert [d.span.line for d in found] == [3, 4, 5]
    assert "^" in found[0].render()


def test_deep_nesting_is_a_diagnostic():
    assert faults(kernel(f"x = {'-' * 5000}n"))[0].code == "high-syntax"
    for count in (200, 400):
        (found,) = faults(kernel(f"x = {' + '.join(['n'] * count)}"))
        assert (found.code, found.span.line) == ("high-nesting", 3)
