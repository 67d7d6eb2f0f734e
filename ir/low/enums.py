"""Enumerations on tokens, before these are parsed: types become integers, names their numbers.

As gcc has it, an enumeration without negative numbers is unsigned; its names are int.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lark import Token

Evaluate = Callable[[Sequence[Token]], int | None]
_KINDS = {"(": "LPAR", "-": "MINUS", ")": "RPAR"}
_BEFORE_BLOCKS = (")", "{", "}", ";", ":", "else", "do")
"""What braces of statements follow; what others define, as of a struct, holds behind them."""


@dataclass(slots=True)
class Enums:
    """The numbers of names, and the types of enumerations with a tag, of all texts so far.

    Those of a function hold until its block ends.
    """

    numbers: Mapping[str, int] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    _before: tuple[Mapping[str, int], Mapping[str, str]] = ({}, {})  # both before this statement
    _opened: list[tuple[Mapping[str, int], Mapping[str, str]] | None] = field(default_factory=list)

    def resolve(self, tokens: Sequence[Token], evaluate: Evaluate) -> list[Token]:
        """Return the tokens without enumerations, but for those whose numbers are no constants."""
        out: list[Token] = []
        i = 0
        while i < len(tokens):
            found = self._type(tokens, i, evaluate) if tokens[i] == "enum" else None
            if found is None:
                member = out[-1:] in (["."], ["->"])
                self._scope(tokens[i], out)
                out += [tokens[i]] if member else self._number(tokens[i])
                i += 1
                continue
            type_, end = found
            if out[-1:] in ([], [";"], ["{"], ["}"]) and tokens[end : end + 1] == [";"]:
                self._scope(tokens[end], out)
                i = end + 1  # nothing is declared with it
                continue
            out.append(Token.new_borrow_pos("NAME", type_, tokens[i]))
            i = end
        return out

    def _scope(self, token: Token, out: Sequence[Token]) -> None:
        """Forget at the end of a block what it defines, and what a function's parameters do."""
        if token == "{":
            self._opened.append(self._before if out and out[-1] in _BEFORE_BLOCKS else None)
        elif token == "}" and self._opened and (kept := self._opened.pop()):
            self.numbers, self.tags = kept
        if token in ("{", "}", ";"):
            self._before = self.numbers, self.tags

    def _type(
        self, tokens: Sequence[Token], start: int, evaluate: Evaluate
    ) -> tuple[str, int] | None:
        """Return the type that an enumeration is, and where what names or defines it ends."""
        opening = start + 1 + (tokens[start + 1 : start + 2] != ["{"])
        tag = "".join(tokens[start + 1 : opening])
        if tokens[opening : opening + 1] != ["{"]:
            return (self.tags[tag], opening) if tag in self.tags else None
        end = next((i for i in range(opening, len(tokens)) if tokens[i] == "}"), opening)
        numbers = self._define(tokens[opening + 1 : end], evaluate)
        if numbers is None:
            return None
        self.numbers = {**self.numbers, **numbers}
        type_ = "int" if min(numbers.values(), default=0) < 0 else "unsigned"
        if tag:
            self.tags = {**self.tags, tag: type_}
        return type_, end + 1

    def _define(self, tokens: Sequence[Token], evaluate: Evaluate) -> dict[str, int] | None:
        """Return the numbers of the names in braces; None where one is no constant."""
        numbers: dict[str, int] = {}
        following = 0
        for name, *given in _split(tokens):
            if given:
                known = Enums({**self.numbers, **numbers})
                value = evaluate(known.resolve(given[1:], evaluate))
                if value is None:
                    return None
                following = value
            numbers[str(name)] = following
            following += 1
        return numbers

    def _number(self, token: Token) -> list[Token]:
        value = self.numbers.get(str(token)) if token.type == "NAME" else None
        if value is None:
            return [token]
        words = ["(", "-", str(-value), ")"] if value < 0 else [str(value)]
        return [Token.new_borrow_pos(_KINDS.get(w, "NUMBER"), w, token) for w in words]


def _split(tokens: Sequence[Token]) -> Iterator[Sequence[Token]]:
    """Yield the tokens between commas outside parentheses; a last comma ends nothing."""
    start = depth = 0
    for i, token in enumerate((*tokens, Token("COMMA", ","))):
        depth += (token == "(") - (token == ")")
        if token == "," and depth == 0:
            if i > start:
                yield tokens[start:i]
            start = i + 1
