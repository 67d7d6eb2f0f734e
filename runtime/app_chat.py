"""What an app answers in conversations: chats and their streams, for threads and for asyncio.

In: messages, and options as for `generate`. Out: answers whose `message` has `role` and `content`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from dovetail.ir.errors import RequestError
from dovetail.runtime.app_generation import GenerationCalls
from dovetail.runtime.chat import (
    AnswerReader,
    ChatCompletion,
    ChatPrompts,
    Delta,
    explain_empty,
)
from dovetail.runtime.host import Ask
from dovetail.runtime.request import Completion

if TYPE_CHECKING:
    from dovetail.runtime.chat_template import ChatTemplate

_FIELDS = [field.name for field in fields(Completion)]


@dataclass(frozen=True, slots=True)
class _AskedChat:
    """A conversation that has been read: what the engine is asked, and notes about it."""

    ask: Ask
    notes: tuple[str, ...]


class ChatCalls(GenerationCalls):
    """The part of an `App` that answers conversations."""

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The model's chat template, None where it has none; ArtifactError where it is damaged."""
        from dovetail.runtime.chat_template import read_template  # noqa: PLC0415 - only chats need it

        part = next(iter(self.artifact.models.values()), None)
        return read_template(part.folder) if part else None

    @cached_property
    def chat_prompts(self) -> ChatPrompts:
        """What makes prompts of conversations; RequestError for a model that has no chats."""
        tokenizer = self.generator.tokenizer
        if self.template is None or tokenizer is None:
            lacks = "tokenizer" if tokenizer is None else "chat template"
            raise RequestError(f"{self.artifact.path} has no {lacks}; use `generate` or `stream`")
        return ChatPrompts(self.template, tokenizer, self.generator.context)

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """The tokens by which the model ends a text."""
        models = self.artifact.models.values()
        return frozenset(token for part in models for token in part.file.spec.eos_token_ids)

    def chat(
        self,
        messages: Sequence[Any],
        *,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: object,
    ) -> ChatCompletion:
        """Return the answer to a conversation; its `message` can be appended to `messages`.

        Where the conversation outgrows the context, its oldest turns are left out, and `notes` say
        so: never messages of the system, the last one of the user, and what follows it. `notes`
        also tell why an answer is empty.

        Args:
            messages: objects with `role` and `content`: mappings, or messages of answers.
            priority: as for `generate`.
            chat_template_kwargs: what the model's template may read beside the messages: `tools`,
                `documents`, switches of its own such as `enable_thinking`.
            **options: as for `generate`, n = 1; `max_tokens` is by default what the context holds.

        Raises:
            RequestError: the model has no chat template, or the template does not take these
                messages, or those that must stay are longer than the context; or as `generate`.
            ArtifactError: the template is damaged.
            CapacityError, DeviceError, RankError: as `generate`.
        """
        asked = self._read_chat(messages, options, priority, chat_template_kwargs)
        (job,) = self.generator.accept(asked.ask)
        try:
            return self._answer(asked, job.result())
        finally:
            self.generator.abandon([job])

    async def achat(
        self,
        messages: Sequence[Any],
        *,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: object,
    ) -> ChatCompletion:
        """As `chat`, in an event loop. A task that is cancelled ends its request."""
        read = partial(self._read_chat, messages, options, priority, chat_template_kwargs)
        asked = await asyncio.to_thread(read)  # which waits for the template's process
        (job,) = self.generator.accept(asked.ask)
        try:
            return self._answer(asked, await job)
        finally:
            await self.generator.aabandon([job])

    def chat_stream(
        self,
        messages: Sequence[Any],
        *,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: object,
    ) -> Generator[Delta, None, None]:
        """Yield the answer to a conversation piece by piece; all else as for `chat`.

        It starts with the first piece asked for; leaving the generator early drops the request.
        """
        asked = self._read_chat(messages, options, priority, chat_template_kwargs)
        return self._chat_stream(asked)

    def achat_stream(
        self,
        messages: Sequence[Any],
        *,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: object,
    ) -> AsyncGenerator[Delta, None]:
        """As `chat_stream`, for `async for`; `aclose` or the task's end drops the request.

        What is wrong with the messages is told with the first piece asked for.
        """
        read = partial(self._read_chat, messages, options, priority, chat_template_kwargs)
        return self._achat_stream(read)

    def _read_chat(
        self,
        messages: Sequence[Any],
        options: Mapping[str, object],
        priority: int,
        template_options: Mapping[str, Any] | None,
    ) -> _AskedChat:
        most = options.get("max_tokens")
        prompts = self.chat_prompts
        given = {**options, "max_tokens": prompts.context if most is None else most}
        room = most if isinstance(most, int) else None  # what is wrong is told of below
        prompt = prompts.fit(messages, room, template_options)
        ask = self.generator.read([prompt.ids], given, priority, single=True)
        return _AskedChat(ask, prompt.notes)

    def _answer(self, asked: _AskedChat, found: Completion) -> ChatCompletion:
        empty = explain_empty(found.text, found.token_ids, found.finish_reason, self.end_tokens)
        same = {name: getattr(found, name) for name in _FIELDS}
        return ChatCompletion(**same, notes=asked.notes + empty)

    def _chat_stream(self, asked: _AskedChat) -> Generator[Delta, None, None]:
        reader = AnswerReader(self.end_tokens, asked.notes)
        (job,) = self.generator.accept(asked.ask)
        try:
            for chunk in job:
                yield reader.read(chunk)
        finally:
            self.generator.abandon([job])

    async def _achat_stream(self, read: Callable[[], _AskedChat]) -> AsyncGenerator[Delta, None]:
        asked = await asyncio.to_thread(read)
        reader = AnswerReader(self.end_tokens, asked.notes)
        (job,) = self.generator.accept(asked.ask)
        try:
            async for chunk in job:
                yield reader.read(chunk)
        finally:
            await self.generator.aabandon([job])
