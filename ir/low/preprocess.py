"""The part of the C preprocessor that kernels use: text in, macro-free tokens out.

`#define` (object- and function-like) is expanded, with spans at the use; `#include` is ignored
unless its file is given; `#if`, `#ifdef` are resolved; `#pragma` stays as a token; `assert` and
`__attribute__` vanish.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from lark import Token

from dovetail.ir.low.lex import Reporter, join_spans, move_token, token_span, tokenise
from dovetail.ir.low.types import LIBRARY
from dovetail.ir.node import MOST_NESTING

Include = Callable[[str], str | None]
"""Gives the text of a header by its name, None for one that is known otherwise."""


def no_header(name: str) -> str | None:
    """Return that no header is at hand."""
    return None


@dataclass(frozen=True, slots=True)
class Macro:
    """A `#define`. `params` is None for an object-like macro."""

    name: str
    params: tuple[str, ...] | None
    body: tuple[Token, ...]
    variadic: bool = False  # the last parameter, __VA_ARGS__, takes all further arguments


_BUILT_IN = (
    ("assert", ("x",), ""),
    ("static_assert", ("x", "y"), ""),
    ("_Static_assert", ("x", "y"), ""),
    ("__attribute__", ("x",), ""),
    ("_Alignas", ("x",), ""),
    ("_Pragma", ("x",), ""),
    ("__builtin_expect", ("x", "y"), "(x)"),
    ("__builtin_expect_with_probability", ("x", "y", "p"), "(x)"),
    ("__builtin_assume_aligned", ("x", "y"), "(x)"),
    ("__builtin_unreachable", (), "((void)0)"),
    ("_MM_SHUFFLE", ("z", "y", "x", "w"), "(((z) << 6) | ((y) << 4) | ((x) << 2) | (w))"),
    *(
        (f"{u}INT{bits}_C", ("x",), f"(({u.lower()}int{bits}_t)(x))")
        for u in ("", "U")
        for bits in (8, 16, 32, 64)
    ),
)
"""Macros of the standard headers and of compilers; a `#define` of the text overrides them.

Alignment may be dropped: every array is printed with the alignment of a cache line.
"""

_WITHOUT_EFFECT = ("register", "__extension__")
"""Words that change nothing that a kernel computes."""

TUNE = re.compile(
    r"dovetail\s+tune\s*\(\s*([A-Za-z_]\w*)\s+in\s+(\d{1,6})\s*\.\.\s*(\d{1,6})\s*\)\s*"
)
"""`#pragma dovetail tune(NAME in 1..6)`: name, first and last value."""

MOST_EXPANDED = 1 << 20
"""Tokens that macros of one text may make: each may double what the one before it makes."""

MOST_FILES = 50
"""Levels of files that include one another: those without guards might never end."""

_DIRECTIVE = re.compile(r"#\s*(\w*)\s*(.*)", re.DOTALL)


@cache
def _built_in() -> dict[str, Macro]:
    macros = {name: Macro(name, params, tuple(tokenise(body))) for name, params, body in _BUILT_IN}
    macros |= {word: Macro(word, None, ()) for word in _WITHOUT_EFFECT}
    spelled = {f"__builtin_{name}": name for name in LIBRARY}
    return macros | {word: Macro(word, None, tuple(tokenise(n))) for word, n in spelled.items()}


@dataclass(slots=True)
class Preprocessor:
    """Reads the text of `reporter`. `macros` may come from an earlier text (a prelude) and grows.

    evaluate: gives the value of a constant expression, None for anything else.
    """

    reporter: Reporter
    evaluate: Callable[[Sequence[Token]], int | None]
    macros: dict[str, Macro]
    include: Include
    dropped: list[Token] = field(default_factory=list)  # false conditions of the text itself
    foreign: set[int] = field(default_factory=set)  # lines at which a file was included
    _once: set[str] = field(default_factory=set)  # files that are read once: they say so
    _files: list[tuple[str, Token]] = field(default_factory=list)  # being read, and from where
    _conditions: list[tuple[bool, bool, Token]] = field(default_factory=list)  # live, taken, where
    _tuned: set[str] = field(default_factory=set)
    _out: list[Token] = field(default_factory=list)
    _depth: int = 0
    _expanded: int = 0

    def run(self) -> list[Token]:
        """Return the tokens of the text after preprocessing; faults go to the reporter."""
        if not self.macros:
            self.macros.update(_built_in())
        self._read(self.reporter.source.text)
        for _, _, opener in self._conditions:
            self._report("low-conditional", "this conditional has no #endif", opener)
        return self._out

    def _read(self, text: str) -> None:
        segment: list[Token] = []
        for token in tokenise(text):
            if token.type == "DIRECTIVE":
                self._out += self._expand(segment, frozenset())
                segment = []
                self._directive(token)
            elif not self._live():
                continue
            elif token.type in _BAD_TOKENS:
                self._bad_token(token)
            else:
                segment.append(token)
        self._out += self._expand(segment, frozenset())

    def _live(self) -> bool:
        return not self._conditions or self._conditions[-1][0]

    def _report(self, code: str, message: str, token: Token, hint: str | None = None) -> None:
        self.reporter.add(code, message, token_span(token), hint)

    def _bad_token(self, token: Token) -> None:
        code, message, hint = _BAD_TOKENS[token.type]
        self._report(code, message.format(str(token)), token, hint)
        if code == "low-comment":
            self.reporter.finish()  # what follows is no code

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

    def _include(self, token: Token, rest: str) -> None:
        found = re.match(r'\s*[<"]([^>"]*)[>"]', rest)
        name = found[1] if found else ""
        text = self.include(name) if name not in self._once else None
        if text is None:
            return  # the tables of this package know what standard headers declare
        self._files.append((name, token))
        if len(self._files) > MOST_FILES:
            message = f"files include one another more than {MOST_FILES} levels deep from here"
            self._report("low-nesting", message, self._files[0][1], "guard them with #ifndef")
            self.reporter.finish()
        start = len(self._out)
        header = name.endswith((".h", ".hpp"))  # what another file has is a part of this text
        foreign = self.foreign | {token.line or 0} if header else self.foreign
        self._read(text)
        self._files.pop()
        self.foreign = foreign  # without lines of the file that was read
        self._out[start:] = [move_token(t, token_span(token)) for t in self._out[start:]]

    def _define(self, token: Token, rest: str) -> None:
        words = list(tokenise(_spell_paste(rest)))
        if not words or words[0].type != "NAME":
            self._report("low-define", "#define needs a name", token)
            return
        name, params, body = str(words[0]), None, words[1:]
        variadic = False
        if body and body[0] == "(" and body[0].start_pos == words[0].end_pos:
            close = body.index(Token("RPAR", ")")) if ")" in body else 0
            inner = body[1:close]
            variadic = bool(inner) and inner[-1].type == "ELLIPSIS"
            if variadic:
                inner[-1] = inner[-1].update(type="NAME", value="__VA_ARGS__")
            params = tuple(str(t) for t in inner[::2])
            if not close or any(t.type != "NAME" for t in inner[::2]) or set(inner[1::2]) - {","}:
                self._report(
                    "low-define",
                    f"the parameters of macro {name} are malformed",
                    token,
                    "write #define NAME(a, b) body",
                )
                return
            body = body[close + 1 :]
        self.macros[name] = Macro(name, params, tuple(body), variadic)
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
        tune = TUNE.fullmatch(text)
        if text.startswith("dovetail") and not (tune and int(tune[2]) <= int(tune[3])):
            hint = "write #pragma dovetail tune(NAME in 1..6), with numbers below a million"
            self._report("low-pragma", "this dovetail pragma is malformed", token, hint)
            return
        if text == "once" and self._files:
            self._once.add(self._files[-1][0])
            return
        self._out.append(move_token(Token("PRAGMA", text), token_span(token)))
        if tune:
            self._tuned.add(tune[1])
            self._declare_tuned(tune[1], token)

    # ---- conditionals ----

    def _open(self, token: Token, live: bool) -> None:
        if self._live() and not live and not self._files:
            self.dropped.append(token)
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
        value = self.evaluate(plain)
        if value is None:
            self._report("low-conditional", "this condition is no constant", token)
        return bool(value)

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
                made = self._leave(body, hidden | {macro.name}, token)
                if i < len(tokens) and tokens[i] == "(" and self._takes_arguments(made):
                    tokens, i = [made.pop(), *tokens[i:]], 0  # its arguments follow the name
                out += made
            elif i < len(tokens) and tokens[i] == "(":
                self._enter(token)
                body, i = self._call(macro, tokens, i, hidden)
                out += self._leave(body, hidden | {macro.name}, token)
            else:
                out.append(token)
        return out

    def _takes_arguments(self, made: Sequence[Token]) -> bool:
        """Tell whether tokens end with the name of a macro with parameters."""
        last = self.macros.get(str(made[-1])) if made and made[-1].type == "NAME" else None
        return last is not None and last.params is not None

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
        if macro.variadic:
            args = _join_last(args, len(macro.params))
        if len(args) != len(macro.params):
            self.reporter.add(
                "low-macro-call",
                f"macro {macro.name} takes {len(macro.params)} arguments, here are {len(args)}",
                whole,
            )
            return [move_token(Token("NUMBER", "0"), whole)], end
        raw = dict(zip(macro.params, args, strict=True))
        pasted = any(token == PASTE for token in macro.body)
        values = raw if pasted else {p: self._expand(a, hidden) for p, a in raw.items()}
        body: list[Token] = []
        for token in macro.body:
            if token.type == "STRING" and str(token)[1:-1] in raw:
                body.append(move_token(token, whole))
            else:
                body += values[token] if token in values else [move_token(token, whole)]
            if token in values and not values[token] and pasted:
                body.append(move_token(Token("UNKNOWN", EMPTY), whole))
        return (paste(body) if pasted else body), end


PASTE, EMPTY = "\x01", "\x02"
"""Characters that stand for `##` in macros, and for an argument without tokens beside it."""


def _spell_paste(text: str) -> str:
    """Return the text of a `#define` with `##` as a token, and `#x` as a string."""
    return re.sub(r"#\s*([A-Za-z_]\w*)", r'"\1"', re.sub(r"\s*##\s*", f" {PASTE} ", text))


def _join_last(args: list[list[Token]], count: int) -> list[list[Token]]:
    """Return `count` arguments: those too many belong to the last one, with their commas."""
    joined: list[Token] = []
    for i, arg in enumerate(args[count - 1 :]):
        joined += [*([Token("COMMA", ",")] if i else []), *arg]
    return [*args[: count - 1], joined]


def paste(tokens: Sequence[Token]) -> list[Token]:
    """Return tokens with those around each PASTE made one."""
    out: list[Token] = []
    i = 0
    while i < len(tokens):
        token = tokens[i]
        i += 1
        if token != PASTE or not out or i == len(tokens):
            out.append(token)
            continue
        left, right = out.pop(), tokens[i]
        i += 1
        if EMPTY in (left, right):
            kept = [t for t in (left, right) if t != EMPTY and not (left == "," and t == ",")]
            out += kept or [left]
        elif left == ",":
            out += [left, right]
        else:
            made = tokenise(f"{left}{right}")
            out += [move_token(t, token_span(left)) for t in made]
    return [t for t in out if t != EMPTY]


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
    "OPEN_COMMENT": ("low-comment", "this comment is never closed", "close it with */"),
}

_Handler = Callable[[Preprocessor, Token, str], object]
_PLAIN: dict[str, _Handler] = {
    "define": Preprocessor._define,
    "undef": lambda run, token, rest: run.macros.pop(rest.strip(), None),
    "include": Preprocessor._include,
    "warning": lambda run, token, rest: None,
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
