"""A conversation that is asked for an answer, whichever API it came by.

In: a chat request. Out: a `Conversation`: what to generate, and how to read the answer's parts. The
APIs (`chat.py`, `responses.py`, `messages.py`) translate to the one and from the other.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request

from dovetail.ir.errors import RequestError
from dovetail.runtime.hosting.generator import Job
from dovetail.runtime.schedule.structured import StructuredOutputs
from dovetail.runtime.server.context import ServerContext
from dovetail.runtime.server.errors import ApiError, decode_error
from dovetail.runtime.server.forms import blame_field, read_form
from dovetail.runtime.server.generation import Asked, check_context, check_scores, read_request
from dovetail.runtime.server.models import ServedModel
from dovetail.runtime.server.schema import ChatRequest
from dovetail.runtime.text.answers import Answer, AnswerParser, Part
from dovetail.runtime.text.call_formats import MISTRAL
from dovetail.runtime.text.call_grammar import call_grammar, frame, write_mark
from dovetail.runtime.text.chat_template import Message
from dovetail.runtime.text.tools import Offer, read_offer, text_of

CALL_LETTERS = 24
MISTRAL_LETTERS = 9
"""Of a call's id: the templates of that family take no others."""


@dataclass(frozen=True)
class Conversation:
    """A request that has been read. begun: whether the prompt ends within reasoning."""

    asked: Asked
    offer: Offer | None
    begun: bool

    def parser(self) -> AnswerParser:
        """Return what reads an answer."""
        style, offer = self.asked.model.style, self.offer
        single = offer is not None and not offer.parallel
        most = 1 if single else None
        return style.parser(offer, begun=self.begun, most=most)

    def read(self, text: str) -> Answer:
        """Return the parts of a whole answer."""
        parser = self.parser()
        return Answer().add([*parser.feed(text), *parser.close()])

    def reason(self, said: str, calls: int) -> str:
        """Return why an answer ended, as OpenAI tells it: one tool that was named is no reason."""
        named = self.offer is not None and self.offer.named
        return "tool_calls" if said == "stop" and calls and not named else said

    def call_id(self) -> str:
        """Return the id of a new call."""
        if self.asked.model.style.calls.begin == MISTRAL.begin:
            return secrets.token_hex(MISTRAL_LETTERS)[:MISTRAL_LETTERS]
        return f"call_{secrets.token_hex(CALL_LETTERS // 2)}"

    async def parts(self, server: ServerContext, jobs: Sequence[Job]) -> AsyncGenerator[list[Part]]:
        """Yield the parts that each piece of one answer brings.

        What opens a stream goes with the first piece: a request that is refused until then gets its
        status.
        """
        parser = self.parser()
        async for _, piece in self.asked.watch(server, jobs):
            found = parser.feed(piece.text)
            yield found + parser.close() if piece.finish_reason else found


def make_chat(**fields: Any) -> ChatRequest:
    """Return the chat that a request of another API is, whose messages have been checked."""
    known = {name: value for name, value in fields.items() if value is not None}
    return msgspec.convert(known, ChatRequest)


def check_message(message: Mapping[str, Any], where: str) -> None:
    """Raise an ApiError that blames what stands at `where` if this is no message of a chat."""
    try:
        msgspec.convert(message, Message)
    except msgspec.ValidationError as error:
        raise decode_error(error, where) from None


@contextmanager
def rename_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Have errors of a chat name the fields of another API; in backticks those that are whole."""
    try:
        yield
    except ApiError as error:
        param = f"`{error.param}`"
        error.param = names[param].strip("`") if param in names else error.param
        for own, name in names.items():
            error.message = error.message.replace(own, name)
        raise


async def converse(
    server: ServerContext, request: Request, body: ChatRequest, kind: str
) -> Conversation:
    """Return what a body asks for; ApiError where that cannot be. kind: before its id."""
    model = check_chat(server, body)
    text, offer = await show_chat(model, body)
    begun = model.style.begins_thinking(text)
    param, form = _find_form(model, body, offer, begun=begun)
    read = partial(_read, model, body, text, kind, form, offer)
    found = Conversation(await server.aside(request, read), offer, begun)
    if form is not None:
        await model.try_form(form, param=param)
    return found


async def show_chat(model: ServedModel, body: ChatRequest) -> tuple[str, Offer | None]:
    """Return the text of the prompt of a chat, and its tools; ApiError where there is none."""
    if body.continue_final_message and body.add_generation_prompt is not False:
        message = "`continue_final_message` needs `add_generation_prompt: false`"
        raise ApiError(400, message, param="continue_final_message")
    offer = _read_offer(body)
    plain = [msgspec.to_builtins(message) for message in body.messages]
    messages, options = model.style.show(plain, offer)
    effort = {"reasoning_effort": body.reasoning_effort} if body.reasoning_effort else {}
    text = await model.render(
        messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        options={**effort, **(body.chat_template_kwargs or {}), **options},
        last=body.truncate_prompt_tokens,
    )
    if body.continue_final_message:
        text = _open_end(text, text_of(messages[-1]))
    return text, offer


def check_chat(server: ServerContext, body: ChatRequest) -> ServedModel:
    """Return the model that a body asks; ApiError where that cannot do it."""
    model = server.find(body.model, "generate")
    check_scores(body, {"prompt_logprobs": body.prompt_logprobs})
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "`top_logprobs` needs `logprobs: true`", param="top_logprobs")
    if body.max_tokens == 0:
        raise ApiError(400, "`max_tokens` must be at least 1", param="max_tokens")
    return model


def _open_end(text: str, said: str) -> str:
    """Return a prompt without what closes its last message, which says `said`."""
    found = said if said in text else said.strip()  # a template may strip it
    if not found or found not in text:
        message = "the chat template does not show the last message, which is to be continued"
        raise ApiError(400, message, param="continue_final_message")
    return text[: text.rindex(found) + len(found)]


def _read_offer(body: ChatRequest) -> Offer | None:
    try:
        return read_offer(
            body.tools, body.tool_choice, parallel=body.parallel_tool_calls is not False
        )
    except RequestError as error:
        field = "tool_choice" if str(error).startswith("tool_choice") else "tools"
        raise ApiError(400, str(error), param=field) from None


def _find_form(
    model: ServedModel, body: ChatRequest, offer: Offer | None, *, begun: bool
) -> tuple[str, StructuredOutputs | None]:
    """Return the field that asks for a form of the answer, and that form."""
    (param, form), calls, literal = read_form(body), None, partial(write_mark, model.tokenizer)
    if offer is not None:
        with blame_field("tools"):
            calls = call_grammar(offer, model.style, literal, begun=begun)
    if form is None:
        return "tools", StructuredOutputs(written=calls) if calls else None
    if calls is not None:
        message = f"`{param}` does not go with tools that must be called, or are `strict`"
        raise ApiError(400, message, param=param)
    return param, frame(form, model.style.thinking, literal, begun=begun)


def _read(
    model: ServedModel,
    body: ChatRequest,
    text: str,
    kind: str,
    form: StructuredOutputs | None,
    offer: Offer | None,
) -> Asked:
    """Return what a body asks for, whose prompt is `text`; ApiError where the context is full."""
    last = body.truncate_prompt_tokens
    prompt = model.encode(text, param="messages", special=False, last=last)
    check_context(model, [prompt], param="messages")
    most = body.max_completion_tokens or body.max_tokens
    most = model.context - len(prompt) if most is None else most
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    own: dict[str, Any] = {"logprobs": logprobs, "prompt_logprobs": body.prompt_logprobs}
    own |= {"max_tokens": most, "structured_outputs": form}
    if model.style.has_special_marks(model.tokenizer, offered=offer is not None):
        own["skip_special_tokens"] = False
    return read_request(body, model, [prompt], kind, **own)
