"""A decoder that ranks, asked over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import httpx
import msgspec
import pytest

from dovetail.compiler.pipeline import compile_model
from dovetail.runtime.app import App, load
from dovetail.runtime.embed.service import EmbedJob
from dovetail.runtime.server.app import make_app
from dovetail.runtime.server.context import ServerContext, ServeSettings
from dovetail.runtime.server.models import Models, ServedModel
from tests.rerankers import save_reranker
from tests.runtime.server.live import Live, http
from tests.runtime.server.test_acceptance import make_scope

QUERY, DOCUMENTS = "Who lives in Elm?", ["The mayor lives in Elm.", "Ada built the harbour."]


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder = tmp_path_factory.mktemp("ranker") / "qwen3-reranker"
    save_reranker(folder)
    output = folder.parent / "ranker.dove"
    compile_model(folder, output=output, effort="none", threads=1, weight_dtype="f32")
    with load(output) as app:
        yield app


def post(app: App, path: str, body: Any) -> Any:
    """Return the reply to a request that a server of this process is sent."""
    server = ServerContext(Models([ServedModel("ranker", app)]), ServeSettings(log_requests=False))

    async def ask() -> Any:
        transport = httpx.ASGITransport(app=make_app(server))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            reply = await client.post(path, json=body)
            assert reply.status_code == 200, reply.text
            return reply.json()

    return asyncio.run(ask())


@pytest.mark.parametrize("told", [{}, {"instruction": "Find builders"}])
def test_pairs_are_ranked_by_an_instruction(ranker: App, told: dict[str, str]) -> None:
    found = post(ranker, "/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, **told})
    wanted = ranker.rerank(QUERY, DOCUMENTS, **told)  # type: ignore[arg-type]
    assert [(one["index"], one["relevance_score"]) for one in found["results"]] == [
        (one.index, one.score) for one in wanted
    ]
    encoder = ranker.embeddings.choose(labels=True)
    read = encoder.read_pairs(QUERY, DOCUMENTS, told.get("instruction"))
    assert found["usage"]["total_tokens"] == sum(len(ids) for ids, _ in read)


def test_who_leaves_takes_its_pairs_out_of_the_queues(ranker: App) -> None:
    server = ServerContext(Models([ServedModel("ranker", ranker)]), ServeSettings())
    waiting: list[EmbedJob] = []

    async def leave() -> None:
        loop, queued = asyncio.get_running_loop(), asyncio.Event()
        parts = iter([msgspec.json.encode({"query": QUERY, "documents": DOCUMENTS})])

        def queue(ids: Any, types: Any, **_options: Any) -> EmbedJob:
            waiting.append(EmbedJob(ids, types, 1, 0.0))
            loop.call_soon_threadsafe(queued.set)
            return waiting[0]

        async def receive() -> Any:
            if (body := next(parts, None)) is not None:
                return {"type": "http.request", "body": body, "more_body": False}
            await queued.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            raise AssertionError(message)

        service = ranker.embeddings.choose(labels=True).service
        with patch.object(service, "submit", queue):
            path = {"path": "/v1/rerank", "raw_path": b"/v1/rerank"}
            asking = make_app(server)({**make_scope(), **path}, receive, send)
            try:
                await asyncio.wait_for(asking, 20)
            except TimeoutError:  # else a thread waits for the job for ever
                waiting[0].settle()
                raise

    asyncio.run(leave())
    assert waiting[0].future.cancelled()


def test_vectors_take_no_instruction(live: Live) -> None:
    body = {"model": "encoder", "query": QUERY, "documents": DOCUMENTS, "instruction": "Find"}
    reply = http.post(f"{live.v1}/rerank", json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "instruction"
