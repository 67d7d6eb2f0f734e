"""Values of arguments that are written without their type, as tags have them: typed by the schema.

In: a tool's JSON Schema, texts of values. Out: JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache

from dovetail.runtime.text.call_literals import read_literal
from dovetail.runtime.text.tool_schema import Kinds, kind_fits, kind_of, kinds_of, read_object

TEXT: Kinds = frozenset({"string"})


@lru_cache(1024)
def argument_kinds(parameters: str) -> Mapping[str, Kinds]:
    """Return what the arguments of a tool may be, whose JSON Schema is given as text.

    Those that it does not name are under "".
    """
    root = json.loads(parameters)
    named, _, others = read_object(root, root)
    return {name: kinds_of(one, root) for name, one in {**named, "": others}.items()}


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
    fits = not kinds or kind_fits(kind_of(json.loads(found)), kinds)
    return found if fits or "string" not in kinds else plain
