"""The process that renders chat templates and tries grammars. Out: texts.

In: templates, then conversations; forms of answers. Templates run in Jinja's
immutable sandbox, which keeps them from changing anything, and in a process of their own, which
keeps them from taking time and memory of anyone else: `template_process.py` ends it where they do.
So it is with grammars.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import resource
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import jinja2
import jinja2.ext
import jinja2.parser
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dovetail.runtime.child.framing import Channel
from dovetail.runtime.schedule.structured import StructuredOutputs
from dovetail.runtime.text.grammar import try_grammar

RESULTS = ("tool", "function")
"""Roles of what tools gave back, which may be nothing."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning: templates read the first one, some the second."""
PROBE = "a part's text"
CALL = {"name": "f", "arguments": '{"a": 1}'}
CALLED: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "a"},
    {"role": "assistant", "tool_calls": [{"id": "a" * 9, "type": "function", "function": CALL}]},
    {"role": "tool", "tool_call_id": "a" * 9, "name": "f", "content": "b"},
)
"""A conversation that shows how a template takes calls."""
WAYS = ((True, False), (True, True), (False, False), (False, True))
"""Those there are, the commonest first: whether arguments are an object, and not their text;
whether an answer that is calls alone has content of None, and not no content."""


class RenderLimits(msgspec.Struct, frozen=True):
    """What a new process is held to: bytes of memory beside its own, and how nice it is."""

    memory: int
    nice: int


class Teach(msgspec.Struct, frozen=True, tag=True):
    """A template, with the special tokens it may name -> Rendered, without a text."""

    key: str
    template: str
    tokens: dict[str, str]


class Render(msgspec.Struct, frozen=True, tag=True):
    """A conversation for the template that was taught as `key` -> Rendered.

    conversation: JSON of `messages`, `add_generation_prompt` and `options`; ASCII, for Python's
    own JSON keeps what msgpack refuses: half of a surrogate pair, integers of any size.
    """

    key: str
    conversation: bytes


class TryForm(msgspec.Struct, frozen=True, tag=True):
    """A form of answers -> Rendered, with its grammar."""

    form: StructuredOutputs


Order: TypeAlias = Teach | Render | TryForm


class Rendered(msgspec.Struct, frozen=True, array_like=True):
    """The text (UTF-8, surrogates let pass), or why there is none; `full`: memory ran out."""

    text: bytes = b""
    error: str | None = None
    full: bool = False


class GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}`, which marks for training what the assistant wrote: its body alone."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Return the body as a scope of its own: what is set in it ends with it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class JinjaTemplate:
    """A model's template, rendered as transformers renders it."""

    def __init__(self, text: str, tokens: Mapping[str, str]) -> None:
        """Raises TemplateError where `text` is no template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationBlocks],
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        }
        self._template = environment.from_string(text)
        self._tokens = dict(tokens)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool,
        options: Mapping[str, Any],
    ) -> str:
        """Return the prompt; raises whatever the template does."""
        calls = any(message.get("tool_calls") for message in messages)
        way = self._takes_calls if calls else WAYS[0]
        plain = [_plain(message, *way) for message in messages]
        if not self._takes_parts:
            plain = [_joined(message) for message in plain]
        return self._render(plain, add_generation_prompt, options)

    def _render(
        self, messages: Sequence[Any], add_generation_prompt: bool, options: Mapping[str, Any]
    ) -> str:
        absent = {"tools": None, "documents": None}  # and not undefined
        known = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        return self._template.render({**absent, **self._tokens, **options, **known})

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template spells the parts of a message itself, not their list as Python."""
        parts = [{"type": "text", "text": PROBE}]
        try:
            found = self._render([{"role": "user", "content": parts}], True, {})
        except MemoryError:
            raise
        except Exception:  # the model's code: any kind may come
            return False
        return PROBE in found and not re.search(rf"[\"']{PROBE}", found)

    @cached_property
    def _takes_calls(self) -> tuple[bool, bool]:
        """The way of WAYS in which the template takes calls of earlier answers."""
        for way in WAYS:
            try:
                found = self._render([_plain(one, *way) for one in CALLED], True, {})
            except MemoryError:
                raise
            except Exception:  # the model's code: any kind may come
                continue
            if "{'a'" not in found:  # which is Python's, not JSON
                return way
        return WAYS[0]


def _plain(message: dict[str, Any], read: bool, none: bool) -> dict[str, Any]:
    """Return a message as templates expect it: without what is None, reasoning by its names.

    read, none: a way of WAYS.
    """
    plain = {name: v for name, v in message.items() if v is not None}
    if plain.get("role") in RESULTS:
        plain.setdefault("content", "")
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [_read_call(call) for call in calls] if read else calls
        plain = {"content": None, **plain} if none else plain
    reasoning = next((plain[name] for name in REASONING if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _read_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call of a tool with its arguments read: clients send them as JSON text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its parts as one text."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as it is, where Jinja's own filter escapes it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def answer(templates: dict[str, JinjaTemplate], order: Order) -> Rendered:
    """Do an order; what is wrong with it is part of the answer."""
    try:
        if isinstance(order, TryForm):
            return Rendered(try_grammar(order.form).encode())
        if isinstance(order, Teach):
            templates[order.key] = JinjaTemplate(order.template, order.tokens)
            return Rendered()
        text = templates[order.key].render(**json.loads(order.conversation))
        return Rendered(text.encode("utf-8", "surrogatepass"))
    except MemoryError:
        return Rendered(full=True)
    except Exception as error:  # the model's code on the user's data: any kind may come
        said = str(error).encode(errors="replace").decode()  # it may hold half a surrogate pair
        return Rendered(error=said or type(error).__name__)


def serve(channel: Channel) -> None:
    """Answer orders until the parent hangs up, or memory has run out."""
    limits = channel.receive(RenderLimits)
    if limits is None:
        return
    os.nice(limits.nice)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + limits.memory,) * 2)
    templates: dict[str, JinjaTemplate] = {}
    kind: Any = Order
    for order in channel.messages(kind):
        reply = answer(templates, order)
        channel.send(reply)
        if reply.full:
            return
