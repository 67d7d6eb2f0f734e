"""Tools that a model may call: which are offered, how its family writes calls, and their grammars.

In: tools and a choice as OpenAI's API has them, a chat template. Out: what the template reads, the
format of calls, and a grammar where calls are wanted or their arguments must be right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dovetail.ir.errors import RequestError
from dovetail.runtime.schedule.structured import StructuredOutputs, write_schema
from dovetail.runtime.text.answers import ARGS, AnswerParser, CallFormat, Thinking
from dovetail.runtime.text.grammar import ANSWER, json_rule, quote
from dovetail.runtime.text.harmony import (
    CHANNEL,
    HARMONY,
    HARMONY_CALLS,
    HarmonyParser,
    open_call,
)
from dovetail.runtime.text.tokenizer import Tokenizer

MAX_TOOLS = 128
MAX_CALLS = 32
"""Calls of an answer that must have some: a model that knows no end finds one."""
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
AUTO, NONE, REQUIRED, NAMED = "auto", "none", "required", "function"

HERMES = CallFormat(begin="<tool_call>", end="</tool_call>")
LLAMA = CallFormat(begin="<|python_tag|>", bare=True, arguments="parameters", divider="; ")
MISTRAL = CallFormat(begin="[TOOL_CALLS]", named=True)
PLAIN = CallFormat(bare=True)
"""JSON alone: what a model is asked for whose template knows no tools."""
FORMATS: tuple[tuple[re.Pattern[str], CallFormat], ...] = (
    (re.compile(r"\[TOOL_CALLS\]"), MISTRAL),
    (re.compile("<tool_call>"), HERMES),
    (re.compile(r"<\|python_tag\|>|ipython"), LLAMA),
)
"""What a chat template of a family holds."""
SPECIAL = re.compile(r"(<\|\w+\|>)")
"""How special tokens look that are parts of marks."""
THOUGHTS = (Thinking("<think>", "</think>"), Thinking("[THINK]", "[/THINK]"))
PRELUDE = """You can call tools:
{tools}
To call one, answer with nothing but {{"name": "NAME", "arguments": {{...}}}}; to call several, \
with a list of these. What they return comes as the next message."""


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
    names = [tool.name for tool in found]
    if doubled := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"two tools have the name {doubled!r}")
    return Offer(found, tuple(tools), *_read_choice(choice, names), parallel)


def _read_tool(place: int, tool: Mapping[str, Any]) -> Tool:
    where = f"tools[{place}]"
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise RequestError(f'{where} must be {{"type": "function", "function": {{...}}}}')
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(
            f"{where}.function.name must have 1 to 64 letters, digits, dots, dashes or underscores"
        )
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
        allowed = tuple(str(tool["function"]["name"]) for tool in tools)
    except (KeyError, TypeError):
        allowed = ()
    if not allowed:
        raise RequestError(
            'tool_choice must be "auto", "none", "required", '
            '{"type": "function", "function": {"name": ...}}, or {"type": "allowed_tools", '
            '"allowed_tools": {"mode": "auto" or "required", "tools": [...]}}'
        )
    if strange := set(allowed) - set(names):
        raise RequestError(f"tool_choice names {min(strange)[:64]!r}, which is none of the tools")
    return mode, allowed


# ---- what a chat template tells ----


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """How a model of some family writes calls and reasoning, as its chat template tells.

    knows_tools: whether the template shows tools to the model.
    """

    calls: CallFormat
    thinking: Thinking | None
    knows_tools: bool

    @classmethod
    def of(cls, template: str) -> ChatStyle:
        """Return the style of a template."""
        knows = re.search(r"\btools\b", template) is not None
        if CHANNEL in template:
            return cls(HARMONY_CALLS, HARMONY, knows)
        calls = next((form for mark, form in FORMATS if mark.search(template)), PLAIN)
        calls = calls if knows else PLAIN
        if calls is MISTRAL and ARGS in template:
            calls = replace(MISTRAL, divider=ARGS)
        thinking = next((one for one in THOUGHTS if one.end in template), None)
        return cls(calls, thinking, knows)

    def parser(
        self, *, offered: bool = False, begun: bool, most: int | None = None
    ) -> AnswerParser:
        """Return what reads an answer; `offered`: calls may be in it. The rest as of the parser."""
        if self.thinking is HARMONY:
            return HarmonyParser(offered=offered, begun=begun, most=most)
        calls = self.calls if offered else None
        return AnswerParser(calls, self.thinking, begun=begun, most=most)

    def has_special_marks(self, tokenizer: Tokenizer, *, offered: bool = False) -> bool:
        """Tell whether the answer's parts are told apart by special tokens, which are no text."""
        marks = [self.calls.begin, self.calls.end] if offered else []
        marks += [self.thinking.begin, self.thinking.end] if self.thinking else []
        pieces = [piece for mark in marks for piece in _cut_mark(mark)]
        return any(tokenizer.find_special(piece) is not None for piece in pieces)

    def begins_thinking(self, prompt: str) -> bool:
        """Tell whether a prompt ends within reasoning."""
        return self.thinking is not None and prompt.rstrip().endswith(self.thinking.begin)

    def show(
        self, messages: Sequence[Mapping[str, Any]], offer: Offer | None
    ) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
        """Return messages and options for the template, so that the model sees the tools.

        A template that knows none is given them, calls and results as messages of plain text.
        """
        if self.thinking is HARMONY:
            messages = [_name_thinking(message) for message in messages]
        if self.knows_tools:
            return list(messages), {"tools": list(offer.shown)} if offer else {}
        plain = [_plain(message) for message in messages]
        if offer is None:
            return plain, {}
        lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in offer.shown)
        prelude = PRELUDE.format(tools=lines)
        first = plain[0] if plain and plain[0]["role"] == "system" else None
        if first is None:
            return [{"role": "system", "content": prelude}, *plain], {}
        return [{**first, "content": f"{text_of(first)}\n\n{prelude}"}, *plain[1:]], {}


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


def _plain(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message without what a template that knows no tools would leave out."""
    if message["role"] == "tool":
        name = message.get("name")
        of = f" of {name}" if name else ""
        return {"role": "user", "content": f"Result{of}: {text_of(message)}"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    said = [
        f'{{"name": {json.dumps(call["function"]["name"])}, '
        f'"arguments": {_arguments(call["function"])}}}'
        for call in calls
    ]
    written = said[0] if len(said) == 1 else f"[{', '.join(said)}]"
    return {"role": "assistant", "content": "\n".join(filter(None, (text_of(message), written)))}


def _arguments(function: Mapping[str, Any]) -> str:
    found = function.get("arguments") or {}
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


# ---- grammars ----

Literal = Callable[[str], str]
"""Writes a mark as Lark: as text, or the token of a model where it is a special one."""
ANYTHING = "/(?s:.*)/"


def write_mark(tokenizer: Tokenizer, mark: str) -> str:
    """Return a mark of calls or reasoning as a grammar of a model has it."""
    tokens = [(piece, tokenizer.find_special(piece)) for piece in _cut_mark(mark)]
    return " ".join(quote(p) if token is None else f"<[{token}]>" for p, token in tokens)


def _cut_mark(mark: str) -> list[str]:
    """Return a mark in pieces, of which some may be special tokens."""
    return [piece for piece in SPECIAL.split(mark) if piece]


def frame(
    form: StructuredOutputs, thinking: Thinking | None, literal: Literal, *, begun: bool
) -> StructuredOutputs:
    """Return a form with the reasoning that may go before it; `begun`: the prompt began it."""
    if thinking is None:
        return form
    first, rules = _write_thinking(thinking, literal, begun=begun)
    head = f"{literal(thinking.answer)} " if thinking.answer else ""
    return replace(form, around="\n".join([f"start: {first}{head}@{ANSWER}", *rules]))


def call_grammar(offer: Offer, style: ChatStyle, literal: Literal, *, begun: bool) -> str | None:
    """Return the grammar of an answer that must be calls, or whose calls must be right.

    None where nothing is asked of them. `begun`: the prompt ends within reasoning.
    """
    wanted = [tool for tool in offer.tools if tool.name in (offer.allowed or (tool.name,))]
    if not (offer.forced or offer.allowed or any(tool.strict for tool in wanted)):
        return None
    form = style.calls
    rules = [
        rule
        for place, tool in enumerate(wanted)
        for rule in _write_call(place, tool, form, literal, offer)
    ]
    rules.append("call: " + " | ".join(f"call_{place}" for place in range(len(wanted))))
    single = offer.named or not offer.parallel
    rules += _write_calls(form, literal, more=0 if single else MAX_CALLS - 1)
    first, thought = "", list[str]()
    if style.thinking is not None:
        first, thought = _write_thinking(style.thinking, literal, begun=begun)
    talk = offer.choice == AUTO
    rules += _write_talk(style, literal, single=single) if talk else ["answer: calls"]
    return "\n".join([*rules, f"start: {first}answer", *thought])


def _write_thinking(thinking: Thinking, literal: Literal, *, begun: bool) -> tuple[str, list[str]]:
    """Return what stands before an answer, and the rules of that."""
    begin, end = literal(thinking.begin), literal(thinking.end)
    if end.startswith('"'):
        inside = ["thought", f"thought[lazy]: {ANYTHING} {end}"]
    else:
        inside = [f"THOUGHT {end}", f"THOUGHT: {ANYTHING}"]
    opening = "" if begun else f"{begin} "
    rules = [f'think: {opening}{inside[0]} ("\\n" | "\\n\\n")?', inside[1]]
    return "think " if begun else "think? ", rules


def _write_call(
    place: int, tool: Tool, form: CallFormat, literal: Literal, offer: Offer
) -> list[str]:
    """Return the rules of a call of one tool. In AUTO the strict ones' arguments alone are held."""
    if form is HARMONY_CALLS:
        call = f"{literal(open_call(tool.name))} args_{place}"
    elif form.divider == ARGS:
        call = f"{quote(tool.name)} {literal(ARGS)} args_{place}"
    else:
        head = quote(f'{{"name": {json.dumps(tool.name)}, "{form.arguments}": ')
        call = f"{head} args_{place} {quote('}')}"
    held = offer.forced or tool.strict
    schema = tool.parameters if held else '{"type": "object"}'
    return [f"call_{place}: {call}", f"args_{place}: {json_rule(schema)}"]


def _write_calls(form: CallFormat, literal: Literal, *, more: int) -> list[str]:
    """Return the rules of one call and up to so many `more`, in a format.

    `marked` is what follows the mark of a format that has one.
    """
    if form is HARMONY_CALLS:  # an answer ends behind one
        return ["calls: call"]
    begin = literal(form.begin)
    if form.divider == ARGS:
        again = _repeat(f"{begin} marked", more)
        return ["marked: call", f"calls: {begin} marked {again}"]
    if form.end:
        again = _repeat(f'"\\n" {begin} marked', more)
        marked = f'marked: "\\n" call "\\n" {literal(form.end)}'
        return [marked, f"calls: {begin} marked {again}"]
    if form.divider:
        return ["calls: call " + _repeat(f"{quote(form.divider)} call", more)]
    again = _repeat('", " call', more)
    listed = f'"[" call {again} "]"'
    if form.begin:
        return [f'marked: " "? {listed}', f"calls: {begin} marked"]
    return [f"calls: call | {listed}" if more else "calls: call"]


def _repeat(item: str, most: int) -> str:
    return f"({item}){{0,{most}}}" if most else ""


def _write_talk(style: ChatStyle, literal: Literal, *, single: bool) -> list[str]:
    """Return the rules of an answer that may hold calls: whatever begins one goes on as one."""
    words, form = f"WORDS: {ANYTHING}", style.calls
    if style.thinking and style.thinking.answer:
        return [f"answer: calls | {literal(style.thinking.answer)} WORDS", words]
    if form.bare:
        thought = style.thinking.begin[0] if style.thinking else ""
        others = thought.replace("[", "")  # which begins a list of calls, too
        return ["answer: calls | WORDS", f"WORDS: /([^\\s{{\\[`{others}](?s:.*))?/"]
    begin = literal(form.begin)
    if not begin.startswith('"'):
        return ["answer: WORDS calls?", words]
    called = "(head marked)" + ("?" if single else "*")
    return [f"answer: {called} WORDS", f"head[lazy]: {ANYTHING} {begin}", words]
