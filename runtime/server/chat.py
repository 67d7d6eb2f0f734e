"""`/v1/chat/completions`: messages in, an answer or its pieces out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from dovetail.runtime.request import Completion
from dovetail.runtime.server.context import ServerContext
from dovetail.runtime.server.edge import DONE, JsonReply, event, present
from dovetail.runtime.server.errors import ApiError
from dovetail.runtime.server.generation import (
    Asked,
    check_context,
    include_usage,
    new_id,
    processing_headers,
    read_options,
    refuse_streamed_scores,
    refuse_unknown_wishes,
)
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
    if body.stream:
        return server.stream(_events(server, asked, usage=include_usage(body)))
    include_usage(body)
    async with present(request.receive):
        found, usage = await asked.complete(server)
    reply = await server.aside(request, partial(_reply, asked, found, usage))
    return JsonReply(reply, headers=processing_headers(found))


def check_chat(server: ServerContext, body: ChatRequest) -> ServedModel:
    """Return the model that a body asks; ApiError where that cannot do it."""
    model = server.find(body.model, "generate")
    refuse_unknown_wishes(body)
    refuse_streamed_scores(body, body.prompt_logprobs, param="prompt_logprobs")
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
    return Asked(
        model=model,
        prompts=[prompt],
        options=read_options(body, model, most, logprobs, body.prompt_logprobs),
        n=body.n or 1,
        priority=body.priority or 0,
        id=new_id("chatcmpl"),
    )


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


async def _events(server: ServerContext, asked: Asked, *, usage: bool) -> AsyncGenerator[bytes]:
    head = {**asked.head, "usage": None} if usage else asked.head
    begun: set[int] = set()

    def chunk(choice: ChatChunkChoice) -> bytes:
        return event(ChatChunk(**head, choices=[choice]))

    async with asked.start(server) as jobs:
        async for index, piece in asked.stream(server, jobs):
            if index not in begun:
                begun.add(index)
                role = ChatDelta(role="assistant", content="")
                yield chunk(ChatChunkChoice(index=index, delta=role))
            logprobs = chat_logprobs(asked.model, piece.logprobs)
            if piece.text or logprobs:
                delta = ChatDelta(content=piece.text)
                yield chunk(ChatChunkChoice(index=index, delta=delta, logprobs=logprobs))
            if piece.finish_reason:
                end = ChatChunkChoice(
                    index=index, delta=ChatDelta(), finish_reason=piece.finish_reason
                )
                yield chunk(end)
        if usage:
            yield event(ChatChunk(**asked.head, choices=[], usage=asked.usage_of(jobs)))
    yield DONE
