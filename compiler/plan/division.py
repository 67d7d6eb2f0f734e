"""What the stages of a mixed load compute and read, and the division of the CPU for it.

In: dimensions of models, the lengths of a trace, a mix of requests. Out: `Demand`s for
`topology/division.py`, and the division as an artifact keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from statistics import fmean

from dovetail.compiler.plan.service import within_quota
from dovetail.ir.encoder import EncoderSpec, encoder_shapes
from dovetail.ir.errors import SpecError
from dovetail.ir.graph import ExecutionGraph
from dovetail.ir.index_file import VECTORS, IndexManifest
from dovetail.ir.model import ModelSpec
from dovetail.ir.place import share_out
from dovetail.ir.plans import DivisionChoice, PlanChoice
from dovetail.runtime.index.cursor import choose_probes
from dovetail.topology.contention import Simulator
from dovetail.topology.division import (
    DECODE,
    ENCODERS,
    PREFILL,
    SEARCHES,
    Demand,
    Demands,
    DivisionPlan,
    divide,
)
from dovetail.topology.hardware import HardwareSpec
from dovetail.topology.parameters import MachineParameters, default_parameters, planned_parameters
from dovetail.topology.replay import DEFAULT_TRACE, Trace

CHUNK = 512
"""Rows of prompts that read the weights once."""
DOCUMENTS, QUERY, TEXT = 512, 32, 128
"""Assumed tokens of what a search adds to a prompt, of a query, and of a text to embed."""
TEXTS = 8
"""Assumed texts of a call that embeds."""
SCANNED = 64 << 20
"""Assumed bytes of vectors that a search reads where no index is given: 1/16 of 700,000 vectors of
384 float32."""
ENCODER_ELEMENTS = 11_000_000
"""Assumed elements of the matrices of an encoder, those of MiniLM, where none is given."""
KEPT = 8
"""Divisions that an artifact lists, the best ones."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Requests that come together, by kind; scanned: bytes of vectors that a search reads."""

    chat: float
    rag: float
    embeddings: float
    scanned: float = SCANNED

    def __str__(self) -> str:
        ratio = f"{self.chat:g}:{self.rag:g}:{self.embeddings:g}"
        return f"{ratio} chats, RAG requests and calls that embed"

    def of(self, indexes: Sequence[IndexManifest]) -> Mix:
        """Return it for searches of these indexes, if there are some; each as often."""
        return replace(self, scanned=fmean(map(bytes_scanned, indexes))) if indexes else self


MOST_REQUESTS = 1e9
"""Of a kind in a mix: prices of more would be no numbers."""


def read_mix(text: str | None) -> Mix:
    """Return the mix that is written CHAT:RAG:EMBED; None = an even one. Raises SpecError."""
    if text is None:
        return EVEN
    try:
        chat, rag, embeddings = map(float, str(text).split(":"))
    except ValueError:
        chat = rag = embeddings = -1.0
    if not all(0 <= count <= MOST_REQUESTS for count in (chat, rag, embeddings)):
        raise SpecError(f"--mix {text}: write CHAT:RAG:EMBED, how many requests of each, as 16:4:1")
    if not chat + rag + embeddings:
        raise SpecError(f"--mix {text}: no request at all; give at least one kind more than 0")
    return Mix(chat, rag, embeddings)


def bytes_scanned(index: IndexManifest) -> float:
    """Return the bytes of vectors that a search of an index reads, with its usual probes."""
    return index.files[VECTORS].bytes * choose_probes(index.clusters) / index.clusters


EVEN = Mix(1, 1, 1)
MIXES = (Mix(16, 1, 16), Mix(1, 16, 16), Mix(1, 1, 1024))
"""Loads of which `dovetail topo` shows the division where none is given."""


def demand_of(
    hardware: HardwareSpec,
    models: Sequence[ModelSpec],
    encoders: Sequence[EncoderSpec] | None,
    trace: Trace,
    mix: Mix,
) -> Demands:
    """Return what the stages of one request of each kind, times its part of the mix, ask for.

    encoders: None = one like MiniLM. What no model is there for is no stage.
    """
    found: dict[str, Demand] = {}
    for model in models[:1]:
        simulator = Simulator(hardware, default_parameters(hardware), model)
        flops, batch = 2 * simulator.elements, fmean(trace.batches)
        prompts = mix.chat * trace.mean_prompt + mix.rag * (trace.mean_prompt + DOCUMENTS)
        answers = (mix.chat + mix.rag) * max(1.0, trace.mean_output)
        kept = answers * trace.mean_context * simulator.kv_row
        found[PREFILL] = Demand(prompts * flops, prompts / CHUNK * simulator.read(CHUNK))
        found[DECODE] = Demand(answers * flops, answers / batch * simulator.read(batch) + kept)
    found[SEARCHES] = Demand(mix.rag * mix.scanned / 2, mix.rag * mix.scanned)
    if encoders is None or encoders:
        sizes = [_elements(spec) for spec in encoders or ()] or [ENCODER_ELEMENTS]
        tokens = mix.rag * QUERY + mix.embeddings * TEXTS * TEXT
        calls = mix.rag + mix.embeddings
        found[ENCODERS] = Demand(2 * fmean(sizes) * tokens, 4 * fmean(sizes) * calls)
    return found


def _elements(spec: EncoderSpec) -> int:
    """Return the elements of the matrices of an encoder's layers."""
    shapes = encoder_shapes(spec).items()
    return sum(prod(shape) for name, shape in shapes if name.startswith("layers."))


def divide_load(
    hardware: HardwareSpec,
    model: ModelSpec,
    trace: Trace,
    mix: Mix,
    figures: MachineParameters | None = None,
) -> tuple[DivisionChoice, ...]:
    """Return the divisions of a machine for a load of a model, searches and an encoder."""
    demands = demand_of(hardware, [model], None, trace, mix)
    return list_divisions(divide(hardware, figures or default_parameters(hardware), demands))


def divide_graph(
    graph: ExecutionGraph,
    hardware: HardwareSpec,
    models: Sequence[ModelSpec],
    encoders: Sequence[EncoderSpec],
    trace: Trace | None,
    choice: PlanChoice | None,
    mix: Mix,
) -> tuple[ExecutionGraph, tuple[DivisionChoice, ...]]:
    """Return a placed graph with the shares of its workers, and the divisions that were priced."""
    usable, _ = within_quota(hardware)
    demands = demand_of(usable, models, encoders, trace or DEFAULT_TRACE, mix)
    found = divide(usable, planned_parameters(usable, choice), demands)
    return share_out(graph, dict(found.shares)), list_divisions(found)


def list_divisions(plan: DivisionPlan) -> tuple[DivisionChoice, ...]:
    """Return the best divisions and, last, all cores for everyone."""
    kept = [
        DivisionChoice(shares=dict(each.shares), seconds=each.seconds, busiest=each.busiest)
        for each in plan.divisions
        if len(set(map(frozenset, each.shares.values()))) > 1
    ][:KEPT]
    cores = sorted({pu for cpus in plan.shares.values() for pu in cpus})
    everyone = dict.fromkeys(plan.shares, tuple(cores))
    return (*kept, DivisionChoice(shares=everyone, seconds=plan.everyone))
