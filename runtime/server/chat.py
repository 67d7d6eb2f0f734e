"""`/v1/chat/completions`: messages in, an answer or its pieces out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from dovetail.runtime.schedule.request import Chunk, Completion
from dovetail.runtime.server.context import ServerContext
from dovetail.runtime.server.conversation import Conversation, converse
from dovetail.runtime.server.logprobs import chat_logprobs, list_candidates
from dovetail.runtime.server.replies import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    ChatReply,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from dovetail.runtime.server.schema import ChatRequest
from dovetail.runtime.server.workflow_chat import chat_with
from dovetail.runtime.text.answers import (
    AnswerParser,
    CallArguments,
    CallBegin,
    Content,
    Part,
    Reasoning,
)


async def chat(server: ServerContext, request: Request) -> Response:
    """Answer a conversation."""
    body = await server.read(request, ChatRequest)
    if (workflow := server.workflows.get(body.model or "")) is not None:
        return await chat_with(server, workflow, request, body)
    found = await converse(server, request, body, "chatcmpl")
    stream = (ChatChunk, ChatStream(found).choices) if body.stream else None
    return await found.asked.respond(server, request, partial(_reply, found), stream)


def _reply(conversation: Conversation, found: Sequence[Completion], usage: Usage) -> ChatReply:
    asked = conversation.asked
    choices = [_choice(conversation, i, one) for i, one in enumerate(found)]
    count = asked.options.get("prompt_logprobs")
    candidates = list_candidates(asked.model, found[0].prompt_logprobs, count)
    return ChatReply(**asked.head, choices=choices, usage=usage, prompt_logprobs=candidates)


def _choice(conversation: Conversation, index: int, found: Completion) -> ChatChoice:
    answer = conversation.read(found.text or "")
    calls: list[ToolCall] | UnsetType = [
        ToolCall(
            id=conversation.call_id(),
            function=CalledFunction(name=call.name, arguments=call.arguments),
        )
        for call in answer.calls
    ] or UNSET
    return ChatChoice(
        index=index,
        message=ChatMessage(
            content=answer.content or (None if answer.calls else ""),
            reasoning_content=answer.reasoning or UNSET,
            tool_calls=calls,
        ),
        logprobs=chat_logprobs(conversation.asked.model, found.logprobs),
        finish_reason=conversation.reason(found.finish_reason, len(answer.calls)),
    )


@dataclass
class ChatStream:
    """What a stream of chunks says, choice by choice."""

    conversation: Conversation
    parsers: dict[int, AnswerParser] = field(default_factory=dict)

    def choices(self, index: int, piece: Chunk) -> Iterator[ChatChunkChoice]:
        """Yield what a piece of a choice brings; the first one says the role before."""
        parser = self.parsers.get(index)
        if parser is None:
            parser = self.parsers[index] = self.conversation.parser()
            yield ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))
        before = parser.calls
        parts = parser.feed(piece.text)
        parts += parser.close() if piece.finish_reason else []
        logprobs = chat_logprobs(self.conversation.asked.model, piece.logprobs)
        deltas = list(self._deltas(before, parts))
        if logprobs and not deltas:  # they go with the tokens, of which no text is sure yet
            deltas.append(ChatDelta(content=""))
        for place, delta in enumerate(deltas):
            shown = None if place else logprobs
            yield ChatChunkChoice(index=index, delta=delta, logprobs=shown)
        if piece.finish_reason:
            reason = self.conversation.reason(piece.finish_reason, parser.calls)
            yield ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=reason)

    def _deltas(self, calls: int, parts: Sequence[Part]) -> Iterator[ChatDelta]:
        """Yield the deltas of parts; `calls` had begun before."""
        for part in parts:
            match part:
                case Content(text):
                    yield ChatDelta(content=text)
                case Reasoning(text):
                    yield ChatDelta(reasoning_content=text)
                case CallBegin(name):
                    calls += 1
                    begun = ToolCallDelta(
                        index=calls - 1,
                        id=self.conversation.call_id(),
                        type="function",
                        function=FunctionDelta(name=name, arguments=""),
                    )
                    yield ChatDelta(tool_calls=[begun])
                case CallArguments(text):
                    more = ToolCallDelta(index=calls - 1, function=FunctionDelta(arguments=text))
                    yield ChatDelta(tool_calls=[more])
