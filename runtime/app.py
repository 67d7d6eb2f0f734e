"""An opened artifact that generates: `load` and `App`, what a user of the runtime holds.

In: prompts (text or token ids) and options with vLLM's names. Out: completions, streams and jobs,
for threads and for asyncio. One thread of the app steps the engine; callers wait for its messages.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

from dovetail.ir.artifact import ServicePlan
from dovetail.ir.errors import RequestError, SpecError
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import Workflow
from dovetail.runtime.apart.process import EngineProcess
from dovetail.runtime.artifact import Artifact, open_artifact
from dovetail.runtime.cuda_engine import CudaOptions
from dovetail.runtime.embedding.settings import EmbeddingSettings
from dovetail.runtime.emulated import Emulation
from dovetail.runtime.encoder import Rows
from dovetail.runtime.encoder_texts import Embeddings, Ranked, TextOrIds, open_encoders
from dovetail.runtime.engine import Engine
from dovetail.runtime.flows.changes import AppIndex
from dovetail.runtime.flows.events import WorkflowResult
from dovetail.runtime.flows.indexes import EmbedTexts
from dovetail.runtime.flows.job import WorkflowJob
from dovetail.runtime.flows.service import AnyWorkflow, FlowService, FlowSettings
from dovetail.runtime.generator import Generator, Prompt, as_list
from dovetail.runtime.gpu_memory import take_share
from dovetail.runtime.host import Ask
from dovetail.runtime.job import Job
from dovetail.runtime.loop import EngineLoop
from dovetail.runtime.meeting import RankOptions
from dovetail.runtime.open_engine import EngineOptions, open_engine
from dovetail.runtime.plan import SchedulerSettings
from dovetail.runtime.request import Chunk, Completion
from dovetail.runtime.retrieval.memory_plan import GpuMemoryPlan
from dovetail.runtime.retrieval.wire import CudaGpu, EmulatedGpu, Gpu
from dovetail.runtime.timeline import Timeline
from dovetail.runtime.tokenizer import Tokenizer
from dovetail.topology.hardware import read_hardware


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
    embedding: EmbeddingSettings | None = None,
    workflows: FlowSettings | None = None,
    check_weights: bool = False,
    apart: bool = False,
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
        embedding: an SLO for `embed` and `rerank`: queues sized for it, accelerators first, then a
            CPU process, else BUSY. Sizing measures for some seconds where the artifact's profile
            does not know this machine. Without it encoders run in this process, and calls wait.
        workflows: how workflows share engine and index, the threads of a search, and memory of the
            GPU for hot clusters of indexes.
        apart: run engine and encoders in processes of their own, which are started again when they
            die; what ran in an engine that dies fails with a DeviceError. For servers: the engine
            shares no interpreter with its callers. `App.engine` is out of reach then.
        check_weights: also check the chunk hashes of the weights (reads all of them).

    Raises:
        ArtifactError: the artifact is damaged, too new, or does not fit this machine.
        CapacityError: there is not enough memory, or threads cannot be started.
        RequestError: `threads` or `kv_blocks` is below 1.
        SpecError: the model cannot be shared by the processes of `plan`, or there is no GPU.
        RankError: a process could not be started.
    """
    options = EngineOptions(
        plan=plan,
        threads=threads,
        kv_blocks=kv_blocks,
        deterministic=deterministic,
        emulation=emulation,
        settings=settings,
        ranks=ranks,
        cuda=cuda,
    )
    if apart and emulation is not None and not emulation.timed:
        raise SpecError("the clock of an exact emulation is the app's: it does not run apart")
    hardware = read_hardware()
    artifact = open_artifact(path, hardware, check_weights=check_weights)
    memory = None
    if workflows is not None and workflows.share is not None and artifact.models:
        memory, options = take_share(workflows.share, options, artifact, workflows.search_threads)
        if memory is not None:
            workflows = replace(workflows, cluster_bytes=memory.cluster_bytes)
    with ExitStack() as opened:
        generator, process = None, None
        if artifact.models and apart:  # it opens while the encoders do
            process = EngineProcess(artifact.path, options)
            opened.callback(process.close)
        embeddings = open_encoders(
            artifact, hardware, plan=plan, threads=threads, settings=embedding, apart=apart
        )
        opened.callback(embeddings.close)
        if artifact.models:
            if process is not None:
                process.wait()
            host = process or EngineLoop(open_engine(artifact, hardware, options))
            file = next(iter(artifact.models.values())).tokenizer
            generator = Generator(host, Tokenizer(file) if file else None, artifact.path)
        opened.pop_all()
    return App(artifact, generator, embeddings, workflows, _gpu_of(options), memory)


def _gpu_of(options: EngineOptions) -> Gpu | None:
    """Return the GPU that indexes may use beside the engine."""
    if options.emulation is not None:
        return EmulatedGpu.of(options.emulation.machine)
    return CudaGpu(options.cuda.ordinal) if options.cuda is not None else None


class App:
    """A loaded artifact. Threads and event loops may call it together; requests share batches."""

    def __init__(
        self,
        artifact: Artifact,
        generator: Generator | None,
        embeddings: Embeddings,
        workflows: FlowSettings | None = None,
        gpu: Gpu | None = None,
        memory: GpuMemoryPlan | None = None,
    ) -> None:
        """`gpu`: where hot clusters of indexes may lie. `memory`: how that was planned."""
        self.gpu_memory = memory
        self.artifact, self.embeddings = artifact, embeddings
        self.tokenizer = generator.tokenizer if generator else None
        self._generator = generator
        settings = workflows or FlowSettings()
        embed = partial(embeddings.embed, wait=True)
        self._flows = FlowService(self._generator, embed, settings, artifact, gpu)
        self._end = weakref.finalize(self, _close, self._flows, self._generator, embeddings)

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

    @property
    def ready(self) -> bool:
        """Whether engine and encoders run: none of their processes is being started again."""
        return self.embeddings.ready and (self._generator is None or self._generator.host.ready)

    @property
    def flows(self) -> FlowService:
        """What runs workflows; for its figures."""
        return self._flows

    def embed(
        self,
        texts: TextOrIds | Sequence[TextOrIds],
        *,
        model: str | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        wait: bool = False,
    ) -> Rows:
        """Return a float32 row for each text, [n][d]; of length 1 where the model says so.

        Args:
            texts: one text or several, each a text or a list of token ids with its special tokens.
                Texts longer than the model takes are cut.
            model: the encoder's name in the artifact, default its first one that embeds.
            prompt_name: the model's prompt of that name (its `prompts`) goes before each text.
            prompt: this text does.
            wait: with an SLO (`load(embedding=...)`), run as there is room beside others instead
                of BUSY; for many texts. Without an SLO calls always wait.

        Raises:
            RequestError: a text or option is wrong, or the artifact has no such encoder.
            CapacityError: BUSY: the SLO cannot be met; `retry_after` says in how many seconds there
                may be room, None that waiting does not help.
            DeviceError: a text could not be run: memory ran out, or processes died under it.
        """
        return self.embeddings.embed(
            texts, model=model, prompt_name=prompt_name, prompt=prompt, wait=wait
        )

    async def aembed(
        self,
        texts: TextOrIds | Sequence[TextOrIds],
        *,
        model: str | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        wait: bool = False,
    ) -> Rows:
        """As `embed`, in an event loop. A task that is cancelled leaves the queues."""
        return await self.embeddings.aembed(
            texts, model=model, prompt_name=prompt_name, prompt=prompt, wait=wait
        )

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        model: str | None = None,
        top_n: int | None = None,
        wait: bool = False,
    ) -> list[Ranked]:
        """Return `documents` scored by how well they answer `query`, the best `top_n` first.

        `model` is the cross-encoder's name, default the first one. Errors and `wait` are those of
        `embed`; RequestError where there is no cross-encoder.
        """
        return self.embeddings.rerank(query, documents, model=model, top_n=top_n, wait=wait)

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
        generator = self.generator
        jobs = generator.accept(generator.read(as_list(prompts), options, priority))
        try:
            return [job.result() for job in jobs]
        finally:
            generator.abandon(jobs)

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

    @property
    def workflows(self) -> Mapping[str, Workflow]:
        """The workflows that `run` knows by name: those of the artifact, and those added.

        Those of the artifact are opened, with its indexes; raises as `run` and `add_index`.
        """
        return self._flows.workflows

    def find_workflow(self, name: str) -> Workflow:
        """Return a workflow that `run` knows; WorkflowError where there is none, or it is wrong."""
        return self._flows.find(name)

    def add_workflow(self, workflow: RAGraph | Workflow) -> None:
        """Have `run` know a workflow by its name; WorkflowError where it is malformed."""
        self._flows.add_workflow(workflow)

    def add_index(
        self,
        path: str | os.PathLike[str],
        *,
        name: str | None = None,
        nprobe: int | None = None,
        embed: EmbedTexts | None = None,
    ) -> None:
        """Have workflows search the index folder at `path`, in a process of its own.

        Indexes of the artifact are known without this, and opened by the first workflow.

        Args:
            path: what `dovetail index build` wrote.
            name: what retrieval nodes call it, the folder's name by default. Nodes that name no
                index search the only one there is.
            nprobe: clusters that a search scans, nearest first: more find more, in more time. All
                of them are an exact search. Default an eighth, and no less than 16.
            embed: turns queries into vectors; by default the app's encoder does, with the prompt
                for queries that the index was built with.

        Raises:
            ArtifactError: there is no index at `path`, or it is damaged.
            SpecError: nprobe is below 1, or faiss is not installed (extra `rag`).
            DeviceError: the process cannot be started.
        """
        self._flows.add_index(path, name=name, nprobe=nprobe, embed=embed)

    def index(self, name: str | None = None) -> AppIndex:
        """Return an index of the app by its name, to add and remove documents; None: the only one.

        Raises WorkflowError where there is none, or several may be meant, and as `add_index`.
        """
        return self._flows.index(name)

    def run(self, workflow: AnyWorkflow, inputs: Mapping[str, object]) -> WorkflowResult:
        """Run a workflow and return what it came to.

        Args:
            workflow: a graph, or the name of one of the artifact, or that was added.
            inputs: the values of its inputs by name.

        Raises:
            WorkflowError: workflow or inputs are wrong; nothing was started. Or a node failed; the
                error names it, and other workflows go on.
            RequestError: the app was closed meanwhile.
        """
        job = self._flows.submit(workflow, inputs, events=False)
        try:
            return job.result()
        finally:
            job.cancel()

    async def arun(self, workflow: AnyWorkflow, inputs: Mapping[str, object]) -> WorkflowResult:
        """As `run`, in an event loop. A task that is cancelled ends its workflow."""
        job = self._flows.submit(workflow, inputs, events=False)
        try:
            return await job
        finally:
            job.cancel()

    def submit_workflow(self, workflow: AnyWorkflow, inputs: Mapping[str, object]) -> WorkflowJob:
        """Start a workflow, as `run`; return it at once.

        The job's `result()` waits for the end, and `cancel()` ends it. Iterating over it gives
        events: nodes that start and finish, text as it is written, sub-stages of searches. `await`
        and `async for` do the same in an event loop.
        """
        return self._flows.submit(workflow, inputs, events=True)

    @contextmanager
    def record(self, path: str | os.PathLike[str]) -> Iterator[Timeline]:
        """Record what is done in the body, and write it to `path` for ui.perfetto.dev.

        A track for the engine, one for the retrieval worker, one for the encoder of queries; the
        lives of requests and of the nodes of workflows, and an arrow along each.

        Raises OSError when `path` cannot be written, RequestError in a recording of the same app.
        """
        host = self.generator.host
        timeline = Timeline(host.now)
        host.start_recording(timeline)
        self._flows.start_recording(timeline)
        try:
            yield timeline
        finally:
            self._flows.stop_recording()
            host.stop_recording()
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


def _close(flows: FlowService, generator: Generator | None, embeddings: Embeddings) -> None:
    flows.close()
    if generator:
        generator.host.close()
    embeddings.close()
