"""`/v1/chat/completions`: messages in, an answer or its pieces out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from dovetail.runtime.schedule.request import Chunk, Completion
from dovetail.runtime.server.context import ServerContext
from dovetail.runtime.server.errors import ApiError
from dovetail.runtime.server.generation import Asked, check_context, check_wishes, read_request
from dovetail.runtime.server.logprobs import chat_logprobs, list_candidates
from dovetail.runtime.server.models import ServedModel
from dovetail.runtime.server.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    ChatReply,
    Usage,
)
from dovetail.runtime.server.schema import ChatRequest
from dovetail.runtime.server.workflow_chat import chat_with


async def chat(server: ServerContext, request: Request) -> Response:
    """Answer a conversation."""
    body = await server.read(request, ChatRequest)
    if (workflow := server.workflows.get(body.model or "")) is not None:
        return await chat_with(server, workflow, request, body)
    model = check_chat(server, body)
    text = await model.render(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        options=body.chat_template_kwargs,
        last=body.truncate_prompt_tokens,
    )
    asked = await server.aside(request, partial(read_chat, model, body, text))
    stream = (ChatChunk, partial(_choices, model, set())) if body.stream else None
    return await asked.respond(server, request, partial(_reply, asked), stream)


def check_chat(server: ServerContext, body: ChatRequest) -> ServedModel:
    """Return the model that a body asks; ApiError where that cannot do it."""
    model = server.find(body.model, "generate")
    check_wishes(body, {"prompt_logprobs": body.prompt_logprobs})
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "`top_logprobs` needs `logprobs: true`", param="top_logprobs")
    if body.max_tokens == 0:
        raise ApiError(400, "`max_tokens` must be at least 1", param="max_tokens")
    return model


def read_chat(model: ServedModel, body: ChatRequest, text: str) -> Asked:
    """Return what a body asks for, whose prompt is `text`; ApiError where the context is full."""
    last = body.truncate_prompt_tokens
    prompt = model.encode(text, param="messages", special=False, last=last)
    check_context(model, [prompt], param="messages")
    most = body.max_completion_tokens or body.max_tokens
    most = model.context - len(prompt) if most is None else most
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    own = {"max_tokens": most, "logprobs": logprobs, "prompt_logprobs": body.prompt_logprobs}
    return read_request(body, model, [prompt], "chatcmpl", **own)


def _reply(asked: Asked, found: Sequence[Completion], usage: Usage) -> ChatReply:
    choices = [
        ChatChoice(
            index=i,
            message=ChatMessage(content=one.text or ""),
            logprobs=chat_logprobs(asked.model, one.logprobs),
            finish_reason=one.finish_reason,
        )
        for i, one in enumerate(found)
    ]
    count = asked.options.get("prompt_logprobs")
    candidates = list_candidates(asked.model, found[0].prompt_logprobs, count)
    return ChatReply(**asked.head, choices=choices, usage=usage, prompt_logprobs=candidates)


def _choices(
    model: ServedModel, begun: set[int], index: int, piece: Chunk
) -> Iterator[ChatChunkChoice]:
    """Yield what a stream says of a piece; those that have `begun` said the role before."""
    if index not in begun:
        begun.add(index)
        yield ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))
    logprobs = chat_logprobs(model, piece.logprobs)
    if piece.text or logprobs:
        yield ChatChunkChoice(index=index, delta=ChatDelta(content=piece.text), logprobs=logprobs)
    if piece.finish_reason:
        yield ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=piece.finish_reason)
