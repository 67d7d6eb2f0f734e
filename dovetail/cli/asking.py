"""Prompts as `dovetail run` asks them: through the chat template, or as plain text.

In: an app, and prompts. Out: answers piece by piece, or results of a batch.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from dovetail.runtime.app import App
from dovetail.runtime.hosting.generator import Prompt
from dovetail.runtime.schedule.request import Completion
from dovetail.runtime.text.chat import AnswerReader, ChatCompletion, Delta
from dovetail.runtime.text.messages import Message


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """One completion as `dovetail run --json` prints it; times in seconds, notes as sentences."""

    prompt: str | Sequence[int]
    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: str
    first_token_seconds: float | None
    decode_tokens_per_second: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Asker:
    """How prompts are asked: texts as conversations if `chats`, else to be continued as they are.

    system: what the model is told first. options: as of `App.chat`.
    """

    app: App
    chats: bool
    system: str | None
    options: Mapping[str, Any]

    def ask(self, prompt: Prompt, earlier: Sequence[Message] = ()) -> Generator[Delta, None, None]:
        """Yield the answer to a prompt that follows `earlier` messages."""
        if self.chats and isinstance(prompt, str):
            return self.app.chat_stream(self._messages(prompt, earlier), **self.options)
        return self._continue(prompt)

    def ask_all(self, prompts: Sequence[Prompt]) -> list[RunResult]:
        """Return the answers to all prompts, `n` to each, which run as a batch."""
        made = [self._prepare(prompt) for prompt in prompts]
        completions = self.app.generate([prompt for prompt, _ in made], **self.options)
        each = self.options["n"]
        return [
            self._result(prompts[i // each], found, made[i // each][1])
            for i, found in enumerate(completions)
        ]

    def _prepare(self, prompt: Prompt) -> tuple[Prompt, tuple[str, ...]]:
        """Return a prompt as `App.generate` takes it, and notes about it."""
        if self.chats and isinstance(prompt, str):
            most = self.options["max_tokens"]
            made = self.app.chat_prompts.fit(self._messages(prompt), most)
            return made.ids, made.notes
        return prompt, ()

    def _messages(self, prompt: str, earlier: Sequence[Message] = ()) -> list[Message]:
        first = [] if self.system is None else [Message(role="system", content=self.system)]
        return [*first, *earlier, Message(role="user", content=prompt)]

    def _continue(self, prompt: Prompt) -> Generator[Delta, None, None]:
        reader = AnswerReader(self.app.end_tokens)
        for chunk in self.app.stream(prompt, **self.options):
            ids = show_ids(chunk.token_ids) + " "
            yield reader.read(chunk if self.app.tokenizer else replace(chunk, text=ids))

    def _result(self, prompt: Prompt, completion: Completion, notes: tuple[str, ...]) -> RunResult:
        found = ChatCompletion.of(completion, notes, self.app.end_tokens)
        return RunResult(
            prompt=prompt,
            text=found.text,
            token_ids=found.token_ids,
            finish_reason=found.finish_reason,
            first_token_seconds=found.metrics.ttft,
            decode_tokens_per_second=found.decode_rate,
            notes=found.notes,
        )


def show_ids(token_ids: Sequence[int]) -> str:
    """Return ids as text, for artifacts that have no tokenizer."""
    return " ".join(map(str, token_ids))
