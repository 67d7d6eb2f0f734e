"""`/v1/embeddings` and `/v1/rerank`: texts to vectors, documents by how well they answer."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from functools import partial

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from dovetail.runtime.embed.texts import RerankOptions, start_aside
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
    EncoderInfo,
    RankedText,
    RerankReply,
    RerankResult,
)
from dovetail.runtime.server.schema import (
    MAX_INPUTS,
    DocumentText,
    EmbeddingRequest,
    EmbedRequest,
    RerankRequest,
    RerankTextsRequest,
)


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
    with blame_field("prompt_name"):
        model.encoder.choose_prompt(body.prompt_name, None)
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
    model: ServedModel, query: str, documents: list[str], instruction: str | None
) -> tuple[list[float], int]:
    assert model.ranker is not None
    ranker = model.ranker

    options = RerankOptions(model=ranker.name, instruction=instruction)
    start = partial(model.app.embeddings.start_rerank, query, documents, **options)
    job, rank = await start_aside(start)
    ranked = rank(await asyncio.wrap_future(job.future))
    scores = {one.index: one.score for one in ranked}
    return [scores[i] for i in range(len(documents))], sum(map(len, job.ids))


def _usage(tokens: int) -> EmbeddingUsage:
    return EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)


# ---- as text-embeddings-inference has it ----


async def embed(server: ServerContext, request: Request) -> Response:
    """Embed texts to a list of vectors, of length 1 unless `normalize` is false."""
    body = await server.read(request, EmbedRequest)
    asked = EmbeddingRequest(
        input=body.inputs,
        model=body.model,
        dimensions=body.dimensions,
        prompt_name=body.prompt_name,
    )
    _, rows, _ = await embed_inputs(server, request, asked, "inputs")
    if body.normalize is not False:
        rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return JsonReply(rows.tolist())


async def rerank_texts(server: ServerContext, request: Request) -> Response:
    """Rank `documents` as `/v1/rerank` does, or `texts` to a list."""
    body = await server.read(request, RerankTextsRequest)
    if not body.texts:
        if not body.documents:
            raise ApiError(400, "give `documents`, or `texts`; at least one", param="documents")
        return JsonReply(await rank(server, request, body))
    if body.documents:
        raise ApiError(400, "give `documents` or `texts`, not both", param="documents")
    if body.raw_scores:
        raise ApiError(400, "scores are not given raw; omit `raw_scores`", param="raw_scores")
    asked = RerankRequest(
        query=body.query,
        documents=list(body.texts),
        model=body.model,
        top_n=body.top_n,
        instruction=body.instruction,
    )
    found = await rank(server, request, asked)
    return JsonReply(
        [
            RankedText(
                index=one.index,
                score=one.relevance_score,
                **({"text": body.texts[one.index]} if body.return_text else {}),
            )
            for one in found.results
        ]
    )


async def info(server: ServerContext, _request: Request) -> Response:
    """Tell what the first model that embeds, or else that ranks, is."""
    embeds = any("embed" in model.skills for model in server.models)
    model = server.find(None, "embed" if embeds else "rerank")
    found = model.encoder or model.ranker
    assert found is not None
    labels = {str(i): f"LABEL_{i}" for i in range(found.spec.labels)}
    kind = {"reranker": {"id2label": labels, "label2id": {v: int(k) for k, v in labels.items()}}}
    return JsonReply(
        EncoderInfo(
            model_id=model.id,
            model_dtype=found.spec.weight_dtype,
            model_type={"embedding": {"pooling": found.spec.pooling}} if embeds else kind,
            max_input_length=found.spec.max_tokens,
            max_client_batch_size=MAX_INPUTS,
            version=server.settings.version,
        )
    )
