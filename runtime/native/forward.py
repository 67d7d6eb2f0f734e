"""One rank's share of a model, ready to run: its weights, KV memory, threads and forward tape.

In: an opened artifact, this rank's plan and, in a group, its communicator. Out: a `ForwardModel`,
one native call per step. The parent process is rank 0; a group of one is the whole model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from dovetail.ir.artifact import PhasePlan
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.errors import ArtifactError
from dovetail.ir.model import KV_BLOCK, ModelSpec
from dovetail.ir.schedule import SCHEDULE_VALUES, Row, ScheduleTable
from dovetail.ir.tape import Tape
from dovetail.runtime.artifact import Artifact, ModelPart, Part
from dovetail.runtime.machine.abi import COLLECTIVES
from dovetail.runtime.machine.library import KernelLibrary
from dovetail.runtime.machine.memory import allocate
from dovetail.runtime.machine.placement import place_pages, placing_on
from dovetail.runtime.native.collective import Communicator
from dovetail.runtime.native.deterministic import fix_part, keep_floats
from dovetail.runtime.native.shard import (
    COMM,
    Shard,
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

    deterministic: the same bits whatever the other fields say.
    own_logits: the logits of a step are no memory that all ranks share.
    floats: activations stay float32 where weights are quantised.
    """

    rank: int = 0
    ranks: int = 1
    prefill: PhasePlan
    decode: PhasePlan
    spin: int
    kv_blocks: int
    deterministic: bool = False
    own_logits: bool = False
    floats: bool = False
    nodes: tuple[int, ...] = ()  # NUMA nodes of its memory; () = where it is touched first

    @property
    def threads(self) -> int:
        """Threads that it starts: those of its larger phase."""
        return max(self.prefill.threads, self.decode.threads)


class ForwardModel:
    """The forward tape of one rank, bound for both phases."""

    def __init__(
        self, artifact: Artifact, part: ModelPart, library: KernelLibrary, plan: RankPlan
    ) -> None:
        """Start threads, map weights, take KV memory and bind the tape.

        Raises:
            ArtifactError: the artifact's parts do not fit each other.
            CapacityError: memory or threads cannot be had.
        """
        self._artifact, self._library, self._plan = artifact, library, plan
        part = keep_floats(artifact, part) if plan.floats else part
        self._part = fix_part(artifact, part) if plan.deterministic else part
        with placing_on(plan.nodes):  # its threads inherit that
            self._load(plan)

    def _load(self, plan: RankPlan) -> None:
        part, library = self._part, self._library
        self.team = Team(library, plan.threads, plan.spin)
        self.weights = Weights(part)
        spec, tape = part.file.spec, find_tape(part, "forward")
        self.shard: Shard | None = None
        if plan.ranks > 1:
            shard = self.shard = split_model(spec, plan.rank, plan.ranks)
            weights, names = part.file.weights, self._operand_names
            ends = {"whole_sums": plan.deterministic, "own_logits": plan.own_logits}
            tape = shard_tape(tape, spec, weights, names, shard, **ends)
            spec = shard_spec(spec, shard)
        self.spec = spec  # of this rank's part
        self._place_weights(tape, plan)
        layer = plan.kv_blocks * layer_block_bytes(spec)
        size = layer * spec.n_layers
        keys, values, arena = map(allocate, (size, size, tape.arena_bytes))
        for memory in (keys, values, arena):
            place_pages(memory, plan.nodes)
        self.kv = KvArrays(keys, values, layer)
        operands = Operands(self.weights, arena, self.kv)
        self.prefill = self.bind(tape, operands, "prefill")
        self.decode = self.bind(tape, operands, "decode")
        self._group_args: dict[str, int] = {}

    def _place_weights(self, tape: Tape, plan: RankPlan) -> None:
        """Have the weights read: all of them, or onto the plan's nodes what this rank computes."""
        if not plan.nodes:
            self.weights.read_ahead()
        elif plan.ranks == 1:
            self.weights.place([(0, self.weights.nbytes)], plan.nodes)
        else:
            ranges = matrix_ranges(tape, self._part.file.weights, self._operand_names)
            self.weights.place(ranges, plan.nodes)

    def bind(self, tape: Tape, operands: Operands, phase: str) -> BoundTape:
        """Bind a tape of this model with the schedule tables and the threads of a phase."""
        tables, plan = {**self._tables(phase), **_COLLECTIVE_TABLES}, self._phase_plan(phase)
        return BoundTape(self._library, tape, tables, operands, plan)

    def _phase_plan(self, phase: str) -> PhasePlan:
        return self._plan.prefill if phase == "prefill" else self._plan.decode

    def _tables(self, phase: str) -> dict[str, tuple[ScheduleTable, ...]]:
        tables, threads = self._part.schedules.tables, self._phase_plan(phase).threads
        return pick_tables(tables, self._artifact.target, phase, threads)

    def device_share(self) -> tuple[Tape, dict[str, WeightShare]]:
        """Return the forward tape of a device with logits and weights of its own, and these."""
        whole, spec = find_tape(self._part, "forward"), self._part.file.spec
        if self.shard is None:
            return whole, {}
        given = (whole, spec, self._part.file.weights, self._operand_names, self.shard)
        tape = shard_tape(*given, own_logits=True, own_weights=True)
        return tape, weight_shares(whole, spec, self._operand_names, self.shard)

    def join(self, comm: Communicator) -> None:
        """Sum over the group of `comm` from now on; runs stop when it fails."""
        self._group_args = {COMM: comm.handle}
        for phase in (self.prefill, self.decode):
            phase.stop_at(comm.stop_word)

    def phase(self, prefill: bool) -> BoundTape:
        """Return the forward tape as a step runs it."""
        return self.prefill if prefill else self.decode

    def part_tokens(self, *, prefill: bool) -> int:
        """Return the fewest keys of a part of a sequence in decode attention; 0 = never cut."""
        tables = self._tables("prefill" if prefill else "decode")
        rows = [table.rows[0] for table in tables.get("decode_attention", ())]
        return rows[0].schedule[SCHEDULE_VALUES.index("block_k")] if rows else 0

    def run(
        self, args: Mapping[str, int], *, prefill: bool, usable: Collection[int] | None = None
    ) -> None:
        """Run one step; in a group all ranks must. Raises RankError when the group failed.

        usable: PUs that this worker has now, None = those of its plan.
        """
        self.phase(prefill).run(self.team, {**args, **self._group_args}, usable=usable)

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


def layer_block_bytes(spec: ModelSpec) -> int:
    """Return the bytes of one block of K, or of V, in one layer."""
    return KV_BLOCK * spec.n_kv_heads * spec.head_dim * DTYPES[spec.kv_dtype].size


def _collective_table(op: str) -> ScheduleTable:
    row = Row(m_lo=1, kernel=op, schedule=(0,) * len(SCHEDULE_VALUES))
    return ScheduleTable(
        target="", op=op, n=0, k=0, dtype="f32", phase="any", threads=0, rows=(row,)
    )


_COLLECTIVE_TABLES = {op: (_collective_table(op),) for op in COLLECTIVES}
