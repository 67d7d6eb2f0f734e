"""What clients send, as msgspec structs: types, bounds and defaults of every field.

In: JSON bodies. Out: checked values. The OpenAPI document is made from the same structs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from dovetail.runtime.schedule.request import (
    MAX_BIAS,
    MAX_LISTED,
    MAX_LOGPROBS,
    MAX_N,
    MAX_REPETITION,
)
from dovetail.runtime.text.messages import Message

MAX_TOKENS = 1 << 30
MAX_STOPS = 16
MAX_INPUTS = 2048
"""Texts of one embedding call, as OpenAI bounds them; and choices of one completion call."""
MAX_IDS = 1 << 20
"""Token ids of a prompt: a context that holds them says how many it takes."""
MAX_DETOKENIZED = 1 << 17
MAX_EMBEDDED = 1 << 20
"""Letters of one text to embed or to rank. Encoders read the beginning of a long one, some thousand
tokens at most; of a text as long as this that is no page and no chapter, but a mistake."""

Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Positive: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
StopText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1000)]
Bias: TypeAlias = Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]
EmbeddedText: TypeAlias = Annotated[str, Meta(max_length=MAX_EMBEDDED)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream holds beside its pieces."""

    include_usage: bool = False


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the answer: text is the one there is."""

    type: str = "text"


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What both kinds of completions take. Null stands for the default everywhere."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    min_p: Share | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    user: str | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=1 / MAX_REPETITION, le=MAX_REPETITION)] | None = (
        None
    )
    logit_bias: (
        Annotated[
            dict[Annotated[str, Meta(pattern="^[0-9]{1,9}$")], Bias], Meta(max_length=MAX_LISTED)
        ]
        | None
    ) = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_LISTED)] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[StopText], Meta(max_length=MAX_LISTED)] | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_LISTED)] | None
    ) = None
    truncate_prompt_tokens: Positive | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template: str | None = None
    metadata: dict[str, str] | None = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """The body of `/v1/completions`: texts or token ids, one or several."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(max_length=MAX_IDS)]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/v1/embeddings`: texts or token ids, one or several."""

    input: (
        EmbeddedText
        | Annotated[list[EmbeddedText | TokenId | list[TokenId]], Meta(max_length=MAX_IDS)]
    )
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    prompt_name: str | None = None
    user: str | None = None


class DocumentText(msgspec.Struct, frozen=True, kw_only=True):
    """A document of a rerank call."""

    text: EmbeddedText


class RerankRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/v1/rerank`."""

    query: EmbeddedText
    documents: Annotated[
        list[EmbeddedText | DocumentText], Meta(min_length=1, max_length=MAX_INPUTS)
    ]
    model: str | None = None
    top_n: Positive | None = None
    return_documents: bool = True


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/tokenize`: a text, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/detokenize`."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_DETOKENIZED)]
    model: str | None = None


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/v1/workflows/{name}/runs`: the workflow's inputs by name."""

    inputs: dict[str, Any]
    stream: bool = False


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "skip_special_tokens": (True,),
    "response_format": (ResponseFormat(),),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "chat_template": (),
    "suffix": ("",),
}
"""Fields that are read but can do nothing here, and the values that ask for nothing."""
