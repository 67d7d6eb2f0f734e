"""Messages to a prompt by the model's own Jinja template, as transformers renders it.

In: the files beside a model's tokenizer, and messages. Out: the text of a prompt. Templates run in
Jinja's immutable sandbox: they change nothing.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.parser
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dovetail.ir.errors import ArtifactError, RequestError
from dovetail.runtime.chat import Message

TEMPLATE, CONFIG, TOKENS = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning: templates read the first one, some the second."""
PROBE = "a part's text"


class GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}`, which marks for training what the assistant wrote: its body alone."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Return the body as a scope of its own: what is set in it ends with it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class ChatTemplate:
    """A model's template, with the special tokens it may name."""

    def __init__(self, text: str, tokens: Mapping[str, str]) -> None:
        """Raises ArtifactError where `text` is no template."""
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
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise ArtifactError(
                f"the model's chat template is wrong: {error}; mend it in {CONFIG} and run "
                "`dovetail compile MODEL` again"
            ) from None
        self._tokens = dict(tokens)

    def render(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt; RequestError where the template does not take these messages.

        options: what the template may read beside the messages: `tools`, `documents`, its own.
        """
        plain = [_plain(message) for message in messages]
        if not self._takes_parts:
            plain = [_joined(message) for message in plain]
        try:
            return self._render(plain, add_generation_prompt, options or {})
        except Exception as error:  # the model's code on the user's data: any kind may come
            raise RequestError(
                f"the model's chat template does not take these messages: {error}"
            ) from None

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
        except Exception:  # the model's code, as above
            return False
        return PROBE in found and not re.search(rf"[\"']{PROBE}", found)


def read_template(folder: Path) -> ChatTemplate | None:
    """Return the template that lies in a model's folder of an artifact, None where there is none.

    Raises ArtifactError where it is damaged.
    """
    config = _read_config(folder / CONFIG)
    file = folder / TEMPLATE
    text = file.read_text() if file.is_file() else _named(config.get("chat_template"))
    if text is None:
        return None
    if "added_tokens_decoder" not in config:  # an old tokenizer, whose tokens lie beside it
        config |= _read_config(folder / TOKENS)
    own = config.get("extra_special_tokens")
    given = {name: config.get(name) for name in SPECIAL} | (own if isinstance(own, dict) else {})
    tokens = {name: _token(found) for name, found in given.items()}
    return ChatTemplate(text, {name: found for name, found in tokens.items() if found is not None})


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ArtifactError(
            f"{file}: cannot be decoded ({error}); run `dovetail compile MODEL` again"
        ) from None


def _named(found: object) -> str | None:
    """Return the one template, or the one named `default` of several."""
    if isinstance(found, list):
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _token(found: object) -> str | None:
    """Return the text of a special token, which may be an object with more facts."""
    if isinstance(found, dict):
        found = found.get("content")
    return found if isinstance(found, str) else None


def _plain(message: Message | Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates expect it: without what is None, reasoning by its names."""
    plain = {name: v for name, v in msgspec.to_builtins(message).items() if v is not None}
    reasoning = next((plain[name] for name in REASONING if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


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
