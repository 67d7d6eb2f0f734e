"""parse_low: macros, preludes, types and spans end in the tree a reader expects."""

import pytest

from dovetail.ir.diagnostics import Source, Span
from dovetail.ir.errors import SyntaxDiagnostic
from dovetail.ir.expr import ArrayType, Cast, Float, Int, Name, NamedType, PointerType
from dovetail.ir.low import nodes as low
from dovetail.ir.low.parse import Pieces, parse_low, parse_low_expr
from dovetail.ir.low.print import print_low
from dovetail.ir.low.types import constant
from dovetail.ir.low.verify import verify_low


def parse(text, **options):
    return parse_low(Source("k.c", text), **options)


def body(text, **options):
    return parse(f"void f(int x, float *p) {{ {text} }}", **options).function("f").body.body


def test_macros_expand_with_spans_at_the_use():
    unit = parse(
        "#define N 16\n#define TWICE(v) ((v) + (v))\nint f(int x) {\n  return TWICE(N);\n}"
    )
    value = unit.function("f").body.body[0].value
    assert print_low(value) == "16 + 16"
    assert value.span == Span(4, 10, 4, 18)
    assert value.left.span.line == 4


def test_macros_do_not_expand_within_themselves():
    assert body("#define x (x + 1)\n x = 2;") == body("(x + 1) = 2;")


def test_a_macro_may_continue_over_lines_and_be_undefined():
    assert body("#define M(a) \\\n  (a)\n x = M(1);\n#undef M\n M(2);") == body("x = 1; M(2);")


@pytest.mark.parametrize(
    ("condition", "taken"),
    [
        ("#if 0", False),
        ("#if 1 && !defined(NDEBUG)", True),
        ("#ifdef A", True),
        ("#ifndef A", False),
        ("#if A > 2", True),
        ("#if defined A && A == 4", False),
        ("#if UNKNOWN", False),
    ],
)
def test_conditionals(condition, taken):
    text = f"#define A 3\n{condition}\n x = 1;\n#else\n x = 2;\n#endif\n"
    assert body(text) == body(f"x = {1 if taken else 2};")


def test_elif_takes_the_first_true_branch():
    text = "#if 0\n x = 1;\n#elif 1\n x = 2;\n#elif 1\n x = 3;\n#else\n x = 4;\n#endif\n"
    assert body(text) == body("x = 2;")


def test_asserts_attributes_and_includes_vanish():
    text = "#include <assert.h>\n__attribute__((noinline)) void f(int x)"
    assert parse(f"{text} {{ assert(x != 0 && g(x, 1)); }}").function("f").body.body == ()


def test_barriers_vanish():
    text = 'asm(""); x = 2; __asm__ volatile("" : "+r"(x) : "m"(*p) : "memory"); asm("" ::: "cc");'
    assert body(text) == body("; x = 2; ; ;")


def test_a_prelude_gives_macros_types_and_structs():
    prelude = "#define LIKELY(c) (c)\ntypedef float real;\nstruct s { struct { real a; } in; };"
    text = "real f(const struct s *p) {\n  if LIKELY(p->in.a > 0) return p->in.a;\n  return 0;\n}"
    unit = parse(text, defines=prelude)
    assert [type(i).__name__ for i in unit.items] == ["StructDef", "StructDef", "Function"]
    verify_low(unit, Source("k.c", text), functions={}, constants={})
    assert unit.function("f").returns == NamedType(name="float")
    assert unit.items[0].span.line == 0  # a prelude is not the text that diagnostics show


def test_casts_and_parentheses_are_told_apart_by_type_names():
    assert parse_low_expr("(float)x") == Cast(type=NamedType(name="float"), operand=Name(id="x"))
    assert print_low(parse_low_expr("(x)+y")) == "x + y"
    assert print_low(parse_low_expr("(const __m256i*)((uintptr_t)&t[7] - n)")) == (
        "(const __m256i *)((uintptr_t)&t[7] - n)"
    )


def test_declarators_nest_as_in_c():
    first, second = body("const float *a = p, (*b)[4];")
    f32 = NamedType(name="float", const=True)
    assert first == low.Declare(type=PointerType(of=f32), name="a", init=Name(id="p"))
    assert second.type == PointerType(of=ArrayType(of=f32, size=Int(value=4)))


def test_type_words_combine_in_any_order():
    (declared,) = body("long unsigned int long x;")
    assert declared.type == NamedType(name="unsigned long long")


def test_array_parameters_keep_their_size_and_lose_their_marks():
    unit = parse("void f(float x[restrict static 4], const int n[]) {}")
    first, second = unit.function("f").params
    assert first.type == ArrayType(of=NamedType(name="float"), size=Int(value=4))
    assert second.type == ArrayType(of=NamedType(name="int", const=True))


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("0x1F", Int(value=31, text="0x1F")),
        ("017", Int(value=15, text="017")),
        ("0b11", Int(value=3, text="0b11")),
        ("7ull", Int(value=7, text="7ull")),
        ("7", Int(value=7)),
        ("0.5f", Float(value=0.5)),
        ("0.5", Float(value=0.5, text="0.5")),
        (".5f", Float(value=0.5, text=".5f")),
        ("1e-5f", Float(value=1e-5, text="1e-5f")),
        ("0x1p-3f", Float(value=0.125, text="0x1p-3f")),
    ],
)
def test_literals_keep_their_spelling_where_it_matters(text, node):
    assert parse_low_expr(text) == node
    assert print_low(node) == text


def test_tuned_macros_survive_as_constants():
    for text in (
        "#define MR 4\n#pragma dovetail tune(MR in 1..6)\n",
        "#pragma dovetail tune(MR in 1..6)\n#define MR 4\n",
    ):
        unit = parse(text + "int f(void) { return MR; }")
        declared = next(i for i in unit.items if isinstance(i, low.Declare))
        assert declared.name == "MR" and declared.init == Int(value=4)
        assert unit.function("f").body.body == (low.Return(value=Name(id="MR")),)


def test_spans_cover_what_was_written():
    unit = parse("int f(int a) {\n  return (a + 1) *\n      a;\n}")
    value = unit.function("f").body.body[0].value
    assert value.span == Span(2, 10, 3, 8)
    assert value.left.span == Span(2, 10, 2, 17)
    assert unit.function("f").span == Span(1, 5, 1, 6)


def test_structs_without_a_name_in_a_prelude_and_in_the_text_are_two():
    unit = parse(
        "typedef struct { int y; } B;\nfloat f(A a, B b) { return a.x + b.y; }",
        defines="typedef struct { float x; } A;",
    )
    first, second = (item for item in unit.items if isinstance(item, low.StructDef))
    assert first.name != second.name
    verify_low(unit, Source("k.c", ""), functions={}, constants={})


def test_a_directive_is_a_fault_of_the_function_and_text_around_it_only():
    pieces = Pieces()
    wrong, fine = (
        "int {}(int x) {{\n#frob\n  return x;\n}}\n",
        "int {}(int x) {{\n\n  return x;\n}}\n",
    )
    for name, text in (("a", fine), ("b", wrong), ("c", fine), ("d", wrong)):
        pieces.add(Source(name, text.format(name)))
    assert [pieces.function(name).name for name in "ac"] == ["a", "c"]
    for name in "bd":
        with pytest.raises(SyntaxDiagnostic, match=f"{name}:2:1.*frob"):
            pieces.function(name)


def test_conditions_that_are_false_in_a_header_are_not_those_of_the_text():
    pieces, header = Pieces(), "\n\n#ifdef NEVER\nint f(int x);\n#endif\n"
    pieces.add(Source("k.c", '#include "a.h"\n#if TARGET\nint g(int x) { return x; }\n#endif\n'),
               {"a.h": header}.get)  # fmt: skip
    assert not pieces.own and [token.line for token in pieces.dropped] == [2]


def test_constants_have_64_bits():
    for text, value in (
        ("1 << 62 << 1", 1 << 63),
        ("4294967296 * 4294967296", None),
        ("7 / -2", -3),
    ):
        assert constant(parse_low_expr(text), {}) == value


def test_braces_of_an_arm_stay_a_scope():
    (chain,) = body("switch (x) { case 0: x = 1; case 1: { int t = 2; x = t; break; } }")
    (arm,) = chain.body
    assert print_low(arm).splitlines() == [
        *("if (x == 0) {", "  x = 1;", "  {", "    int t = 2;", "    x = t;", "  }"),
        *("} else {", "  if (x == 1) {", "    {", "      int t = 2;", "      x = t;", "    }"),
        *("  }", "}"),
    ]


def test_the_most_cases_a_switch_may_have_print_and_parse_back():
    def text(count):
        arms = "".join(f"case {i}: p[{i}] = 1.0f;" for i in range(count))
        return f"void f(int x, float *p) {{ switch (x & 255) {{ {arms} }} }}"

    def parses(count):
        try:
            return parse(text(count))
        except SyntaxDiagnostic:
            return None

    most = next(unit for unit in map(parses, range(75, 0, -1)) if unit is not None)
    assert parse(print_low(most)) == most


def test_enumerations_become_integers_and_their_names_numbers():
    prelude = "enum { FIRST = 3, };"
    text = """
    typedef enum { A, B = 1 << 2, C = (B), D } kind;
    enum sign { LESS = -FIRST, MORE };
    int f(kind k, enum sign s, enum { X } x, struct P *p) { return k == D ? LESS : p->A + MORE; }
    """
    same = """
    typedef unsigned kind;
    int f(kind k, int s, unsigned x, struct P *p) { return k == 5 ? (-3) : p->A + (-2); }
    """
    found, wanted = (parse_low(Source("k.c", t), defines=prelude) for t in (text, same))
    assert print_low(found) == print_low(wanted)


def test_enumerations_of_a_block_end_with_it():
    """Those of a struct do not."""
    text = """
    enum sign { A = 7, B };
    void f(float *x, enum { B = 3 } k) {
        enum sign { A = -1 } s = A;
        if (k) { enum { A = 2 }; x[A] = B; }
        x[2 + A] = 0;
    }
    struct s { enum { C = 4 } c; };
    void g(float *x, enum sign s) { x[A] = B + C; }
    """
    same = """
    void f(float *x, unsigned k) {
        int s = (-1);
        if (k) { x[2] = 3; }
        x[2 + (-1)] = 0;
    }
    struct s { unsigned c; };
    void g(float *x, unsigned s) { x[7] = 8 + 4; }
    """
    assert print_low(parse(text)) == print_low(parse(same))


def test_a_label_that_one_condition_goes_back_to_is_a_loop():
    found = parse(
        """
        int f(int x, int n, float *p) {
            if (x > 3) { x = 1; }
        outer:
            x += 2;
            const int half = x / 2;
            x += half;
        again:
            if (n < 8) { p[0] += n; n = 0; }
            else { p[8] += 1; n -= 8; }
            if (n) { goto again; }
            if (x < 9 && (n + x)) goto outer;
            return x;
        }
        """
    )
    same = parse(
        """
        int f(int x, int n, float *p) {
            if (x > 3) { x = 1; }
            do {
                x += 2;
                const int half = x / 2;
                x += half;
                do {
                    if (n < 8) { p[0] += n; n = 0; }
                    else { p[8] += 1; n -= 8; }
                } while (n);
            } while (x < 9 && (n + x));
            return x;
        }
        """
    )
    assert print_low(found) == print_low(same)


@pytest.mark.parametrize(
    "body",
    [
        "again: x = 2; int y = x, *z = 0; if (x) goto again; z = p;",  # z is needed behind the loop
        "again: x = 2; int y = x, *z = 0; if (y) goto again;",
        "for (;;) { again: if (x) { break; } if (p) goto again; }",
        "again: x -= 1; if (x) { goto again; p = 0; }",
        "again: x -= 1; if (x) goto again; else x = 1;",
        "if (x) goto again; x = 2; again: x = 1;",
    ],
)
def test_other_labels_stay_outside_the_subset(body):
    with pytest.raises(SyntaxDiagnostic) as caught:
        parse(f"void f(int x, float *p) {{ {body} }}")
    fault = caught.value.diagnostics[0]
    assert fault.message == "goto is outside the kernel subset"
    assert fault.source.text[fault.span.column - 1 :].startswith("goto again")
