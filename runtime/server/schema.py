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
from dovetail.runtime.text.chat_template import Message

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
BadWord: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1000, pattern=r"\S")]
Repetition: TypeAlias = Annotated[float, Meta(ge=1 / MAX_REPETITION, le=MAX_REPETITION)]
Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=2)]
TopP: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
TopK: TypeAlias = Annotated[int, Meta(ge=-1, le=MAX_TOKENS)]
Listed = Meta(max_length=MAX_LISTED)
Bias: TypeAlias = Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]
WrittenId: TypeAlias = Annotated[str, Meta(pattern="^[0-9]{1,9}$")]
EmbeddedText: TypeAlias = Annotated[str, Meta(max_length=MAX_EMBEDDED)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream holds beside its pieces."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True):
    """A schema as OpenAI has it in a request. It is always kept to, `strict` or not."""

    schema: dict[str, Any] | bool | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the answer; `json_schema` comes with the schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What both kinds of completions take. Null stands for the default everywhere."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
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
    repetition_penalty: Repetition | None = None
    logit_bias: Annotated[dict[WrittenId, Bias], Listed] | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[TokenId], Listed] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[BadWord], Listed] | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_LISTED)] | None
    ) = None
    truncate_prompt_tokens: Positive | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    metadata: dict[str, str] | None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The form of an answer where a schema stands beside its type, as in `/v1/responses`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What `/v1/responses` and `/v1/messages` say of the answer's text."""

    format: TextFormat | None = None


class ReasoningConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How much a model of `/v1/responses` that reasons does so."""

    effort: str | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/v1/responses`: a text, or items of a conversation."""

    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    prompt: dict[str, Any] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: list[str] | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """A block of a message of `/v1/messages`."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None


class BlockMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of `/v1/messages`."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class BlockTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of `/v1/messages`."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    type: str | None = None


class BlockChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which tool `/v1/messages` is to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class BlockThinking(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a model of `/v1/messages` that reasons does so."""

    type: Literal["enabled", "disabled", "adaptive"]


class CountRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/v1/messages/count_tokens`."""

    messages: Annotated[list[BlockMessage], Meta(min_length=1)]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[BlockTool] | None = None
    tool_choice: BlockChoice | None = None
    thinking: BlockThinking | None = None
    output_config: TextConfig | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """The body of `/v1/messages`."""

    max_tokens: Positive
    temperature: Share | None = None
    top_p: TopP | None = None
    top_k: Count | None = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """The body of `/v1/completions`: texts or token ids, one or several."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(max_length=MAX_IDS)]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
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
    instruction: EmbeddedText | None = None
    return_documents: bool = True


class RerankTextsRequest(RerankRequest, frozen=True, kw_only=True):
    """The body of `/rerank`: that of `/v1/rerank`, or with `texts` text-embeddings-inference's."""

    documents: Annotated[list[EmbeddedText | DocumentText], Meta(max_length=MAX_INPUTS)] = []
    texts: Annotated[list[EmbeddedText], Meta(max_length=MAX_INPUTS)] = []
    raw_scores: bool = False
    return_text: bool = False


class EmbedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/embed`, as of text-embeddings-inference; long texts are cut in any case."""

    inputs: (
        EmbeddedText
        | Annotated[list[EmbeddedText | TokenId | list[TokenId]], Meta(max_length=MAX_IDS)]
    )
    model: str | None = None
    normalize: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["Right", "right"] | None = None
    dimensions: Positive | None = None
    prompt_name: str | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/tokenize`: a text, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/detokenize`."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_DETOKENIZED)]
    model: str | None = None


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/v1/workflows/{name}/runs`: the workflow's inputs by name."""

    inputs: dict[str, Any]
    stream: bool = False


EMPTY: tuple[Any, ...] = (0, "", [], {})
UNHEEDED = {"model", "user", "stream", "stream_options", "priority"}
READ: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("chat_template", "documents", "functions", "return_token_strs"), EMPTY),
    **{"normalize": (True,), "truncate_prompt_tokens": (-1,), "max_tokens_per_doc": ()},
    **{"activation": (True,), "use_activation": (True,), "embed_dtype": ("float32", "float")},
    "add_special_tokens": (True,),
}
"""Fields of OpenAI's and vLLM's API that change how a text is read, and the values that change
nothing. Where an endpoint does not have one of them, others are refused rather than ignored."""
WRITTEN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys({*GenerationRequest.__struct_fields__} - UNHEEDED, EMPTY),
    **dict.fromkeys(("max_completion_tokens", "tools", "audio", "web_search_options"), EMPTY),
    **dict.fromkeys(("suffix", "echo", "logprobs", "thinking_token_budget"), EMPTY),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids", "prompt_embeds"), EMPTY),
    **dict.fromkeys(("use_beam_search", "logits_processors"), EMPTY),
    **{"seed": (), "n": (1,), "best_of": (1,), "repetition_penalty": (1,), "length_penalty": (1,)},
    **{"skip_special_tokens": (True,), "include_reasoning": (True,), **READ},
    "add_special_tokens": EMPTY,
}
"""The same of endpoints that write an answer."""
