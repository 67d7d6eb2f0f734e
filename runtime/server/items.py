"""What `/v1/responses` and `/v1/messages` send, with the field names of OpenAI and Anthropic."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """A text of an answer."""

    text: str
    annotations: list[Any] = []


class ReasoningText(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"
):
    """A text that the model said to itself."""

    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """What the model says to the user."""

    id: str
    role: str = "assistant"
    content: list[OutputText]
    status: str


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What it says to itself."""

    id: str
    summary: list[Any] = []
    content: list[ReasoningText]
    status: str


class FunctionCallItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"
):
    """A call of a tool."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: str


Item: TypeAlias = MessageItem | ReasoningItem | FunctionCallItem


class Incomplete(msgspec.Struct, frozen=True, kw_only=True):
    """Why an answer is not complete."""

    reason: str


class InputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens of the prompt were known already."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens of the answer were reasoning."""

    reasoning_tokens: int


class ResponsesUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that were read and generated."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponsesReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of `/v1/responses`: nothing of it is stored."""

    id: str
    object: str = "response"
    created_at: float
    status: str
    error: None = None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: None = None
    store: bool = False
    temperature: float | None
    top_p: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    truncation: str = "disabled"
    metadata: dict[str, str]
    usage: ResponsesUsage | None


class TextBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """What the model says to the user."""

    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """What it says to itself; nothing is signed."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


class BlockUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that were read, those known already apart, and generated."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int


class BlockReply(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """The reply of `/v1/messages`."""

    id: str
    role: str = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: BlockUsage


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of `/v1/messages/count_tokens`."""

    input_tokens: int
