"""The form that a request asks its answer in: all the ways to say it, as one value.

In: `response_format`, `structured_outputs`, the older `guided_...`. Out: a `StructuredOutputs`, or
an ApiError that names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dovetail.ir.errors import LengthError, RequestError
from dovetail.runtime.schedule.structured import StructuredOutputs, read_structured, write_schema
from dovetail.runtime.server.errors import ApiError
from dovetail.runtime.server.schema import GenerationRequest, ResponseFormat

GUIDED = ("json", "regex", "choice", "grammar")


@contextmanager
def blame_field(param: str) -> Iterator[None]:
    """Make what is wrong in the body the fault of a field; a text that is too long says its own."""
    try:
        yield
    except LengthError:
        raise
    except RequestError as error:
        raise ApiError(400, str(error), param=param) from None


def read_form(body: GenerationRequest) -> tuple[str, StructuredOutputs | None]:
    """Return the field that asks for a form, and what that is; None where none does."""
    given = {name: getattr(body, f"guided_{name}") for name in GUIDED}
    given = {name: found for name, found in given.items() if found is not None}
    guided = {**given, "whitespace_pattern": body.guided_whitespace_pattern} if given else None
    ways: dict[str, Callable[[], StructuredOutputs | None]] = {
        "response_format": lambda: _read_format(body.response_format),
        f"guided_{next(iter(given), '')}": lambda: read_structured("guided", guided),
        "structured_outputs": lambda: read_structured(
            "structured_outputs", body.structured_outputs
        ),
    }
    asked: dict[str, StructuredOutputs] = {}
    for field, read in ways.items():
        with blame_field(field):
            if (form := read()) is not None:
                asked[field] = form
    if len(asked) > 1:
        names = " and ".join(f"`{name}`" for name in asked)
        raise ApiError(400, f"give one of {names}", param=next(iter(asked)))
    return next(iter(asked.items()), ("", None))


def _read_format(form: ResponseFormat | None) -> StructuredOutputs | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return StructuredOutputs(json_object=True)
    if form.json_schema is None or form.json_schema.schema is None:
        raise RequestError("`response_format` of type json_schema needs `json_schema.schema`")
    return StructuredOutputs(json=write_schema("json_schema.schema", form.json_schema.schema))
