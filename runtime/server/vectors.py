"""`/v1/embeddings` and `/v1/rerank`: texts to vectors, documents by how well they answer."""

from __future__ import annotations

import asyncio
from base64 import b64encode

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from dovetail.runtime.native.encoder import Rows
from dovetail.runtime.server.completions import as_inputs
from dovetail.runtime.server.context import ServerContext
from dovetail.runtime.server.edge import JsonReply, while_connected
from dovetail.runtime.server.errors import ApiError
from dovetail.runtime.server.forms import blame_field
from dovetail.runtime.server.generation import new_id
from dovetail.runtime.server.models import ServedModel
from dovetail.runtime.server.replies import (
    Embedding,
    EmbeddingReply,
    EmbeddingUsage,
    RerankReply,
    RerankResult,
)
from dovetail.runtime.server.schema import DocumentText, EmbeddingRequest, RerankRequest


async def embeddings(server: ServerContext, request: Request) -> Response:
    """Embed texts."""
    body = await server.read(request, EmbeddingRequest)
    model, rows, tokens = await embed_inputs(server, request, body)
    base = body.encoding_format == "base64"
    data = [
        Embedding(index=i, embedding=b64encode(row.tobytes()).decode() if base else row.tolist())
        for i, row in enumerate(rows.astype("<f4", copy=False))
    ]
    return JsonReply(EmbeddingReply(data=data, model=model.id, usage=_usage(tokens)))


async def embed_inputs(
    server: ServerContext, request: Request, body: EmbeddingRequest, param: str = "input"
) -> tuple[ServedModel, Rows, int]:
    """Return who embedded, a row for each text, and how many tokens were read."""
    model = server.find(body.model, "embed")
    assert model.encoder is not None
    with blame_field("dimensions"):
        model.encoder.cutter(body.dimensions)
    inputs = as_inputs(body.input, param=param)
    async with while_connected(request.receive):
        with blame_field(param):
            rows, tokens = await _embed(model, inputs, body.prompt_name, body.dimensions)
    server.metrics.embed(model, len(inputs), tokens)
    return model, rows, tokens


async def rerank(server: ServerContext, request: Request) -> Response:
    """Rank documents."""
    return JsonReply(await rank(server, request, await server.read(request, RerankRequest)))


async def rank(server: ServerContext, request: Request, body: RerankRequest) -> RerankReply:
    """Rank documents: by a cross-encoder, else by the cosine of their vectors."""
    model = server.find(body.model, "rerank")
    documents = [one if isinstance(one, str) else one.text for one in body.documents]
    async with while_connected(request.receive):
        if model.ranker:
            scores, tokens = await _score_pairs(model, body.query, documents, body.instruction)
        elif body.instruction is not None:
            raise ApiError(400, "vectors are ranked without instruction", param="instruction")
        else:
            scores, tokens = await _score_vectors(model, body.query, documents)
    server.metrics.embed(model, len(documents), tokens)
    order = np.argsort(-np.asarray(scores), kind="stable")[: body.top_n]
    results = [
        RerankResult(
            index=i,
            relevance_score=scores[i],
            **({"document": DocumentText(text=documents[i])} if body.return_documents else {}),
        )
        for i in order.tolist()
    ]
    return RerankReply(id=new_id("rerank"), model=model.id, usage=_usage(tokens), results=results)


async def _embed(
    model: ServedModel,
    texts: list[str] | list[list[int]],
    prompt_name: str | None = None,
    dimensions: int | None = None,
) -> tuple[Rows, int]:
    """Return a row for each text, and how many tokens were read."""
    assert model.encoder is not None
    ids = await asyncio.to_thread(model.encoder.read, texts, prompt_name, None)
    rows = await model.app.aembed(ids, model=model.encoder.name, dimensions=dimensions)
    return rows, sum(map(len, ids))


async def _score_vectors(
    model: ServedModel, query: str, documents: list[str]
) -> tuple[list[float], int]:
    rows, tokens = await _embed(model, [query, *documents])
    wide = rows.astype(np.float64)
    wide /= np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-30)
    return (wide[1:] @ wide[0]).tolist(), tokens


async def _score_pairs(
    model: ServedModel, query: str, documents: list[str], told: str | None
) -> tuple[list[float], int]:
    assert model.ranker is not None
    ranker = model.ranker

    def count() -> int:
        return sum(len(ids) for ids, _ in ranker.read_pairs(query, documents, told))

    tokens = await asyncio.to_thread(count)
    ranked = await asyncio.to_thread(
        model.app.rerank, query, documents, model=ranker.name, instruction=told
    )
    scores = {one.index: one.score for one in ranked}
    return [scores[i] for i in range(len(documents))], tokens


def _usage(tokens: int) -> EmbeddingUsage:
    return EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
