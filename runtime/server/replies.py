"""What the server sends, as msgspec structs with OpenAI's field names and order.

Usage counts tokens; `created` is in seconds since 1970.
"""

from __future__ import annotations

from typing import Any, Self, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from dovetail.runtime.flows.events import NodeTime
from dovetail.runtime.server.schema import DocumentText


class CachedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens of the prompts were known already."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that were read and generated, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens

    @classmethod
    def of(cls, read: int, written: int, cached: int = 0) -> Self:
        """Return the usage of so many tokens."""
        return cls(
            prompt_tokens=read,
            completion_tokens=written,
            total_tokens=read + written,
            prompt_tokens_details=CachedTokens(cached_tokens=cached),
        )


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token that might have been chosen; `bytes` are its UTF-8 ones, whole characters or not."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(TopLogprob, frozen=True, kw_only=True):
    """A chosen token of a chat, and the likeliest ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log probabilities of a chat's tokens."""

    content: list[TokenLogprobs]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log probabilities of a completion's tokens; offsets are characters of its text.

    The first token of an echoed prompt has none.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token that is, or might be, at a place of the prompt; `rank` is 1 for the most likely."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt candidates by their ids, its own first; None for the first token."""


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A tool's name, and its arguments: JSON as the model wrote it."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool."""

    id: str
    type: str = "function"
    function: CalledFunction


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a chunk adds to a call: first the name, then pieces of the arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to the call number `index`; id and type come with the first piece."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a chat; its content is null where it is calls of tools alone."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a chunk adds to the answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One completion, or a piece of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of `/v1/chat/completions`."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a streamed chat; `usage` is left out unless it was asked for."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str


class TextReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of `/v1/completions`, and an event of its stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that were read."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """A vector as numbers, or as base64 of little-endian float32."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of `/v1/embeddings`."""

    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class RerankResult(msgspec.Struct, frozen=True, kw_only=True):
    """A document by its place in the request, the best first."""

    index: int
    relevance_score: float
    document: DocumentText | UnsetType = UNSET


class RerankReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of `/v1/rerank`."""

    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RerankResult]


class RankedText(msgspec.Struct, frozen=True, kw_only=True):
    """A text in the reply of `/rerank` to `texts`, the best first."""

    index: int
    score: float
    text: str | UnsetType = UNSET


class EncoderInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of `/info`: the model that `/embed` and `/rerank` ask where they name none."""

    model_id: str
    model_dtype: str
    model_type: dict[str, dict[str, Any]]
    max_input_length: int
    max_client_batch_size: int
    auto_truncate: bool = True
    version: str


class RunReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of `/v1/workflows/{name}/runs`: all that was written, and when.

    left: by transformation that was never applied where it might have been: why it was not.
    """

    id: str
    object: str = "workflow.run"
    workflow: str
    outputs: dict[str, Any]
    timeline: list[NodeTime]
    seconds: float
    notes: list[str] = []
    left: dict[str, str] = {}


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A served model or workflow; `max_model_len` is its context in tokens.

    capabilities: of `chat`, `generate`, `embed`, `rerank` and `workflow` those that it has. parent:
    of an adapter, the model. inputs: of a workflow. answers: its nodes whose text is the answer.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str
    max_model_len: int
    capabilities: list[str]
    parent: str | UnsetType = UNSET
    inputs: list[str] | UnsetType = UNSET
    answers: list[str] | UnsetType = UNSET


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of `/v1/models`."""

    object: str = "list"
    data: list[ModelCard]


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of `/tokenize`."""

    tokens: list[int]
    count: int
    max_model_len: int


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of `/detokenize`."""

    prompt: str


class Health(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The reply of `/health`: `ok`, `draining` once the server is to stop, or `restarting`.

    `restarting` while a model waits for a process that died or hung and is started again; `reason`
    says which, and what became of it.
    """

    status: str
    reason: str | None = None


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of `/timeline`: a trace in Chrome's format, times in microseconds."""

    traceEvents: list[dict[str, Any]]
    displayTimeUnit: str
    otherData: dict[str, Any]


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of `/version`."""

    version: str
