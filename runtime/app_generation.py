"""What an app generates: completions, streams and jobs, for threads and for asyncio.

In: prompts (text or token ids) and options with vLLM's names. Out: completions, chunks, jobs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence

from dovetail.ir.errors import RequestError
from dovetail.runtime.artifact import Artifact
from dovetail.runtime.engine import Engine
from dovetail.runtime.generator import Generator, Prompt, as_list
from dovetail.runtime.host import Ask
from dovetail.runtime.job import Job
from dovetail.runtime.loop import EngineLoop
from dovetail.runtime.request import Chunk, Completion, Score


class GenerationCalls:
    """The part of an `App` that generates."""

    artifact: Artifact
    _generator: Generator | None

    @property
    def generator(self) -> Generator:
        """What takes requests; RequestError where the artifact has no model that generates."""
        if self._generator is None:
            raise RequestError(
                f"{self.artifact.path} has no model that generates; compile one with "
                f"`dovetail compile MODEL -o {self.artifact.path}`"
            )
        return self._generator

    @property
    def engine(self) -> Engine:
        """The engine that generates; RequestError as for `generator`, or where it runs apart."""
        host = self.generator.host
        if not isinstance(host, EngineLoop):
            raise RequestError(
                "the engine runs in a process of its own, where it cannot be touched"
            )
        return host.engine

    def generate(
        self, prompts: Prompt | Sequence[Prompt], *, priority: int = 0, **options: object
    ) -> list[Completion]:
        """Return the completions of `prompts` in order, `n` for each.

        Args:
            prompts: one prompt or several, each a text or a list of token ids.
            priority: -100..100; requests of a lower one go first, so that these overtake a bounded
                number of others and nobody waits for ever.
            **options: `max_tokens temperature top_p top_k min_p seed stop ignore_eos logprobs n`,
                penalties and the other fields of `SamplingParams`.

        Raises:
            RequestError: an option or a prompt is wrong; nothing has been generated. Or a prompt
                was poisoned (its logits are not finite), or the app was closed meanwhile.
            CapacityError: a request is larger than the whole KV pool; or too many wait already,
                and `retry_after` says in how many seconds there should be room.
            DeviceError: a step could not be run (a kernel failed, memory ran out).
            RankError: a process of the group died; the requests under way are lost.

        The first prompt that fails ends the call; use `submit` for requests that may fail alone.
        """
        return self._complete(self.generator.read(as_list(prompts), options, priority))

    async def agenerate(
        self, prompts: Prompt | Sequence[Prompt], *, priority: int = 0, **options: object
    ) -> list[Completion]:
        """As `generate`, in an event loop. A task that is cancelled ends its requests."""
        generator = self.generator
        jobs = generator.accept(generator.read(as_list(prompts), options, priority))
        try:
            return [await job for job in jobs]
        finally:
            await generator.aabandon(jobs)

    def score(
        self, prompts: Prompt | Sequence[Prompt], *, top: int = 0, priority: int = 0
    ) -> list[Score]:
        """Return how likely the model finds the tokens of each of `prompts`; nothing is generated.

        Args:
            prompts: one prompt or several, each a text or a list of token ids, at most as long as
                the context.
            top: how many of the most likely tokens to tell in the place of each, 0..100.
            priority: as for `generate`.

        Raises what `generate` does.
        """
        options = {"max_tokens": 0, "prompt_logprobs": top}
        ask = self.generator.read(as_list(prompts), options, priority)
        found = [one.prompt_logprobs or () for one in self._complete(ask)]
        return [
            Score(
                token_ids=tuple(tokens),
                logprobs=tuple(one.logprob if one else None for one in each),
                top=tuple(one.top if one else () for one in each),
            )
            for tokens, each in zip(ask.prompts, found, strict=True)
        ]

    def stream(self, prompt: Prompt, *, priority: int = 0, **options: object) -> Iterator[Chunk]:
        """Yield the completion of one prompt piece by piece; options as for `generate`, n = 1.

        It starts with the first piece asked for; leaving the iterator early drops the request.
        """
        return self._stream(self.generator.read([prompt], options, priority, single=True))

    def astream(
        self, prompt: Prompt, *, priority: int = 0, **options: object
    ) -> AsyncIterator[Chunk]:
        """As `stream`, for `async for`; `aclose` or the task's end drops the request."""
        return self._astream(self.generator.read([prompt], options, priority, single=True))

    def submit(self, prompt: Prompt, *, priority: int = 0, **options: object) -> Job:
        """Start the completion of one prompt, options as for `stream`; return it at once.

        The job's `result()` waits for the end, iterating over it gives chunks; `await` and
        `async for` do the same in an event loop.
        """
        generator = self.generator
        (job,) = generator.accept(generator.read([prompt], options, priority, single=True))
        return job

    def submit_all(
        self, prompts: Prompt | Sequence[Prompt], *, priority: int = 0, **options: object
    ) -> list[Job]:
        """Start the completions of `prompts`, all or none; return jobs at once, `n` for each.

        Options as for `generate`; the jobs are as those of `submit`.
        """
        generator = self.generator
        return generator.accept(generator.read(as_list(prompts), options, priority, chunks=True))

    def cancel(self, job: Job) -> None:
        """End a job. When this returns its blocks are free; its result has the reason `abort`."""
        self.generator.abandon([job])

    async def acancel(self, job: Job) -> None:
        """As `cancel`, in an event loop: it goes on while a step ends."""
        await self.generator.aabandon([job])

    def _complete(self, ask: Ask) -> list[Completion]:
        jobs = self.generator.accept(ask)
        try:
            return [job.result() for job in jobs]
        finally:
            self.generator.abandon(jobs)

    def _stream(self, ask: Ask) -> Iterator[Chunk]:
        (job,) = self.generator.accept(ask)
        try:
            yield from job
        finally:
            self.generator.abandon([job])

    async def _astream(self, ask: Ask) -> AsyncIterator[Chunk]:
        (job,) = self.generator.accept(ask)
        try:
            async for chunk in job:
                yield chunk
        finally:
            await self.generator.aabandon([job])
