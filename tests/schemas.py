"""Random JSON Schemas of the kinds that JSONSchemaBench has, from a seed.

Forms of function calls, settings of services, API documents, records of events: objects in objects,
choices, bounds, patterns, formats, references. All keywords are those that docs/server.md lists.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

WORDS = tuple(
    """
    name id kind city email count price active tags items size owner date note state code title
    level url path user amount unit color width height start end source target label version
    """.split()
)
FORMATS = (
    "date",
    "date-time",
    "time",
    "uuid",
    "email",
    "ipv4",
    "ipv6",
    "hostname",
    "uri",
    "duration",
)
PATTERNS = (
    *(r"^[A-Z]{2,3}-[0-9]{4}$", r"^v?[0-9]+\.[0-9]+$", r"^(red|green|blue)$", r"^#[0-9a-fA-F]{6}$"),
    *(r"^[a-z][a-z0-9_]{0,15}$", r"^\+?[0-9]{7,12}$", r"[0-9]", r"^[^@ ]{1,9}@[a-z]{2,9}\.com$"),
)  # fmt: skip
DEPTH = 3


class SchemaMaker:
    """Draws schemas; one for each document, for it may have definitions."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._defs: dict[str, Schema] = {}

    def make(self) -> Schema:
        """Return a schema, an object nearly always."""
        rare = (self._array, self._choice, self._ref, self._enum, self._string, self._nullable)
        top = self._object(0) if self._rng.random() < 0.9 else self._rng.choice(rare)(0)
        head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
        found = {**(head if self._rng.random() < 0.3 else {}), **top}
        if self._defs:
            found["$defs"] = self._defs
        return found

    def _any(self, depth: int) -> Schema:
        kinds: dict[Callable[[int], Schema], float] = {
            self._string: 5,
            self._integer: 3,
            self._number: 2,
            self._boolean: 2,
            self._enum: 2,
            self._const: 0.4,
            self._nullable: 1,
        }
        if depth < DEPTH:
            kinds |= {self._object: 2, self._array: 2, self._choice: 0.8, self._ref: 0.8}
        made = self._rng.choices(list(kinds), list(kinds.values()))[0](depth)
        if self._rng.random() < 0.25 and "$ref" not in made:
            made = {"description": "The " + self._rng.choice(WORDS), **made}
        return made

    # ---- objects and arrays ----

    def _object(self, depth: int) -> Schema:
        rng = self._rng
        names = rng.sample(WORDS, rng.randint(1, 5 if depth < 2 else 3))
        found: Schema = {
            "type": "object",
            "properties": {name: self._any(depth + 1) for name in names},
        }
        wanted = [name for name in names if rng.random() < 0.7]
        if wanted:
            found["required"] = wanted
        more = rng.random()
        if more < 0.5:
            found["additionalProperties"] = False
        elif more < 0.6:
            found["additionalProperties"] = {"type": rng.choice(("string", "integer"))}
        return found

    def _array(self, depth: int) -> Schema:
        rng = self._rng
        found: Schema = {"type": "array", "items": self._any(depth + 1)}
        if rng.random() < 0.6:
            found["minItems"] = rng.randint(0, 2)
        if rng.random() < 0.6:
            found["maxItems"] = found.get("minItems", 0) + rng.randint(0, 3)
        if rng.random() < 0.1:
            found = {"type": "array", "prefixItems": [self._any(depth + 1), self._any(depth + 1)]}
            found |= {"items": False, "minItems": 2}
        return found

    def _choice(self, depth: int) -> Schema:
        rng = self._rng
        if rng.random() < 0.5:
            return {"anyOf": [self._any(depth + 1) for _ in range(rng.randint(2, 3))]}
        tags = rng.sample(WORDS, rng.randint(2, 3))
        return {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"type": {"const": tag}, tag: self._any(depth + 1)},
                    "required": ["type", tag],
                    "additionalProperties": False,
                }
                for tag in tags
            ]
        }

    def _ref(self, depth: int) -> Schema:
        rng = self._rng
        if self._defs and rng.random() < 0.5:
            return {"$ref": f"#/$defs/{rng.choice(list(self._defs))}"}
        name = f"{rng.choice(WORDS).title()}{len(self._defs)}"
        self._defs[name] = {}
        made = self._object(max(depth, 2))
        if rng.random() < 0.3:  # a tree
            made["properties"]["next"] = {"anyOf": [{"$ref": f"#/$defs/{name}"}, {"type": "null"}]}
        self._defs[name] = made
        return {"$ref": f"#/$defs/{name}"}

    # ---- values ----

    def _string(self, _depth: int) -> Schema:
        rng, kind = self._rng, self._rng.random()
        if kind < 0.25:
            return {"type": "string", "format": rng.choice(FORMATS)}
        if kind < 0.45:
            return {"type": "string", "pattern": rng.choice(PATTERNS)}
        found: Schema = {"type": "string"}
        if kind < 0.75:
            found |= {"minLength": rng.randint(0, 4), "maxLength": rng.randint(4, 40)}
        return found

    def _integer(self, _depth: int) -> Schema:
        return {"type": "integer", **self._bounds(whole=True)}

    def _number(self, _depth: int) -> Schema:
        return {"type": "number", **self._bounds(whole=False)}

    def _bounds(self, *, whole: bool) -> Schema:
        rng, found = self._rng, Schema()
        low = rng.randint(-50, 50)
        high = low + rng.randint(2, 2000)
        if rng.random() < 0.6:
            found[rng.choice(("minimum", "exclusiveMinimum"))] = low if whole else low + 0.5
        if rng.random() < 0.6:
            found[rng.choice(("maximum", "exclusiveMaximum"))] = high
        if rng.random() < 0.1:
            found["multipleOf"] = rng.choice((1, 2, 5, 10) if whole else (0.5, 0.25, 1))
        return found

    def _boolean(self, _depth: int) -> Schema:
        return {"type": "boolean"}

    def _enum(self, _depth: int) -> Schema:
        rng = self._rng
        values: list[object] = list(rng.sample(WORDS, rng.randint(2, 5)))
        if rng.random() < 0.2:
            values += [rng.randint(0, 9), None, True]
        return {"enum": values}

    def _const(self, _depth: int) -> Schema:
        return {"const": self._rng.choice(("on", 3, None, "a b", [1, "x"], {"k": False}))}

    def _nullable(self, _depth: int) -> Schema:
        kind = self._rng.choice(("string", "integer", "number", "boolean"))
        return {"type": [kind, "null"]}


def draw_schemas(seed: int, count: int) -> list[Schema]:
    """Return `count` schemas."""
    rng = random.Random(seed)
    return [SchemaMaker(rng).make() for _ in range(count)]
