"""An opened artifact: `load` and `App`, what a user of the runtime holds.

In: an artifact and how it is to be run. Out: an app, which generates (`app_generation.py`), chats
(`app_chat.py`), runs workflows (`app_workflows.py`), embeds and ranks. One thread of the app steps
the engine, or a process does; callers wait for its messages.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

from dovetail.ir.artifact import ServicePlan
from dovetail.runtime.apart.process import EngineProcess
from dovetail.runtime.app_chat import ChatCalls
from dovetail.runtime.app_workflows import WorkflowCalls
from dovetail.runtime.artifact import Artifact, open_artifact
from dovetail.runtime.embedding.settings import EmbeddingSettings
from dovetail.runtime.encoder import Rows
from dovetail.runtime.encoder_texts import Embeddings, Ranked, TextOrIds, open_encoders
from dovetail.runtime.flows.service import FlowService, FlowSettings
from dovetail.runtime.generator import Generator
from dovetail.runtime.gpu_memory import take_share
from dovetail.runtime.loop import EngineLoop
from dovetail.runtime.open_engine import EngineOptions, open_engine
from dovetail.runtime.plan import Offload, SchedulerSettings
from dovetail.runtime.rank_options import RankOptions
from dovetail.runtime.retrieval.memory_plan import GpuMemoryPlan
from dovetail.runtime.retrieval.wire import Gpu, TorchGpu
from dovetail.runtime.timeline import Timeline
from dovetail.runtime.tokenizer import Tokenizer
from dovetail.runtime.trust import meet
from dovetail.topology.hardware import read_hardware


def load(
    path: str | os.PathLike[str],
    *,
    plan: ServicePlan | None = None,
    threads: int | None = None,
    kv_blocks: int | None = None,
    deterministic: bool = False,
    activations: str = "integer",
    settings: SchedulerSettings | None = None,
    ranks: RankOptions | None = None,
    device: str = "cpu",
    offload: Offload = "auto",
    dtype: str = "auto",
    gpu_memory_utilization: float = 0.9,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    max_model_len: int | None = None,
    gpu_blocks: int | None = None,
    max_waiting: int | None = None,
    embedding: EmbeddingSettings | None = None,
    workflows: FlowSettings | None = None,
    check_weights: bool = False,
    apart: bool = False,
    trust: bool = False,
) -> App:
    """Open the artifact at `path` on this machine: what generates, and what embeds.

    Args:
        path: the artifact directory.
        plan: processes, threads and PUs to run with instead of the artifact's plan.
        threads: use this many threads in both phases of each process instead of the plan's.
        kv_blocks: size of the KV pool in blocks of 16 tokens; default from the plan or memory.
        deterministic: give a prompt the same logits, bit for bit, whatever else is in the batch,
            in one step or several, with any `plan`, `threads` and `kv_blocks`. It costs time.
        activations: `integer` rounds what meets quantised weights to 8 bits, 32 values with one
            scale, and multiplies integers; `float` keeps it in float32, which costs time and gives
            the products of the weights as they are. Other weights do not know the difference.
        settings: how requests share the machine: `chunked` prompts, bounds of queues and waiting,
            kept prefixes; `offload` is said below. `runtime.plan.ON_CPU` is the CPU's default.
        ranks: how the processes of `plan` beyond this one are started and joined when each has an
            device: on this machine or by Ray on several, summing by gloo or NCCL.
        device: what computes beside the CPU, by torch: `cuda`, `cuda:1`, `xpu`, `npu`, `auto` for
            the first accelerator that is here (else the CPU), or `torch:cpu`, torch on cores of its
            own. `kv_blocks` are the CPU's. Encoders run on it, too, with `auto` on all that are
            here, and hot clusters of indexes lie on it.
        offload: what of a device's work the CPU takes with its KV: `auto` weighs it in each step,
            `off` none, `full` all attention.
        dtype: of activations on a device: `f32`, `bf16`, `f16`, or `auto`: bfloat16 where it can,
            on `torch:cpu` the weights' own.
        gpu_memory_utilization: part of the device's free memory to use.
        max_num_seqs: sequences of a step at most.
        max_num_batched_tokens: tokens of a step at most. Without these two a device's memory
            decides, and on the CPU what the artifact was compiled for.
        max_model_len: tokens of a request at most, prompt and answer.
        gpu_blocks: blocks of 16 tokens of the device's KV pool, instead of all there is room for.
        max_waiting: requests beyond so many that wait are refused, instead of what `settings` say.
        embedding: an SLO for `embed` and `rerank`: queues sized for it, accelerators first, then a
            CPU process, else BUSY. Sizing measures for some seconds where the artifact's profile
            does not know this machine. Without it encoders run in this process, and calls wait.
        workflows: how workflows share engine and index, the threads of a search, and memory of the
            GPU for hot clusters of indexes.
        apart: run engine and encoders in processes of their own, which are started again when they
            die; what ran in an engine that dies fails with a DeviceError. For servers: the engine
            shares no interpreter with its callers. `App.engine` is out of reach then.
        check_weights: also check the chunk hashes of the weights (reads all of them).
        trust: load an artifact that was not made here, and indexes, without a word. The first load
            of one says in the log what that means; DOVETAIL_TRUST=1 leaves this out, too.

    Raises:
        ArtifactError: the artifact is damaged, too new, or does not fit this machine.
        CapacityError: there is not enough memory, or threads cannot be started.
        RequestError: an option has a value that it cannot have.
        SpecError: the model cannot be shared by the processes of `plan`, or the artifact holds less
            than `max_...` ask for.
        DeviceError: the device is not here, or the torch that is installed does not know it.
        RankError: a process could not be started.
    """
    options = EngineOptions(
        plan=plan,
        threads=threads,
        kv_blocks=kv_blocks,
        deterministic=deterministic,
        activations=activations,
        settings=settings,
        ranks=ranks,
        device=device,
        offload=offload,
        dtype=dtype,
        gpu_memory_utilization=gpu_memory_utilization,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        gpu_blocks=gpu_blocks,
        max_waiting=max_waiting,
    )
    hardware = read_hardware()
    options = options.settle(hardware)
    artifact = open_artifact(path, hardware, check_weights=check_weights)
    meet(artifact.path, trust=trust, code=artifact.code)
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
            artifact,
            hardware,
            plan=plan,
            threads=threads,
            settings=embedding,
            apart=apart,
            device=device,
        )
        opened.callback(embeddings.close)
        if artifact.models:
            if process is not None:
                process.wait()
            host = process or EngineLoop(open_engine(artifact, hardware, options))
            part = next(iter(artifact.models.values()))
            tokenizer = Tokenizer(part.tokenizer) if part.tokenizer else None
            context = options.wishes.bound_context(part.file.spec.max_context)
            generator = Generator(host, tokenizer, artifact.path, context)
        opened.pop_all()
    return App(artifact, generator, embeddings, workflows, _gpu_of(options), memory, trust=trust)


def _gpu_of(options: EngineOptions) -> Gpu | None:
    """Return the GPU that indexes may use beside the engine."""
    return TorchGpu(options.device) if options.beside_cpu else None


class App(ChatCalls, WorkflowCalls):
    """A loaded artifact. Threads and event loops may call it together; requests share batches."""

    def __init__(
        self,
        artifact: Artifact,
        generator: Generator | None,
        embeddings: Embeddings,
        workflows: FlowSettings | None = None,
        gpu: Gpu | None = None,
        memory: GpuMemoryPlan | None = None,
        *,
        trust: bool = False,
    ) -> None:
        """`gpu`: where hot clusters of indexes may lie. `memory`: how that was planned.

        trust: indexes that are added, see `load`.
        """
        self.gpu_memory = memory
        self.artifact, self.embeddings = artifact, embeddings
        self.tokenizer = generator.tokenizer if generator else None
        self._generator = generator
        settings = workflows or FlowSettings()
        embed = partial(embeddings.embed, wait=True)
        self._flows = FlowService(self._generator, embed, settings, artifact, gpu, trust=trust)
        self._end = weakref.finalize(self, _close, self._flows, self._generator, embeddings)

    @property
    def ready(self) -> bool:
        """Whether all is served: nothing waits for a process that is being started again."""
        engine = self._generator is None or self._generator.host.ready
        return engine and self.embeddings.ready and self._flows.worker.ready

    @property
    def ailment(self) -> str:
        """Why it is not ready, in words; "" where it is, or nobody knows."""
        engine = self._generator.host.ailment if self._generator else ""
        return engine or self._flows.worker.ailment

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
        if template := self.__dict__.get("template"):
            template.close()
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


def _close(flows: FlowService, generator: Generator | None, embeddings: Embeddings) -> None:
    flows.close()
    if generator:
        generator.host.close()
    embeddings.close()
