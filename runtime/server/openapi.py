"""The OpenAPI document, made from the table of endpoints and the structs of their bodies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dovetail.runtime.server.errors import BLOCK_PATH, BlockError, ErrorReply

COMMON = (400, 401, 404, 405, 408, 413, 415, 429, 500, 503)
"""Statuses that any endpoint may end with, all with the same envelope."""
_TEMPLATE = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path with the types of its body and reply; None for no body, and for plain text.

    query: numbers that it takes by name, with what they are at least and at most.
    """

    path: str
    body: type[msgspec.Struct] | None
    reply: object
    query: tuple[tuple[str, float, float], ...] = ()

    @property
    def method(self) -> str:
        """Of HTTP: what has a body is posted."""
        return "GET" if self.body is None else "POST"


def make_document(endpoints: Sequence[Endpoint], version: str) -> dict[str, Any]:
    """Return the document of all `endpoints`."""
    kinds = [kind for e in endpoints for kind in (e.body, e.reply) if kind is not None]
    listed = list(dict.fromkeys([*kinds, ErrorReply, BlockError]))
    shown, components = msgspec.json.schema_components(listed, ref_template=_TEMPLATE)
    refs = dict(zip(listed, shown, strict=True))
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        path = _PARAMETER.sub(r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, refs)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Dovetail", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(endpoint: Endpoint, refs: dict[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"responses": _responses(endpoint, refs)}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(endpoint.path)
    ]
    for name, least, most in endpoint.query:
        bounds = {"type": "number", "minimum": least, "maximum": most}
        parameters.append({"name": name, "in": "query", "required": False, "schema": bounds})
    if parameters:
        found["parameters"] = parameters
    if endpoint.body is not None:
        content = {"application/json": {"schema": refs[endpoint.body]}}
        found["requestBody"] = {"required": True, "content": content}
    return found


def _responses(endpoint: Endpoint, refs: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if endpoint.reply is not None:
        content = {"application/json": {"schema": refs[endpoint.reply]}}
    if endpoint.body is not None and "stream" in endpoint.body.__struct_fields__:
        content["text/event-stream"] = {}  # events, for which OpenAPI 3.1 has no schema
    envelope = BlockError if endpoint.path.startswith(BLOCK_PATH) else ErrorReply
    error = {"application/json": {"schema": refs[envelope]}}
    failures = {
        str(code): {"description": "Refused or failed", "content": error} for code in COMMON
    }
    return {"200": {"description": "Done", "content": content}, **failures}
