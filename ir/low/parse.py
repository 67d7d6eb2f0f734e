"""C text in, low-IR unit out; every syntax fault found is raised at once in one SyntaxDiagnostic.

After a fault the parser goes back to the last whole statement and skips the broken one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lark import Token, Tree, UnexpectedToken
from lark.parsers.lalr_interactive_parser import InteractiveParser

from dovetail.ir.diagnostics import NO_SPAN, Diagnostic, Source, Span
from dovetail.ir.errors import SyntaxDiagnostic
from dovetail.ir.expr import Call, Expr
from dovetail.ir.low import nodes as low
from dovetail.ir.low.build import Builder
from dovetail.ir.low.cycles import resolve_cycles
from dovetail.ir.low.enums import Enums
from dovetail.ir.low.lex import Reporter, classify, grammar, token_span
from dovetail.ir.low.preprocess import Include, Macro, Preprocessor, no_header, split_arguments
from dovetail.ir.low.types import constant
from dovetail.ir.node import MOST_NESTING, NESTING_HINT, Node

ASSEMBLY = ("inline assembly", "use intrinsics")
UNSUPPORTED: dict[str, tuple[str, str]] = {
    "goto": ("goto", "use a loop with break, or a condition"),
    "enum": ("an enum that is not defined here, or whose numbers are no constants", "use int"),
    "extern": ("extern", "define the function here, or call one the target's tables know"),
    "volatile": ("volatile", "kernels work on plain memory; leave it out"),
    "auto": ("auto", "write the type"),
    **dict.fromkeys(("asm", "__asm__", "__asm"), ASSEMBLY),
    "_Generic": ("_Generic", "call the function for the type at hand"),
    **dict.fromkeys(("typeof", "__typeof__"), ("typeof", "write the type")),
    "_Complex": ("complex numbers", "keep real and imaginary parts apart"),
    "va_list": ("variable arguments", "name each argument"),
    **dict.fromkeys(("template", "class", "namespace"), ("C++", "kernels are C")),
}
"""C words outside the subset: what they are, and what to write in their place."""


@dataclass(slots=True)
class _Reading:
    """Reads texts one after another: each knows macros, types and enums of those before it."""

    macros: dict[str, Macro] = field(default_factory=dict)
    types: set[str] = field(default_factory=set)
    enums: Enums = field(default_factory=Enums)
    builder: Builder | None = None

    def read(self, source: Source, include: Include) -> tuple[Preprocessor, list[Token]]:
        """Return the tokens of a text, and what read it, which has the faults of directives."""
        run = Preprocessor(Reporter(source), _evaluate, self.macros, include)
        tokens = classify(self.enums.resolve(run.run(), _evaluate), self.types)
        return run, resolve_cycles(list(tokens))

    def parse(self, source: Source, include: Include = no_header, start: str = "unit") -> Any:
        """Return what the start rule makes of a text; raises SyntaxDiagnostic with all faults."""
        run, tokens = self.read(source, include)
        return self.build(run.reporter, tokens, start)

    def build(self, reporter: Reporter, tokens: Sequence[Token], start: str = "unit") -> Any:
        """Return what the start rule makes of tokens; raises as `parse`."""
        self.builder = self.builder or Builder(reporter)
        self.builder.reporter = reporter
        made = _Run(reporter, self.builder, start).parse(tokens)
        reporter.finish()
        return made


def parse_low(source: Source, *, defines: str = "", include: Include = no_header) -> low.Unit:
    """Parse `source`; `defines` is a prelude: macros, typedefs, structs and functions it may use.

    `include` gives the text of a header by its name, None for one that is known otherwise.

    Raises SyntaxDiagnostic with all faults found, in text order. Nothing is checked beyond syntax:
    see `verify_low`.
    """
    reading = _Reading()
    before = reading.parse(Source("<prelude>", defines), include).items
    items = map(without_spans, before)  # no text the reader can see has them
    return low.Unit(items=(*items, *reading.parse(source, include).items))


@dataclass(slots=True)
class Pieces:
    """The top-level items of texts, each parsed on its own: a fault in one leaves the others.

    `items` are all but functions. `dropped` are the conditions that were false.
    """

    functions: dict[str, tuple[Source, Sequence[Token]]] = field(default_factory=dict)
    own: list[str] = field(default_factory=list)  # functions of the last text
    items: list[Node] = field(default_factory=list)
    dropped: list[Token] = field(default_factory=list)
    faults: list[Diagnostic] = field(default_factory=list)  # of directives
    _reading: _Reading = field(default_factory=_Reading)
    _parsed: dict[str, low.Function] = field(default_factory=dict)

    def add(self, source: Source, include: Include = no_header) -> None:
        """Read one text after those before it."""
        run, tokens = self._reading.read(source, include)
        self.dropped, self.own = run.dropped, []
        self.faults += run.reporter.found.values()
        for piece in split_items(tokens):
            name = _function_name(piece)
            if name is not None and name not in self.functions:
                self.functions[name] = (source, piece)
                if piece[0].line not in run.foreign:
                    self.own.append(name)
            elif name is None:
                with contextlib.suppress(SyntaxDiagnostic):  # whoever needs it will say so
                    self.items += self._reading.build(Reporter(source), piece).items

    def function(self, name: str) -> low.Function:
        """Return one function; raises SyntaxDiagnostic with its faults."""
        if name not in self._parsed:
            source, piece = self.functions[name]
            first, last = piece[0].line or 0, piece[-1].end_line or 0
            if inside := [
                fault
                for fault in self.faults
                if fault.source is source and first <= fault.span.line <= last
            ]:
                raise SyntaxDiagnostic(inside)
            items = self._reading.build(Reporter(source), piece).items
            self.items += [n for i in items for n in i.walk() if isinstance(n, low.StructDef)]
            self._parsed[name] = next(i for i in items if isinstance(i, low.Function))
        return self._parsed[name]

    def unit(self, names: Iterable[str]) -> low.Unit:
        """Return a unit of functions with those they call; raises as `function` does."""
        waiting, found = list(names)[::-1], dict[str, low.Function]()
        while waiting:
            name = waiting.pop()
            if name in found or name not in self.functions:
                continue
            found[name] = self.function(name)
            waiting += [n.name for n in found[name].walk() if isinstance(n, Call)]
        return low.Unit(items=(*self.items, *found.values()))


def split_items(tokens: Sequence[Token]) -> list[Sequence[Token]]:
    """Return the tokens of each top-level item; `extern "C"` and namespaces are opened."""
    out: list[Sequence[Token]] = []
    start = depth = 0
    for i, token in enumerate(tokens):
        if (
            token == "{"
            and i > 1
            and (tokens[i - 1].type == "STRING" or "namespace" in tokens[i - 2 : i])
        ):
            start = i + 1
            continue
        depth += (token in ("{", "(", "[")) - (token in ("}", ")", "]"))
        if depth < 0:  # the end of an extern "C"
            depth, start = 0, i + 1
        body = token == "}" and depth == 0 and _function_name(tokens[start : i + 1]) is not None
        if depth == 0 and (token == ";" or body or token.type == "PRAGMA"):
            out.append(tokens[start : i + 1])
            start = i + 1
    return out


def _function_name(piece: Sequence[Token]) -> str | None:
    """Return the name of the function that an item defines, None for other items."""
    opening = next((i for i, t in enumerate(piece) if t == "{"), 0)
    if not opening or piece[opening - 1] != ")" or any(t == "=" for t in piece[:opening]):
        return None
    depth = 0
    for i in range(opening - 1, 0, -1):
        depth += (piece[i] == ")") - (piece[i] == "(")
        if depth == 0:
            return str(piece[i - 1]) if piece[i - 1].type in ("NAME", "TYPE_NAME") else None
    return None


def parse_low_expr(text: str) -> Expr:
    """Parse one expression; raises SyntaxDiagnostic."""
    expr: Expr = _Reading().parse(Source("<expression>", text), start="expression")
    return expr


def without_spans(node: Node) -> Node:
    """Return the tree as if made by a pass: it stands in no text the reader can see."""
    return replace(node.map_children(without_spans), span=NO_SPAN)


def _evaluate(tokens: Sequence[Token]) -> int | None:
    """Return the value of an `#if` condition, None if it is no constant."""
    reporter = Reporter(Source("<condition>", ""))
    expr = _Run(reporter, Builder(reporter), "expression").parse(tokens)
    return None if reporter.found else constant(expr, {})


@dataclass(slots=True)
class _Run:
    """One parse of a token list, with recovery at statement ends."""

    reporter: Reporter
    builder: Builder
    start: str

    def parse(self, tokens: Sequence[Token]) -> Any:
        """Return what the start rule builds, or None if the text does not parse at all."""
        parser = grammar().parse_interactive(start=self.start)
        restart = (_copy(parser), 0)
        parentheses = 0
        i = 0
        while i < len(tokens):
            i = after_barrier(tokens, i)
            if i == len(tokens):
                break
            token = tokens[i]
            if token.type == "NAME" and token in UNSUPPORTED:
                self.reporter.add(*_unsupported(token))
            else:
                try:
                    parser.feed_token(token)
                except UnexpectedToken:
                    self._report(parser, tokens, i)
                else:
                    i += 1
                    parentheses += (token == "(") - (token == ")")
                    if token in (";", "{", "}") and parentheses == 0:
                        restart = (_copy(parser), i)
                    continue
            if self.start != "unit" or self.reporter.full:
                return None
            parser = _copy(restart[0])
            i, parentheses = skip_statement(tokens, restart[1], i), 0
            restart = (restart[0], i)
        return self._finish(parser, tokens)

    def _finish(self, parser: InteractiveParser, tokens: Sequence[Token]) -> Any:
        last = tokens[-1] if tokens else Token("$END", "", line=1, column=1)
        try:
            tree = parser.feed_token(Token.new_borrow_pos("$END", "", last))
        except UnexpectedToken:
            if not self.reporter.found:
                opener = unclosed(tokens)
                what = (
                    f"this `{opener}` is never closed"
                    if opener is not None
                    else "the text ends too early"
                )
                span = token_span(opener if opener is not None else last)
                self.reporter.add("low-unclosed", what, span)
            return None
        if self.reporter.found:
            return None
        return self._build(tree) if isinstance(tree, Tree) else tree

    def _build(self, tree: Tree[Token]) -> Any:
        """Return the nodes of a parse tree; nesting that no walk could follow is a fault."""
        deep = _first_too_deep(tree)
        if deep is not None:
            message = f"this is nested more than {MOST_NESTING} levels deep"
            self.reporter.add("low-nesting", message, token_span(deep), NESTING_HINT)
            return None
        return self.builder.transform(tree)

    def _report(self, parser: InteractiveParser, tokens: Sequence[Token], i: int) -> None:
        token = tokens[i]
        before = tokens[i - 1] if i else None
        accepts: set[str] = parser.accepts()  # type: ignore[no-untyped-call]
        span = token_span(token)
        for known in _KNOWN_FAULTS:
            said = known(tokens, i, accepts)
            if said:
                code, message, at, hint = said
                self.reporter.add(code, message, at, hint)
                return
        place = f" after `{before}`" if before is not None else ""
        written = self.reporter.source.line(span.line)[span.column - 1 : span.end_column - 1]
        if token.type == "NUMBER" and written.isidentifier():
            message = f"`{written}` stands for {token} here"
            hint = "where it is to name something else, rename one of the two"
            self.reporter.add("low-taken-name", message, span, hint)
            return
        wanted = ", ".join(sorted(_READABLE[a] for a in accepts if a in _READABLE))
        hint = f"here may stand: {wanted}" if wanted else None
        self.reporter.add("low-syntax", f"unexpected `{token}`{place}", span, hint)


def _first_too_deep(tree: Tree[Token]) -> Token | None:
    """Return a token at which nesting goes too far; each case of a switch becomes an else-if."""
    waiting: list[tuple[Tree[Token] | Token, int]] = [(tree, 0)]
    while waiting:
        node, depth = waiting.pop()
        if isinstance(node, Tree):
            depth += 2 * sum(isinstance(n, Tree) and n.data == "label" for n in node.children)
            waiting += [(child, depth + 1) for child in reversed(node.children)]
        elif depth > MOST_NESTING:
            return node
    return None


def _copy(parser: InteractiveParser) -> InteractiveParser:
    # trees are never changed once built, so copies may share them
    copied: InteractiveParser = parser.copy(deepcopy_values=False)  # type: ignore[no-untyped-call]
    return copied


TYPE_HINT = "known are the C, <stdint.h> and SIMD types; a prelude may add a typedef"
Fault = tuple[str, str, Span, str | None] | None


def _unknown_type(tokens: Sequence[Token], i: int, accepts: set[str]) -> Fault:
    if (
        tokens[i] in ("=", ";", ",")
        and i > 2
        and tokens[i - 2] == "*"
        and tokens[i - 1].type == "NAME"
    ):
        unknown = tokens[i - 3]
        if unknown.type == "NAME" and (i < 4 or tokens[i - 4] in (";", "{", "}", "const")):
            return "low-unknown-type", f"`{unknown}` names no type", token_span(unknown), TYPE_HINT
    starts = i > 0 and (i < 2 or tokens[i - 2] in (";", "{", "}", "(", ",", "const", "static"))
    before = tokens[i - 1]
    star = before == "*" and i > 1 and "TYPE_NAME" in accepts
    name = tokens[i - 2] if star else before
    if tokens[i].type == "NAME" and "TYPE_NAME" in accepts and "NAME" not in accepts:
        return "low-unknown-type", f"`{tokens[i]}` names no type", token_span(tokens[i]), TYPE_HINT
    if i and tokens[i].type == "NAME" and name.type == "NAME" and (starts or star):
        return "low-unknown-type", f"`{name}` names no type", token_span(name), TYPE_HINT
    return None


def _varargs(tokens: Sequence[Token], i: int, accepts: set[str]) -> Fault:
    if tokens[i].type != "ELLIPSIS":
        return None
    message = "variable arguments are outside the subset"
    return "low-varargs", message, token_span(tokens[i]), "name each argument"


def _label(tokens: Sequence[Token], i: int, accepts: set[str]) -> Fault:
    jumps = (j for j in range(1, len(tokens)) if tokens[j - 1] == "goto")
    jump = next((j for j in jumps if tokens[j] == tokens[i - 1]), None)
    return None if tokens[i] != ":" or jump is None else _unsupported(tokens[jump - 1])


def _unsupported(token: Token) -> tuple[str, str, Span, str]:
    what, hint = UNSUPPORTED[token]
    return "low-unsupported", f"{what} is outside the kernel subset", token_span(token), hint


def _missing_end(tokens: Sequence[Token], i: int, accepts: set[str]) -> Fault:
    before = tokens[i - 1] if i else None
    if before is None or before in (";", "{", "}") or "SEMICOLON" not in accepts:
        return None
    if tokens[i] == "}" or (tokens[i].line or 0) > (before.end_line or 0):
        at = token_span(before)
        end = Span(at.end_line, at.end_column, at.end_line, at.end_column + 1)
        return "low-missing-semicolon", f"`;` is missing after `{before}`", end, None
    return None


_KNOWN_FAULTS = (_varargs, _label, _unknown_type, _missing_end)
_READABLE = {
    "SEMICOLON": "`;`",
    "RPAR": "`)`",
    "LPAR": "`(`",
    "RSQB": "`]`",
    "RBRACE": "`}`",
    "LBRACE": "`{`",
    "COMMA": "`,`",
    "EQUAL": "`=`",
    "NAME": "a name",
    "NUMBER": "a number",
    "TYPE_NAME": "a type",
}


def after_barrier(tokens: Sequence[Token], i: int) -> int:
    """Return the index after an `asm` without instructions at `i`, if it computes nothing.

    One that writes an output may give it an input's value, and `++` counts without instructions.
    """
    start = i + 1 + (tokens[i + 1 : i + 2] in (["volatile"], ["__volatile__"]))
    if UNSUPPORTED.get(tokens[i], "") != ASSEMBLY or tokens[start + 1 : start + 2] != ['""']:
        return i
    end = split_arguments(tokens, start)[1]
    writes = any(t.startswith('"=') or t in ("++", "--", "=") for t in tokens[start:end])
    return i if end > len(tokens) or tokens[start + 2] not in (":", ")") or writes else end


def skip_statement(tokens: Sequence[Token], start: int, fault: int) -> int:
    """Return the index after the statement that began at `start` and is broken at `fault`."""
    depth = 0
    for i in range(start, len(tokens)):
        token = tokens[i]
        if depth == 0 and token == "}" and i >= fault:
            return max(i, fault + (i == fault and i == start))
        depth += (token in ("(", "{", "[")) - (token in (")", "}", "]"))
        if i >= fault and depth <= 0 and token in (";", "}"):
            return i + 1
    return len(tokens)


def unclosed(tokens: Sequence[Token]) -> Token | None:
    """Return the innermost bracket that is open at the end."""
    stack: list[Token] = []
    for token in tokens:
        if token in ("(", "[", "{"):
            stack.append(token)
        elif token in (")", "]", "}") and stack:
            stack.pop()
    return stack[-1] if stack else None
