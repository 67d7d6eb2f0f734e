"""The JSON Schema of a tool's arguments: what it says of each, through references and alternatives.

In: schemas of callers, each with the root that it refers to. Out: the types, values and properties
that they allow; RequestError where one is no schema, or more than can be looked at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import unquote

from dovetail.ir.errors import RequestError

Kinds: TypeAlias = frozenset[str]
"""The types that a schema allows; empty where it says nothing."""
KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
ANY_OF, ALL_OF = ("anyOf", "oneOf"), ("allOf",)
DEFINED = ("$defs", "definitions")
NAMED = ("properties", "patternProperties", *DEFINED)
BELOW = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
VALUES = ("const", "enum", "default", "examples")
"""Keywords with schemas under names, with one schema, and with values that are none."""
TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(NAMED, Mapping),
    **dict.fromkeys((*ANY_OF, *ALL_OF, "prefixItems", "enum", "required"), list),
    **dict.fromkeys(("minLength", "maxLength"), int),
    **dict.fromkeys(("$ref", "pattern"), str),
    "type": (str, list),
}
WORDS: dict[type | tuple[type, ...], str] = {
    Mapping: "an object",
    list: "a list",
    int: "a whole number",
    str: "a text",
    (str, list): "a text or a list of texts",
}
MAX_DEPTH = 64
"""Schemas within each other, down to which all are read."""
MAX_PARTS = 1 << 16
"""Schemas that those of all tools are put together from, each counted anew where it is referred to:
some 50 ms."""
MAX_REF = 512
"""Letters of a reference, which is read anew for each schema that it is a part of."""
REF_LETTERS, ENUM_VALUES = 8, 2
"""So many letters of a reference, or values of an enum, take as long to read as a schema."""


def count_parts(where: str, root: Any, most: int) -> int:
    """Return how many schemas those within `root`, called `where`, are put together from.

    Raises RequestError where `root` is no schema of an object, or they are more than `most`.
    """
    count, left = 0, [*_walk(where, root)]  # all are looked at before any is counted
    known = set(map(id, left))
    while left:
        for part in list_parts(left.pop(), root):
            if id(part) not in known:  # a reference leads to where no schema was looked for
                found = [one for one in _walk(f"{where} by $ref", part) if id(one) not in known]
                known.update(map(id, found))
                left += found
            count += 1 + len(part.get("$ref") or "") // REF_LETTERS
            count += len(part.get("enum") or ()) // ENUM_VALUES
            if count > most:
                raise RequestError(f"{where} refers to too many schemas or values; leave some out")
    if "object" not in (root.get("type") or "object"):
        raise RequestError(f'{where} must have "type": "object"')
    return count


def _walk(where: str, schema: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yield all schemas within one; RequestError where one has not the types of TYPES."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise RequestError(f"{where} must be a JSON Schema: an object")
    if depth > MAX_DEPTH:
        raise RequestError(f"{where} is nested too deeply: {MAX_DEPTH} schemas at most")
    given = {key: value for key, value in schema.items() if value is not None and key in TYPES}
    for key, value in given.items():
        kind = TYPES[key]
        if isinstance(value, bool) or not isinstance(value, kind):
            raise RequestError(f"{where}.{key} must be {WORDS[kind]}")
    for key in ("type", "required"):
        if not all(isinstance(name, str) for name in given.get(key, ())):
            raise RequestError(f"{where}.{key} must hold texts")
    if len(given.get("$ref", "")) > MAX_REF:
        raise RequestError(f"{where}.$ref may have {MAX_REF} letters")
    yield schema
    for key, one in _list_below(schema):
        yield from _walk(f"{where}.{key}", one, depth + 1)


def _list_below(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas right below one, and where they are."""
    for key, value in schema.items():
        if value is None:
            continue
        if key in NAMED:
            yield from ((f"{key}.{name}", one) for name, one in value.items())
        elif key in (*ANY_OF, *ALL_OF, "prefixItems") or (key == "items" and _is_list(value)):
            yield from ((f"{key}[{place}]", one) for place, one in enumerate(value))
        elif key in BELOW:
            yield key, value


def check_depth(depth: int) -> None:
    """Raise RequestError where so many schemas are within, or refer to, each other."""
    if depth >= MAX_DEPTH:
        raise RequestError(
            "a tool's schema refers to schemas that refer to others, and so on, too deeply: "
            f"{MAX_DEPTH} at most"
        )


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def list_parts(
    schema: Any, root: Any, words: Sequence[str] = (*ANY_OF, *ALL_OF)
) -> Iterator[dict[str, Any]]:
    """Yield a schema and those that it is put together from by `words` and `$ref`, each once."""
    left, seen = [schema], set[int]()
    while left:
        part = left.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        within = [one for word in words for one in part.get(word) or ()]
        left += [*reversed(within), find_ref(part.get("$ref"), root)]


def find_ref(ref: Any, root: Any) -> Any:
    """Return what a reference within a schema points at, None where that is nothing."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return None
    found = root
    for step in filter(None, unquote(ref[1:]).split("/")):
        if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        elif isinstance(found, dict):
            found = found.get(step.replace("~1", "/").replace("~0", "~"))
        else:
            return None
    return found


def kinds_of(schema: Any, root: Any) -> Kinds:
    """Return the types that a schema allows."""
    found: set[str] = set()
    for part in list_parts(schema, root):
        named = part.get("type") or []
        found |= {named} if isinstance(named, str) else set(named)
        values = [*(part.get("enum") or ()), *([part["const"]] if "const" in part else ())]
        if not named:
            found |= {kind_of(value) for value in values}
    return frozenset(found)


def kind_of(value: object) -> str:
    """Return the type of a value as a JSON Schema calls it."""
    return "null" if value is None else KINDS.get(type(value), "object")


def read_object(schema: Any, root: Any) -> tuple[dict[str, Any], set[str], Any]:
    """Return the properties that a schema names, those it wants, and what others may be.

    None where no others may come. What is wanted by one of several alternatives alone is not.
    """
    parts = list(list_parts(schema, root))
    named: dict[str, Any] = {}
    for part in parts:
        named |= part.get("properties") or {}
    others = [part["additionalProperties"] for part in parts if "additionalProperties" in part]
    other: Any = next((one for one in others if one is not False), None if others or named else {})
    other = {} if other is True else other
    wanted = [
        name for part in list_parts(schema, root, ALL_OF) for name in part.get("required") or ()
    ]
    named |= {name: other or {} for name in wanted if name not in named}
    return {name: one for name, one in named.items() if one is not False}, set(wanted), other


def read_alternatives(schema: Any, root: Any) -> Iterator[tuple[dict[str, Any], set[str], Any]]:
    """Yield an object as `read_object` returns it, for each alternative that it has."""
    parts = list(list_parts(schema, root, ALL_OF))
    for place, part in enumerate(parts):
        for word in ANY_OF:
            if alternatives := part.get(word):
                parts[place] = {key: value for key, value in part.items() if key != word}
                if len(parts) * len(alternatives) > MAX_PARTS:
                    raise RequestError("a tool's schema has too many alternatives; leave some out")
                own = [{**one, "allOf": None, "$ref": None} for one in parts]
                yield from (read_object({"allOf": [*own, one]}, root) for one in alternatives)
                return
    yield read_object(schema, root)


def find_choices(schema: Any, root: Any) -> list[Any] | None:
    """Return the values that a schema lists, each once; None where it allows others, too."""
    found = _find_choices(schema, root, set(), 0)
    if found is None:
        return None
    return list({json.dumps(value, sort_keys=True): value for value in found}.values())


def _find_choices(schema: Any, root: Any, seen: set[int], depth: int) -> list[Any] | None:
    """As `find_choices`; [] where the schema is one of `seen`, whose values are there already."""
    if not isinstance(schema, dict):
        return None
    if id(schema) in seen:
        return []
    check_depth(depth)
    seen.add(id(schema))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        kinds = kinds_of({"type": schema.get("type")}, root)
        return [one for one in values if not kinds or kind_fits(kind_of(one), kinds)]
    for word in ANY_OF:
        if alternatives := schema.get(word):
            each = [_find_choices(one, root, seen, depth + 1) for one in alternatives]
            if None not in each:
                return [value for one in each for value in one or ()]
    within = [*(schema.get("allOf") or ()), find_ref(schema.get("$ref"), root)]
    some = (_find_choices(one, root, seen, depth + 1) for one in within)
    found = next((one for one in some if one is not None), None)
    return [None] if found is None and schema.get("type") == "null" else found


def kind_fits(kind: str, kinds: Kinds) -> bool:
    """Tell whether a value of a type is one of those that are allowed."""
    return kind in kinds or (kind == "integer" and "number" in kinds)


def stand_alone(schema: Any, root: Any) -> tuple[Any, int]:
    """Return a part of a schema with what it refers to, directly or by that, and nothing else.

    And how many letters its references have, each of which is read once or twice.
    """
    names: dict[str, str] = {}
    part, defs = _move(schema, root, names), dict[str, Any]()
    while len(defs) < len(names):
        for ref in [*names][len(defs) :]:
            defs[names[ref]] = _move(find_ref(ref, root), root, names)
    return {**part, "$defs": defs} if defs else part, sum(map(len, names))


def _move(schema: Any, root: Any, names: dict[str, str]) -> Any:
    """Return a schema whose references are to definitions, of which `names` holds those so far."""
    if isinstance(schema, list):
        return [_move(item, root, names) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key in DEFINED:
            continue
        if key in VALUES or (key == "$ref" and not isinstance(value, str)):
            moved[key] = value
        elif key == "$ref" and (value in names or find_ref(value, root) is not None):
            moved[key] = "#/$defs/" + names.setdefault(value, str(len(names)))
        elif key in NAMED and isinstance(value, dict):
            moved[key] = {name: _move(one, root, names) for name, one in value.items()}
        else:
            moved[key] = _move(value, root, names)
    return moved
