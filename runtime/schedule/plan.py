"""What one step does, as frozen values: chunks of prompts, batches, moves of KV, limits.

Schedulers return a StepPlan; executors run it and report back. Nothing here decides anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from dovetail.ir.errors import SpecError

Offload: TypeAlias = Literal["auto", "off", "full"]
OFFLOADS = get_args(Offload)
Pipelining: TypeAlias = Literal["asymmetric", "symmetric", "none"]
PIPELININGS = get_args(Pipelining)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens start .. start + length of a request's tokens.

    `scores` are those positions among them whose logits tell how likely the next prompt token was.
    """

    request: int
    start: int
    length: int
    scores: range = range(0)

    @property
    def places(self) -> int:
        """How many it takes of the step's sequences, which are as many as there are logits rows."""
        return self.length if self.scores else 1


@dataclass(frozen=True, slots=True)
class Batch:
    """What one pass over the layers computes.

    A decode computes the newest token of a request. One that is named several times also computes
    tokens that were drafted behind it (`Request.drafted`), a row each.
    """

    prefill: tuple[PrefillChunk, ...] = ()
    gpu_decode: tuple[int, ...] = ()
    cpu_decode: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Token rows of the batch."""
        chunks = sum(chunk.length for chunk in self.prefill)
        return chunks + len(self.gpu_decode) + len(self.cpu_decode)

    @property
    def sequences(self) -> int:
        """Requests of the batch, with drafted tokens as further ones."""
        return len(self.prefill) + len(self.gpu_decode) + len(self.cpu_decode)


@dataclass(frozen=True, slots=True)
class Move:
    """KV blocks of a request to copy to the other device's pool: source[i] -> target[i]."""

    request: int
    source: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: moves first (in the order of `moves`), then one or two batches, side by side.

    `swap_out` (GPU -> CPU), then `swap_in`, name the requests of `moves` in that order. The KV of
    a request in `preempt` is dropped. A prefill chunk writes to the pool of its request's home:
    one whose home is the CPU leaves the GPU layer by layer, and reads what lies before its start
    from there. A plan may drop a request's KV and start it anew at once. `forced` names CPU
    decodes beyond the two inequalities: to bound a wait, or because the step's rate is higher so.
    """

    batches: tuple[Batch, ...]
    swap_out: tuple[int, ...] = ()
    swap_in: tuple[int, ...] = ()
    preempt: tuple[int, ...] = ()
    predicted_seconds: float = 0.0
    moves: tuple[Move, ...] = ()
    forced: tuple[int, ...] = ()

    @property
    def members(self) -> tuple[int, ...]:
        """The requests whose KV the step writes, each once: those of its batches and its moves."""
        batches = [
            (*(chunk.request for chunk in batch.prefill), *batch.gpu_decode, *batch.cpu_decode)
            for batch in self.batches
        ]
        moved = (move.request for move in self.moves)
        return tuple(dict.fromkeys((*itertools.chain(*batches), *moved)))

    @property
    def largest(self) -> int:
        """The request with the most tokens in the step; of equals, the last."""
        sizes = [(1, n) for batch in self.batches for n in (*batch.gpu_decode, *batch.cpu_decode)]
        sizes += [(c.length, c.request) for batch in self.batches for c in batch.prefill]
        return max(sizes)[1]

    def without(self, request: int) -> StepPlan:
        """Return the step without a request, and without batches that nothing is left of."""
        batches = (
            Batch(
                prefill=tuple(c for c in batch.prefill if c.request != request),
                gpu_decode=tuple(n for n in batch.gpu_decode if n != request),
                cpu_decode=tuple(n for n in batch.cpu_decode if n != request),
            )
            for batch in self.batches
        )
        return replace(self, batches=tuple(batch for batch in batches if batch.sequences))


def split_rounds(
    batches: tuple[Batch, ...], landed: Callable[[PrefillChunk], Sequence[int]], room: int
) -> list[tuple[Batch, ...]]:
    """Return the batches, and behind them one for each chunk that has no room to land beside these.

    landed: names the CPU's blocks that a chunk has to have on the GPU while it is computed. room:
    for so many of them.
    """
    used, first, later = set[int](), list[Batch](), list[tuple[Batch, ...]]()
    for batch in batches:
        kept = list[PrefillChunk]()
        for chunk in batch.prefill:
            blocks = used.union(landed(chunk))
            if len(blocks) <= room:
                used = blocks
                kept.append(chunk)
            else:
                later.append((Batch(prefill=(chunk,)),))
        first.append(replace(batch, prefill=tuple(kept)))
    rounds = [tuple(batch for batch in first if batch.sequences), *later]
    return [each for each in rounds if each]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step (over all its batches) and a request may hold, in tokens and sequences.

    Predictors answer for one layer: a step is `n_layers` of them. `block_bytes` is one KV block
    over all layers, K and V.
    """

    max_step_tokens: int
    max_step_sequences: int
    max_context: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    n_layers: int = 1
    block_bytes: int = 0

    @property
    def max_decodes(self) -> int:
        """Requests that decode in a step, a row each."""
        return min(self.max_step_sequences, self.max_step_tokens)


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Choices of a scheduler; figures are those of NEO's code where it has one.

    `offload`: auto weighs the CPU each step, off never uses it, full keeps all KV there
    (FastDecode+). `chunked`: prompts are cut to fill a step; else only where longer than one.
    """

    offload: Offload = "auto"
    pipelining: Pipelining = "asymmetric"
    """How CPU decodes are hidden: as NEO does, or for comparison as the paper's strawmen do.

    `none`: in one batch, so that the accelerator waits for them; `symmetric`: in equal halves.
    """
    chunked: bool = True
    min_tokens: int = 128
    """A linear stage of fewer rows costs about as much: prompts bound for the CPU fill it up."""
    swap_in_share: float = 0.95
    """Requests come back to the GPU while no more than this part of its blocks is in use."""
    patience: int = 64
    """Plans that a CPU request may be passed over before it is run at any price."""
    priority_span: int = 64
    """Later arrivals that one step of priority lets a request overtake."""
    max_waiting: int | None = None
    """Arrivals beyond so many waiting requests are refused with a time to come back."""
    min_gain: float = 1.05
    """Requests begin to go to the CPU where the known queue should end sooner by this factor.

    Two fifths of its margin will do where all are to run at once, which is predicted less roughly,
    unless the two estimates of the GPU alone disagree.
    """
    first_lateness: float = 50e-6
    """Seconds for starting the CPU's part of a stage until steps tell, where no table does."""
    weigh_every: int = 32
    """Plans between two answers to whether offloading pays, where the queue stays about as long.

    An answer takes some 3 to 20 ms of the host, for 64 to 1000 requests, rarely more. In simulated
    serving one came every 23 to 60 plans: with steps of 16 ms (H200) 1 to 5 % of the time.
    """
    prompt_tokens: int | None = None
    """Rows of prompts in a step while several requests are under way, where these may be cut."""
    crowd_tokens: int = 0
    """As many at most while so much waits that all end sooner by it; 0: never more."""
    short_first: int = 0
    """Later arrivals that a prompt lets pass for each of its blocks: most of a crowd wait less."""
    keep_prefixes: bool = True
    """What ended requests left in free blocks serves those that begin alike, until overwritten."""
    num_speculative_tokens: int = 0
    """Most tokens that are drafted for a request in a step."""

    def __post_init__(self) -> None:
        if self.offload not in OFFLOADS:
            raise SpecError(f"offload must be auto, off or full, not {self.offload!r}")
        if self.pipelining not in PIPELININGS:
            names = ", ".join(PIPELININGS)
            raise SpecError(f"pipelining must be one of {names}, not {self.pipelining!r}")
        if min(self.patience, self.weigh_every, self.priority_span) < 1:
            raise SpecError("patience, weigh_every and priority_span must be at least 1")
        if self.short_first < 0 or (self.prompt_tokens is not None and self.prompt_tokens < 1):
            raise SpecError("short_first must be at least 0, prompt_tokens at least 1")
        if self.crowd_tokens < 0:
            raise SpecError("crowd_tokens must be at least 0")


ON_CPU = SchedulerSettings(offload="off", prompt_tokens=48, crowd_tokens=96, short_first=3)
"""What serves on the CPU alone. Beside some decodes, 48 rows of prompts cost nearly as little each
as many would: prompts one after the other then bring first tokens earlier, and the others' next."""
