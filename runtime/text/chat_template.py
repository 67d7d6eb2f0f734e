"""Messages to a prompt by the model's own Jinja template, as transformers renders it.

In: the files beside a model's tokenizer, and messages. Out: the text of a prompt. Templates are run
in another process (`template_worker.py`), whose time and memory are bounded.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from dovetail.ir.errors import ArtifactError, RequestError
from dovetail.runtime.child.supervisor import CLOSED
from dovetail.runtime.text.template_process import SHARED
from dovetail.runtime.text.template_worker import RESULTS, Teach


class TextPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message; `text` is the one type there is."""

    type: Literal["text"]
    text: str


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message of a conversation, as the model's template is given it."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | UnsetType | None = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType | None = UNSET
    tool_call_id: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        """Raise ValueError where it says nothing at all, or holds a call of no function."""
        beside = self.tool_calls or self.reasoning_content or self.reasoning
        if self.content is None and not beside and self.role not in RESULTS:
            raise ValueError("a message without calls of tools must have `content`")
        for call in self.tool_calls or ():
            function = call.get("function")
            if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
                raise ValueError("a call must have `function` with `name` and `arguments`")


TEMPLATE, CONFIG, TOKENS = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
PROCESSOR = "chat_template.json"
"""Where the template of an older model of pictures and text may lie alone."""
SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class ChatTemplate:
    """A model's template, with the special tokens it may name. For any thread."""

    def __init__(self, text: str, tokens: Mapping[str, str]) -> None:
        """Raises ArtifactError where `text` is no template."""
        key = hashlib.sha256(msgspec.json.encode([text, dict(tokens)])).hexdigest()
        self.text, self._teach = text, Teach(key, text, dict(tokens))
        SHARED.take()
        self._end = weakref.finalize(self, SHARED.give_back)
        try:
            SHARED.learn(self._teach)
        except BaseException:
            self._end()
            raise

    def render(self, messages: Sequence[Message | Mapping[str, Any]], **options: Any) -> str:
        """Return the prompt that `start` promises; waits, so that no event loop may call it."""
        return self.start(messages, **options).result()

    def start(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> Future[str]:
        """Have another process make the prompt.

        options: what the template may read beside the messages: `tools`, `documents`, its own.

        Raises RequestError, now or by the future, where the template does not take these messages,
        or takes too much time or memory for them; DeviceError where its process cannot be started,
        or ended.
        """
        if not self._end.alive:
            raise RequestError(CLOSED)
        try:
            conversation = {
                "messages": [msgspec.to_builtins(message) for message in messages],
                "add_generation_prompt": add_generation_prompt,
                "options": dict(options or {}),
            }
            data = json.dumps(conversation).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"messages or options of the template are not JSON: {error}"
            ) from None
        return SHARED.render(self._teach, data)

    def close(self) -> None:
        """Use the process no more."""
        self._end()


def read_template(folder: Path) -> ChatTemplate | None:
    """Return the template that lies in a model's folder of an artifact, None where there is none.

    Raises ArtifactError where it is damaged.
    """
    config = _read_config(folder / CONFIG)
    file = folder / TEMPLATE
    try:
        text = file.read_text("utf-8") if file.is_file() else _named(config.get("chat_template"))
    except UnicodeDecodeError as error:
        raise _damaged(file, error) from None
    if text is None:
        text = _named(_read_config(folder / PROCESSOR).get("chat_template"))
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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(file, error) from None


def _damaged(file: Path, error: Exception) -> ArtifactError:
    return ArtifactError(f"{file}: cannot be decoded ({error}); run `dovetail compile MODEL` again")


def _named(found: object) -> str | None:
    """Return the one template, or the one named `default` of several."""
    if isinstance(found, list):
        named = (item for item in found if isinstance(item, dict))
        found = next((it.get("template") for it in named if it.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _token(found: object) -> str | None:
    """Return the text of a special token, which may be an object with more facts."""
    if isinstance(found, dict):
        found = found.get("content")
    return found if isinstance(found, str) else None
