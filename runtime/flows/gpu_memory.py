"""One plan of a GPU's memory for an app: its KV pool and hot clusters of an index (HedraRAG §4.4).

In: what workflows ask of both, the bytes that a device has left beside weights, encoders and
workspace, its cost tables, the index. Out: a `GpuMemoryPlan` by equation (2). Scans are measured
here; throughput follows from those times and the step tables. A device is asked by a process of its
own (`flows/survey.py`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from dovetail.ir.errors import CapacityError, SpecError
from dovetail.ir.model import KV_BLOCK, ModelSpec
from dovetail.ir.profile import ProfileFile
from dovetail.runtime.artifact import Artifact
from dovetail.runtime.child.child import Child
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.flows.costs import measure_scan
from dovetail.runtime.hosting.wire import Setup
from dovetail.runtime.native.encoder import device_bytes
from dovetail.runtime.native.forward import find_tape, kv_block_bytes
from dovetail.runtime.retrieval import memory_plan, wire
from dovetail.runtime.retrieval.budget import ScanCost
from dovetail.runtime.retrieval.process import RetrievalProcess
from dovetail.runtime.schedule.cost_tables import TablePredictor

SIZES = 33
"""Sizes of either side for which there are rows."""
SHOWN = 7
"""Sizes of the KV cache for which a division tells what would come of them."""

SURVEY = "dovetail.runtime.flows.survey"

log = logging.getLogger("dovetail")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShare:
    """What workflows ask of a GPU, for `load` to divide the memory of its KV pool by.

    index: the folder that they search, `nprobe` clusters each time; None is the artifact's. rate:
    workflows that begin each second. generations, retrievals: stages of one of them. prompt, reply:
    tokens of a generation.
    """

    rate: float
    index: str | os.PathLike[str] | None = None
    nprobe: int = 16
    generations: float = 1.0
    retrievals: float = 1.0
    prompt: int = 512
    reply: int = 128

    def __post_init__(self) -> None:
        """Raises SpecError for numbers that make no sense."""
        if min(self.rate, self.nprobe, self.prompt, self.reply) <= 0:
            raise SpecError("rate, nprobe and tokens of a share of memory must be positive")


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """What a device told of itself.

    device: in words. room: bytes that KV may take beside weights and workspace. profile: measured.
    """

    device: str
    room: int
    profile: ProfileFile


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A GPU as generations see it: bytes to divide, seconds of its steps, and whence these are.

    origin: what says so, in words.
    """

    gpu: str
    budget: int
    tables: TablePredictor
    spec: ModelSpec
    origin: str

    @classmethod
    def measured(cls, name: str, found: Survey, taken: int, spec: ModelSpec) -> Accelerator:
        """Return a device by what it told; encoders take `taken` bytes of its room.

        Raises CapacityError where they take all.
        """
        if found.room <= taken:
            raise CapacityError(
                f"{found.device} has {found.room} bytes beside a model, and encoders take {taken}; "
                "load with device='cpu' for one of them, or a smaller model"
            )
        tables, origin = TablePredictor(found.profile), f"measured on {found.device}"
        return cls(name, found.room - taken, tables, spec, origin)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of KV in all layers."""
        return kv_block_bytes(self.spec)

    @property
    def token_bytes(self) -> int:
        """Bytes of the KV of a token in all layers."""
        return self.block_bytes // KV_BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDivision:
    """How the memory of a GPU is divided, and what says so.

    origin: what says how fast steps are, and scans on the GPU, in words. share: what workflows ask,
    of which index. budget: bytes of both; least_kv: bytes of KV of one generation; index_bytes: of
    all clusters. host, device: what scans were measured to cost on either, device None where no
    cluster can be on the GPU; why_cold: the reason. tried: what comes of other sizes, from the
    least KV to the most; the plan is among them.
    """

    plan: memory_plan.GpuMemoryPlan
    origin: str
    share: GpuShare
    budget: int
    least_kv: int
    index_bytes: int
    host: ScanCost
    device: ScanCost | None
    why_cold: str
    tried: tuple[memory_plan.GpuMemoryPlan, ...]


def ask_device(artifact: Artifact, options: EngineOptions) -> Accelerator:
    """Return the device of `options` by a survey for an artifact's first model.

    Its memory less weights, workspace and the artifact's encoders; tables that were measured on it,
    which takes some seconds the first time. Raises what opening the engine there raises.
    """
    setup = Setup(path=str(artifact.path), options=options, log_level=log.getEffectiveLevel())
    child = Child.start(SURVEY, f"the process {{}} that asks {options.device}")
    found = child.set_up(setup, Survey)
    child.end()
    taken = sum(
        sum(device_bytes(part.file, find_tape(part, "encode")))
        for part in artifact.encoders.values()
    )
    spec = next(iter(artifact.models.values())).file.spec
    return Accelerator.measured(options.device, found, taken, spec)


def name_index(share: GpuShare, artifact: Artifact) -> GpuShare:
    """Return a share with its index, by default the artifact's only one.

    Raises SpecError where it is not clear which is meant, or no model is to share with it.
    """
    if not artifact.models:
        raise SpecError("the artifact has no model that generates: no memory is to be divided")
    if share.index is not None:
        return share
    if len(artifact.indexes) != 1:
        has = ", ".join(sorted(artifact.indexes)) or "none"
        raise SpecError(f"name the index that the GPU's memory is for: {artifact.path} has {has}")
    return replace(share, index=next(iter(artifact.indexes.values())))


def divide_memory(
    share: GpuShare, accelerator: Accelerator, threads: int, *, kernels: bool | None = None
) -> MemoryDivision:
    """Return how a GPU's bytes are best divided; `threads` search on the CPU.

    kernels: False keeps to scans by faiss, so that no code of the index runs.

    Raises what `App.add_index` does, SpecError where one generation needs more than all blocks.
    """
    assert share.index is not None
    budget = accelerator.budget
    with closing(RetrievalProcess(threads)) as worker:
        opened = worker.open(
            "planned", share.index, kernels=kernels, room=wire.Room(accelerator.gpu, budget)
        )
        host, _ = measure_scan(worker, "planned", opened, threads)
    if opened.hot is None:
        why = opened.why_cold or "no cluster fits"
        log.warning("all memory of the GPU goes to KV: there are no hot clusters (%s)", why)
    bytes_ = [size * opened.code_bytes for size in opened.sizes]
    problem = memory_plan.MemoryProblem(
        budget=budget,
        generation=generation_throughput(share, accelerator),
        retrieval=retrieval_throughput(share, opened.sizes, bytes_, host, opened.hot),
        generations=share.generations,
        retrievals=share.retrievals,
        rate=share.rate,
        least_kv=-(-(share.prompt + share.reply) // KV_BLOCK) * accelerator.block_bytes,
        most_clusters=sum(bytes_) if opened.hot else 0,
    )
    plan = memory_plan.plan_gpu_memory(problem, step=accelerator.block_bytes)
    between = np.linspace(problem.least, budget, SHOWN).astype(int).tolist()
    return MemoryDivision(
        plan=plan,
        origin=accelerator.origin,
        share=replace(share, index=os.fspath(share.index)),
        budget=budget,
        least_kv=problem.least_kv,
        index_bytes=sum(bytes_),
        host=host,
        device=opened.hot,
        why_cold=opened.why_cold,
        tried=tuple(problem.judge(kv) for kv in sorted({*between, plan.kv_bytes})),
    )


def describe(plan: memory_plan.GpuMemoryPlan) -> str:
    """Return a plan in words."""
    kv, clusters = (round(nbytes / (1 << 20), 1) for nbytes in (plan.kv_bytes, plan.cluster_bytes))
    return (
        f"{kv} MiB for KV, {clusters} MiB for hot clusters; {plan.limited_by} limits workflows to "
        f"{plan.workflows:.3g}/s (generation {plan.generation:.3g}, retrieval {plan.retrieval:.3g})"
    )


def generation_throughput(share: GpuShare, accelerator: Accelerator) -> memory_plan.Throughput:
    """Return generations done each second by bytes of KV, no more than come.

    As many decode together as there is KV for; between steps their prompts are read.
    """
    rate, done = share.rate * share.generations, dict[int, float]()
    for nbytes in sorted({accelerator.budget * i // (SIZES - 1) for i in range(SIZES)}):
        batch = int(nbytes / (accelerator.token_bytes * (share.prompt + share.reply)))
        most = batch / _generation_seconds(share, accelerator, batch) if batch else 0.0
        done[nbytes] = min(rate, most)
    return memory_plan.Throughput(tuple(done), tuple(done.values()))


def _generation_seconds(share: GpuShare, accelerator: Accelerator, batch: int) -> float:
    """Return the seconds in which a batch of generations begins and ends."""
    tables, layers = accelerator.tables, accelerator.spec.n_layers
    stored = batch * (share.prompt + share.reply // 2)
    layer = tables.linear(batch) + tables.gpu_decode(stored)
    step = layers * layer + tables.head(batch)
    layer = tables.linear(share.prompt) + tables.prefill([share.prompt])
    prompt = layers * layer + tables.head(1)
    return share.reply * step + batch * prompt


def retrieval_throughput(
    share: GpuShare,
    sizes: Sequence[int],
    bytes_: Sequence[int],
    host: ScanCost,
    device: ScanCost | None,
) -> memory_plan.Throughput:
    """Return searches done each second by bytes of hot clusters, no more than come.

    Clusters are taken to be wanted as often as they have vectors; CPU and GPU scan beside each
    other, and what the GPU does not hold the CPU scans.
    """
    order = np.argsort(sizes, kind="stable")[::-1]
    wanted = np.asarray(sizes, np.float64)[order]
    scanned = wanted**2 / max(1.0, float((wanted**2).sum()))
    vectors = min(share.nprobe, len(sizes)) * float((wanted**2).sum() / max(1.0, wanted.sum()))
    shares = np.concatenate([[0.0], np.cumsum(scanned)])
    ends = np.concatenate([[0], np.cumsum(np.asarray(bytes_, np.int64)[order])])
    rate, done, most = share.rate * share.retrievals, dict[int, float](), 0.0
    for held in np.unique(np.linspace(0, len(sizes), SIZES).astype(int)).tolist():
        hits = float(shares[held]) if device else 0.0
        here = host.fixed + host.per_vector * vectors * (1 - hits) / host.threads
        there = device.fixed + device.per_vector * vectors * hits if device and hits else 0.0
        most = max(most, 1 / max(here, there, 1e-12))  # what is there need not be used
        done[int(ends[held])] = min(rate, most)
    return memory_plan.Throughput(tuple(done), tuple(done.values()))
