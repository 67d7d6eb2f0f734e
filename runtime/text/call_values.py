"""Values of arguments that are written without their type, as tags have them: typed by the schema.

In: a tool's JSON Schema, texts of values. Out: JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

from dovetail.runtime.text.call_literals import read_literal

Kinds: TypeAlias = frozenset[str]
"""The types that a schema allows; empty where it says nothing."""
TEXT: Kinds = frozenset({"string"})
KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
WITHIN = ("anyOf", "oneOf", "allOf")


@lru_cache(1024)
def argument_kinds(parameters: str) -> Mapping[str, Kinds]:
    """Return what the arguments of a tool may be, whose JSON Schema is given as text."""
    root = json.loads(parameters)
    found: dict[str, Kinds] = {}
    for one in list_parts(root, root):
        for name, schema in (one.get("properties") or {}).items():
            found[name] = kinds_of(schema, root)
    return found


def list_parts(schema: Any, root: Any, depth: int = 8) -> Iterator[dict[str, Any]]:
    """Yield a schema and those that it is put together from, as far as it refers to its root."""
    if not isinstance(schema, dict) or not depth:
        return
    yield schema
    if "$ref" in schema:
        yield from list_parts(find_ref(schema["$ref"], root), root, depth - 1)
    for word in WITHIN:
        for part in schema.get(word) or ():
            yield from list_parts(part, root, depth - 1)


def find_ref(ref: Any, root: Any) -> Any:
    """Return what a reference within a schema points at, None where that is nothing."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return None
    found = root
    for step in filter(None, ref[1:].split("/")):
        if not isinstance(found, dict):
            return None
        found = found.get(step.replace("~1", "/").replace("~0", "~"))
    return found


def kinds_of(schema: Any, root: Any) -> Kinds:
    """Return the types that a schema allows."""
    found: set[str] = set()
    for part in list_parts(schema, root):
        named = part.get("type") or []
        found |= {named} if isinstance(named, str) else set(map(str, named))
        values = part["enum"] if isinstance(part.get("enum"), list) else []
        values = [*values, part["const"]] if "const" in part else values
        if "type" not in part:
            found |= {kind_of(value) for value in values}
    return frozenset(found)


def kind_of(value: object) -> str:
    """Return the type of a value as a JSON Schema calls it."""
    return "null" if value is None else KINDS.get(type(value), "object")


def read_value(text: str, kinds: Kinds) -> str:
    """Return the JSON of a value that a model wrote.

    A text stays one where the schema asks for a text. Else what reads as JSON, or as a literal of
    Python, is that if its type is allowed, or if texts are not.
    """
    plain = json.dumps(text, ensure_ascii=False)
    if kinds == TEXT:
        return plain
    found = read_literal(text)
    if found is None:
        return plain
    kind = kind_of(json.loads(found))
    fits = not kinds or kind in kinds or (kind == "integer" and "number" in kinds)
    return found if fits or "string" not in kinds else plain
