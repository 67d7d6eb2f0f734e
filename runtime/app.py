"""An opened artifact that generates: `load` and `App`, what a user of the runtime holds.

In: prompts (text or token ids) and options with vLLM's names. Out: completions, streams and jobs,
for threads and for asyncio. One thread of the app steps the engine; callers wait for its messages.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

from dovetail.ir.artifact import ServicePlan
from dovetail.ir.errors import DovetailError, RequestError, SpecError
from dovetail.runtime.artifact import Artifact, open_artifact
from dovetail.runtime.cuda_engine import CudaEngine, CudaOptions
from dovetail.runtime.emulated import Emulation
from dovetail.runtime.encoder import Rows
from dovetail.runtime.encoder_texts import Embeddings, Ranked, TextOrIds, open_encoders
from dovetail.runtime.engine import Engine
from dovetail.runtime.job import Job
from dovetail.runtime.loop import EngineLoop
from dovetail.runtime.meeting import RankOptions
from dovetail.runtime.pipelined import PipelinedEngine
from dovetail.runtime.plan import SchedulerSettings
from dovetail.runtime.queues import check_priority
from dovetail.runtime.recorder import StepRecorder
from dovetail.runtime.request import Chunk, Completion, SamplingParams
from dovetail.runtime.timed import TimedEngine
from dovetail.runtime.timeline import Timeline
from dovetail.runtime.tokenizer import TextStream, Tokenizer
from dovetail.topology.hardware import read_hardware

Prompt: TypeAlias = str | Sequence[int]
NO_EMBEDDINGS = Embeddings(Path(), {})


def load(
    path: str | os.PathLike[str],
    *,
    plan: ServicePlan | None = None,
    threads: int | None = None,
    kv_blocks: int | None = None,
    deterministic: bool = False,
    emulation: Emulation | None = None,
    settings: SchedulerSettings | None = None,
    ranks: RankOptions | None = None,
    cuda: CudaOptions | None = None,
    check_weights: bool = False,
) -> App:
    """Open the artifact at `path` on this machine: what generates, and what embeds.

    Args:
        path: the artifact directory.
        plan: processes, threads and PUs to run with instead of the artifact's plan.
        threads: use this many threads in both phases of each process instead of the plan's.
        kv_blocks: size of the KV pool in blocks of 16 tokens; default from the plan or memory.
        deterministic: give a prompt the same logits, bit for bit, whatever else is in the batch,
            in one step or several, with any `plan`, `threads` and `kv_blocks`. It costs time.
        emulation: an accelerator to emulate beside the CPU: tokens are computed on the CPU, the
            app's clock shows the time that steps were to take, `kv_blocks` are the CPU's. In its
            timed mode tokens are made up and steps take that time.
        settings: how requests share the machine: `offload`, `chunked` prompts, bounds of queues
            and waiting, kept prefixes. They stand for those of `emulation` and `cuda`; the CPU
            alone has nothing to offload, and `runtime.plan.ON_CPU` is its default.
        ranks: how the processes of `plan` beyond this one are started and joined when each has an
            accelerator: on this machine or by Ray on several, summing through shared memory, gloo
            or NCCL.
        cuda: an NVIDIA GPU to use beside the CPU; `kv_blocks` are the CPU's. The artifact must have
            been compiled with `--target cuda`, and torch be installed (extra `cuda`).
        check_weights: also check the chunk hashes of the weights (reads all of them).

    Raises:
        ArtifactError: the artifact is damaged, too new, or does not fit this machine.
        CapacityError: there is not enough memory, or threads cannot be started.
        RequestError: `threads` or `kv_blocks` is below 1.
        SpecError: the model cannot be shared by the processes of `plan`, or there is no GPU.
        RankError: a process could not be started.
    """
    for name, value in (("threads", threads), ("kv_blocks", kv_blocks)):
        if value is not None and value < 1:
            raise RequestError(f"{name} must be at least 1, not {value}")
    if emulation is not None and cuda is not None:
        raise RequestError("give either a GPU or one to emulate")
    hardware = read_hardware()
    artifact = open_artifact(path, hardware, check_weights=check_weights)
    embeddings = open_encoders(artifact, hardware, plan=plan, threads=threads)
    if not artifact.models:
        return App(artifact, None, None, embeddings)
    part = next(iter(artifact.models.values()))
    make: Callable[..., Engine] = Engine
    if emulation is not None:
        settings = settings or emulation.settings
        emulation = replace(emulation, settings=settings)
        kind = TimedEngine if emulation.timed else PipelinedEngine
        make = partial(kind, emulation, ranks=ranks)
    elif ranks is not None:
        raise SpecError("`ranks` are for processes with accelerators; give an `emulation`, too")
    if cuda is not None:
        settings = settings or cuda.settings
        make = partial(CudaEngine, replace(cuda, settings=settings))
    engine = make(
        artifact,
        part,
        hardware,
        plan=plan,
        threads=threads,
        kv_blocks=kv_blocks,
        deterministic=deterministic,
        settings=settings,
    )
    tokenizer = Tokenizer(part.tokenizer) if part.tokenizer else None
    return App(artifact, engine, tokenizer, embeddings)


class App:
    """A loaded artifact. Threads and event loops may call it together; requests share batches."""

    def __init__(
        self,
        artifact: Artifact,
        engine: Engine | None,
        tokenizer: Tokenizer | None,
        embeddings: Embeddings = NO_EMBEDDINGS,
    ) -> None:
        self.artifact, self.tokenizer, self.embeddings = artifact, tokenizer, embeddings
        self._engine = engine
        self._engine_loop = EngineLoop(engine) if engine else None
        self._end = weakref.finalize(self, _close, self._engine_loop, embeddings)

    @property
    def engine(self) -> Engine:
        """The engine that generates; RequestError where the artifact has no model that does."""
        if self._engine is None:
            raise RequestError(
                f"{self.artifact.path} has no model that generates; compile one with "
                f"`dovetail compile MODEL -o {self.artifact.path}`"
            )
        return self._engine

    @property
    def _loop(self) -> EngineLoop:
        assert self._engine_loop is not None, "only an engine's jobs come here"
        return self._engine_loop

    def embed(
        self,
        texts: TextOrIds | Sequence[TextOrIds],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> Rows:
        """Return a float32 row for each text, [n][d]; of length 1 where the model says so.

        Args:
            texts: one text or several, each a text or a list of token ids with its special tokens.
                Texts longer than the model takes are cut.
            prompt_name: the model's prompt of that name (its `prompts`) goes before each text.
            prompt: this text does.

        Raises:
            RequestError: a text or option is wrong, or the artifact has no encoder.
        """
        return self.embeddings.embed(texts, prompt_name=prompt_name, prompt=prompt)

    async def aembed(
        self,
        texts: TextOrIds | Sequence[TextOrIds],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> Rows:
        """As `embed`, in an event loop."""
        work = partial(self.embed, texts, prompt_name=prompt_name, prompt=prompt)
        return await asyncio.to_thread(work)

    def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None
    ) -> list[Ranked]:
        """Return `documents` scored by how well they answer `query`, the best `top_n` first.

        Raises:
            RequestError: a text is wrong, or the artifact has no cross-encoder.
        """
        return self.embeddings.rerank(query, documents, top_n=top_n)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], *, priority: int = 0, **options: object
    ) -> list[Completion]:
        """Return the completions of `prompts` in order, `n` for each.

        Args:
            prompts: one prompt or several, each a text or a list of token ids.
            priority: -100..100; requests of a lower one go first, so that these overtake a bounded
                number of others and nobody waits for ever.
            **options: `max_tokens temperature top_p top_k min_p seed stop ignore_eos logprobs n`.

        Raises:
            RequestError: an option or a prompt is wrong; nothing has been generated. Or a prompt
                was poisoned (its logits are not finite), or the app was closed meanwhile.
            CapacityError: a request is larger than the whole KV pool; or too many wait already,
                and `retry_after` says in how many seconds there should be room.
            DeviceError: a step could not be run (a kernel failed, memory ran out).
            RankError: a process of the group died; the requests under way are lost.

        The first prompt that fails ends the call; use `submit` for requests that may fail alone.
        """
        jobs = self._accept(self._read(_as_list(prompts), options, priority))
        try:
            return [job.result() for job in jobs]
        finally:
            self._abandon(jobs)

    async def agenerate(
        self, prompts: Prompt | Sequence[Prompt], *, priority: int = 0, **options: object
    ) -> list[Completion]:
        """As `generate`, in an event loop. A task that is cancelled ends its requests."""
        jobs = self._accept(self._read(_as_list(prompts), options, priority))
        try:
            return [await job for job in jobs]
        finally:
            await self._aabandon(jobs)

    def stream(self, prompt: Prompt, *, priority: int = 0, **options: object) -> Iterator[Chunk]:
        """Yield the completion of one prompt piece by piece; options as for `generate`, n = 1.

        It starts with the first piece asked for; leaving the iterator early drops the request.
        """
        return self._stream(self._read([prompt], options, priority, single=True))

    def astream(
        self, prompt: Prompt, *, priority: int = 0, **options: object
    ) -> AsyncIterator[Chunk]:
        """As `stream`, for `async for`; `aclose` or the task's end drops the request."""
        return self._astream(self._read([prompt], options, priority, single=True))

    def submit(self, prompt: Prompt, *, priority: int = 0, **options: object) -> Job:
        """Start the completion of one prompt, options as for `stream`; return it at once.

        The job's `result()` waits for the end, iterating over it gives chunks; `await` and
        `async for` do the same in an event loop.
        """
        (job,) = self._accept(self._read([prompt], options, priority, single=True))
        return job

    def cancel(self, job: Job) -> None:
        """End a job. When this returns its blocks are free; its result has the reason `abort`."""
        self._abandon([job])

    async def acancel(self, job: Job) -> None:
        """As `cancel`, in an event loop: it goes on while a step ends."""
        await self._aabandon([job])

    @contextmanager
    def record(self, path: str | os.PathLike[str]) -> Iterator[Timeline]:
        """Record what the engine does in the body, and write it to `path` for ui.perfetto.dev.

        Raises OSError when `path` cannot be written, RequestError in a recording of the same app.
        """
        timeline = Timeline(self.engine.device.now)
        recorder = StepRecorder(timeline, self.engine.pool)
        self._loop.call(lambda: self.engine.start_recording(recorder)).result()
        try:
            yield timeline
        finally:
            with suppress(RequestError):  # closed meanwhile: what there is gets written
                self._loop.call(self.engine.stop_recording).result()
            timeline.write(path)

    def close(self) -> None:
        """End the threads; requests under way fail with a RequestError. Safe to call twice."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _stream(self, ask: _Ask) -> Iterator[Chunk]:
        (job,) = self._accept(ask)
        try:
            yield from job
        finally:
            self._abandon([job])

    async def _astream(self, ask: _Ask) -> AsyncIterator[Chunk]:
        (job,) = self._accept(ask)
        try:
            async for chunk in job:
                yield chunk
        finally:
            await self._aabandon([job])

    # ---- reading what is asked for ----

    def _read(
        self,
        prompts: Sequence[Prompt],
        options: Mapping[str, object],
        priority: int,
        *,
        single: bool = False,
    ) -> _Ask:
        _ = self.engine  # there must be one
        params = SamplingParams.make(options)
        if params.stop and self.tokenizer is None:
            raise RequestError(f"{self.artifact.path} has no tokenizer, so `stop` cannot be used")
        if single and params.n != 1:
            raise RequestError(f"a stream has one completion: n must be 1, not {params.n}")
        check_priority(priority)
        return _Ask([self._encode(prompt) for prompt in prompts], params, priority, chunks=single)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    f"{self.artifact.path} has no tokenizer, so prompts must be lists of token ids"
                )
            return self.tokenizer.encode(prompt)
        if not _is_listed(prompt) or any(
            isinstance(t, bool) or not hasattr(t, "__index__") for t in prompt
        ):
            raise RequestError("a prompt must be a text or a list of token ids")
        return [int(t) for t in prompt]

    # ---- messages to the engine's thread ----

    def _accept(self, ask: _Ask) -> list[Job]:
        """Have the requests of `ask` started, all or none; return at once.

        What the engine's thread changes meanwhile matters for `max_waiting` alone: then the jobs
        fail.
        """
        for prompt in ask.prompts:
            self.engine.scheduler.check(prompt, ask.params)
        count = len(ask.prompts) * ask.params.n
        jobs = [Job(self._text_stream(ask.params), chunks=ask.chunks) for _ in range(count)]
        arrival = self.engine.device.now()  # a step may be under way
        self._loop.call(lambda: self._start(ask, arrival, jobs))
        return jobs

    def _start(self, ask: _Ask, arrival: float, jobs: Sequence[Job]) -> None:
        """Queue the requests of `ask`. On the engine's thread."""
        try:
            for prompt in ask.prompts:
                self.engine.scheduler.check(prompt, ask.params)
            requests = [
                request
                for prompt in ask.prompts
                for request in self.engine.submit(prompt, ask.params, ask.priority)
            ]
        except DovetailError as error:
            for job in jobs:
                job.fail(error)
            return
        for job, request in zip(jobs, requests, strict=True):
            request.metrics.arrival = arrival
            job.begin(request)
        self._loop.watch(jobs)

    def _text_stream(self, params: SamplingParams) -> TextStream | None:
        return TextStream(self.tokenizer, params.stop) if self.tokenizer else None

    def _drop(self, jobs: Sequence[Job]) -> Future[None] | None:
        """Have the unfinished ones of `jobs` ended; None where there are none."""
        left = [job for job in jobs if not job.finished]
        if not left:
            return None
        with suppress(RequestError):  # closed: they have ended
            return self._loop.call(lambda: self._loop.drop(left))
        return None

    def _abandon(self, jobs: Sequence[Job]) -> None:
        future = self._drop(jobs)
        if future is not None:
            future.result()

    async def _aabandon(self, jobs: Sequence[Job]) -> None:
        future = self._drop(jobs)
        if future is not None:
            await asyncio.wrap_future(future)


def _close(loop: EngineLoop | None, embeddings: Embeddings) -> None:
    if loop:
        loop.close()
    embeddings.close()


@dataclass(frozen=True, slots=True)
class _Ask:
    """A call that has been read: prompts as token ids, and their options."""

    prompts: list[list[int]]
    params: SamplingParams
    priority: int
    chunks: bool = False


def _is_listed(value: object) -> bool:
    """Tell whether `value` is a list, tuple or array: ordered, and no text or bytes."""
    return hasattr(value, "__iter__") and not isinstance(value, str | bytes | Mapping | Set)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not _is_listed(prompts):
        raise RequestError("prompts must be texts or lists of token ids")
    listed = list(prompts)
    if listed and all(hasattr(item, "__index__") for item in listed):
        return [listed]  # type: ignore[list-item]
    if not all(isinstance(item, str | Sequence) or hasattr(item, "__len__") for item in listed):
        raise RequestError("prompts must be texts or lists of token ids")
    return listed  # type: ignore[return-value]
