"""Requests on their way to the engine's thread: prompts and options in, jobs out.

In: prompts (text or token ids) and options with vLLM's names. Out: `Job`s that the engine's thread
tells of tokens. Knows no caller: an app and the workflows it runs share one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from dovetail.ir.errors import RequestError
from dovetail.runtime.hosting.job import Job
from dovetail.runtime.hosting.loop import EngineLoop
from dovetail.runtime.hosting.process import EngineProcess
from dovetail.runtime.hosting.wire import Ask
from dovetail.runtime.schedule.queue import check_priority
from dovetail.runtime.schedule.request import SamplingParams
from dovetail.runtime.text.forms import Forms
from dovetail.runtime.text.tokenizer import TextStream, Tokenizer
from dovetail.runtime.text.tools import ChatStyle

if TYPE_CHECKING:
    from dovetail.runtime.text.chat_template import ChatTemplate

Prompt: TypeAlias = str | Sequence[int]
WRONG_PROMPT = "a prompt must be a text or a list of token ids"


class Generator:
    """An engine, wherever it runs, and the tokenizer of its model. For any thread."""

    def __init__(
        self,
        host: EngineLoop | EngineProcess,
        tokenizer: Tokenizer | None,
        path: Path,
        context: int,
        folder: Path | None = None,
    ) -> None:
        """`path`: the artifact, for errors. `context`: tokens that a request may have.

        folder: where the model's chat template is.
        """
        self.host, self.tokenizer, self.context = host, tokenizer, context
        self._folder = folder
        self.forms = Forms()
        self._path = path

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The model's chat template, None if it has none; ArtifactError if it is damaged."""
        from dovetail.runtime.text.chat_template import read_template  # noqa: PLC0415 - only chats need it

        return read_template(self._folder) if self._folder else None

    @cached_property
    def style(self) -> ChatStyle:
        """How the model writes calls and reasoning, as its template tells."""
        return ChatStyle.of(self.template.text if self.template else "")

    # ---- reading what is asked for ----

    def read(
        self,
        prompts: Sequence[Prompt],
        options: Mapping[str, object],
        priority: int = 0,
        *,
        single: bool = False,
        chunks: bool = False,
        flow: int | None = None,
    ) -> Ask:
        """Return prompts and options as the engine takes them; RequestError where one is wrong.

        single: there is one completion, whose chunks are wanted. chunks: those of all are. flow:
        see Ask.
        """
        params = SamplingParams.make(options)
        params = self._read_form(self._read_words(params))
        if single and params.n != 1:
            raise RequestError(f"a stream or a job has one completion; n must be 1, not {params.n}")
        check_priority(priority)
        read = [self._encode(prompt) for prompt in prompts]
        return Ask(read, params, priority, chunks=single or chunks, flow=flow)

    def _read_words(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with the ids of their bad words; RequestError without a tokenizer."""
        if not (params.stop or params.bad_words):
            return params
        if self.tokenizer is None:
            raise RequestError(
                f"{self._path} has no tokenizer, so `stop` and `bad_words` cannot be used"
            )
        ids = [found for word in params.bad_words for found in _spellings(self.tokenizer, word)]
        return replace(params, bad_word_ids=tuple(ids))

    def _read_form(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with the grammar of their form, which may have to be tried first."""
        form = params.structured_outputs
        if form is None:
            return params
        if self.tokenizer is None:
            raise RequestError(f"{self._path} has no tokenizer, so no form can be asked for")
        return replace(params, grammar=self.forms.write(form))

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    f"{self._path} has no tokenizer, so prompts must be lists of token ids"
                )
            return self.tokenizer.encode(prompt, most=self.context)
        if not _is_listed(prompt):
            raise RequestError(WRONG_PROMPT)
        if set(map(type, prompt)) == {int}:
            return list(prompt)
        if any(isinstance(t, bool) or not hasattr(t, "__index__") for t in prompt):
            raise RequestError(WRONG_PROMPT)
        return [int(t) for t in prompt]

    # ---- messages to the engine ----

    def accept(self, ask: Ask) -> list[Job]:
        """Have the requests of `ask` started, all or none; return at once.

        Raises RequestError or CapacityError, and then nothing was started; what only the engine
        can know by then makes the jobs fail.
        """
        count = len(ask.prompts) * ask.params.n
        jobs = [Job(self._text_stream(ask.params), chunks=ask.chunks) for _ in range(count)]
        try:
            self.host.begin(ask, jobs)
        except KeyboardInterrupt:  # Ctrl-C came before the caller has them to drop
            self.abandon(jobs)
            raise
        return jobs

    def _text_stream(self, params: SamplingParams) -> TextStream | None:
        if self.tokenizer is None:
            return None
        return TextStream(
            self.tokenizer,
            params.stop,
            keeps_stop=params.include_stop_str_in_output,
            least=params.min_tokens,
            special=not params.skip_special_tokens,
        )

    def drop(self, jobs: Sequence[Job]) -> Future[None] | None:
        """Have the unfinished ones of `jobs` ended; None where there are none."""
        left = [job for job in jobs if not job.finished]
        if not left:
            return None
        with suppress(RequestError):  # closed: they have ended
            return self.host.drop(left)
        return None

    def abandon(self, jobs: Sequence[Job]) -> None:
        """End the unfinished ones of `jobs`; their blocks are free when it returns."""
        future = self.drop(jobs)
        if future is not None:
            future.result()

    def close(self) -> None:
        """Fail what is under way and end threads and processes."""
        self.host.close()
        self.forms.close()
        if template := self.__dict__.get("template"):
            template.close()

    async def aabandon(self, jobs: Sequence[Job]) -> None:
        """As `abandon`, in an event loop."""
        future = self.drop(jobs)
        if future is not None:
            await asyncio.wrap_future(future)


def _spellings(tokenizer: Tokenizer, word: str) -> list[tuple[int, ...]]:
    """Return the ids of a word at the start of a text, and after a space where it has others.

    Those after a space count where they begin otherwise and are as many, as vLLM has it.
    """
    first, inside = (
        tuple(tokenizer.encode(space + word.lstrip(), special=False)) for space in ("", " ")
    )
    differs = len(inside) == len(first) > 0 and inside[0] != first[0]
    return [ids for ids in ((first, inside) if differs else (first,)) if ids]


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list of them; RequestError where they are neither."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_listed(prompts):
        raise RequestError("prompts must be texts or lists of token ids")
    listed = list(prompts)
    if listed and all(hasattr(item, "__index__") for item in listed):
        return [listed]  # type: ignore[list-item]
    if not all(hasattr(item, "__len__") for item in listed):
        raise RequestError("prompts must be texts or lists of token ids")
    return listed  # type: ignore[return-value]


def _is_listed(value: object) -> bool:
    """Tell whether `value` is a list, tuple or array: ordered, and no text or bytes."""
    return isinstance(value, list) or (
        hasattr(value, "__iter__") and not isinstance(value, str | bytes | Mapping | Set)
    )
