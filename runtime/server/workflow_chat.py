"""A chat with a workflow: any client of OpenAI's API can run one, its name as the model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dovetail.runtime.flows.events import NodeText
from dovetail.runtime.server.context import ServerContext
from dovetail.runtime.server.edge import DONE, JsonReply, event, while_connected
from dovetail.runtime.server.errors import ApiError
from dovetail.runtime.server.forms import read_form
from dovetail.runtime.server.generation import make_head, new_id, read_stream_options
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
from dovetail.runtime.server.served_workflow import ServedWorkflow
from dovetail.runtime.server.workflow_endpoint import running
from dovetail.runtime.text.chat_template import Message

UNREAD = (
    *("logprobs", "top_logprobs", "tools", "stop", "stop_token_ids", "logit_bias", "bad_words"),
    *("allowed_token_ids", "continue_final_message", "truncate_prompt_tokens"),
)
"""Fields that would change what a client gets, but which no node reads."""


async def chat_with(
    server: ServerContext, served: ServedWorkflow, request: Request, body: ChatRequest
) -> Response:
    """Answer a conversation by a workflow. Sampling is what its nodes say."""
    _refuse_fields(body)
    question = _question(body.messages)
    inputs = served.ask(question)
    count = partial(served.model.encode, question, param="messages")
    read = len(await server.aside(request, count))
    head = make_head(served.model, new_id("chatcmpl"), served.id, int(time.time()))
    usage = read_stream_options(body).include_usage
    if body.stream:
        return server.stream(_events(server, served, inputs, head, read if usage else None))
    async with while_connected(request.receive), running(server, served, inputs, "messages") as job:
        text = served.answer(await job)
    choice = ChatChoice(
        index=0, message=ChatMessage(content=text), logprobs=None, finish_reason="stop"
    )
    return JsonReply(ChatReply(**head, choices=[choice], usage=await _usage(served, read, text)))


def _refuse_fields(body: ChatRequest) -> None:
    """Raise ApiError where a body asks for what the nodes of a workflow do not read."""
    form, _ = read_form(body)
    given = {
        "n": (body.n or 1) != 1,
        "prompt_logprobs": body.prompt_logprobs is not None,
        "tool_choice": body.tool_choice not in (None, "none", "auto"),
        form: form,
    }
    given |= {name: getattr(body, name) for name in UNREAD}
    if wrong := [name for name, there in given.items() if there]:
        said = (
            "a workflow gives one answer, without log probabilities and calls of tools, with the "
            f"form and the ends that its nodes say; leave out `{wrong[0]}`"
        )
        raise ApiError(400, said, param=wrong[0])


def _question(messages: list[Message]) -> str:
    last = next((message for message in reversed(messages) if message.role == "user"), None)
    if last is None or last.content is None:
        raise ApiError(400, "a workflow needs a message of the user", param="messages")
    if isinstance(last.content, str):
        return last.content
    return "\n".join(part.text for part in last.content)


async def _usage(served: ServedWorkflow, read: int, text: str) -> Usage:
    """Return the tokens of question and answer; what nodes read and wrote is not counted."""
    written = len(await asyncio.to_thread(served.model.tokenizer.encode, text))
    return Usage.of(read, written)


async def _events(
    server: ServerContext,
    served: ServedWorkflow,
    inputs: dict[str, object],
    head: dict[str, Any],
    read: int | None,
) -> AsyncGenerator[bytes]:
    """Yield the answer as it is written, where its node is known by then; `read` asks for usage.

    Nothing is sent before there is text: a run that is refused until then gets its status.
    """
    shared = head if read is None else {**head, "usage": None}

    def chunk(delta: ChatDelta, reason: str | None = None) -> bytes:
        choice = ChatChunkChoice(index=0, delta=delta, finish_reason=reason)
        return event(ChatChunk(**shared, choices=[choice]))

    shown, opening = "", chunk(ChatDelta(role="assistant", content=""))
    async with running(server, served, inputs, "messages") as job:
        async for item in job:
            if isinstance(item, NodeText) and item.node in served.speakers and item.text:
                if not shown:
                    yield opening
                shown += item.text
                yield chunk(ChatDelta(content=item.text))
        answer = served.answer(await job)
    if not shown:
        yield opening
    if rest := answer.removeprefix(shown):
        yield chunk(ChatDelta(content=rest))
    yield chunk(ChatDelta(), "stop")
    if read is not None:
        yield event(ChatChunk(**head, choices=[], usage=await _usage(served, read, answer)))
    yield DONE
