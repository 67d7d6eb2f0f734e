"""Grammars of arguments that are written one by one, between tags or as literals.

In: a format of calls, a JSON Schema. Out: Lark, in which arguments come in the schema's order. What
a form cannot hold is let through: how many arguments there are, which names they have beside those
that are named; between tags the `format` of a text, and bounds of what may also be a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from dovetail.ir.errors import RequestError
from dovetail.runtime.text.call_formats import LITERAL, TAGS, CallFormat
from dovetail.runtime.text.call_values import TEXT
from dovetail.runtime.text.grammar import json_rule, quote
from dovetail.runtime.text.tool_schema import (
    ANY_OF,
    check_depth,
    find_choices,
    find_ref,
    kinds_of,
    list_parts,
    read_alternatives,
    stand_alone,
)

Literal: TypeAlias = Callable[[str], str]
"""Writes a mark as Lark: as text, or the token of a model where it is a special one."""
ANYTHING = "/(?s:.*)/"
KEYS = {TAGS: r'/[^<>"\n]{1,64}/', LITERAL: "/[A-Za-z_][A-Za-z0-9_]{0,63}/"}
"""Names of arguments that no schema names."""
SINGLE = r"/'([^'\\\n]|\\[^\n])*'/"
"""A text of Python as models write most of them; JSON's own are texts of Python, too."""
MAX_FREE = 32
MAX_LETTERS = 1 << 20
"""Of the rules of all tools: parts of a schema are written with all that they refer to."""
NAME_LETTERS = 8
"""What a property counts as beside its rules: some are read that no model can write."""
READ = {
    TAGS: re.compile(r'[^<>"\n]{1,256}'),
    LITERAL: re.compile(r"""[^\s,:=()[\]{}"']([^\n,:=()[\]{}]*[^\s,:=()[\]{}])?"""),
}
"""Names of arguments that can be read, of those that a schema names."""
LENGTHS = ("minLength", "maxLength")
TEXT_LIMITS = ("enum", "const", "format", "pattern", *LENGTHS)
ARRAY_LIMITS = ("enum", "const", "minItems", "maxItems", "prefixItems")
OBJECT_LIMITS = ("enum", "const", "patternProperties", "minProperties", "maxProperties")
NESTED = ("items", "properties", "additionalProperties", "required")
ALL_LIMITS = (*TEXT_LIMITS, *ARRAY_LIMITS, *OBJECT_LIMITS, *NESTED)
WHOLE = "-?(0|[1-9][0-9]*)"
PLAIN = {
    "null": "/null/",
    "boolean": "/true|false/",
    "integer": f"/{WHOLE}/",
    "number": rf"/{WHOLE}(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
}
"""What stands for the values of a type without texts, lists and objects."""


class Arguments:
    """The rules of one tool's arguments."""

    def __init__(
        self, form: CallFormat, literal: Literal, root: Any, prefix: str, most: int
    ) -> None:
        """`root`: the schema. `prefix`: the first rule; the names of all begin so.

        most: letters of all rules together.
        """
        self._form, self._literal, self._root, self._prefix = form, literal, root, prefix
        self._rules: list[str] = []
        self._most, self._letters, self._depth = most, 0, 0
        self._values: dict[int, str] = {}  # rules of values, by the schema: it may refer to itself
        self._texts: dict[int, str] = {}  # terminals of texts, by the schema
        self._has_any = False

    def write(self) -> list[str]:
        """Return the rules."""
        inner = self._write_pairs(self._root, self._form.key, self._form.keyed)
        return [f"{self._prefix}: {inner or quote('')}", *self._rules]

    def _add(self, rule: str, flags: str = "", *, terminal: bool = False) -> str:
        """Add a rule; return its name. RequestError where there are too many letters."""
        name = f"{self._prefix}_{len(self._rules)}"
        name = name.upper() if terminal else name
        self._count(len(rule))
        self._rules.append(f"{name}{flags}: {rule}")
        return name

    def _count(self, letters: int) -> None:
        """Count letters that are written, or read where what comes of them is shorter."""
        self._letters += letters
        if self._letters > self._most:
            raise RequestError("schemas of tools refer to too much, too often; make them smaller")

    def _mark(self, text: str) -> str:
        return self._literal(text) if text else ""

    # ---- pairs ----

    def _write_pairs(self, schema: Any, key: str, keyed: str) -> str:
        """Return the expression of an object's pairs, without what stands around them."""
        ways = [
            self._write_properties(*found, key, keyed)
            for found in read_alternatives(schema, self._root)
        ]
        return ways[0] if len(ways) == 1 else f"({' | '.join(way or quote('') for way in ways)})"

    def _write_properties(
        self, named: Mapping[str, Any], wanted: set[str], others: Any, key: str, keyed: str
    ) -> str:
        pairs = []
        self._count(NAME_LETTERS * len(named))
        for name, one in named.items():
            if READ[self._form.kind].fullmatch(name):
                pair = f"{self._mark(key + name + keyed)} {self._name_value(one)}"
                pairs.append((pair, name in wanted))
            elif name in wanted:
                said = f"the argument {name!r} cannot be written as this model writes calls"
                raise RequestError(f"{said}; rename it, or do not require it")
        rest = ""
        if others is not None:
            names, value = KEYS[self._form.kind], self._name_value(others)
            rest = self._add(f"{self._mark(key)} {names} {self._mark(keyed)} {value}")
        return self._join(pairs, rest)

    def _join(self, pairs: Sequence[tuple[str, bool]], rest: str) -> str:
        """Return pairs in their order, of which some may be left out, and any number of `rest`."""
        comma = f"{quote(self._form.comma)} " if self._form.comma else ""
        later = f"({comma}{rest}){{0,{MAX_FREE}}}" if rest else ""
        starts, needed = [f"{rest} {later}"] if rest else [], False
        for pair, wanted in reversed(pairs):
            named = self._add(pair)
            start = f"{named} {later}"
            starts, needed = [start, *([] if wanted else starts)], needed or wanted
            later = self._add(f"{comma}{named} {later}" if wanted else f"({comma}{named})? {later}")
        return f"({' | '.join(starts)}){'' if needed else '?'}" if starts else ""

    # ---- values ----

    def _name_value(self, schema: Any) -> str:
        """Return the rule of a value, with what ends it."""
        if not isinstance(schema, dict) or not schema:
            return self._write_value({})
        if id(schema) not in self._values:
            check_depth(self._depth)
            place, self._values[id(schema)] = len(self._rules), self._add("")
            self._depth += 1
            self._rules[place] += self._write_value(schema)
            self._depth -= 1
        return self._values[id(schema)]

    def _write_value(self, schema: Any) -> str:
        """Return the expression of a value, with what ends it."""
        kinds, form = kinds_of(schema, self._root), self._form
        choices = find_choices(schema, self._root)
        spelled = form.kind == TAGS or form.quote
        if choices is not None and spelled:
            return self._write_choices(choices)
        if form.kind == TAGS:
            if "string" in kinds or not kinds:
                return self._write_text(self._find_text(schema), form.valued)
            return f"{self._json(schema)} {self._mark(form.valued)}"
        ways = self._write_quoted(schema) if form.quote else self._write_python(schema)
        return ways or self._json(schema)

    def _write_choices(self, values: Sequence[Any]) -> str:
        """Return the expression of values, without those that hold what would end them."""
        if not values:
            raise RequestError("a tool's schema lets no value through, or refers to itself alone")
        form, mark = self._form, self._form.quote
        end = (form.valued or mark).strip()
        texts = [one for one in values if isinstance(one, str) and end not in one]
        others = [json.dumps(one, ensure_ascii=False) for one in values if not isinstance(one, str)]
        others = [one for one in others if end not in one]
        if not texts and not others:
            raise RequestError(f"no value of an enum can be written where {end} ends one")
        close = self._mark(mark + form.valued)
        if "<[" not in close:  # in one terminal: a value may begin with another and the mark
            written = [f"{mark}{one}{mark}" for one in texts] + others
            return self._add(self._list(one + form.valued for one in written), terminal=True)
        ways = []
        if texts:
            ways.append(f"{self._mark(mark)} {self._add(self._list(texts), terminal=True)} {close}")
        if others:
            name = self._add(self._list(others), terminal=True)
            ways.append(f"{name} {self._mark(form.valued)}")
        return f"({' | '.join(ways)})"

    def _list(self, texts: Iterable[str]) -> str:
        return " | ".join(map(quote, texts))

    def _write_python(self, schema: Any) -> str:
        """Return the expression of a literal of Python, "" where JSON says it all."""
        kinds = kinds_of(schema, self._root)
        if self._has(schema, *TEXT_LIMITS):
            return ""
        ways = [SINGLE] * ("string" in kinds or not kinds)
        ways += ['"True" | "False"'] * ("boolean" in kinds or not kinds)
        ways += ['"None"'] * ("null" in kinds or not kinds)
        return f"({' | '.join([*ways, self._json(schema)])})" if ways else ""

    def _write_quoted(self, schema: Any) -> str:
        """Return the expression of a value whose texts have marks of their own, "" for JSON."""
        kinds, mark = kinds_of(schema, self._root), self._form.quote
        if kinds == TEXT and not self._has(schema, "format"):
            return f"{self._mark(mark)} {self._write_text(self._find_text(schema), mark)}"
        if "string" in kinds and not self._has(schema, *TEXT_LIMITS):
            text = f"{self._mark(mark)} {self._write_text('', mark)}"
            return f"({text} | {self._json(schema)})"
        if not kinds and not self._has(schema, *ALL_LIMITS):
            return self._write_any()
        if kinds == {"object"} and not self._has(schema, *OBJECT_LIMITS):
            return f'"{{" {self._write_pairs(schema, "", ":")} "}}"'
        items = [one["items"] for one in list_parts(schema, self._root) if "items" in one]
        plain = len(items) == 1 and isinstance(items[0], Mapping)
        if kinds == {"array"} and plain and not self._has(schema, *ARRAY_LIMITS):
            item = self._name_value(items[0])
            return f'"[" ({item} ("," {item})*)? "]"'
        return ""

    def _write_any(self) -> str:
        """Return the name of the rule of any value whose texts have marks of their own."""
        name, mark = f"{self._prefix}_any", self._form.quote
        if not self._has_any:
            self._has_any = True
            pair = f'{KEYS[LITERAL]} ":" {name}'
            plain = json_rule('{"type": ["number", "boolean", "null"]}')
            self._rules += [
                f"{name}: {self._mark(mark)} {self._write_text('', mark)} | {self._add(plain)}"
                f' | "[" ({name} ("," {name})*)? "]" | "{{" ({pair} ("," {pair})*)? "}}"'
            ]
        return name

    def _write_text(self, inner: str, mark: str) -> str:
        """Return the expression of a text up to its mark, and that. inner: a terminal, or ""."""
        written = self._mark(mark)
        if "<[" in written:  # a token, which no text can be
            return f"{inner or ANYTHING} {written if inner else self._mark(mark.strip())}"
        tail = mark[len(mark.rstrip()) :]
        ended = mark.rstrip() if inner else mark.strip()
        rule = f"{inner or ANYTHING} {quote(ended)}"
        if inner:  # it ends with the first mark, however few letters it has then
            again = re.escape(mark.strip()).replace("/", r"\/")
            first = self._add(rule, terminal=True)
            rule = f"{first} & ~/(?s:.*){again}(?s:.+)/"
        name = self._add(rule, "[lazy]")
        return f"{name} {quote(tail)}" if tail else name

    def _find_text(self, schema: Any) -> str:
        """Return the terminal of the texts that stand for values of a schema, "" where all do."""
        if not isinstance(schema, dict):
            return ""
        if id(schema) not in self._texts:
            check_depth(self._depth)
            self._texts[id(schema)] = ""  # where it refers to itself
            self._depth += 1
            self._texts[id(schema)] = self._write_terminal(schema)
            self._depth -= 1
        return self._texts[id(schema)]

    def _write_terminal(self, schema: Mapping[str, Any]) -> str:
        within = [*(schema.get("allOf") or ()), find_ref(schema.get("$ref"), self._root)]
        held = [self._find_text(one) for one in within]
        held += [self._join_ways(map(self._find_text, schema.get(word) or ())) for word in ANY_OF]
        if "const" in schema or schema.get("enum"):
            values = [schema["const"]] if "const" in schema else schema["enum"]
            texts = (one if isinstance(one, str) else json.dumps(one) for one in values)
            held.append(self._join_ways(map(quote, texts)))
        elif "type" in schema or _find_limits(schema):
            types = kinds_of({"type": schema.get("type")}, {}) or kinds_of(schema, self._root)
            limits = " & ".join(_find_limits(schema))
            ways = [limits if kind == "string" else PLAIN.get(kind, "") for kind in sorted(types)]
            held.append(self._join_ways(f"({way})" if way else "" for way in ways or [limits]))
        held = [one for one in held if one]
        return self._add(" & ".join(held), terminal=True) if held else ""

    def _join_ways(self, ways: Iterable[str]) -> str:
        """Return the alternative of terminals, "" where one of them is any text."""
        ways = list(ways)
        return f"({' | '.join(ways)})" if ways and all(ways) else ""

    def _json(self, schema: Any) -> str:
        """Return the expression of JSON that a part of the schema allows, put in a rule."""
        alone, letters = stand_alone(schema, self._root)
        self._count(letters)
        return self._add(json_rule(json.dumps(alone)))

    def _has(self, schema: Any, *words: str) -> bool:
        """Tell whether a schema, or one that it is put together from, has one of these keywords."""
        parts = list_parts(schema, self._root)
        return any(not part.keys().isdisjoint(words) for part in parts)


def _find_limits(schema: Mapping[str, Any]) -> list[str]:
    """Return what a schema itself asks of a text, as expressions of Lark that it matches all."""
    found = []
    if (pattern := schema.get("pattern")) is not None:
        found.append(_write_pattern(pattern))
    if not schema.keys().isdisjoint(LENGTHS):
        least, most = schema.get("minLength") or 0, schema.get("maxLength")
        found.append(f"/(?s:.{{{least},{'' if most is None else most}}})/")
    return found


PIECES = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|.", re.DOTALL)
"""Parts of an expression: an escape, a class of letters, a letter. A class without an end is one
part, too: else each bracket of many would be read to the end of the text."""
_SLASHES = re.compile(r"(\\.)|/", re.DOTALL)


def _write_pattern(pattern: str) -> str:
    """Return a pattern, which may match anywhere in a text, as one that matches the whole text."""
    ways: list[list[str]] = [[]]
    depth = 0
    for piece in PIECES.findall(pattern):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and not depth:
            ways.append([])
        else:
            ways[-1].append(piece)
    some, whole = "(?s:.*)", []
    for way in ways:
        begins, ends = way[:1] == ["^"], way[-1:] == ["$"]
        bare = "".join(way[begins : len(way) - ends])
        whole.append(f"{'' if begins else some}({bare}){'' if ends else some}")
    slashed = _SLASHES.sub(lambda found: found[1] or r"\/", "|".join(whole))
    return f"/{slashed}/".replace("\n", r"\n")
