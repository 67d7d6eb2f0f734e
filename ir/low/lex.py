"""C text in, tokens out: the generated lexer, the table of type names, and spans of tokens.

Everything that reads tokens (preprocessor, parser) takes them from here.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO
from pathlib import Path

import lark
from lark import Lark, Token

from dovetail.ir.cache import cache_directory
from dovetail.ir.diagnostics import Diagnostic, Source, Span
from dovetail.ir.errors import SpecError, SyntaxDiagnostic
from dovetail.ir.files import write_whole
from dovetail.ir.low.types import SCALARS, VECTOR_GROUPS, VECTORS

GRAMMAR = Path(__file__).with_name("grammar.lark")

BASE_WORDS = frozenset(
    "void char short int long float double signed unsigned _Bool bool _Float16 __bf16".split()
)
"""Words that combine into arithmetic types; see `dovetail.ir.low.types.ARITHMETIC`."""

TYPE_NAMES = BASE_WORDS.union(SCALARS, VECTORS, VECTOR_GROUPS)

_KEYWORD_KINDS = {
    **dict.fromkeys(("inline", "__inline", "__inline__"), "INLINE"),
    **dict.fromkeys(("restrict", "__restrict", "__restrict__"), "RESTRICT"),
    **dict.fromkeys(("struct", "union"), "STRUCT"),
}


MOST_FAULTS = 100
"""Faults of one text that are shown: nobody mends more at a time."""


@dataclass(slots=True)
class Reporter:
    """Collects the diagnostics of one text, so that all faults are shown at once, or the first.

    found: by place; a second fault at the same place is the echo of the first and is dropped.
    """

    source: Source
    found: dict[Span, Diagnostic] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        """Whether later faults would be left out."""
        return len(self.found) >= MOST_FAULTS

    def add(self, code: str, message: str, span: Span, hint: str | None = None) -> None:
        """Record one fault."""
        if not self.full:
            self.found.setdefault(span, Diagnostic(code, message, span, self.source, hint))

    def finish(self) -> None:
        """Raise SyntaxDiagnostic with everything recorded, in text order, if there is anything."""
        if self.found:
            found = self.found.values()
            raise SyntaxDiagnostic(sorted(found, key=lambda d: (d.span.line, d.span.column)))


@cache
def grammar() -> Lark:
    """Return the parser generated from grammar.lark; start rules are `unit` and `expression`.

    Its tables take a third of a second: the build cache keeps them, where there is one.
    """
    text = GRAMMAR.read_bytes()
    made_by = f"{lark.__version__} {sys.version}".encode()
    name = f"{hashlib.sha256(text + made_by).hexdigest()}.tables"
    with suppress(Exception):  # what cannot be read, or was damaged, is made again
        return Lark.load(BytesIO((cache_directory() / "grammar" / name).read_bytes()))
    made = _make_grammar(text.decode())
    with suppress(OSError, SpecError):
        folder, tables = cache_directory() / "grammar", BytesIO()
        folder.mkdir(parents=True, exist_ok=True)
        made.save(tables)
        write_whole(folder / name, tables.getvalue())
    return made


def _make_grammar(text: str) -> Lark:
    return Lark(
        text,
        parser="lalr",
        lexer="basic",
        strict=True,
        start=["unit", "expression", "lexical"],
        keep_all_tokens=True,
        maybe_placeholders=False,
    )


@cache
def _lexer() -> Lark:
    # `Lark.lex` of an object with a parser builds the lexer anew on each call
    text = GRAMMAR.read_text(encoding="utf-8")
    return Lark(text, parser=None, lexer="basic", strict=True, start=["unit", "lexical"])


def tokenise(text: str) -> Iterator[Token]:
    """Yield the tokens of `text` without comments; what is no token comes as UNKNOWN."""
    return _lexer().lex(text)


def token_span(token: Token) -> Span:
    """Return where `token` stands; macro expansions stand where the macro is used."""
    return Span(token.line or 0, token.column or 0, token.end_line or 0, token.end_column or 0)


def join_spans(first: Span, last: Span) -> Span:
    """Return the span from the start of `first` to the end of `last`."""
    return Span(first.line, first.column, last.end_line, last.end_column)


def move_token(token: Token, span: Span) -> Token:
    """Return `token` with `span` as its place."""
    return Token(
        token.type,
        str(token),
        line=span.line,
        column=span.column,
        end_line=span.end_line,
        end_column=span.end_column,
    )


def classify(tokens: Iterable[Token], types: set[str]) -> Iterator[Token]:
    """Yield `tokens` with type names and respelled keywords told apart from plain names.

    `types` holds the known typedef names and grows as typedefs go by.
    """
    stream = list(tokens)
    pending = _typedef_names(stream)
    declared = set(pending.values())  # plain names there, though an inner block may know them
    for i, token in enumerate(stream):
        if i in pending:
            types.add(str(stream[pending[i]]))
        if token.type != "NAME" or i in declared or (i and stream[i - 1] in (".", "->")):
            yield token
        elif token in _KEYWORD_KINDS:
            yield token.update(type=_KEYWORD_KINDS[token])
        elif token in TYPE_NAMES or token in types:
            yield token.update(type="TYPE_NAME")
        else:
            yield token


def _typedef_names(stream: list[Token]) -> dict[int, int]:
    """Return where names stand that typedefs declare, by the index from which each is known."""
    found: dict[int, int] = {}
    opened: set[int] = set()  # depths of braces at which a typedef has not ended
    depth = last = 0
    for i, token in enumerate(stream):
        depth += (token == "{") - (token == "}")
        if token.type == "TYPEDEF":
            opened.add(depth)
            last = i
        elif token.type == "NAME":
            last = i
        elif depth in opened and token in (";", "["):
            opened.discard(depth)
            found[i] = last
    return found
