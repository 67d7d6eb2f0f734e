"""`/v1/messages`: Anthropic's API, translated to a chat and back.

In: messages of blocks. Out: a message of blocks, at once or as events; the tokens of a prompt.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dovetail.runtime.schedule.request import Completion
from dovetail.runtime.server.context import ServerContext
from dovetail.runtime.server.conversation import (
    Conversation,
    check_message,
    converse,
    make_chat,
    rename_fields,
)
from dovetail.runtime.server.edge import JsonReply, named_event
from dovetail.runtime.server.errors import ApiError
from dovetail.runtime.server.items import (
    BlockReply,
    BlockUsage,
    InputTokens,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from dovetail.runtime.server.replies import Usage
from dovetail.runtime.server.schema import Block, BlockMessage, CountRequest, MessagesRequest
from dovetail.runtime.text.answers import CallArguments, CallBegin, Content, Part, Reasoning

STOPS = {"length": "max_tokens"}
"""Why an answer ended, in the words of this API; else it is `end_turn`."""
NAMES = {
    "`response_format`": "`output_config.format`",
    "json_schema.schema": "output_config.format.schema",
    ".function.parameters": ".input_schema",
    ".function.": ".",
}
"""Fields of chats, and what they are called here."""
ROLES = {"tool_use": "assistant", "thinking": "assistant", "tool_result": "user"}
"""Whose messages hold blocks of a type."""


async def messages(server: ServerContext, request: Request) -> Response:
    """Answer a conversation."""
    body = await server.read(request, MessagesRequest)
    same = ("max_tokens", "temperature", "top_p", "top_k", "stream")
    fields = {name: getattr(body, name) for name in same}
    found = await _converse(server, request, body, stop=body.stop_sequences or None, **fields)
    if body.stream:
        return server.stream(_events(server, found, body), _fail)
    return await found.asked.respond(server, request, partial(_reply, found, body), None)


async def count_tokens(server: ServerContext, request: Request) -> Response:
    """Count the tokens of a conversation."""
    body = await server.read(request, CountRequest)
    found = await _converse(server, request, body)
    return JsonReply(InputTokens(input_tokens=len(found.asked.prompts[0])))


async def _converse(
    server: ServerContext, request: Request, body: CountRequest, **fields: object
) -> Conversation:
    with rename_fields(NAMES):
        chat = make_chat(**_translate(body), **fields)
        return await converse(server, request, chat, "msg")


# ---- in ----


def _translate(body: CountRequest) -> dict[str, Any]:
    """Return the fields of a chat that make its prompt."""
    conversation: list[dict[str, Any]] = []
    if body.system:
        conversation.append({"role": "system", "content": _join(body.system, "system")})
    for place, message in enumerate(body.messages):
        conversation += _read_message(message, f"messages[{place}]")
        check_message(conversation[-1], f"messages[{place}]")
    if len(conversation) > 1 and conversation[-1] == {"role": "assistant", "content": ""}:
        conversation.pop()  # nothing has been begun
    last = conversation[-1]
    begun = last.get("role") == "assistant" and "tool_calls" not in last and bool(last["content"])
    choice = body.tool_choice
    names = {"auto": "auto", "any": "required", "none": "none"}
    wish: object = names.get(choice.type) if choice else None
    if choice and choice.type == "tool":
        if choice.name is None:
            said = "`tool_choice` of type 'tool' must have the `name` of the tool to call"
            raise ApiError(400, said, param="tool_choice.name")
        wish = {"type": "function", "function": {"name": choice.name}}
    tools = []
    for place, tool in enumerate(body.tools or ()):
        if tool.type not in (None, "custom"):
            raise _unsupported("tools", tool.type, f"tools[{place}].type")
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
        function |= {"description": tool.description} if tool.description else {}
        function |= {"strict": True} if tool.strict else {}
        tools.append({"type": "function", "function": function})
    form = body.output_config.format if body.output_config else None
    thinks = None if body.thinking is None else body.thinking.type != "disabled"
    return {
        "model": body.model,
        "messages": conversation,
        "add_generation_prompt": not begun,
        "continue_final_message": begun,
        "tools": tools,
        "tool_choice": wish,
        "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
        "response_format": form and {"type": form.type, "json_schema": {"schema": form.schema}},
        "chat_template_kwargs": None if thinks is None else {"enable_thinking": thinks},
    }


def _read_message(message: BlockMessage, place: str) -> list[dict[str, Any]]:
    """Return the messages of a message: results of tools stand before what the user says."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results, calls, texts, thoughts = [], [], list[str](), list[str]()
    for number, block in enumerate(message.content):
        where = f"{place}.content[{number}]"
        if (role := ROLES.get(block.type, message.role)) != message.role:
            said = f"blocks of type {block.type!r} belong in a message of the {role!r} role"
            raise ApiError(400, said, param=f"{where}.type")
        if block.type == "text":
            texts.append(block.text or "")
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            function = {"name": block.name, "arguments": json.dumps(block.input or {})}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "tool_result":
            said = _join(block.content or "", f"{where}.content")
            called = {"role": "tool", "tool_call_id": block.tool_use_id or ""}
            results.append({**called, "content": said})
        elif block.type != "redacted_thinking":
            raise _unsupported("blocks", block.type, f"{where}.type")
    text = "\n".join(texts)
    answer: dict[str, Any] = {"role": message.role, "content": text or (None if calls else "")}
    answer |= {"tool_calls": calls} if calls else {}
    answer |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    return [*results, answer] if text or calls or not results else results


def _join(said: str | Sequence[Block], where: str) -> str:
    """Return what is said, texts of blocks as lines; ApiError where one is no text."""
    if isinstance(said, str):
        return said
    for number, block in enumerate(said):
        if block.type != "text":
            raise _unsupported("blocks", block.type, f"{where}[{number}].type")
    return "\n".join(block.text or "" for block in said)


def _unsupported(what: str, kind: str, param: str) -> ApiError:
    taken = "functions" if what == "tools" else "texts"
    return ApiError(400, f"{what} of type {kind!r} are not supported; {taken} are", param=param)


# ---- out ----


def _reply(
    found: Conversation, body: MessagesRequest, done: Sequence[Completion], usage: Usage
) -> BlockReply:
    (one,) = done
    answer = found.read(one.text or "")
    content: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
    if answer.reasoning:
        content.append(ThinkingBlock(thinking=answer.reasoning))
    if answer.content:
        content.append(TextBlock(text=answer.content))
    content += [
        ToolUseBlock(id=found.call_id(), name=call.name, input=_loads(call.arguments))
        for call in answer.calls
    ]
    return BlockReply(
        id=found.asked.id,
        model=found.asked.model.id,
        content=content,
        **_end(found, body, one, calls=len(answer.calls)),
        usage=_usage(usage),
    )


def _end(
    found: Conversation, body: MessagesRequest, one: Completion, *, calls: int
) -> dict[str, Any]:
    """Return why an answer ended, and the stop text in its tokens that ended it."""
    stops, model, ids = body.stop_sequences or [], found.asked.model, one.token_ids
    reason, stop = "tool_use" if calls else "end_turn", None
    if one.finish_reason != "stop":
        reason = STOPS.get(one.finish_reason, "end_turn")
    elif stops and not (ids and ids[-1] in model.app.end_tokens):
        written = model.tokenizer.decode(ids)
        held = (stop for stop in stops if stop in written)
        reason, stop = "stop_sequence", min(held, key=written.index, default=None)
    return {"stop_reason": reason, "stop_sequence": stop}


def _usage(usage: Usage) -> BlockUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return BlockUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
    )


def _loads(arguments: str) -> dict[str, Any]:
    """Return arguments as an object; an empty one where they were cut off."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@dataclass
class BlockWriter:
    """Parts of an answer as the events of blocks."""

    conversation: Conversation
    kind: type[Part] | None = None  # of the block under way
    index: int = -1
    calls: int = 0

    def take(self, parts: Iterable[Part]) -> Iterator[dict[str, Any]]:
        """Yield the events of parts."""
        for part in parts:
            match part:
                case Content(text):
                    yield from self._begin(Content, TextBlock(text=""))
                    yield self._delta({"type": "text_delta", "text": text})
                case Reasoning(text):
                    yield from self._begin(Reasoning, ThinkingBlock(thinking=""))
                    yield self._delta({"type": "thinking_delta", "thinking": text})
                case CallBegin(name):
                    self.calls += 1
                    block = ToolUseBlock(id=self.conversation.call_id(), name=name, input={})
                    yield from self.end()
                    yield from self._begin(CallArguments, block)
                case CallArguments(text):
                    yield self._delta({"type": "input_json_delta", "partial_json": text})

    def end(self) -> Iterator[dict[str, Any]]:
        """Yield the event of the end of the block under way, if there is one."""
        if self.kind is not None:
            yield {"type": "content_block_stop", "index": self.index}
        self.kind = None

    def _begin(
        self, kind: type[Part], block: TextBlock | ThinkingBlock | ToolUseBlock
    ) -> Iterator[dict[str, Any]]:
        if kind is not self.kind:
            yield from self.end()
            self.kind, self.index = kind, self.index + 1
            yield {"type": "content_block_start", "index": self.index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self.index, "delta": delta}


async def _events(
    server: ServerContext, found: Conversation, body: MessagesRequest
) -> AsyncGenerator[bytes]:
    asked, writer = found.asked, BlockWriter(found)
    begun = BlockReply(
        id=asked.id,
        model=asked.model.id,
        content=[],
        stop_reason=None,
        stop_sequence=None,
        usage=BlockUsage(input_tokens=len(asked.prompts[0]), output_tokens=0),
    )
    opening: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    async with asked.start(server) as jobs:
        async for parts in found.parts(server, jobs):
            for data in (*opening, *writer.take(parts)):
                yield named_event(data["type"], data)
            opening.clear()
        for data in writer.end():
            yield named_event(data["type"], data)
        delta = _end(found, body, await jobs[0], calls=writer.calls)
        usage = _usage(asked.usage_of(jobs))
        end = {"type": "message_delta", "delta": delta, "usage": usage}
        yield named_event("message_delta", end)
    yield named_event("message_stop", {"type": "message_stop"})


def _fail(error: ApiError) -> bytes:
    return named_event("error", error.block_reply)
