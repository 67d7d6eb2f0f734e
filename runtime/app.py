"""An opened artifact: `load` and `App`, what a user of the runtime holds.

In: an artifact and how it is to be run. Out: an app that generates, chats, embeds, ranks and runs
workflows. One thread of the app, or a child process, steps the engine; callers wait for its
messages. Calls come in two forms, for threads and for asyncio.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections import abc
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from functools import cached_property, partial
from typing import Any, Self, TypeVar, Unpack, get_type_hints

from dovetail.ir.errors import RequestError
from dovetail.ir.files import hold
from dovetail.ir.options import ChatOptions, GenerateOptions, check_names, check_types
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import Workflow
from dovetail.runtime.artifact import Artifact, open_artifact
from dovetail.runtime.embed.open import open_encoders
from dovetail.runtime.embed.settings import EmbeddingSettings
from dovetail.runtime.embed.texts import (
    Embeddings,
    EmbedOptions,
    Ranked,
    RerankOptions,
    TextOrIds,
)
from dovetail.runtime.engine.engine import Engine
from dovetail.runtime.engine.options import EngineKeywords, EngineOptions
from dovetail.runtime.flows.events import WorkflowResult
from dovetail.runtime.flows.indexes import AppIndex, EmbedTexts
from dovetail.runtime.flows.job import WorkflowJob
from dovetail.runtime.flows.service import AnyWorkflow, FlowService, FlowSettings
from dovetail.runtime.hosting.division import divide_cpu
from dovetail.runtime.hosting.generator import Generator, Job, Prompt, as_list
from dovetail.runtime.hosting.loop import EngineLoop
from dovetail.runtime.hosting.memory import share_memory
from dovetail.runtime.hosting.open_engine import check_draft, open_engine
from dovetail.runtime.hosting.process import EngineProcess
from dovetail.runtime.hosting.wire import Ask
from dovetail.runtime.machine.devices import CPU
from dovetail.runtime.machine.seat import Board
from dovetail.runtime.machine.trust import check_trust
from dovetail.runtime.native.encoder import Rows
from dovetail.runtime.retrieval.memory_plan import GpuMemoryPlan
from dovetail.runtime.schedule.request import Chunk, Completion, Score
from dovetail.runtime.text.chat import AnswerReader, ChatCompletion, ChatPrompts, Delta
from dovetail.runtime.text.chat_template import ChatTemplate
from dovetail.runtime.text.tokenizer import Tokenizer
from dovetail.runtime.timeline import MAX_EVENTS, Timeline
from dovetail.topology.hardware import HardwareSpec, read_hardware

Prompts = Prompt | abc.Sequence[Prompt]
Messages = abc.Sequence[Any]
Texts = TextOrIds | abc.Sequence[TextOrIds]
Piece = TypeVar("Piece")
ReadChunk = abc.Callable[[Chunk], Piece]
NAMED = ("embedding", "workflows", "check_weights", "apart", "trust")
LOAD_OPTIONS = (*NAMED, *EngineKeywords.__annotations__)


def load(
    path: str | os.PathLike[str],
    *,
    embedding: EmbeddingSettings | None = None,
    workflows: FlowSettings | None = None,
    check_weights: bool = False,
    apart: bool = False,
    trust: bool = False,
    **engine: Unpack[EngineKeywords],
) -> App:
    """Open the artifact directory at `path` on this machine, to generate, embed and run workflows.

    Args:
        path: the artifact directory.
        plan: processes, threads and PUs to run with instead of the artifact's plan.
        threads: threads of each process in both phases, instead of the plan's.
        kv_blocks: size of the CPU's KV pool in blocks of 16 tokens; default from plan or memory.
        memory: bytes of the CPU's memory to use, where several apps share it; default all free.
        deterministic: give a prompt the same logits, bit for bit, in any batch and any number of
            steps, with any `plan`, `threads` and `kv_blocks`. Slower.
        activations: how activations meet quantised weights: `integer` rounds them to 8 bits, 32
            values with one scale; `float` keeps float32, which is slower and exact.
        settings: how requests share the machine: `chunked` prompts, bounds of queues and waiting,
            kept prefixes. Default on the CPU: `runtime.schedule.plan.ON_CPU`.
        ranks: how the further processes of `plan` are started and joined when each has a device:
            on this machine or by Ray on several, summing by gloo or NCCL.
        device: what computes beside the CPU, by torch: `cuda`, `cuda:1`, `xpu`, `npu`; `auto` for
            the first accelerator found (else the CPU); `torch:cpu` for torch on cores of its own.
            Encoders (with `auto` on all accelerators) and hot clusters of indexes use it, too.
        offload: requests of a device whose attention and KV the CPU takes: `auto` decides in each
            step, `off` none, `full` all.
        dtype: of activations on a device: `f32`, `bf16`, `f16`, or `auto`: bfloat16 if supported,
            on `torch:cpu` that of the weights.
        gpu_memory_utilization: fraction of the device's free memory to use, default 0.9.
        max_num_seqs, max_num_batched_tokens: maximum sequences and tokens of a step; default by
            the device's memory, on the CPU what the artifact was compiled for.
        max_model_len: maximum tokens of a request, prompt and answer together.
        gpu_blocks: size of the device's KV pool in blocks of 16 tokens, default by its memory.
        speculative_config, draft: draft tokens, by `{"method": "suffix"}` what stood behind the
            same words before, by an artifact what its small model thinks. Answers stay the same.
        max_waiting: refuse requests while this many wait, instead of what `settings` say.
        kv_file, kv_file_bytes: keep KV of what prompts begin with there, too, beyond the app's
            life, in 1 GiB by default. On the CPU alone; of one process at a time.
        embedding: an SLO for `embed` and `rerank`: queues are sized for it (measuring for seconds
            on a new machine), accelerators first, then a CPU process, else BUSY. None: encoders
            run in this process, and calls wait.
        workflows: how workflows share engine, index, search threads and GPU memory.
        apart: for servers: run engine and encoders in child processes, restarted when they die;
            what ran in one that died fails with a DeviceError. `App.engine` is out of reach.
        check_weights: also check the chunk hashes of the weights (reads all of them).
        trust: do not warn at the first load of an artifact or index that was not made here, whose
            code runs; DOVETAIL_TRUST=1 does the same.

    Raises:
        ArtifactError: the artifact is damaged, too new, or does not fit this machine.
        CapacityError: there is not enough memory, or threads cannot be started.
        RequestError: an option has a wrong value.
        SpecError: the processes of `plan` cannot share the model, `draft` has another vocabulary,
            or `max_...` is more than the artifact was compiled for.
        DeviceError: the device is not here, or the installed torch does not support it.
        RankError: a process could not be started.
    """
    check_names("load", engine, LOAD_OPTIONS)
    check_types(
        {"path": path, "embedding": embedding, "workflows": workflows, "apart": apart, **engine},
        get_type_hints(load) | get_type_hints(EngineKeywords),
    )
    hardware = read_hardware()
    options = EngineOptions(**engine).settle(hardware)
    artifact = open_artifact(path, hardware, check_weights=check_weights)
    check_trust(artifact.path, trust=trust, code=artifact.code)
    draft = check_draft(artifact, options, hardware, trust=trust)
    settings, memory, options = (workflows or FlowSettings()).share_gpu(artifact, options)
    board = divide_cpu(artifact, options, hardware)
    device = engine.get("device", CPU)  # encoders run on all that `auto` finds
    options = share_memory(artifact, draft, hardware, options, embedding, device)
    parts = _open_parts(artifact, hardware, options, board, embedding, device=device, apart=apart)
    return App(artifact, *parts, settings, _gpu_of(options), memory, trust=trust, board=board)


def _open_parts(
    artifact: Artifact,
    hardware: HardwareSpec,
    options: EngineOptions,
    board: Board | None,
    embedding: EmbeddingSettings | None,
    *,
    device: str,
    apart: bool,
) -> tuple[Generator | None, Embeddings]:
    """Return what generates, if the artifact has a model that does, and what embeds; or neither."""
    generator, process = None, None
    with ExitStack() as opened:
        if apart and artifact.models:  # it opens while the encoders do
            process = EngineProcess(artifact.path, options, board)
            opened.callback(process.close)
        embeddings = open_encoders(
            artifact,
            hardware,
            plan=options.plan,
            threads=options.threads,
            settings=embedding,
            apart=apart,
            device=device,
            board=board,
        )
        opened.callback(embeddings.close)
        for part in artifact.models.values():  # one at most
            if process is not None:
                process.wait()
            host = process or EngineLoop(open_engine(artifact, hardware, options, board))
            tokenizer = Tokenizer(part.tokenizer) if part.tokenizer else None
            given = artifact.path, options.bound_context(part.file.spec.max_context), part.folder
            generator = Generator(host, tokenizer, *given, part.file.spec.adapters)
        opened.pop_all()
    return generator, embeddings


def _gpu_of(options: EngineOptions) -> str | None:
    """Return the GPU that indexes may use beside the engine."""
    return options.device if options.beside_cpu else None


class App:
    """A loaded artifact. Threads and event loops may call it together; requests share batches."""

    def __init__(
        self,
        artifact: Artifact,
        generator: Generator | None,
        embeddings: Embeddings,
        workflows: FlowSettings | None = None,
        gpu: str | None = None,
        memory: GpuMemoryPlan | None = None,
        *,
        trust: bool = False,
        board: Board | None = None,
    ) -> None:
        """`gpu`: where hot clusters may lie. memory: how. board: of workers that share CPUs."""
        self.gpu_memory, self.board = memory, board
        self.artifact, self.embeddings, self._generator = artifact, embeddings, generator
        self.tokenizer = generator.tokenizer if generator else None
        embed, rerank = partial(embeddings.embed, wait=True), embeddings.start_rerank
        cut = embeddings.divide if embeddings.embeds else None
        settings = workflows or FlowSettings()
        self.flows = FlowService(
            generator, embed, rerank, settings, artifact, gpu, cut=cut, trust=trust, board=board
        )
        held = hold(artifact.path, *{path.parent for path in artifact.shared.values()})
        engine = [generator.close] if generator else []
        ends = [self.flows.close, *engine, embeddings.close, held.close]
        self._end = weakref.finalize(self, _close, os.getpid(), ends)

    @property
    def ready(self) -> bool:
        """Whether all is served: no child process is being restarted."""
        engine = self._generator is None or self._generator.host.ready
        return engine and self.embeddings.ready and self.flows.worker.ready

    @property
    def failure(self) -> str:
        """Why it is not ready, in words; "" if it is ready or the reason is unknown."""
        engine = self._generator.host.failure if self._generator else ""
        return engine or self.embeddings.failure or self.flows.worker.failure

    @property
    def generator(self) -> Generator:
        """What takes requests; RequestError if the artifact has no model that generates."""
        if self._generator is None:
            raise RequestError(
                f"{self.artifact.path} has no model that generates; compile one with "
                "`dovetail compile MODEL -o app.dove`"
            )
        return self._generator

    @property
    def engine(self) -> Engine:
        """The engine that generates; RequestError as `generator`, or if it is a child process."""
        host = self.generator.host
        if not isinstance(host, EngineLoop):
            raise RequestError("the engine runs in a child process and cannot be accessed here")
        return host.engine

    # ---- generation ----

    def generate(self, prompts: Prompts, **options: Unpack[GenerateOptions]) -> list[Completion]:
        """Return the completions of `prompts` in order, `n` for each.

        Args:
            prompts: one prompt or several, each a text or a list of token ids.
            priority: -100..100; requests with a lower one go first, so that they overtake a
                bounded number of others and nobody waits for ever.
            options: those of `SamplingOptions`, such as `max_tokens temperature top_p top_k min_p
                seed stop ignore_eos logprobs n schema adapter`, and penalties.

        Raises:
            RequestError: an option or a prompt is wrong (then nothing has been generated), a
                prompt's logits are not finite, or the app was closed meanwhile.
            CapacityError: a request is larger than the whole KV pool; or too many wait already:
                `retry_after` is the seconds until there should be room.
            DeviceError: a step could not be run (a kernel failed, memory ran out).
            RankError: a process of the group died; the requests under way are lost.

        The first prompt that fails ends the call; use `submit` for requests that may fail alone.
        """
        with self._started(self._read(as_list(prompts), options)) as jobs:
            return [job.result() for job in jobs]

    async def agenerate(
        self, prompts: Prompts, **options: Unpack[GenerateOptions]
    ) -> list[Completion]:
        """As `generate`, in an event loop. A task that is cancelled ends its requests."""
        async with self._astarted(self._read(as_list(prompts), options)) as jobs:
            return [await job for job in jobs]

    def score(
        self, prompts: Prompts, *, top: int = 0, priority: int = 0, adapter: str | None = None
    ) -> list[Score]:
        """Return how likely the model finds the tokens of each of `prompts`; nothing is generated.

        top: how many of the most likely tokens to tell in the place of each, 0..100. Prompts,
        priority, adapter and errors are as for `generate`; a prompt may fill the context.
        """
        options = GenerateOptions(max_tokens=0, prompt_logprobs=top, adapter=adapter)
        ask = self.generator.read(as_list(prompts), options, priority)
        with self._started(ask) as jobs:
            found = [job.result().prompt_logprobs or () for job in jobs]
        return list(map(Score.of, ask.prompts, found))

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> abc.Iterator[Chunk]:
        """Yield the completion of one prompt piece by piece; options as for `generate`, n = 1.

        It starts with the first piece asked for; leaving the iterator early drops the request.
        """
        return self._pieces(self._read([prompt], options, single=True), lambda chunk: chunk)

    def astream(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> abc.AsyncIterator[Chunk]:
        """As `stream`, for `async for`; `aclose` or the task's end drops the request."""
        return self._apieces(self._read([prompt], options, single=True), lambda chunk: chunk)

    def submit(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Job:
        """Start the completion of one prompt, options as for `stream`; return it at once.

        The job's `result()` waits for the end, iterating over it gives chunks; `await` and
        `async for` do the same in an event loop.
        """
        (job,) = self.generator.accept(self._read([prompt], options, single=True))
        return job

    def submit_all(
        self, prompts: Prompts, *, chunks: bool = True, **options: Unpack[GenerateOptions]
    ) -> list[Job]:
        """Start the completions of `prompts`, all or none; return jobs as of `submit`, `n` each.

        chunks: False where only results are wanted, which costs less.
        """
        return self.generator.accept(self._read(as_list(prompts), options, chunks=chunks))

    def cancel(self, job: Job) -> None:
        """End a job. When this returns its blocks are free; its result has the reason `abort`."""
        check_types({"job": job}, {"job": Job})
        self.generator.abandon([job])

    async def acancel(self, job: Job) -> None:
        """As `cancel`, in an event loop: it goes on while a step ends."""
        check_types({"job": job}, {"job": Job})
        await self.generator.aabandon([job])

    def _read(self, prompts: abc.Sequence[Prompt], options: GenerateOptions, **form: bool) -> Ask:
        return self.generator.read(prompts, options, options.pop("priority", 0), **form)

    @contextmanager
    def _started(self, ask: Ask) -> abc.Iterator[list[Job]]:
        """Yield the jobs of a call; those that have not ended are dropped after."""
        jobs = self.generator.accept(ask)
        try:
            yield jobs
        finally:
            self.generator.abandon(jobs)

    @asynccontextmanager
    async def _astarted(self, ask: Ask) -> abc.AsyncIterator[list[Job]]:
        jobs = self.generator.accept(ask)
        try:
            yield jobs
        finally:
            await self.generator.aabandon(jobs)

    def _pieces(self, ask: Ask, read: ReadChunk[Piece]) -> abc.Generator[Piece, None, None]:
        """Yield what `read` makes of the chunks of one completion."""
        with self._started(ask) as (job,):
            yield from map(read, job)

    async def _apieces(self, ask: Ask, read: ReadChunk[Piece]) -> abc.AsyncGenerator[Piece]:
        async with self._astarted(ask) as (job,):
            async for chunk in job:
                yield read(chunk)

    # ---- conversations ----

    @property
    def template(self) -> ChatTemplate | None:
        """The model's chat template, None if it has none; ArtifactError if it is damaged."""
        return self._generator.template if self._generator else None

    @cached_property
    def chat_prompts(self) -> ChatPrompts:
        """What makes prompts of conversations; RequestError if the model has no chats."""
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

    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> ChatCompletion:
        """Return the answer to a conversation; its `message` can be appended to `messages`.

        If the conversation outgrows the context, its oldest turns are left out: never messages of
        the system, the last one of the user, and what follows it. `notes` say so, and why an answer
        is empty.

        messages: mappings or messages of answers, with `role` and `content`. Options are as for
        `generate`, n = 1; default of `max_tokens`: what the context holds. `chat_template_kwargs`:
        what the model's template may read: `tools`, `documents`, its own such as `enable_thinking`.

        Raises what `generate` does, and RequestError if the template does not take these messages
        or the context cannot hold those that must stay, ArtifactError if the template is damaged.
        """
        ask, notes = self._read_chat(messages, options)
        with self._started(ask) as (job,):
            return ChatCompletion.of(job.result(), notes, self.end_tokens)

    async def achat(self, messages: Messages, **options: Unpack[ChatOptions]) -> ChatCompletion:
        """As `chat`, in an event loop. A task that is cancelled ends its request."""
        # on a thread, for it waits for the template's process
        ask, notes = await asyncio.to_thread(self._read_chat, messages, options)
        async with self._astarted(ask) as (job,):
            return ChatCompletion.of(await job, notes, self.end_tokens)

    def chat_stream(
        self, messages: Messages, **options: Unpack[ChatOptions]
    ) -> abc.Generator[Delta, None, None]:
        """Yield the answer to a conversation piece by piece; all else as for `chat`.

        As `stream`, it starts with the first piece asked for.
        """
        ask, notes = self._read_chat(messages, options)
        return self._pieces(ask, AnswerReader(self.end_tokens, notes).read)

    async def achat_stream(
        self, messages: Messages, **options: Unpack[ChatOptions]
    ) -> abc.AsyncGenerator[Delta]:
        """As `chat_stream`, for `async for`; wrong messages are told of by the first piece."""
        ask, notes = await asyncio.to_thread(self._read_chat, messages, options)
        async with aclosing(self._apieces(ask, AnswerReader(self.end_tokens, notes).read)) as found:
            async for delta in found:
                yield delta

    def _read_chat(self, messages: Messages, options: ChatOptions) -> tuple[Ask, tuple[str, ...]]:
        """Return what the engine is asked, and notes about it."""
        prompts = self.chat_prompts
        given = options.get("max_tokens")
        room = given if isinstance(given, int) else None  # a wrong type is told of below
        prompt = prompts.fit(messages, room, options.pop("chat_template_kwargs", None))
        options["max_tokens"] = prompts.context if given is None else given
        return self._read([prompt.ids], options, single=True), prompt.notes

    # ---- texts to vectors ----

    def embed(self, texts: Texts, **options: Unpack[EmbedOptions]) -> Rows:
        """Return a float32 row for each text, `[n, d]`; of length 1 where the model says so.

        Args:
            texts: one or several, each a text (cut if it is too long for the model) or a list of
                token ids with its special tokens.
            model: the encoder's name in the artifact, default its first one that embeds.
            prompt_name, prompt: what goes before each text: one of the model's prompts, or a text.
            dimensions: of each row only so many values, for models trained so (Matryoshka).
            wait: with an SLO, for room, not BUSY (many texts). Without one calls always wait.

        Raises:
            RequestError: a text or option is wrong, or the artifact has no such encoder.
            CapacityError: BUSY: the SLO cannot be met; `retry_after`: seconds until there may be
                room, None if waiting does not help.
            DeviceError: a text could not be run: memory ran out, or processes died under it.
        """
        return self.embeddings.embed(texts, **options)

    async def aembed(self, texts: Texts, **options: Unpack[EmbedOptions]) -> Rows:
        """As `embed`, in an event loop. A task that is cancelled leaves the queues."""
        return await self.embeddings.aembed(texts, **options)

    def rerank(
        self, query: str, documents: abc.Sequence[str], **options: Unpack[RerankOptions]
    ) -> list[Ranked]:
        """Return `documents` scored by how well they answer `query`, the best `top_n` first.

        `model`: the cross-encoder's name, default the first one. `instruction`: what is looked for,
        for models that read it (Qwen3-Reranker). Errors and `wait` are as of `embed`.
        """
        return self.embeddings.rerank(query, documents, **options)

    # ---- workflows ----

    @property
    def workflows(self) -> abc.Mapping[str, Workflow]:
        """The workflows that `run` knows by name: those of the artifact, and those added.

        Those of the artifact are opened, with its indexes. Raises as `run` and `add_index`.
        """
        return self.flows.workflows

    def find_workflow(self, name: str) -> Workflow:
        """Return a workflow that `run` knows; WorkflowError if there is none, or it is wrong."""
        return self.flows.find(name)

    def add_workflow(self, workflow: RAGraph | Workflow) -> None:
        """Have `run` know a workflow by name; WorkflowError if it is wrong. Indexes may follow."""
        self.flows.add_workflow(workflow)

    def add_index(
        self,
        path: str | os.PathLike[str],
        *,
        name: str | None = None,
        nprobe: int | None = None,
        embed: EmbedTexts | None = None,
    ) -> None:
        """Have workflows search the index folder at `path`, in a process of its own.

        Indexes of the artifact are known without this, and opened by the first workflow. An index
        takes the place of one of its name; runs that are halfway through a search of that fail.

        Args:
            path: what `dovetail index build` wrote.
            name: what retrieval nodes call it, default the folder's name.
            nprobe: clusters that a search scans, nearest first: more find more, in more time; all
                of them are an exact search. Default an eighth, and no less than 64.
            embed: turns queries into vectors; default the app's encoder, with the index's prompt.

        Raises ArtifactError if the index is missing or damaged, SpecError if nprobe is below 1 or
        nothing here embeds as what made the index, DeviceError if the process cannot be started.
        """
        self.flows.add_index(path, name=name, nprobe=nprobe, embed=embed)

    def index(self, name: str | None = None) -> AppIndex:
        """Return an index of the app by its name, to add and remove documents; None: the only one.

        Raises WorkflowError if there is none, or several may be meant, and as `add_index`.
        """
        return self.flows.index(name)

    def run(self, workflow: AnyWorkflow, inputs: abc.Mapping[str, object]) -> WorkflowResult:
        """Run a workflow and return its result.

        workflow: a graph, or the name of one of the artifact or that was added. inputs: by name.

        Raises:
            WorkflowError: workflow or inputs are wrong (then nothing was started), or a node,
                which the error names, failed.
            RequestError: the app was closed meanwhile.
        """
        job = self.flows.submit(workflow, inputs, events=False)
        try:
            return job.result()
        finally:
            job.cancel()

    async def arun(self, workflow: AnyWorkflow, inputs: abc.Mapping[str, object]) -> WorkflowResult:
        """As `run`, in an event loop; a thread opens indexes. A cancelled task ends its run."""
        found = await asyncio.to_thread(lambda: self.flows.check(self.flows.find(workflow)))
        job = self.flows.submit(found, inputs, events=False)
        try:
            return await job
        finally:
            job.cancel()

    def submit_workflow(
        self, workflow: AnyWorkflow, inputs: abc.Mapping[str, object]
    ) -> WorkflowJob:
        """Start a workflow, as `run`; return it at once.

        The job's `result()` waits for the end, `cancel()` ends it, iterating over it gives events:
        nodes that start and finish, text as it is written, sub-stages of searches. `await` and
        `async for` do the same in an event loop.
        """
        return self.flows.submit(workflow, inputs, events=True)

    # ---- the whole ----

    @contextmanager
    def record(
        self, path: str | os.PathLike[str] | None = None, *, max_events: int = MAX_EVENTS
    ) -> abc.Iterator[Timeline]:
        """Record what is done in the body, and write it to `path`, if any, for ui.perfetto.dev.

        It has tracks for engine, retrieval worker and query encoder, and the lives of requests and
        nodes. Raises OSError if `path` cannot be written, RequestError in another recording.
        """
        host = self.generator.host
        timeline = Timeline(host.now, max_events)
        host.start_recording(timeline)
        self.flows.start_recording(timeline)
        try:
            yield timeline
        finally:
            self.flows.stop_recording()
            host.stop_recording()
            if path is not None:
                timeline.write(path)

    def close(self) -> None:
        """End the threads; requests under way fail with a RequestError. Safe to call twice."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def _close(owner: int, ends: abc.Sequence[abc.Callable[[], object]]) -> None:
    """Call `ends`, but in a fork: threads and processes are those of its parent."""
    for end in ends if os.getpid() == owner else ():
        end()
