"""The part of the C preprocessor that kernels use: text in, macro-free tokens out.

`#define` (object- and function-like) is expanded, with spans at the use; `#include` is ignored;
`#if`, `#ifdef` are resolved; `#pragma` stays as a token; `assert` and `__attribute__` vanish.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lark import Token

from dovetail.ir.low.lex import Reporter, join_spans, move_token, token_span, tokenise


@dataclass(frozen=True, slots=True)
class Macro:
    """A `#define`. `params` is None for an object-like macro."""

    name: str
    params: tuple[str, ...] | None
    body: tuple[Token, ...]


def _built_in(name: str, params: tuple[str, ...], body: str) -> tuple[str, Macro]:
    return name, Macro(name, params, tuple(tokenise(body)))


_BUILT_IN = (
    ("assert", ("x",), ""),
    ("static_assert", ("x", "y"), ""),
    ("_Static_assert", ("x", "y"), ""),
    ("__attribute__", ("x",), ""),
    ("_Alignas", ("x",), ""),
    ("__builtin_expect", ("x", "y"), "(x)"),
    ("INT32_C", ("x",), "((int32_t)(x))"),
    ("INT64_C", ("x",), "((int64_t)(x))"),
    ("UINT32_C", ("x",), "((uint32_t)(x))"),
    ("UINT64_C", ("x",), "((uint64_t)(x))"),
)
"""Macros of the standard headers and of compilers; a `#define` of the text overrides them.

Alignment may be dropped: every array is printed with the alignment of a cache line.
"""

TUNE = re.compile(r"dovetail\s+tune\s*\(\s*([A-Za-z_]\w*)\s+in\s+(\d+)\s*\.\.\s*(\d+)\s*\)\s*")
"""`#pragma dovetail tune(NAME in 1..6)`: name, first and last value."""

MOST_NESTING = 150
"""Levels of a parse tree, or of macros; Python's own stack bounds what can be walked."""
MOST_EXPANDED = 1 << 20
"""Tokens that macros of one text may make: each may double what the one before it makes."""

_DIRECTIVE = re.compile(r"#\s*(\w*)\s*(.*)", re.DOTALL)


@dataclass(slots=True)
class Preprocessor:
    """Reads one text. `macros` may come from an earlier text (a prelude) and grows."""

    reporter: Reporter
    evaluate: Callable[[Sequence[Token]], int]
    macros: dict[str, Macro] = field(default_factory=dict)
    _conditions: list[tuple[bool, bool, Token]] = field(default_factory=list)  # live, taken, where
    _tuned: set[str] = field(default_factory=set)
    _out: list[Token] = field(default_factory=list)
    _depth: int = 0
    _expanded: int = 0

    def run(self, text: str) -> list[Token]:
        """Return the tokens of `text` after preprocessing; faults go to the reporter."""
        if not self.macros:
            self.macros.update(_built_in(*row) for row in _BUILT_IN)
        segment: list[Token] = []
        for token in tokenise(text):
            if token.type == "DIRECTIVE":
                self._out += self._expand(segment, frozenset())
                segment = []
                self._directive(token)
            elif token.type in _BAD_TOKENS:
                self._bad_token(token, segment)
            elif self._live():
                segment.append(token)
        self._out += self._expand(segment, frozenset())
        for _, _, opener in self._conditions:
            self._report("low-conditional", "this conditional has no #endif", opener)
        return self._out

    def _live(self) -> bool:
        return not self._conditions or self._conditions[-1][0]

    def _report(self, code: str, message: str, token: Token, hint: str | None = None) -> None:
        self.reporter.add(code, message, token_span(token), hint)

    def _bad_token(self, token: Token, segment: list[Token]) -> None:
        """Report the token and leave something that parses in its place: one fault, one message."""
        code, message, hint = _BAD_TOKENS[token.type]
        if not self._live():
            return
        self._report(code, message.format(str(token)), token, hint)
        if code == "low-string":
            segment.append(token.update(type="NUMBER", value="0"))
        elif code == "low-comment":
            self.reporter.finish()  # what follows is no code
        elif code == "low-varargs" and segment and segment[-1] == ",":
            segment.pop()

    # ---- directives ----

    def _directive(self, token: Token) -> None:
        match = _DIRECTIVE.match(str(token).replace("\\\n", " "))
        assert match
        word, rest = match.groups()
        if word in _CONDITIONALS:
            _CONDITIONALS[word](self, token, rest)
        elif self._live() and word in _PLAIN:
            _PLAIN[word](self, token, rest)
        elif self._live() and word:
            self._report(
                "low-directive",
                f"unknown directive #{word}",
                token,
                "known are define, undef, include, pragma, if, ifdef, ifndef, else, elif, endif",
            )

    def _define(self, token: Token, rest: str) -> None:
        words = list(tokenise(rest))
        if not words or words[0].type != "NAME":
            self._report("low-define", "#define needs a name", token)
            return
        name, params, body = str(words[0]), None, words[1:]
        if body and body[0] == "(" and body[0].start_pos == words[0].end_pos:
            close = body.index(Token("RPAR", ")")) if ")" in body else 0
            inner = body[1:close]
            params = tuple(str(t) for t in inner[::2])
            if not close or any(t.type != "NAME" for t in inner[::2]) or set(inner[1::2]) - {","}:
                self._report(
                    "low-define",
                    f"the parameters of macro {name} are malformed",
                    token,
                    "write #define NAME(a, b) body; variadic macros are outside the subset",
                )
                return
            body = body[close + 1 :]
        if any(t.type == "DIRECTIVE" for t in body):
            self._report("low-paste", f"macro {name} uses # or ##", token, "write the text out")
            return
        self.macros[name] = Macro(name, params, tuple(body))
        self._declare_tuned(name, token)

    def _declare_tuned(self, name: str, token: Token) -> None:
        # A tuned #define must survive as a name: it becomes a constant the lifter can see.
        macro = self.macros.get(name)
        if name in self._tuned and macro and macro.params is None:
            del self.macros[name]
            head = tokenise(f"static const int {name} =")
            made = [*head, *macro.body, *tokenise(";")]
            self._out += [move_token(t, token_span(token)) for t in made]

    def _pragma(self, token: Token, rest: str) -> None:
        text = " ".join(rest.split())
        if text.startswith("dovetail"):
            tune = TUNE.fullmatch(text)
            if not tune or int(tune[2]) > int(tune[3]):
                self._report(
                    "low-pragma",
                    "this dovetail pragma is malformed",
                    token,
                    "write #pragma dovetail tune(NAME in 1..6)",
                )
                return
            self._tuned.add(tune[1])
            self._out.append(move_token(Token("PRAGMA", text), token_span(token)))
            self._declare_tuned(tune[1], token)
            return
        self._out.append(move_token(Token("PRAGMA", text), token_span(token)))

    # ---- conditionals ----

    def _open(self, token: Token, live: bool) -> None:
        live = live and self._live()
        self._conditions.append((live, live, token))

    def _elif(self, token: Token, rest: str) -> None:
        if self._inside(token):
            _, taken, opener = self._conditions.pop()
            live = not taken and self._live() and self._condition(token, rest)
            self._conditions.append((live, taken or live, opener))

    def _else(self, token: Token, rest: str) -> None:
        if self._inside(token):
            _, taken, opener = self._conditions.pop()
            self._conditions.append((not taken and self._live(), True, opener))

    def _endif(self, token: Token, rest: str) -> None:
        if self._inside(token):
            self._conditions.pop()

    def _inside(self, token: Token) -> bool:
        if not self._conditions:
            self._report("low-conditional", "this stands outside any #if", token)
        return bool(self._conditions)

    def _condition(self, token: Token, rest: str) -> bool:
        rest = re.sub(
            r"\bdefined\s*(?:\(\s*(\w+)\s*\)|(\w+))",
            lambda m: str(int((m[1] or m[2]) in self.macros)),
            rest,
        )
        words = self._expand(
            [move_token(t, token_span(token)) for t in tokenise(rest)], frozenset()
        )
        plain = [Token("NUMBER", "0") if t.type == "NAME" else t for t in words]
        try:
            return bool(self.evaluate(plain))
        except ValueError:
            self._report("low-conditional", "this condition is no constant", token)
            return False

    # ---- expansion ----

    def _expand(self, tokens: Sequence[Token], hidden: frozenset[str]) -> list[Token]:
        out: list[Token] = []
        i = 0
        while i < len(tokens):
            token = tokens[i]
            i += 1
            macro = self.macros.get(str(token)) if token.type == "NAME" else None
            if macro is None or macro.name in hidden:
                out.append(token)
            elif macro.params is None:
                self._enter(token)
                body = [move_token(t, token_span(token)) for t in macro.body]
                out += self._leave(body, hidden | {macro.name}, token)
            elif i < len(tokens) and tokens[i] == "(":
                self._enter(token)
                body, i = self._call(macro, tokens, i, hidden)
                out += self._leave(body, hidden | {macro.name}, token)
            else:
                out.append(token)
        return out

    def _enter(self, use: Token) -> None:
        """Begin to expand a macro; those nested too deep are a fault that ends the text."""
        self._depth += 1
        if self._depth > MOST_NESTING:
            message = f"macros are nested more than {MOST_NESTING} levels deep here"
            self._report("low-nesting", message, use)
            self.reporter.finish()

    def _leave(self, body: Sequence[Token], hidden: frozenset[str], use: Token) -> list[Token]:
        """Return what a macro's `body` is expanded to; too much of that is a fault as well."""
        self._expanded += len(body)
        if self._expanded > MOST_EXPANDED:
            message = f"macros make more than {MOST_EXPANDED} tokens of this text"
            self._report("low-macro-size", message, use, "write a loop or a function")
            self.reporter.finish()
        out = self._expand(body, hidden)
        self._depth -= 1
        return out

    def _call(
        self, macro: Macro, tokens: Sequence[Token], i: int, hidden: frozenset[str]
    ) -> tuple[list[Token], int]:
        """Return the body with arguments put in, and the index after the call; `i` is at `(`."""
        args, end = split_arguments(tokens, i)
        use = token_span(tokens[i - 1])
        assert macro.params is not None
        if end > len(tokens):
            self.reporter.add("low-macro-call", f"the call of {macro.name} is never closed", use)
            self.reporter.finish()  # the rest of the text would be its argument
        whole = join_spans(use, token_span(tokens[end - 1]))
        if macro.name in _ANY_ARGUMENTS:
            return [], end
        if len(args) != len(macro.params):
            self.reporter.add(
                "low-macro-call",
                f"macro {macro.name} takes {len(macro.params)} arguments, here are {len(args)}",
                whole,
            )
            return [move_token(Token("NUMBER", "0"), whole)], end
        values = {p: self._expand(a, hidden) for p, a in zip(macro.params, args, strict=True)}
        body: list[Token] = []
        for token in macro.body:
            body += values[token] if token in values else [move_token(token, whole)]
        return body, end


_ANY_ARGUMENTS = {name for name, _, body in _BUILT_IN if not body}


def split_arguments(tokens: Sequence[Token], i: int) -> tuple[list[list[Token]], int]:
    """Split the call whose `(` is `tokens[i]` at its commas; also return the index after it."""
    args: list[list[Token]] = [[]]
    depth = 0
    for j in range(i, len(tokens)):
        token = tokens[j]
        depth += (token == "(") - (token == ")")
        if depth == 0:
            return ([] if args == [[]] else args), j + 1
        if depth == 1 and token == ",":
            args.append([])
        elif j > i:
            args[-1].append(token)
    return args, len(tokens) + 1


_BAD_TOKENS: dict[str, tuple[str, str, str | None]] = {
    "UNKNOWN": ("low-character", "the character {!r} has no meaning here", None),
    "STRING": ("low-string", "strings are outside the kernel subset", "kernels compute numbers"),
    "CHARACTER": ("low-string", "characters are outside the kernel subset", "write the number"),
    "OPEN_COMMENT": ("low-comment", "this comment is never closed", "close it with */"),
    "ELLIPSIS": ("low-varargs", "variable arguments are outside the subset", "name each argument"),
}

_Handler = Callable[[Preprocessor, Token, str], object]
_PLAIN: dict[str, _Handler] = {
    "define": Preprocessor._define,
    "undef": lambda run, token, rest: run.macros.pop(rest.strip(), None),
    "include": lambda run, token, rest: None,  # the tables of this package know what they declare
    "pragma": Preprocessor._pragma,
    "error": lambda run, token, rest: run._report("low-error", f"#error {rest.strip()}", token),
}
_CONDITIONALS: dict[str, _Handler] = {
    "if": lambda run, token, rest: run._open(token, run._live() and run._condition(token, rest)),
    "ifdef": lambda run, token, rest: run._open(token, rest.strip() in run.macros),
    "ifndef": lambda run, token, rest: run._open(token, rest.strip() not in run.macros),
    "elif": Preprocessor._elif,
    "else": Preprocessor._else,
    "endif": Preprocessor._endif,
}


def preprocess(
    text: str,
    reporter: Reporter,
    macros: dict[str, Macro],
    evaluate: Callable[[Sequence[Token]], int],
) -> Iterable[Token]:
    """Return the tokens of `text` with macros expanded; `macros` is read and extended.

    `evaluate` gives the value of a constant expression and raises ValueError for anything else.
    """
    return Preprocessor(reporter, evaluate, macros).run(text)
