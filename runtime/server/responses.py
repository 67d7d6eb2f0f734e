"""`/v1/responses`: OpenAI's newer API for agents, translated to a chat and back.

In: a text or items. Out: items, at once or as events. Nothing is stored: a conversation comes whole
with each request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dovetail.ir.errors import RequestError
from dovetail.runtime.schedule.request import Completion
from dovetail.runtime.server.context import ServerContext
from dovetail.runtime.server.conversation import (
    Conversation,
    check_message,
    converse,
    make_chat,
    rename_fields,
)
from dovetail.runtime.server.edge import named_event
from dovetail.runtime.server.errors import ApiError
from dovetail.runtime.server.forms import blame_field
from dovetail.runtime.server.generation import new_id
from dovetail.runtime.server.items import (
    FunctionCallItem,
    Incomplete,
    InputDetails,
    Item,
    MessageItem,
    OutputDetails,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponsesReply,
    ResponsesUsage,
)
from dovetail.runtime.server.replies import Usage
from dovetail.runtime.server.schema import ResponsesRequest
from dovetail.runtime.text.answers import CallArguments, CallBegin, Content, Part, Reasoning

REFUSED: dict[str, str] = {
    "previous_response_id": "this server keeps no answers; send the whole conversation as `input`",
    "conversation": "this server keeps no conversations; send the whole one as `input`",
    "background": "this server keeps no answers, so that nobody could ask for one later",
    "prompt": "this server keeps no prompts; send the text as `instructions` and `input`",
    "top_logprobs": "log probabilities come with /v1/chat/completions (`logprobs: true`), not here",
}
"""Fields that ask for what is not there, and why they are refused."""
LOGPROBS = "message.output_text.logprobs"
NAMES = {
    "`messages`": "`input`",
    "`response_format`": "`text.format`",
    "json_schema.schema": "text.format.schema",
    ".function.": ".",
    '"function": {"name": ...}': '"name": ...',
    '"allowed_tools": {"mode": "auto" or "required", "tools": [...]}': (
        '"mode": "auto" or "required", "tools": [...]'
    ),
}
"""Fields of chats, and what they are called here."""


async def responses(server: ServerContext, request: Request) -> Response:
    """Answer a conversation."""
    body = await server.read(request, ResponsesRequest)
    for name, why in REFUSED.items():
        if getattr(body, name):
            raise ApiError(400, why, param=name, code="unsupported_parameter")
    if LOGPROBS in (body.include or ()):
        why = REFUSED["top_logprobs"]
        raise ApiError(400, why, param="include", code="unsupported_parameter")
    if body.truncation == "auto":
        said = "`truncation` auto is not supported; leave items out that the context cannot hold"
        raise ApiError(400, said, param="truncation")
    with rename_fields(NAMES):
        chat = make_chat(**_translate(body))
        found = await converse(server, request, chat, "resp")
    if body.stream:
        numbers = count()
        return server.stream(_events(server, found, body, numbers), partial(_fail, numbers))
    return await found.asked.respond(server, request, partial(_reply, found, body), None)


# ---- in ----


def _translate(body: ResponsesRequest) -> dict[str, Any]:
    """Return the fields of a chat."""
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    messages += _read_items(items)
    form = body.text.format if body.text else None
    same = ("model", "temperature", "top_p", "top_k", "seed", "stream", "parallel_tool_calls")
    return {
        **{name: getattr(body, name) for name in (*same, "chat_template_kwargs")},
        "messages": messages,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "max_completion_tokens": body.max_output_tokens,
        "tools": [_read_tool(place, tool) for place, tool in enumerate(body.tools or ())],
        "tool_choice": _read_choice(body.tool_choice),
        "response_format": form and {"type": form.type, "json_schema": {"schema": form.schema}},
    }


def _read_items(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return items as messages: what an assistant said and called is one message."""
    messages: list[dict[str, Any]] = []
    for place, item in enumerate(items):
        kind = item.get("type") or "message"
        read = _READ.get(kind) if isinstance(kind, str) else None
        if read is None:
            said = f"items of type {kind!r} are not supported"
            raise ApiError(400, said, param=f"input[{place}].type")
        try:
            with blame_field(f"input[{place}]"):
                message = read(item)
        except (KeyError, TypeError, AttributeError) as error:
            lacks = f": {error} is missing" if isinstance(error, KeyError) else ""
            said = f"the item is not a {kind} as the API has it{lacks}"
            raise ApiError(400, said, param=f"input[{place}]") from None
        check_message(message, f"input[{place}]")
        last = messages[-1] if messages else {}
        if message["role"] == last.get("role") == "assistant" and not (
            last.get("content") and message.get("content")
        ):
            calls = [*last.get("tool_calls", ()), *message.pop("tool_calls", ())]
            last |= {name: found for name, found in message.items() if found}
            last |= {"tool_calls": calls} if calls else {}
        else:
            messages.append(message)
    return messages


def _read_message(item: Mapping[str, Any]) -> dict[str, Any]:
    content = item["content"]
    if not isinstance(content, str):
        content = [{"type": "text", "text": _part_text(part)} for part in content]
    return {"role": item["role"], "content": content}


_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def _part_text(part: Mapping[str, Any]) -> str:
    kind = part["type"]
    if kind not in _PARTS:
        raise RequestError(f"parts of type {kind!r} are not supported; texts are")
    return _text(part, _PARTS[kind])


def _text(item: Mapping[str, Any], field: str) -> str:
    if not isinstance(item[field], str):
        raise RequestError(f"`{field}` must be a text")
    return str(item[field])


def _read_call(item: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": _text(item, "name"), "arguments": _text(item, "arguments")}
    call = {"id": _text(item, "call_id"), "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _read_result(item: Mapping[str, Any]) -> dict[str, Any]:
    output = item["output"]
    if not isinstance(output, str):
        output = "\n".join(_part_text(part) for part in output)
    return {"role": "tool", "tool_call_id": _text(item, "call_id"), "content": output}


def _read_reasoning(item: Mapping[str, Any]) -> dict[str, Any]:
    parts = item.get("content") or item.get("summary") or ()
    said = "\n".join(part["text"] for part in parts)
    return {"role": "assistant", "content": "", "reasoning_content": said}


_READ = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_result,
    "reasoning": _read_reasoning,
}


def _read_tool(place: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        said = f"tools of type {tool.get('type')!r} are not supported; functions are"
        raise ApiError(400, said, param=f"tools[{place}].type")
    names = ("name", "description", "parameters", "strict")
    known = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": known}


def _read_choice(choice: object) -> object:
    """Return the choice as a chat has it, where names of tools lie deeper."""
    if not isinstance(choice, Mapping):
        return choice
    if isinstance(tools := choice.get("tools"), list):
        return {"allowed_tools": {**choice, "tools": [_read_choice(tool) for tool in tools]}}
    named = choice.get("type") == "function" and "name" in choice
    return {"function": {"name": choice["name"]}} if named else choice


# ---- out ----


@dataclass
class ItemWriter:
    """Parts of an answer as items, with the events that tell of them."""

    conversation: Conversation
    output: list[Item] = field(default_factory=list)
    _kind: str = ""  # of the item under way
    _id: str = ""
    _call: tuple[str, str] = ("", "")  # the id and name of a call
    _text: str = ""

    def take(self, parts: Iterable[Part]) -> Iterator[dict[str, Any]]:
        """Yield the events of parts."""
        for part in parts:
            match part:
                case Content(text):
                    yield from self._add("message", text)
                case Reasoning(text):
                    yield from self._add("reasoning", text)
                case CallBegin(name):
                    yield from self.end()
                    self._call = self.conversation.call_id(), name
                    yield from self._begin("function_call")
                case CallArguments(text):
                    yield from self._add("function_call", text)

    def end(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """Yield the events of the end of the item under way, if there is one."""
        if not self._kind:
            return
        item, index = self._item(status), len(self.output)
        if isinstance(item, FunctionCallItem):
            yield self._tell("done", arguments=self._text)
        else:
            yield self._tell("done", text=self._text)
            part = {**self._place, "part": item.content[0]}
            yield {"type": "response.content_part.done", **part}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
        self.output.append(item)
        self._kind = ""

    def _begin(self, kind: str) -> Iterator[dict[str, Any]]:
        self._kind, self._text, self._id = kind, "", new_id(_PREFIXES[kind])
        item, index = self._item("in_progress"), len(self.output)
        bare = item if kind == "function_call" else msgspec.structs.replace(item, content=[])
        yield {"type": "response.output_item.added", "output_index": index, "item": bare}
        if not isinstance(item, FunctionCallItem):
            part = {**self._place, "part": item.content[0]}
            yield {"type": "response.content_part.added", **part}

    def _add(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if kind != self._kind:
            yield from self.end()
            yield from self._begin(kind)
        self._text += text
        yield self._tell("delta", delta=text)

    @property
    def _place(self) -> dict[str, Any]:
        """Where the text of the item under way is."""
        place = {"item_id": self._id, "output_index": len(self.output)}
        return place if self._kind == "function_call" else {**place, "content_index": 0}

    def _tell(self, what: str, **said: str) -> dict[str, Any]:
        """Return an event of the text of the item under way."""
        data = {"type": f"response.{_DELTAS[self._kind]}.{what}", **self._place, **said}
        return data | {"logprobs": []} if self._kind == "message" else data

    def _item(self, status: str) -> Item:
        id, text = self._id, self._text
        if self._kind == "function_call":
            call, name = self._call
            return FunctionCallItem(id=id, call_id=call, name=name, arguments=text, status=status)
        if self._kind == "reasoning":
            return ReasoningItem(id=id, content=[ReasoningText(text=text)], status=status)
        return MessageItem(id=id, content=[OutputText(text=text)], status=status)


_PREFIXES = {"function_call": "fc", "reasoning": "rs", "message": "msg"}
_DELTAS = {
    "function_call": "function_call_arguments",
    "reasoning": "reasoning_text",
    "message": "output_text",
}


def _reply(
    found: Conversation, body: ResponsesRequest, done: Sequence[Completion], usage: Usage
) -> ResponsesReply:
    (one,) = done
    parser, writer = found.parser(), ItemWriter(found)
    parts = [*parser.feed(one.text or ""), *parser.close()]
    cut = one.finish_reason == "length"
    for _ in (*writer.take(parts), *writer.end("incomplete" if cut else "completed")):
        pass  # nobody asked for events
    return _make(found, body, writer.output, one.finish_reason, usage)


async def _events(
    server: ServerContext, found: Conversation, body: ResponsesRequest, numbers: Iterator[int]
) -> AsyncGenerator[bytes]:
    writer = ItemWriter(found)

    def tell(data: dict[str, Any]) -> bytes:
        return named_event(data["type"], {**data, "sequence_number": next(numbers)})

    empty = _make(found, body, [], "", None)
    opening: list[dict[str, Any]] = [
        {"type": f"response.{kind}", "response": empty} for kind in ("created", "in_progress")
    ]
    async with found.asked.start(server) as jobs:
        async for parts in found.parts(server, jobs):
            for data in (*opening, *writer.take(parts)):
                yield tell(data)
            opening.clear()
        reason = (await jobs[0]).finish_reason
        for data in writer.end("incomplete" if reason == "length" else "completed"):
            yield tell(data)
        reply = _make(found, body, writer.output, reason, found.asked.usage_of(jobs))
        yield tell({"type": f"response.{reply.status}", "response": reply})


def _make(
    found: Conversation,
    body: ResponsesRequest,
    output: list[Item],
    reason: str,
    usage: Usage | None,
) -> ResponsesReply:
    """Return the answer as it stands; `reason` "": it is under way."""
    status = {"": "in_progress", "length": "incomplete"}.get(reason, "completed")
    asked, model = found.asked, found.asked.model
    thought = "".join(
        part.text for item in output if isinstance(item, ReasoningItem) for part in item.content
    )
    counted = len(model.tokenizer.encode(thought, special=False)) if thought else 0
    return ResponsesReply(
        id=asked.id,
        created_at=asked.created,
        status=status,
        incomplete_details=Incomplete(reason="max_output_tokens") if reason == "length" else None,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        model=model.id,
        output=output,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        temperature=asked.options.get("temperature"),
        top_p=asked.options.get("top_p", 1.0),
        text=msgspec.to_builtins(body.text) if body.text else {"format": {"type": "text"}},
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        metadata=body.metadata or {},
        usage=_usage(usage, counted) if usage else None,
    )


def _usage(usage: Usage, reasoning: int) -> ResponsesUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return ResponsesUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(cached_tokens=cached),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputDetails(reasoning_tokens=reasoning),
        total_tokens=usage.total_tokens,
    )


def _fail(numbers: Iterator[int], error: ApiError) -> bytes:
    """Return the event of an error in a stream; the official client raises on its `error`."""
    found = error.reply.error
    told = {name: getattr(found, name) for name in ("code", "message", "param")}
    told |= {"sequence_number": next(numbers), "error": found}
    return named_event("error", {"type": "error", **told})
