"""Loops that are written with a label, on tokens: `again: ... if (c) goto again;` is a do loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lark import Token

from dovetail.ir.low.lex import tokenise

_ENDS = ("{", "}", ";")
_LEAVING = ("break", "continue", "case", "default")
"""Words that would mean another loop or switch inside of a new one."""
_DECLARING = ("const", "static", "struct", "union")


def resolve_cycles(tokens: Sequence[Token]) -> list[Token]:
    """Return the tokens with a do loop for each label that only one `if` behind it goes back to.

    Where variables of its body would be lost behind the loop, and of other labels, nothing changes.
    """
    out = list(tokens)
    for at in reversed(range(1, len(out) - 1)):  # inner ones first
        if out[at].type == "NAME" and out[at + 1] == ":" and out[at - 1] in _ENDS:
            found = _closing(out, at)
            if found is None:
                continue
            test, jump, behind_jump = found
            body, condition = out[at + 2 : test], out[test + 1 : jump]
            behind = {*condition, *_rest_of_block(out[behind_jump:])}
            if behind.isdisjoint(_declared(body)) and not {*body} & {*_LEAVING}:
                end = [*_words("} while", out[jump]), *condition, *_words(";", out[jump])]
                out[at:behind_jump] = [*_words("do {", out[at]), *body, *end]
    return out


def _words(text: str, at: Token) -> Iterator[Token]:
    return (Token.new_borrow_pos(word.type, str(word), at) for word in tokenise(text))


def _closing(tokens: Sequence[Token], label: int) -> tuple[int, int, int] | None:
    """Return where what goes back to a label stands in the label's own block.

    That is its `if`, its `goto` or the brace before, and what follows.
    """
    test = depth = 0
    for i in range(label + 2, len(tokens) - 2):
        jump = i + (tokens[i] == "{")
        if depth == 0 and test and tokens[i - 1] == ")" and tokens[jump] == "goto":
            back = [*_words(f"goto {tokens[label]};" + "}" * (jump - i), tokens[jump])]
            end = jump + len(back)
            alone = tokens[jump:end] == back and tokens[end : end + 1] != ["else"]
            return (test, i, end) if alone and _one_condition(tokens[test + 1 : i]) else None
        depth += (tokens[i] in ("{", "(")) - (tokens[i] in ("}", ")"))
        if depth < 0:
            return None
        if depth == 0 and tokens[i] == "if" and tokens[i - 1] in (*_ENDS, ":"):
            test = i
    return None


def _one_condition(tokens: Sequence[Token]) -> bool:
    """Tell whether tokens are one pair of parentheses with what is inside."""
    depth = 0
    for i, token in enumerate(tokens):
        depth += (token == "(") - (token == ")")
        if depth == 0:
            return i == len(tokens) - 1
    return False


def _rest_of_block(tokens: Sequence[Token]) -> Iterator[Token]:
    depth = 0
    for token in tokens:
        depth += (token == "{") - (token == "}")
        if depth < 0:
            return
        yield token


def _declared(body: Sequence[Token]) -> Iterator[str]:
    """Yield all names that declarations of a block may be of, and some more."""
    depth, declares = 0, False
    for i, token in enumerate(body):
        if i == 0 or body[i - 1] in _ENDS:
            declares = depth == 0 and (token.type == "TYPE_NAME" or token in _DECLARING)
        if declares and token.type == "NAME" and body[i - 1] not in ("(", "=", ".", "->"):
            yield str(token)
        depth += (token == "{") - (token == "}")
