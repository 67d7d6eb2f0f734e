"""Bad kernel text: every kind of fault is named by its code, at its place, once.

The fault of each text stands between « and »; where the place is empty, the caret points at it.
"""

import pytest

from dovetail.ir.diagnostics import Source
from dovetail.ir.errors import SyntaxDiagnostic
from dovetail.ir.expr import NamedType, PointerType
from dovetail.ir.low.parse import parse_low
from dovetail.ir.low.types import Signature
from dovetail.ir.low.verify import verify_low

M256 = NamedType(name="__m256")
KNOWN = {
    "_mm256_loadu_ps": Signature((PointerType(of=NamedType(name="float")),), M256),
    "_mm256_add_ps": Signature((M256, M256), M256),
}

SYNTAX = {
    "character": ("low-character", "void f(int x) {\n  x = «@»1;\n}"),
    "open comment": ("low-comment", "void f(void) {\n} «/*» never closed"),
    "string": ("low-string", 'void f(int x) {\n  g(«"text"»);\n}'),
    "character constant": ("low-string", "void f(int x) {\n  x = «'a'»;\n}"),
    "number": ("low-number", "void f(float x) {\n  x = «1.5g»;\n}"),
    "two points": ("low-number", "void f(float x) {\n  x = «0x1.2.3p5»;\n}"),
    "too large": ("low-number", "void f(float x) {\n  x = «0x1p99999»;\n}"),
    "too long": ("low-number", "void f(int x) {\n  x = «" + "9" * 5000 + "»;\n}"),
    "octal": ("low-number", "void f(int x) {\n  x = «089»;\n}"),
    "missing semicolon": ("low-missing-semicolon", "void f(int x) {\n  x = 1«»\n  x = 2;\n}"),
    "semicolon before brace": ("low-missing-semicolon", "void f(int x) {\n  x = 1«» }"),
    "unclosed brace": ("low-unclosed", "void f(int x) «{»\n  x = 1;\n"),
    "stray token": ("low-syntax", "void f(int x) {\n  x = 1 + «;»\n}"),
    "missing parenthesis": ("low-syntax", "void f(int x) {\n  if (x «{»\n  x = 1;\n  }\n}"),
    "extra brace": ("low-syntax", "void f(int x) {\n}\n«}»\n"),
    "unknown type": ("low-unknown-type", "void f(int x) {\n  «half» y = x;\n}"),
    "unknown pointer type": ("low-unknown-type", "void f(int x) {\n  «FILE» *y = x;\n}"),
    "unknown parameter type": ("low-unknown-type", "void f(«real» *x) {\n}"),
    "no type": ("low-type", "void f(int x) {\n  «unsigned float» y = x;\n}"),
    "nameless parameter": ("low-parameter", "void f(«float*») {\n}"),
    "goto": ("low-unsupported", "void f(int x) {\n  «goto» end;\n}"),
    "break of a switch": (
        "low-switch",
        "void f(int x) {\n  switch (x) { case 1: if (x) «break;» x = 2; }\n}",
    ),
    "call in a switch": ("low-switch", "void f(int x) {\n  switch («abs(x)») { case 1: ; }\n}"),
    "no case": ("low-switch", "void f(int x) {\n  switch (x) { «x = 2;» }\n}"),
    "declaration in an arm": (
        "low-switch",
        "void f(int x) {\n  switch (x) { case 0: ; int «t»; t = 1; break; case 1: t = 2; }\n}",
    ),
    "name of a later arm": (
        "low-switch",
        "void f(int x) {\n  switch (x) { case 0: ; int «a» = 1; case 1: { int a = 2; break; } }\n}",
    ),
    "cases": ("low-nesting", "void f(int x) {\n  «switch» (x) {" + " case 1: ;" * 100 + " }\n}"),
    "enum": ("low-unsupported", "«enum» kind { A, B = f() };\n"),
    "enum that is not here": ("low-unsupported", "void f(«enum» kind k) {\n}"),
    "parameter as an enumerator": (
        "low-taken-name",
        "enum { N = 4 };\nvoid f(float *x, int «N») {\n  x[N] = 0;\n}",
    ),
    "variable as a macro": ("low-taken-name", "#define N 4\nvoid f(int x) {\n  int y, «N»;\n}"),
    "volatile": ("low-unsupported", "void f(«volatile» int *x) {\n}"),
    "assembly": ("low-unsupported", 'void f(int x) {\n  «asm»(0);\n}'),
    "copy by assembly": ("low-unsupported", 'void f(int x) {\n  «asm»("" : "=r"(x) : "0"(1));\n}'),
    "count in assembly": ("low-unsupported", 'void f(int x) {\n  «asm»("" : : "r"(x++));\n}'),
    "joined assembly": ("low-unsupported", 'void f(int x) {\n  «asm» volatile("" "nop");\n}'),
    "open assembly": ("low-unsupported", 'void f(int x) {\n  «asm»(""'),
    "end after assembly": ("low-unclosed", 'void f(int x) «{»\n  asm("")'),
    "varargs": ("low-varargs", "void f(int x, «...») {\n}"),
    "function pointer": ("low-function-pointer", "void f(float (*«g»)(float)) {\n}"),
    "indirect call": ("low-call", "void f(float *x) {\n  «x[0]»(1);\n}"),
    "macro arguments": ("low-macro-call", "#define TWO(a, b) a\nint g = «TWO(1)»;\n"),
    "open macro call": ("low-macro-call", "#define ONE(a) a\nint f(int x) {\n  return «ONE»(x;\n}"),
    "macro parameters": ("low-define", "«#define M(a, 1) a»\n"),
    "unknown directive": ("low-directive", "«#define_once X 1»\n"),
    "open conditional": ("low-conditional", "«#if 1»\nvoid f(void) {\n}\n"),
    "stray endif": ("low-conditional", "void f(void) {\n}\n«#endif»\n"),
    "open condition": ("low-conditional", "«#if SIZE(3)»\n#endif\n"),
    "error directive": ("low-error", "«#error not for this machine»\n"),
    "malformed tune": ("low-pragma", "«#pragma dovetail tune(MR 1..6)»\n"),
    "endless tune": ("low-pragma", "«#pragma dovetail tune(MR in 1.." + "9" * 5000 + ")»\n"),
}  # fmt: skip

MEANING = {
    "unknown name": ("low-unknown-name", "void f(int *out) {\n  out[0] = «cuont»;\n}"),
    "unknown function": ("low-unknown-function", "float f(float x) {\n  return «expo(x)»;\n}"),
    "unknown intrinsic": ("low-unknown-function", "void f(float *x) {\n  «_mm256_lodu_ps(x)»;\n}"),
    "arity": ("low-arity", "float f(float x) {\n  return «sqrtf(x, x)»;\n}"),
    "assign to value": ("low-not-assignable", "void f(int x) {\n  «(x + 1)» = 2;\n}"),
    "step a value": ("low-not-assignable", "void f(int x) {\n  «4»++;\n}"),
    "assign to array": ("low-not-assignable", "void f(float x) {\n  float y[2];\n  «y» = 0;\n}"),
    "assign to const": ("low-const", "void f(const float *x) {\n  «x[0]» = 1.0f;\n}"),
    "break outside": ("low-outside-loop", "void f(int x) {\n  «break;»\n}"),
    "continue outside": ("low-outside-loop", "void f(int x) {\n  if (x) «continue;»\n}"),
    "index a scalar": ("low-not-pointer", "float f(float x) {\n  return «x»[0];\n}"),
    "follow a scalar": ("low-not-pointer", "float f(float x) {\n  return *«x»;\n}"),
    "read void": ("low-not-pointer", "float f(void *x) {\n  return *«x»;\n}"),
    "float index": ("low-index", "float f(float *x) {\n  return x[«1.5f»];\n}"),
    "variable twice": ("low-duplicate", "void f(int x) {\n  int «x» = 1;\n}"),
    "parameter twice": ("low-duplicate", "void f(int x, «int x») {\n}"),
    "function twice": ("low-duplicate", "void f(int x) {\n}\nvoid «f»(int x) {\n}"),
    "field twice": ("low-duplicate", "struct s { int a; float «a»; };\n"),
    "missing return": ("low-missing-return", "int «f»(int x) {\n  if (x) return 1;\n}"),
    "return without value": ("low-return", "int f(int x) {\n  «return;»\n}"),
    "value from void": ("low-return", "void f(int x) {\n  return «x»;\n}"),
    "vector to scalar": (
        "low-type-mismatch",
        "void f(float *x) {\n  float y = «_mm256_loadu_ps(x)»;\n}",
    ),
    "pointer types": ("low-type-mismatch", "void f(float *x) {\n  int *y = «x»;\n}"),
    "argument type": (
        "low-type-mismatch",
        "void f(float *x) {\n  _mm256_add_ps(_mm256_loadu_ps(x), «1.0f»);\n}",
    ),
    "float remainder": ("low-operand", "float f(float x) {\n  return «x % 2»;\n}"),
    "pointer sum": ("low-operand", "float *f(float *x) {\n  return «x + x»;\n}"),
    "complement": ("low-operand", "float f(float x) {\n  return «~x»;\n}"),
    "vector condition": (
        "low-condition",
        "void f(float *x) {\n  if («_mm256_loadu_ps(x)») x = x;\n}",
    ),
    "void value": ("low-void", "void g(void) {\n}\nint f(int x) {\n  return x + «g()»;\n}"),
    "void variable": ("low-void", "void f(int x) {\n  void «y»;\n}"),
    "cast": ("low-cast", "void f(float *x) {\n  «(float) x»;\n}"),
    "address": ("low-address", "int *f(int x) {\n  return «&(x + 1)»;\n}"),
    "unknown field": ("low-field", "struct s { int a; };\nvoid f(struct s *p) {\n  «p->b»;\n}"),
    "dot on pointer": ("low-not-struct", "struct s { int a; };\nvoid f(struct s *p) {\n «p».a;\n}"),
    "incomplete struct": ("low-incomplete", "int f(struct s *p) {\n  return «p»->a;\n}"),
    "array size": ("low-array-size", "void f(int x) {\n  float y[«0»];\n}"),
    "open array": ("low-array-size", "void f(int x) {\n  float «y»[];\n}"),
    "too many values": ("low-initialiser", "void f(int x) {\n  int y[2] = {1, 2, «3»};\n}"),
    "tune without constant": ("low-tune", "«#pragma dovetail tune(MR in 1..6)»\n"),
}  # fmt: skip


def faults(text):
    source = Source("kernel.c", text)
    with pytest.raises(SyntaxDiagnostic) as caught:
        verify_low(parse_low(source), source, functions=KNOWN, constants={})
    return caught.value.diagnostics


@pytest.mark.parametrize(
    ("code", "marked"),
    [*SYNTAX.values(), *MEANING.values()],
    ids=[*SYNTAX, *MEANING],
)
def test_fault_is_reported_once_at_its_place(code, marked):
    before, _, rest = marked.partition("«")
    inside, _, _ = rest.partition("»")
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    found = faults(marked.replace("«", "").replace("»", ""))
    assert [d.code for d in found] == [code], "\n".join(d.render() for d in found)
    span = found[0].span
    assert (span.line, span.column) == (line, column)
    assert (span.end_line, span.end_column) == (line, column + max(1, len(inside)))
    shown = found[0].render().splitlines()
    carets = shown[2]
    assert carets.index("^") == column - 1 + 2
    assert carets.count("^") == max(1, len(inside))


def test_there_are_many_kinds_of_faults():
    assert len({code for code, _ in [*SYNTAX.values(), *MEANING.values()]}) >= 25


def test_all_faults_of_a_text_come_at_once_in_order():
    found = faults("void f(int x) {\n  x = 1\n  x = 2;\n  goto end;\n  x = @;\n}\nint g( {\n}\n")
    assert [(d.span.line, d.code) for d in found] == [
        (2, "low-missing-semicolon"),
        (4, "low-unsupported"),
        (5, "low-character"),
        (5, "low-syntax"),
        (7, "low-syntax"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        f"int f(int x) {{ return {'(' * 400}x{')' * 400}; }}",
        f"void f(int x) {{ {'{' * 2000}{'}' * 2000} }}",
        f"int f(int x) {{ return x{' + 1' * 5000}; }}",
    ],
    ids=["parentheses", "blocks", "a long sum"],
)
def test_nesting_beyond_reason_is_a_fault_too(text):
    (found,) = faults(text)
    assert found.code == "low-nesting"


def test_arms_that_repeat_too_much_are_a_fault():
    body = ";"
    for _ in range(5):
        body = f"switch (x) {{ {'case 1: x = 1; ' * 12}{body} }}"
    found = faults(f"void f(int x) {{ {body} }}")
    assert {d.code for d in found} == {"low-nesting"}


def test_unsupported_words_say_what_to_do():
    (found,) = faults("void f(int x) {\n  goto end;\n}")
    assert found.hint == "use a loop with break, or a condition"


def test_a_likely_name_is_offered():
    (found,) = faults("void f(int count) {\n  cuont = 1;\n}")
    assert found.hint == "did you mean `count`?"
