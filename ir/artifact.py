"""The artifact's own files: manifest, kernel index; how a model is served."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

FORMAT_MAJOR, FORMAT_MINOR = 2, 0
MACHINE, SERVE = "hardware.json", "graph/serve.json"
"""The machine that it is for; what serves, and where: models, encoders and searches, as a graph of
placed nodes."""


Parts = Annotated[int, Meta(ge=1, le=1 << 16)]
"""Processes, or threads of one."""
Number = Annotated[int, Meta(ge=0, le=1 << 16)]
"""Of a process, PU or memory node."""
Amount = Annotated[int, Meta(ge=0, le=1 << 40)]
Spins = Annotated[int, Meta(ge=0, le=1 << 24)]


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Size in bytes and sha256 of one file; None for weights, whose chunks carry hashes."""

    bytes: int
    sha256: str | None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`manifest.json`. `files` lists every other file of the artifact by its relative path."""

    format_major: int = FORMAT_MAJOR
    format_minor: int = FORMAT_MINOR
    producer: str
    created: str
    model_fingerprint: str
    workload_fingerprint: str
    targets: tuple[str, ...]
    models: tuple[str, ...]  # that generate
    encoders: tuple[str, ...] = ()
    workflows: tuple[str, ...] = ()  # graph/<name>.json, and .py where they call functions
    command: tuple[str, ...] = ()  # that makes it again
    indexes: tuple[str, ...] = ()  # indexes/<name>/
    effort: str
    files: dict[str, FileEntry]


class KernelParam(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter of an exported kernel. `kind`: slot (taken in order), sched or thread."""

    name: str
    type: str
    kind: str


class KernelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One exported kernel: plain C symbol `name`, tape entry symbol `dt_entry_<name>`.

    digest: sha256 of its lowered text, by which tuning records know it again. shared: sha256 of its
    C text, by which a library is found that has it (`ir/shared_kernels.py`); empty where it is in
    the library beside the index. warps: on a GPU the warps of a block, the symbol being
    `dt_cuda_<name>`; 0 on CPUs.
    """

    name: str
    family: str  # the @kernel function it was bound from
    params: tuple[KernelParam, ...]
    binding: dict[str, int | str]
    digest: str = ""
    shared: str = ""
    warps: int = 0


class KernelIndex(msgspec.Struct, frozen=True, kw_only=True):
    """`kernels/<target>/index.json`.

    library: a file beside it, empty where all kernels are shared; then nobody compiled here.
    """

    schema: int = 1
    target: str
    abi: int = 1
    library: str
    source: str
    compiler: str
    flags: tuple[str, ...]
    kernels: tuple[KernelEntry, ...]


PHASES = ("prefill", "decode")


class PhasePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Threads of one phase, in each process.

    `cpus` are the PUs of the first process's threads, then of the second's ... (empty = unpinned).
    """

    threads: Parts
    cpus: tuple[Number, ...]


class ServicePlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is served: the pair of phase plans and the rule that picks one.

    An artifact has it as the placed nodes of the model, see `ir/place.py`.

    processes: of decode, and of prefill where `prefill_processes` is 0. Where the phases differ
    they share one copy of the KV, of which each process sees its heads (Sandwich §5).
    """

    processes: Parts = 1
    prefill_processes: Amount = 0
    nodes: tuple[Number, ...] = ()  # NUMA node of each process's memory; () = those of its CPUs
    prefill: PhasePlan
    decode: PhasePlan
    prefill_token_threshold: Amount = 32
    kv_blocks: Amount = 0  # 0 = sized at load from free memory
    spin_iterations: Spins = 2000

    def processes_of(self, phase: str) -> int:
        """Return the processes of `prefill` or `decode`."""
        return self.prefill_processes or self.processes if phase == "prefill" else self.processes

    @property
    def most_processes(self) -> int:
        """Those that run: the first ones serve both phases."""
        return max(self.processes, self.prefill_processes)
