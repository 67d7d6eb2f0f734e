"""The OpenAPI document holds what the server does: made-up requests meet no 500 and no surprise."""

from __future__ import annotations

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.runtime.server.live import Live, http

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
POSITIVE = schemathesis.GenerationMode.POSITIVE
FAST = ("/v1/completions", "/v1/embeddings", "/v1/models")
GENERATING = ("/v1/chat/completions", "/v1/completions")


def call_all(live: Live, path: str, examples: int) -> None:
    """Send `examples` requests that the document allows, and as many whose body it does not."""
    document = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    for operation in document.get_all_operations():
        found = operation.ok()
        if found.path != path:
            continue
        modes = list(schemathesis.GenerationMode) if found.body else [POSITIVE]
        for mode in modes:

            @hypothesis.given(case=found.as_strategy(generation_mode=mode))
            @hypothesis.settings(
                max_examples=examples,
                deadline=None,
                suppress_health_check=list(hypothesis.HealthCheck),
                database=None,
            )
            def run(case: schemathesis.Case) -> None:
                if path in GENERATING and isinstance(case.body, dict):
                    case.body["max_tokens"] = 1
                    case.body["n"] = 1
                case.call_and_validate(checks=CHECKS, timeout=200)

            run()


def paths() -> list[str]:
    from dovetail.runtime.server.app import ENDPOINTS

    return sorted({e.path.replace(":path", "") for e, _ in ENDPOINTS})


@pytest.mark.parametrize("path", FAST)
def test_replies_are_those_of_the_document(live: Live, path: str) -> None:
    call_all(live, path, 4)


@pytest.mark.long
@pytest.mark.parametrize("path", paths())
def test_many_replies_are_those_of_the_document(live: Live, path: str) -> None:
    call_all(live, path, 4 if path == "/timeline" else 200)  # which takes the seconds asked for


def test_all_paths_are_in_the_document(live: Live) -> None:
    document = http.get(f"{live.url}/openapi.json").json()
    assert set(document["paths"]) == set(paths())
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert fields["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
