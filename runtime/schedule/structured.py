"""What form an answer must have: vLLM's `structured_outputs`, checked.

In: options of callers. Out: a frozen `StructuredOutputs`; `runtime/text/grammar.py` makes a grammar
of it, which the engine follows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from dovetail.ir.errors import RequestError

MAX_FORM = 1 << 18
"""Letters of a schema, an expression, a grammar, or all choices together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """One of the first five is set.

    json: a JSON Schema, as text. regex: the whole answer matches it. choice: the answer is one of
    these texts. grammar: Lark as llguidance reads it, or GBNF. json_object: any JSON object.
    whitespace_pattern: what may stand between the parts of JSON, instead of a space or a line break
    with an indent. disable_any_whitespace: nothing may. Ours alone: written, a grammar that is
    ready, instead of the first five; around, a Lark grammar that has the answer's as `@answer`.
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    written: str = ""
    around: str = ""


FORMS = ("json", "regex", "choice", "grammar", "json_object")
_NAMES = tuple(field.name for field in fields(StructuredOutputs))[:-2]


def read_structured(name: str, value: object) -> StructuredOutputs | None:
    """Return the option `name`: a mapping or an object with vLLM's names.

    Raises RequestError where it is neither, or asks for no form or for several.
    """
    if value is None or isinstance(value, StructuredOutputs):
        return value
    if isinstance(value, Mapping):
        given = {str(key): found for key, found in value.items() if found is not None}
        for key in given.keys() - set(_NAMES):
            raise RequestError(f"{name} has no {key!r}; it has {', '.join(_NAMES)}")
    else:
        given = {key: found for key in _NAMES if (found := getattr(value, key, None)) is not None}
    asked = [key for key in FORMS if given.get(key) not in (None, False)]
    if len(asked) != 1:
        said = " and ".join(asked) or "none"
        raise RequestError(f"{name} must have one of {', '.join(FORMS)}; it has {said}")
    if "json" in given:
        given["json"] = write_schema(f"{name}.json", given["json"])
    if "choice" in given:
        given["choice"] = _choices(f"{name}.choice", given["choice"])
    for key in ("regex", "grammar", "whitespace_pattern"):
        if key in given and not (isinstance(given[key], str) and given[key]):
            raise RequestError(f"{name}.{key} must be a text that is not empty")
    for key in ("json_object", "disable_any_whitespace"):
        if not isinstance(given.get(key, False), bool):
            raise RequestError(f"{name}.{key} must be true or false")
    text = "".join(found for found in given.values() if isinstance(found, str))
    text += "".join(given.get("choice", ()))
    if len(text) > MAX_FORM:
        raise RequestError(f"{name} may have {MAX_FORM} letters, not {len(text)}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} is not valid Unicode: it holds half a surrogate pair") from None
    return StructuredOutputs(**given)


def read_schema(name: str, value: object) -> StructuredOutputs | None:
    """Return the option `name`, a JSON Schema: a mapping, JSON text, or a pydantic model."""
    return None if value is None else StructuredOutputs(json=write_schema(name, value))


def write_schema(name: str, value: Any) -> str:
    """Return a JSON Schema as text, its keys in order; RequestError where it is none."""
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    try:
        found = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(found, ensure_ascii=False, allow_nan=False)
        text.encode()  # what is no Unicode cannot be sent to a process
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name} is no JSON: {error}") from None
    if not isinstance(found, Mapping | bool):
        raise RequestError(f"{name} must be a JSON Schema: an object")
    if len(text) > MAX_FORM:
        raise RequestError(f"{name} may have {MAX_FORM} letters, not {len(text)}")
    return text


def _choices(name: str, value: object) -> tuple[str, ...]:
    texts = isinstance(value, Sequence) and not isinstance(value, str)
    if not texts or not value or not all(isinstance(one, str) and one for one in value):  # type: ignore[attr-defined]
        raise RequestError(f"{name} must be a list of texts that are not empty")
    return tuple(value)  # type: ignore[arg-type]
