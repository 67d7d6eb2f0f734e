"""One rank's share of a model, ready to run: its weights, KV memory, threads and forward tape.

In: an opened artifact, this rank's plan and, in a group, its communicator. Out: a `ForwardModel`,
one native call per step. The parent process is rank 0; a group of one is the whole model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from mmap import PAGESIZE

import msgspec
from msgspec.structs import replace

from dovetail.ir.artifact import PHASES, PhasePlan
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.errors import ArtifactError
from dovetail.ir.model import KV_BLOCK, OWN_GATE, ModelSpec
from dovetail.ir.schedule import SCHEDULE_VALUES, Row, ScheduleTable
from dovetail.ir.tape import ADAPTED, ADAPTER_ARGS, GATED, WHOLE, Tape
from dovetail.runtime.artifact import Artifact, ModelPart, Part
from dovetail.runtime.machine.abi import COLLECTIVES
from dovetail.runtime.machine.library import KernelLibrary
from dovetail.runtime.machine.memory import SharedMemory, allocate
from dovetail.runtime.machine.placement import place_pages, placing_on
from dovetail.runtime.native.collective import Communicator
from dovetail.runtime.native.deterministic import adapt_part
from dovetail.runtime.native.shard import (
    COMM,
    Shard,
    kv_unit,
    matrix_ranges,
    shard_spec,
    shard_tape,
    split_model,
)
from dovetail.runtime.native.shares import WeightShare, weight_shares
from dovetail.runtime.native.tape import BoundTape, KvArrays, Operands, Team, pick_tables
from dovetail.runtime.native.weights import Weights


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How rank `rank` of `ranks` runs; `spin` is what its threads do before they sleep.

    prefill_ranks: those of prefill where they are not as many, else 0. Then K and V are in memory
    that all share, and who is no rank of a phase has no part in its steps.
    deterministic: the same bits whatever the other fields say.
    own_logits: the logits of a step are no memory that all ranks share.
    floats: activations stay float32 where weights are quantised.
    state_slots: sequences and prefixes whose state there is memory for.
    """

    rank: int = 0
    ranks: int = 1
    prefill_ranks: int = 0
    prefill: PhasePlan
    decode: PhasePlan
    spin: int
    kv_blocks: int
    state_slots: int = 0
    deterministic: bool = False
    own_logits: bool = False
    floats: bool = False
    nodes: tuple[int, ...] = ()  # NUMA nodes of its memory; () = where it is touched first

    @property
    def threads(self) -> int:
        """Threads that it starts: those of the larger phase."""
        return max(self.prefill.threads, self.decode.threads)

    def ranks_of(self, phase: str) -> int:
        """Return the ranks of `prefill` or `decode`."""
        return self.prefill_ranks or self.ranks if phase == "prefill" else self.ranks

    def plan_of(self, phase: str) -> PhasePlan:
        """Return its own plan of `prefill` or `decode`."""
        return self.prefill if phase == "prefill" else self.decode

    @property
    def phases(self) -> tuple[str, ...]:
        """Those in which it is a rank."""
        return tuple(phase for phase in PHASES if self.rank < self.ranks_of(phase))


@dataclass(frozen=True, slots=True)
class PhasePart:
    """What a rank computes in a phase: its dimensions, its tape, and how it was cut, if it was."""

    spec: ModelSpec
    tape: Tape
    shard: Shard | None


class ForwardModel:
    """The forward tape of one rank, bound for both phases."""

    def __init__(
        self,
        artifact: Artifact,
        part: ModelPart,
        library: KernelLibrary,
        plan: RankPlan,
        shared: SharedMemory | None = None,
    ) -> None:
        """Start threads, map weights, take KV memory, from `shared` if need be; bind the tapes.

        Raises:
            ArtifactError: the artifact's parts do not fit each other.
            CapacityError: memory or threads cannot be had.
        """
        self._artifact, self._library, self._plan = artifact, library, plan
        self._part = adapt_part(artifact, part, plan.floats, plan.deterministic)
        with placing_on(plan.nodes):  # its threads inherit that
            self._load(plan, shared)

    def _load(self, plan: RankPlan, shared: SharedMemory | None) -> None:
        part, library = self._part, self._library
        self.team = Team(library, plan.threads, plan.spin)
        self.weights = Weights(part)
        self.parts = {phase: self._cut(plan, phase) for phase in plan.phases}
        home = self.parts[plan.phases[-1]]  # decode says where memory lies
        self.spec, self.shard = home.spec, home.shard
        self._place_weights(home.tape, plan)
        arena = allocate(max(home.tape.arena_bytes, arena_bytes(part)))
        place_pages(arena, plan.nodes)
        self.kv = self._take_kv(plan, shared)
        state = self._part.file.spec.state_bytes
        self.states = allocate(plan.state_slots * state).reshape(plan.state_slots, state)
        operands = Operands(self.weights, arena, self.kv, self.states)
        self.tapes = {p: self.bind(self.parts[p].tape, operands, p) for p in plan.phases}
        adapted = self._part.tapes.get(ADAPTED)
        self.adapted = {p: self.bind(adapted, operands, p) for p in plan.phases if adapted}
        """The same for steps that have rows of adapters."""
        self._group_args: dict[str, dict[str, int]] = {phase: {} for phase in plan.phases}

    def _cut(self, plan: RankPlan, phase: str) -> PhasePart:
        """Return this rank's part of a phase."""
        part, unit, ranks = self._part, pool_unit(self._part.file.spec, plan), plan.ranks_of(phase)
        name = GATED if OWN_GATE in self._tables(phase) else "forward"
        spec, tape = part.file.spec, find_tape(part, name)
        if ranks == 1 and not unit:
            return PhasePart(spec, tape, None)
        shard = split_model(spec, plan.rank, ranks)
        own = shard_tape(
            tape,
            spec,
            part.file.weights,
            self._operand_names,
            shard,
            whole_sums=plan.deterministic,
            own_logits=plan.own_logits,
            unit=unit,
        )
        return PhasePart(shard_spec(spec, shard), own, shard)

    def _take_kv(self, plan: RankPlan, shared: SharedMemory | None) -> KvArrays:
        """Return the pools: the rank's own, or those of all, of which it sees its units."""
        spec, unit = self._part.file.spec, pool_unit(self._part.file.spec, plan)
        if not unit or shared is None:
            starts = layer_starts(self.spec, plan.kv_blocks)
            keys, values = (allocate(starts[-1] * (n < spec.pools)) for n in range(2))
            own = slice(None)
        else:
            part = replace(spec, n_kv_heads=unit)
            starts = layer_starts(part, plan.kv_blocks, spec.n_kv_heads // unit)
            heads = starts[-1] // spec.n_kv_heads
            keys, values = (shared.take(starts[-1]) for _ in "kv")
            kept = self.shard.kv_heads if self.shard and "decode" in plan.phases else range(0)
            own = slice(heads * kept.start // PAGESIZE * PAGESIZE, heads * kept.stop)
        for memory in (keys, values):
            place_pages(memory[own], plan.nodes)
        return KvArrays(keys, values, starts)

    @property
    def prefill(self) -> BoundTape:
        """The forward tape as prefill runs it."""
        return self.tapes["prefill"]

    @property
    def decode(self) -> BoundTape:
        """The forward tape as decode runs it."""
        return self.tapes["decode"]

    def _place_weights(self, tape: Tape, plan: RankPlan) -> None:
        """Have the weights read: all of them, or onto the plan's nodes what this rank computes."""
        if not plan.nodes:
            self.weights.read_ahead()
        elif self.shard is None or self.shard.ranks == 1:
            self.weights.place([(0, self.weights.nbytes)], plan.nodes)
        else:
            ranges = matrix_ranges(tape, self._part.file.weights, self._operand_names)
            self.weights.place(ranges, plan.nodes)

    def bind(self, tape: Tape, operands: Operands, phase: str) -> BoundTape:
        """Bind a tape of this model with the schedule tables and the threads of a phase."""
        tables, plan = {**self._tables(phase), **_COLLECTIVE_TABLES}, self._plan.plan_of(phase)
        return BoundTape(self._library, tape, tables, operands, plan)

    def _tables(self, phase: str) -> dict[str, tuple[ScheduleTable, ...]]:
        tables, threads = self._part.schedules.tables, self._plan.plan_of(phase).threads
        return pick_tables(tables, self._artifact.target, phase, threads)

    def device_share(self) -> tuple[Tape, dict[str, WeightShare]]:
        """Return the forward tape of a device with logits and weights of its own, and these."""
        name = WHOLE if WHOLE in self._part.tapes else "forward"
        whole, spec = find_tape(self._part, name), self._part.file.spec
        if self.shard is None:
            return whole, {}
        given = (whole, spec, self._part.file.weights, self._operand_names, self.shard)
        tape = shard_tape(*given, own_logits=True, own_weights=True)
        return tape, weight_shares(whole, spec, self._operand_names, self.shard)

    def join(self, sums: Mapping[str, Communicator]) -> None:
        """Sum over the groups of the phases from now on; runs stop when they fail."""
        for phase, comm in sums.items():
            self._group_args[phase] = {COMM: comm.handle}
            self.tapes[phase].stop_at(comm.stop_word)

    def part_tokens(self, phase: str) -> int:
        """Return the fewest keys of a part of a sequence in decode attention; 0 = never cut."""
        rows = [table.rows[0] for table in self._tables(phase).get("decode_attention", ())]
        return rows[0].schedule[SCHEDULE_VALUES.index("block_k")] if rows else 0

    def copy_states(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy states from slot to slot, in order."""
        for source, target in copies:
            self.states[target] = self.states[source]

    def run(
        self, args: Mapping[str, int], phase: str, usable: Collection[int] | None = None
    ) -> None:
        """Run a step of a phase; in a group all ranks must. RankError when the group failed.

        usable: PUs that this worker has now, None = those of its plan.
        """
        tapes = self.adapted if ADAPTER_ARGS[0] in args else self.tapes
        tapes[phase].run(self.team, {**args, **self._group_args[phase]}, usable=usable)

    def close(self) -> None:
        """End the threads."""
        self.team.close()

    def _operand_names(self, op: str) -> tuple[str, ...]:
        for table in self._part.schedules.tables:
            if table.op == op and table.target == self._artifact.target:
                return self._library.slots(table.rows[0].kernel)
        raise ArtifactError(
            f"{self._part.folder / 'schedules.json'}: has no table for {op!r}; "
            "run `dovetail compile MODEL` again"
        )


def find_tape(part: Part, name: str) -> Tape:
    """Return a tape of a model; ArtifactError where there is none of that name."""
    if name not in part.tapes:
        raise ArtifactError(
            f"{part.folder / 'tapes'}: has no tape {name!r}; run `dovetail compile MODEL` again"
        )
    return part.tapes[name]


def arena_bytes(part: ModelPart) -> int:
    """Return the bytes of buffers of a step of one process."""
    tapes = (part.tapes.get(name) for name in ("forward", GATED, ADAPTED))
    return max((tape.arena_bytes for tape in tapes if tape), default=0)


def pool_unit(spec: ModelSpec, plan: RankPlan) -> int:
    """Return the KV heads in a unit of the pools that all ranks share; 0 = each has its own."""
    if plan.prefill_ranks in (0, plan.ranks):
        return 0
    return kv_unit(spec, (plan.prefill_ranks, plan.ranks))


def shared_kv_bytes(spec: ModelSpec, plan: RankPlan) -> int:
    """Return the bytes that both pools take of shared memory."""
    pool = plan.kv_blocks * kv_block_bytes(spec) // 2
    return 2 * -(-pool // PAGESIZE) * PAGESIZE if pool_unit(spec, plan) else 0


def layer_block_bytes(spec: ModelSpec, layer: int) -> int:
    """Return the bytes of one block of K, or of V, that a layer has of its own."""
    return KV_BLOCK * spec.kv_values(layer) * DTYPES[spec.kv_dtype].size


def kv_block_bytes(spec: ModelSpec) -> int:
    """Return the bytes of one block of K and V in all layers."""
    return spec.pools * sum(layer_block_bytes(spec, layer) for layer in range(spec.n_layers))


def layer_starts(spec: ModelSpec, blocks: int, units: int = 1) -> tuple[int, ...]:
    """Return where the layers of a pool begin, one unit's after the other's, and their end."""
    each = [blocks * layer_block_bytes(spec, layer) for layer in range(spec.n_layers)]
    return tuple(accumulate(each * units, initial=0))


def _collective_table(op: str) -> ScheduleTable:
    row = Row(m_lo=1, kernel=op, schedule=(0,) * len(SCHEDULE_VALUES))
    return ScheduleTable(
        target="", op=op, n=0, k=0, dtype="f32", phase="any", threads=0, rows=(row,)
    )


_COLLECTIVE_TABLES = {op: (_collective_table(op),) for op in COLLECTIVES}
