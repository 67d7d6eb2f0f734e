"""What a planned step takes on a machine one does not have: the simulator's truth.

In: a StepPlan, the requests it names, cost tables. Out: `StepTime`: seconds of the step and of each
device. The truth may differ from the tables by seeded noise and by costs no scheduler is told of.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dovetail.ir.dtypes import DTYPES
from dovetail.ir.model import KV_BLOCK, ModelSpec
from dovetail.runtime.schedule.cost_tables import TablePredictor
from dovetail.runtime.schedule.pipeline import LayerTimes
from dovetail.runtime.schedule.plan import Batch, StepPlan
from dovetail.runtime.schedule.request import Home, Request
from dovetail.runtime.sim.machines import kv_token_bytes

NOTHING = Batch()


class Stage(NamedTuple):
    """One of the two stages of a layer: what runs at once on the GPU and on the CPU, in seconds."""

    gpu: float
    cpu: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, of its two stages in one layer, of logits and of each way of the link."""

    seconds: float
    layers: int
    stages: tuple[Stage, Stage]
    head: float
    link_out: float
    link_in: float

    @property
    def gpu(self) -> float:
        """Seconds in which the GPU computes."""
        return self.layers * sum(stage.gpu for stage in self.stages) + self.head

    @property
    def cpu(self) -> float:
        """Seconds in which the CPU computes, or waits for its rows."""
        return self.layers * sum(stage.cpu for stage in self.stages)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What one batch takes in one layer."""

    linear: float
    attention: float  # on the GPU
    decode: float  # on the CPU
    sequences: int  # decoded on the CPU


class Truth:
    """Times of steps. Layers are alike, so a step is one layer as often as there are layers.

    While batch-0 is in its products the CPU attends for batch-1, and the other way round (NEO
    §3.1). Copies of KV run behind compute, layer by layer, both ways at once.
    """

    def __init__(
        self,
        tables: TablePredictor,
        spec: ModelSpec,
        *,
        noise: float = 0.0,
        hidden: bool = False,
        launch: bool = False,
        seed: int = 0,
    ) -> None:
        """Noise: largest relative error of each part of each step, up or down, all equally likely.

        launch: count starting the CPU's part of a stage, measured with its copies, and the logits.
        hidden: count these, and copies of q, k, v and of results beside those of KV.
        """
        self.tables, self.spec, self.noise, self.hidden = tables, spec, noise, hidden
        self._layer, self._starts = LayerTimes(tables), launch or hidden
        self._random = random.Random(seed)
        size = DTYPES[spec.kv_dtype].size
        rows = spec.qkv_size + spec.n_heads * spec.head_dim
        self._row_bytes = rows * size  # q, k and v out, the result in
        self._token_bytes = kv_token_bytes(spec) * spec.n_layers

    def step(self, plan: StepPlan, requests: Mapping[int, Request]) -> StepTime:
        """Return what `plan` takes; `requests` as they are when it was made."""
        first, second = (self._measure(b, requests) for b in (*plan.batches, NOTHING, NOTHING)[:2])
        out, back = self._copied_tokens(plan, requests)
        link_out, link_in = (
            self._disturb(self.tables.swap(tokens * self._token_bytes)) for tokens in (out, back)
        )
        layers = self.spec.n_layers
        busy = layers * sum(max(stage) for stage in self._stages(first, second, 0.0))
        share = min(1.0, max(link_out, link_in) / busy) if busy else 0.0
        stages = self._stages(first, second, share)
        rows = [batch.sequences for batch in plan.batches] if self._starts else []
        head = sum(map(self.tables.head, rows))
        seconds = layers * sum(max(stage) for stage in stages) + head
        return StepTime(
            seconds=max(seconds, link_out, link_in),
            layers=layers,
            stages=stages,
            head=head,
            link_out=link_out,
            link_in=link_in,
        )

    def _stages(self, first: _Parts, second: _Parts, share: float) -> tuple[Stage, Stage]:
        return (
            Stage(first.linear + second.attention, self._on_cpu(second, share)),
            Stage(second.linear + first.attention, self._on_cpu(first, share)),
        )

    def _on_cpu(self, parts: _Parts, share: float) -> float:
        """Return the CPU's part of a stage; KV is on the link for `share` of the time."""
        if not parts.sequences:
            return 0.0
        launch = self.tables.launch() if self._starts else 0.0
        rows = self.tables.swap(parts.sequences * self._row_bytes) if self.hidden else 0.0
        return parts.decode + launch + rows * (1 + share)

    def _measure(self, batch: Batch, requests: Mapping[int, Request]) -> _Parts:
        tables, noisy, count = self.tables, self._disturb, len(batch.cpu_decode)
        stored, moved = (
            sum(len(requests[i].tokens) for i in decodes)
            for decodes in (batch.gpu_decode, batch.cpu_decode)
        )
        return _Parts(  # in this order, which is that of the noise
            attention=noisy(self._layer.prefill(batch.prefill)) + noisy(tables.gpu_decode(stored)),
            linear=noisy(tables.linear(batch.tokens)),
            decode=noisy(tables.cpu_decode(count, moved)),
            sequences=count,
        )

    def _copied_tokens(self, plan: StepPlan, requests: Mapping[int, Request]) -> tuple[int, int]:
        """Return the tokens whose KV leaves the GPU, and those whose KV comes to it."""
        leaving = len(plan.swap_out)  # `moves` names them first
        out = sum(len(move.source) for move in plan.moves[:leaving]) * KV_BLOCK
        back = sum(len(move.source) for move in plan.moves[leaving:]) * KV_BLOCK
        for batch in plan.batches:
            for chunk in batch.prefill:
                if requests[chunk.request].home is Home.CPU:
                    out, back = out + chunk.length, back + chunk.start
        return out, back

    def _disturb(self, seconds: float) -> float:
        factor = self._random.uniform(1 - self.noise, 1 + self.noise) if self.noise else 1.0
        return seconds * factor
