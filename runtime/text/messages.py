"""The messages of a conversation."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class TextPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message; `text` is the one type there is."""

    type: Literal["text"]
    text: str


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message of a conversation, as the model's template is given it."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType | None = UNSET
    tool_call_id: str | UnsetType = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        """Raise ValueError where it says nothing at all, or holds a call of no function."""
        beside = self.tool_calls or self.reasoning_content or self.reasoning
        if self.content is None and not beside:
            raise ValueError("a message without calls of tools must have `content`")
        for call in self.tool_calls or ():
            function = call.get("function")
            if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
                raise ValueError("a call must have `function` with `name` and `arguments`")
