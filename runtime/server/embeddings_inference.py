"""`/embed`, `/rerank` and `/info`: the forms of text-embeddings-inference, which clients ask in."""

from __future__ import annotations

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from dovetail.runtime.server.context import ServerContext
from dovetail.runtime.server.edge import JsonReply
from dovetail.runtime.server.errors import ApiError
from dovetail.runtime.server.replies import EncoderInfo, RankedText
from dovetail.runtime.server.schema import (
    MAX_INPUTS,
    EmbeddingRequest,
    EmbedRequest,
    RerankRequest,
    RerankTextsRequest,
)
from dovetail.runtime.server.vectors import embed_inputs, rank


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
    if body.raw_scores:
        raise ApiError(400, "scores are not given raw; omit `raw_scores`", param="raw_scores")
    asked = RerankRequest(query=body.query, documents=list(body.texts), model=body.model)
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
