"""Tools that a model may call: which are offered, and how its family writes calls.

In: tools and a choice as OpenAI's API has them, a chat template. Out: what the template reads, and
what reads an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dovetail.ir.errors import RequestError
from dovetail.runtime.schedule.structured import write_schema
from dovetail.runtime.text.answers import AnswerParser, Thinking
from dovetail.runtime.text.call_formats import (
    PLAIN,
    TAGS,
    CallFormat,
    cut_mark,
    find_format,
    write_calls,
)
from dovetail.runtime.text.call_values import argument_kinds
from dovetail.runtime.text.harmony import CHANNEL, HARMONY, HARMONY_CALLS, HarmonyParser
from dovetail.runtime.text.tokenizer import Tokenizer
from dovetail.runtime.text.tool_schema import MAX_PARTS, count_parts

MAX_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
AUTO, NONE, REQUIRED, NAMED = "auto", "none", "required", "function"

THOUGHTS = (
    Thinking("<think>", "</think>"),
    Thinking("[THINK]", "[/THINK]"),
    Thinking("<seed:think>", "</seed:think>"),
    Thinking("<|channel>thought\n", "<channel|>"),
)
ANSWER_MARKS = ("<response>", "</response>")
"""Around what a model says behind its reasoning, in templates that hold them."""
PRELUDE = """You can call tools:
{tools}
To call one, answer with nothing but
{one}
To call several, answer with nothing but
{several}
What they return comes as the next message."""
FIELDS: dict[str, tuple[type, str]] = {
    "description": (str, "a text"),
    "parameters": (Mapping, "a JSON Schema: an object"),
    "strict": (bool, "true or false"),
}
"""Of a function, each of which may be absent or null."""
EXAMPLE = {"PARAMETER": "VALUE"}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. parameters: a JSON Schema, as text."""

    name: str
    parameters: str
    strict: bool


@dataclass(frozen=True, slots=True)
class Offer:
    """Tools that are offered, all but with the choice `none`.

    shown: as the caller has them, for the template. choice: AUTO, REQUIRED, or NAMED: the one of
    `allowed`, the names that may be called (none: all). parallel: whether several may be at once.
    """

    tools: tuple[Tool, ...]
    shown: tuple[Mapping[str, Any], ...]
    choice: str = AUTO
    allowed: tuple[str, ...] = ()
    parallel: bool = True

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.choice != AUTO

    @property
    def named(self) -> bool:
        """Whether the caller has named the tool to call."""
        return self.choice == NAMED


def read_offer(
    tools: Sequence[Mapping[str, Any]] | None, choice: object = None, *, parallel: bool = True
) -> Offer | None:
    """Return what `tools` and `tool_choice` of a request offer, None where that is nothing.

    Raises RequestError where one is wrong.
    """
    if not tools and choice not in (None, NONE, AUTO):
        raise RequestError("tool_choice needs tools")
    if not tools or choice == NONE:
        return None
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"there may be {MAX_TOOLS} tools, not {len(tools)}")
    found = tuple(_read_tool(place, tool) for place, tool in enumerate(tools))
    left = MAX_PARTS
    for place, tool in enumerate(found):
        where = f"tools[{place}].function.parameters"
        left -= count_parts(where, json.loads(tool.parameters), left)
    names = [tool.name for tool in found]
    if doubled := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"two tools have the name {doubled!r}")
    shown = tuple({**_drop_nulls(one), "function": _drop_nulls(one["function"])} for one in tools)
    return Offer(found, shown, *_read_choice(choice, names), parallel)


def _drop_nulls(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if value is not None}


def _read_tool(place: int, tool: Mapping[str, Any]) -> Tool:
    where = f"tools[{place}]"
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type") not in ("function", None):
        raise RequestError(f'{where} must be {{"type": "function", "function": {{...}}}}')
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(
            f"{where}.function.name must have 1 to 64 letters, digits, dots, dashes or underscores"
        )
    for key, (kind, said) in FIELDS.items():
        if not isinstance(function.get(key), kind | None):
            raise RequestError(f"{where}.function.{key} must be {said}")
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    return Tool(
        name, write_schema(f"{where}.function.parameters", schema), bool(function.get("strict"))
    )


def _read_choice(choice: Any, names: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    if choice in (None, AUTO, REQUIRED):
        return choice or AUTO, ()
    try:
        mode, tools = NAMED, [choice]
        if "allowed_tools" in choice:
            choice = choice["allowed_tools"]
            mode, tools = {AUTO: AUTO, REQUIRED: REQUIRED}[choice["mode"]], choice["tools"]
        allowed = tuple(tool["function"]["name"] for tool in tools)
    except (KeyError, TypeError):
        allowed = ()
    if not allowed or not all(isinstance(name, str) for name in allowed):
        raise RequestError(
            'tool_choice must be "auto", "none", "required", '
            '{"type": "function", "function": {"name": ...}}, or {"type": "allowed_tools", '
            '"allowed_tools": {"mode": "auto" or "required", "tools": [...]}}'
        )
    if unknown := set(allowed) - set(names):
        raise RequestError(f"tool_choice names {min(unknown)[:64]!r}, which is none of the tools")
    return mode, allowed


# ---- what a chat template tells ----


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """How a model of some family writes calls and reasoning, as its chat template tells.

    knows_tools: whether the template shows tools to the model. recalls: whether it shows calls of
    earlier answers. tools: names of what it reads the tools from.
    """

    calls: CallFormat
    thinking: Thinking | None
    knows_tools: bool
    recalls: bool = True
    tools: tuple[str, ...] = ("tools",)

    @classmethod
    def of(cls, template: str) -> ChatStyle:
        """Return the style of a template."""
        knows = re.search(r"\btools\b", template) is not None
        if CHANNEL in template:
            return cls(HARMONY_CALLS, HARMONY, knows)
        calls = find_format(template) or PLAIN
        thinking = next((one for one in THOUGHTS if one.end in template), None)
        if thinking is not None and ANSWER_MARKS[0] in template:
            thinking = replace(thinking, around=ANSWER_MARKS)
        recalls = knows if calls is PLAIN else "tool_calls" in template
        names = tuple(name for name in ("tools", "xml_tools") if name in template)
        return cls(calls, thinking, knows, recalls, names)

    def parser(
        self, offer: Offer | None = None, *, begun: bool, most: int | None = None
    ) -> AnswerParser:
        """Return what reads an answer, and the calls of what is offered. The rest as of it."""
        if self.thinking is HARMONY:
            return HarmonyParser(offered=offer is not None, begun=begun, most=most)
        if offer is None:
            return AnswerParser(None, self.thinking, begun=begun)
        typed = self.calls.kind == TAGS
        tools = {tool.name: argument_kinds(tool.parameters) for tool in offer.tools if typed}
        return AnswerParser(self.calls, self.thinking, begun=begun, most=most, tools=tools)

    def has_special_marks(self, tokenizer: Tokenizer, *, offered: bool = False) -> bool:
        """Tell whether the answer's parts are told apart by special tokens, which are no text."""
        marks = set(self.calls.marks) if offered else set()
        for mark in (self.thinking.begin, self.thinking.end) if self.thinking else ():
            marks.update(cut_mark(mark))
        return any(tokenizer.find_special(piece) is not None for piece in marks)

    def begins_thinking(self, prompt: str) -> bool:
        """Tell whether a prompt ends within reasoning."""
        return self.thinking is not None and prompt.rstrip().endswith(self.thinking.begin.rstrip())

    def show(
        self, messages: Sequence[Mapping[str, Any]], offer: Offer | None
    ) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
        """Return messages and options for the template, so that the model sees the tools.

        What the template leaves out is given to it as plain text: tools as a part of the system
        message, calls as a part of the answers they were in, and results as messages of the user.
        """
        if self.thinking is HARMONY:
            messages = [_name_thinking(message) for message in messages]
        if not self.recalls:
            messages = [self._write_out(message) for message in messages]
        if offer is None or self.knows_tools:
            return list(messages), {name: list(offer.shown) for name in self.tools if offer}
        lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in offer.shown)
        one, several = (write_calls(self.calls, [("NAME", EXAMPLE)] * count) for count in (1, 2))
        prelude = PRELUDE.format(tools=lines, one=one, several=several)
        first = messages[0] if messages and messages[0]["role"] == "system" else None
        if first is None:
            return [{"role": "system", "content": prelude}, *messages], {}
        return [{**first, "content": f"{text_of(first)}\n\n{prelude}"}, *messages[1:]], {}

    def _write_out(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message without what a template would leave out that shows no calls."""
        if message["role"] == "tool" and self.calls is PLAIN:
            name = message.get("name")
            of = f" of {name}" if name else ""
            return {"role": "user", "content": f"Result{of}: {text_of(message)}"}
        calls = message.get("tool_calls")
        if not calls:
            return message
        functions = [call["function"] for call in calls]
        written = write_calls(self.calls, [(one["name"], _arguments(one)) for one in functions])
        said = "\n".join(filter(None, (text_of(message), written)))
        plain = {name: value for name, value in message.items() if name != "tool_calls"}
        return {**plain, "content": said}


def text_of(message: Mapping[str, Any]) -> str:
    """Return what a message says, its parts as lines."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _name_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its reasoning as gpt-oss's template calls it, where that takes it."""
    said = message.get("reasoning_content") or message.get("reasoning")
    if not said or (message.get("content") and message.get("tool_calls")):
        return message
    return {**message, "thinking": said}


def _arguments(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a call, which clients send as JSON text."""
    found = function.get("arguments") or {}
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError:
            found = {"arguments": found}
    return found if isinstance(found, Mapping) else {"arguments": found}
