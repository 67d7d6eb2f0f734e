"""Grammars of arguments that are written one by one, between tags or as literals.

In: a format of calls, a JSON Schema. Out: Lark, in which arguments come in the schema's order. What
a form cannot hold is let through: of a text between tags its `format`, of alternatives at the root
which arguments go together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from dovetail.runtime.text.call_formats import LITERAL, TAGS, CallFormat
from dovetail.runtime.text.call_values import TEXT, kinds_of, list_parts
from dovetail.runtime.text.grammar import json_rule, quote

Literal: TypeAlias = Callable[[str], str]
"""Writes a mark as Lark: as text, or the token of a model where it is a special one."""
ANYTHING = "/(?s:.*)/"
KEYS = {TAGS: r'/[^<>"\n]{1,64}/', LITERAL: "/[A-Za-z_][A-Za-z0-9_]{0,63}/"}
"""Names of arguments that no schema names."""
SINGLE = r"/'([^'\\\n]|\\[^\n])*'/"
"""A text of Python as models write most of them; JSON's own are texts of Python, too."""
MAX_FREE = 32
MAX_DEPTH = 6
LIMITS = ("minItems", "maxItems", "prefixItems", "contains", "format", "pattern")
LENGTHS = ("minLength", "maxLength")


class Arguments:
    """The rules of one tool's arguments."""

    def __init__(self, form: CallFormat, literal: Literal, root: Any, prefix: str) -> None:
        """`root`: the schema. `prefix`: the first rule; the names of all begin so."""
        self._form, self._literal, self._root, self._prefix = form, literal, root, prefix
        self._rules: list[str] = []
        self._has_any = False

    def write(self) -> list[str]:
        """Return the rules."""
        inner = self._write_pairs(self._root, self._form.key, self._form.keyed, 0)
        return [f"{self._prefix}: {inner or quote('')}", *self._rules]

    def _add(self, rule: str, flags: str = "") -> str:
        """Add a rule; return its name."""
        name = f"{self._prefix}_{len(self._rules)}"
        self._rules.append(f"{name}{flags}: {rule}")
        return name

    def _mark(self, text: str) -> str:
        return self._literal(text) if text else ""

    # ---- pairs ----

    def _write_pairs(self, schema: Any, key: str, keyed: str, depth: int) -> str:
        """Return the expression of an object's pairs, without what stands around them."""
        named, wanted, others = read_object(schema, self._root)
        pairs = [
            (f"{self._mark(key + name + keyed)} {self._write_value(one, depth)}", name in wanted)
            for name, one in named.items()
        ]
        rest = ""
        if others is not None:
            names, value = KEYS[self._form.kind], self._write_value(others, depth)
            rest = self._add(f"{self._mark(key)} {names} {self._mark(keyed)} {value}")
        return self._join(pairs, rest)

    def _join(self, pairs: Sequence[tuple[str, bool]], rest: str) -> str:
        """Return pairs in their order, of which some may be left out, and any number of `rest`."""
        comma = f"{quote(self._form.comma)} " if self._form.comma else ""
        later = f"({comma}{rest}){{0,{MAX_FREE}}}" if rest else ""
        first = f"({rest} {later})?" if rest else ""
        for pair, wanted in reversed(pairs):
            named = self._add(pair)
            start = f"{named} {later}"
            if wanted:
                first, later = start, f"{comma}{named} {later}"
            else:
                first = f"({start} | {first})" if first else f"({start})?"
                later = f"({comma}{named})? {later}"
            later = self._add(later)
        return first

    # ---- values ----

    def _write_value(self, schema: Any, depth: int) -> str:
        """Return the expression of a value, with what ends it."""
        kinds, form = kinds_of(schema, self._root), self._form
        choices = find_choices(schema, self._root)
        spelled = form.kind == TAGS or form.quote
        if choices is not None and spelled and depth < MAX_DEPTH:
            return f"({' | '.join(map(self._write_choice, choices))})"
        if form.kind == TAGS:
            if "string" in kinds or not kinds:
                return self._write_text(schema if kinds == TEXT else {}, form.valued)
            return f"{self._json(schema)} {self._mark(form.valued)}"
        ways = self._write_quoted(schema, depth) if form.quote else self._write_python(schema)
        return ways or self._json(schema)

    def _write_choice(self, value: Any) -> str:
        mark, written = self._form.quote, json.dumps(value, ensure_ascii=False)
        if isinstance(value, str):
            written = f"{mark}{value}{mark}"
        return self._mark(written + self._form.valued)

    def _write_python(self, schema: Any) -> str:
        """Return the expression of a literal of Python, "" where JSON says it all."""
        kinds = kinds_of(schema, self._root)
        if find_choices(schema, self._root) is not None or _has(schema, *LIMITS, *LENGTHS):
            return ""
        ways = [SINGLE] * ("string" in kinds or not kinds)
        ways += ['"True" | "False"'] * ("boolean" in kinds or not kinds)
        ways += ['"None"'] * ("null" in kinds or not kinds)
        return f"({' | '.join([*ways, self._json(schema)])})" if ways else ""

    def _write_quoted(self, schema: Any, depth: int) -> str:
        """Return the expression of a value whose texts have marks of their own, "" for JSON."""
        kinds, mark = kinds_of(schema, self._root), self._form.quote
        if depth >= MAX_DEPTH:
            return ""
        if kinds == TEXT:
            return f"{self._mark(mark)} {self._write_text(schema, mark)}"
        if not kinds:
            return self._write_any()
        if "string" in kinds:
            text = f"{self._mark(mark)} {self._write_text({}, mark)}"
            return f"({text} | {self._json(schema)})"
        if kinds == {"object"}:
            return f'"{{" {self._write_pairs(schema, "", ":", depth + 1)} "}}"'
        items = next((one["items"] for one in list_parts(schema, self._root) if "items" in one), 0)
        if kinds == {"array"} and isinstance(items, Mapping) and not _has(schema, *LIMITS):
            item = self._add(self._write_value(items, depth + 1))
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
                f"{name}: {self._mark(mark)} {self._write_text({}, mark)} | {self._add(plain)}"
                f' | "[" ({name} ("," {name})*)? "]" | "{{" ({pair} ("," {pair})*)? "}}"'
            ]
        return name

    def _write_text(self, schema: Any, mark: str) -> str:
        """Return the expression of a text up to its mark, and that."""
        inner, written = _find_limits(schema), self._mark(mark)
        if "<[" in written:  # a token, which no text can be
            return f"{inner or ANYTHING} {written if inner else self._mark(mark.strip())}"
        tail = mark[len(mark.rstrip()) :]
        ended = mark.rstrip() if inner else mark.strip()
        rule = f"{inner or ANYTHING} {quote(ended)}"
        if inner:  # it ends with the first mark, however few letters it has then
            again = re.escape(mark.strip()).replace("/", r"\/")
            first = self._add(rule).upper()
            self._rules[-1] = f"{first}: {rule}"
            rule = f"{first} & ~/(?s:.*){again}(?s:.+)/"
        name = self._add(rule, "[lazy]")
        return f"{name} {quote(tail)}" if tail else name

    def _json(self, schema: Any) -> str:
        """Return the expression of JSON that a part of the schema allows, put in a rule."""
        return self._add(json_rule(json.dumps(stand_alone(schema, self._root))))


def _has(schema: Any, *words: str) -> bool:
    return isinstance(schema, Mapping) and not schema.keys().isdisjoint(words)


def _find_limits(schema: Any) -> str:
    """Return what a schema asks of a text as an expression of Lark, "" where that is nothing."""
    if not _has(schema, "pattern", *LENGTHS):
        return ""
    if (pattern := schema.get("pattern")) is not None:
        begins, ends = pattern.startswith("^"), pattern.endswith("$")
        bare = pattern.removeprefix("^").removesuffix("$").replace("/", r"\/")
        some = "(?s:.*)"
        return f"/{'' if begins else some}({bare}){'' if ends else some}/"
    return f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/"


def read_object(schema: Any, root: Any) -> tuple[dict[str, Any], set[str], Any]:
    """Return the properties that a schema names, those it wants, and what others may be.

    None where no others may come.
    """
    parts = list(list_parts(schema, root))
    named: dict[str, Any] = {}
    for part in parts:
        found = part.get("properties")
        named |= found if isinstance(found, dict) else {}
    wanted = {str(name) for part in parts for name in part.get("required") or ()}
    others = [part["additionalProperties"] for part in parts if "additionalProperties" in part]
    other: Any = next((one for one in others if one is not False), None if others or named else {})
    return named, wanted, {} if other is True else other


def find_choices(schema: Any, root: Any) -> list[Any] | None:
    """Return the values that a schema lists, None where it lists none."""
    for part in list_parts(schema, root):
        if "const" in part:
            return [part["const"]]
        if isinstance(part.get("enum"), list):
            return list(part["enum"])
    return None


def stand_alone(schema: Any, root: Any) -> Any:
    """Return a part of a schema with all that it refers to."""
    if "$ref" not in json.dumps(schema):
        return schema
    return {**_move(schema), "$defs": {"root": _move(root)}}


def _move(schema: Any) -> Any:
    """Return a schema whose references are to a root that lies in a definition."""
    if isinstance(schema, list):
        return [_move(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: "#/$defs/root" + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _move(value)
        for key, value in schema.items()
    }
