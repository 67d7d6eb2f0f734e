"""Messages to a prompt by the model's own Jinja template, in a sandbox that changes nothing.

In: the files beside a model's tokenizer, and messages. Out: the text of a prompt.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dovetail.ir.errors import ArtifactError, RequestError
from dovetail.runtime.server.schema import Message

TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """A model's template, with the special tokens it may name."""

    def __init__(self, text: str, tokens: Mapping[str, str]) -> None:
        """Raises ArtifactError where `text` is no template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
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
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt; RequestError where the template does not take these messages."""
        known = {
            "messages": [_plain(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render({**self._tokens, **(options or {}), **known})
        except Exception as error:  # the model's code on the user's data: any kind may come
            raise RequestError(
                f"the model's chat template does not take these messages: {error}"
            ) from None


def read_template(folder: Path) -> ChatTemplate | None:
    """Return the template that lies in a model's folder of an artifact, None where there is none.

    Raises ArtifactError where it is damaged.
    """
    config = _read_config(folder / CONFIG)
    file = folder / TEMPLATE
    text = file.read_text() if file.is_file() else _named(config.get("chat_template"))
    if text is None:
        return None
    return ChatTemplate(text, {name: _token(config.get(name)) for name in SPECIAL})


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


def _token(found: object) -> str:
    """Return the text of a special token, which may be an object with more facts."""
    if isinstance(found, dict):
        found = found.get("content")
    return found if isinstance(found, str) else ""


def _plain(message: Message) -> dict[str, Any]:
    """Return a message as templates expect it: its parts joined to one text."""
    plain: dict[str, Any] = msgspec.to_builtins(message)
    if isinstance(message.content, list):
        plain["content"] = "\n".join(part.text for part in message.content)
    return {"content": None, **plain}


def _to_json(value: Any, indent: int | None = None, **_: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
