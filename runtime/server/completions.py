"""`/v1/completions`: texts or token ids in, their continuations or pieces of them out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dovetail.runtime.schedule.request import Chunk, Completion
from dovetail.runtime.schedule.structured import StructuredOutputs
from dovetail.runtime.server.context import ServerContext
from dovetail.runtime.server.edge import JsonReply
from dovetail.runtime.server.errors import ApiError
from dovetail.runtime.server.forms import read_form
from dovetail.runtime.server.generation import (
    Asked,
    StreamForm,
    check_context,
    check_scores,
    read_request,
)
from dovetail.runtime.server.logprobs import (
    Offsets,
    echo_logprobs,
    list_candidates,
    text_logprobs,
)
from dovetail.runtime.server.models import ServedModel
from dovetail.runtime.server.replies import TextChoice, TextReply, Usage
from dovetail.runtime.server.schema import MAX_INPUTS, CompletionRequest

DEFAULT_TOKENS = 16
"""Tokens of a completion whose request does not say, as OpenAI has it."""


@dataclass(frozen=True)
class TextAsked:
    """A request that has been read; `echoes` is the text that goes before each choice.

    top: rivals of each token in `logprobs`, which begin with the prompt's where `scores` is true.
    candidates: those of each token in `prompt_logprobs`, None where these are not asked for.
    """

    asked: Asked
    echoes: Sequence[str]
    top: int
    scores: bool
    candidates: int | None

    def reply(self, found: Sequence[Completion], usage: Usage) -> TextReply:
        """Return the whole reply; choices of a prompt share what the first one knows of it."""
        n = self.asked.n
        choices = [self._choice(i, one, found[i - i % n]) for i, one in enumerate(found)]
        return TextReply(**self.asked.head, choices=choices, usage=usage)

    def stream(self) -> StreamForm:
        """Return how pieces are told of."""
        offsets = list(map(self._offsets, range(len(self.echoes))))
        return TextReply, partial(self._choices, list(self.echoes), offsets)

    def _choices(
        self, before: list[str], offsets: Sequence[Offsets], index: int, piece: Chunk
    ) -> Iterator[TextChoice]:
        """Yield what a stream says of a piece; `before`: echoes to come, of each choice."""
        text, before[index] = before[index] + piece.text, ""
        logprobs = text_logprobs(self.asked.model, piece.logprobs, offsets[index], self.top)
        if text or logprobs or piece.finish_reason:
            yield TextChoice(
                index=index, text=text, logprobs=logprobs, finish_reason=piece.finish_reason
            )

    def _offsets(self, index: int) -> Offsets:
        """Return what tells where the tokens of an answer begin."""
        special = self.asked.options.get("skip_special_tokens") is False
        start = len(self.echoes[index])
        return Offsets(self.asked.model, start, special=special)

    def _choice(self, index: int, found: Completion, first: Completion) -> TextChoice:
        echo, model, read = self.echoes[index], self.asked.model, first.prompt_logprobs
        logprobs = text_logprobs(model, found.logprobs, self._offsets(index), self.top)
        if self.scores and read is not None:
            prompt = self.asked.prompts[index // self.asked.n]
            listed = [*read, *(found.logprobs or ())]
            logprobs = echo_logprobs(model, prompt, listed, echo, self.top)
        return TextChoice(
            index=index,
            text=echo + (found.text or ""),
            logprobs=logprobs,
            finish_reason=found.finish_reason,
            prompt_logprobs=list_candidates(model, read, self.candidates),
        )


async def completions(server: ServerContext, request: Request) -> Response:
    """Continue texts."""
    body = await server.read(request, CompletionRequest)
    param, form = read_form(body)
    text = await server.aside(request, partial(_read, server, body, form))
    if form is not None:
        await text.asked.model.try_form(form, param=param)
    if body.max_tokens == 0 and text.candidates is None and not text.scores:
        return _only_echo(text)
    stream = text.stream() if body.stream else None
    return await text.asked.respond(server, request, text.reply, stream)


def _read(
    server: ServerContext, body: CompletionRequest, form: StructuredOutputs | None
) -> TextAsked:
    model = server.find(body.model, "generate")
    echoed = body.logprobs if body.echo else None
    check_scores(body, {"logprobs": echoed, "prompt_logprobs": body.prompt_logprobs})
    n = body.n or 1
    if body.best_of not in (None, n):
        raise ApiError(400, "`best_of` must equal `n`", param="best_of")
    scores = body.echo or body.prompt_logprobs is not None
    if body.max_tokens == 0 and (not scores or body.stream):
        message = "`max_tokens` must be at least 1, or `echo` be true without `stream`"
        raise ApiError(400, message, param="max_tokens")
    given = as_inputs(body.prompt, param="prompt")
    if len(given) * n > MAX_INPUTS:
        message = f"a request has {MAX_INPUTS} choices at most: `n` for each prompt"
        raise ApiError(400, message, param="n")
    special = body.add_special_tokens is not False
    prompts = [_encode(model, one, body.truncate_prompt_tokens, special) for one in given]
    check_context(model, prompts, param="prompt", answer=body.max_tokens != 0)
    most = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    scored = max((one for one in (echoed, body.prompt_logprobs) if one is not None), default=None)
    own: dict[str, Any] = {"logprobs": body.logprobs, "prompt_logprobs": scored}
    own |= {"max_tokens": most, "structured_outputs": form}
    asked = read_request(body, model, prompts, "cmpl", **own)
    whole = body.truncate_prompt_tokens is None
    shown = given if whole else prompts
    echoes = [_text(model, one) if body.echo else "" for one in shown for _ in range(n)]
    return TextAsked(asked, echoes, body.logprobs or 0, echoed is not None, body.prompt_logprobs)


def as_inputs(
    given: str | list[str | int | list[int]], *, param: str
) -> list[str] | list[list[int]]:
    """Return texts or lists of ids; ApiError where they are mixed, none or too many."""
    if isinstance(given, str):
        return [given]
    if len(given) > MAX_INPUTS and not isinstance(given[0], int):
        message = f"`{param}` may have {MAX_INPUTS} texts or lists of token ids, not {len(given)}"
        raise ApiError(400, message, param=param)
    kinds = set(map(type, given))
    if kinds == {int}:
        return [given]  # type: ignore[return-value]
    if kinds in ({str}, {list}):
        return given  # type: ignore[return-value]
    raise ApiError(400, "give a text, texts, a list of token ids, or lists of them", param=param)


def _encode(
    model: ServedModel, prompt: str | list[int], last: int | None, special: bool
) -> list[int]:
    if isinstance(prompt, str):
        return model.encode(prompt, last=last, special=special)
    return prompt if last is None else prompt[-last:]


def _text(model: ServedModel, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt)


def _only_echo(text: TextAsked) -> JsonReply:
    read = sum(map(len, text.asked.prompts))
    choices = [
        TextChoice(index=i, text=echo, finish_reason="length") for i, echo in enumerate(text.echoes)
    ]
    return JsonReply(TextReply(**text.asked.head, choices=choices, usage=Usage.of(read, 0)))
