"""Searches for a user's own gate in a model: behind a product of gates and ups, or ours within one.

In: a kernel that was fitted, the gated products of a model's steps, and the schedules that were
found for them. Out: for each phase tables of the operator OWN_GATE, and of the products before it,
which have the schedules of the rules, where both together are surely faster than ours at every
thread count of the phase. A runtime takes the tape `GATED` in the phases that have such tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from msgspec.structs import replace as replace_struct

from dovetail.codegen.catalog import KernelRequest
from dovetail.codegen.isa.target import Target
from dovetail.codegen.library import LibrarySpec
from dovetail.compiler.measure.meter import Candidate, GateCase, Measurer
from dovetail.compiler.rules.payload import Payload
from dovetail.compiler.rules.schedules import (
    GemmOp,
    default_row,
    gemm_requests,
    make_schedule,
    take_apart,
)
from dovetail.compiler.search.instances import (
    USER,
    InstanceChoice,
    InstanceTask,
    search_instances,
)
from dovetail.compiler.search.user_kernels import UserKernel
from dovetail.ir.artifact import PHASES, PhasePlan, ServicePlan
from dovetail.ir.model import OWN_GATE
from dovetail.ir.schedule import Row, ScheduleTable
from dovetail.runtime.native.tape import pick_tables
from dovetail.topology.hardware import HardwareSpec

SHARE = 0.2
"""Of the seconds of a search, kept for gates while products are searched for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateTask(InstanceTask):
    """One M of a gated product in a phase: ours first, then the user's gates.

    schedules: of our product, and of `apart`, the one before the user's. op: our product.
    """

    apart: KernelRequest
    op: GemmOp

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Each instance with the schedule of its product."""
        ours, apart = self.schedules
        schedules = (ours, *[apart] * (len(self.rivals) - 1))
        return tuple(Candidate(r.name, s) for r, s in zip(self.rivals, schedules, strict=True))

    def beside(self, tables: Iterable[ScheduleTable], target: Target) -> GateTask:
        """Return the same search beside what was found for our product."""
        op, case = self.op, self.case
        assert isinstance(case, GateCase)
        picked = pick_tables(tables, target.name, self.phase, case.threads).get(op.op, ())
        rows = (
            row
            for table in picked
            if (table.n, table.k, table.dtype) == (op.n, op.k, op.dtype)
            for row in reversed(table.rows)
            if row.m_lo <= case.m
        )
        row = next(rows)
        ours, schedules = _request(op, row.kernel, target), (row.schedule, self.schedules[1])
        return replace(self, rivals=(ours, *self.rivals[1:]), schedules=schedules)


def gate_tasks(
    kernel: UserKernel,
    payload: Payload,
    plans: Iterable[ServicePlan],
    hardware: HardwareSpec,
    target: Target,
) -> tuple[GateTask, ...]:
    """Return a search for each M that stands for a phase of a plan: the least, middle and most."""
    found: dict[GateCase, GateTask] = {}
    for plan in plans:
        for phase in PHASES if kernel.gates else ():
            uses = payload.of(plan.processes_of(phase))
            gated = [use for use in uses if use.gemm.op == "gate_up"]
            use = max(gated, key=lambda use: (use.calls, use.gemm.n))
            decodes = payload.largest("head")
            sizes = sorted(m for m in use.sizes if (m <= decodes) == (phase == "decode"))
            for m in {sizes[i] for i in (0, len(sizes) // 2, -1) if sizes}:
                team = plan.prefill if phase == "prefill" else plan.decode
                task = _task(kernel, use.gemm, m, phase, team, hardware, target)
                assert isinstance(task.case, GateCase)
                found.setdefault(task.case, task)
    return tuple(found.values())


def _task(
    kernel: UserKernel,
    op: GemmOp,
    m: int,
    phase: str,
    team: PhasePlan,
    hardware: HardwareSpec,
    target: Target,
) -> GateTask:
    ops = op, take_apart(op)
    rows = [default_row(each, target, m, team.threads, hardware) for each in ops]
    case = GateCase(
        kind=kernel.op,
        dtype=op.dtype,
        threads=team.threads,
        cpus=team.cpus[: team.threads],
        n=op.n,
        k=op.k,
        m=m,
        gated=op.kind,
        apart=rows[1].kernel,
    )
    products = [_request(each, row.kernel, target) for each, row in zip(ops, rows, strict=True)]
    rivals, schedules = (products[0], *kernel.gates), tuple(row.schedule for row in rows)
    return GateTask(
        case, rivals, schedules, user=kernel.file, phase=phase, apart=products[1], op=op
    )


def _request(op: GemmOp, name: str, target: Target) -> KernelRequest:
    requests = gemm_requests([op.dtype], target, [op.kind])
    return next(request for request in requests if request.name == name)


def gate_library(
    kernels: Iterable[UserKernel], tasks: Iterable[GateTask], target: Target
) -> LibrarySpec:
    """Return the library of gates, the products before them, and all of ours for these products."""
    requests = {
        request.name: request
        for task in tasks
        for ours in (gemm_requests([task.op.dtype], target, [task.op.kind]),)
        for request in (*ours, *task.rivals, task.apart)
    }
    modules = {kernel.module: kernel.unit for kernel in kernels if kernel.gates}
    every = tuple(requests.values())
    return LibrarySpec(target, every, name="gates", modules=modules, tvm_ffi=False)


def search_gates(
    tasks: Iterable[GateTask],
    found: Sequence[ScheduleTable],
    measurer: Measurer,
    seconds: float,
    target: Target,
) -> tuple[tuple[InstanceChoice, ...], tuple[str, ...]]:
    """Return the user's gates of the phases where they won, and notes where they were not measured.

    found: the tables of our products. They won where they did at every thread count: a load may
    choose any, and takes the nearest table.
    """
    asked = [task.beside(found, target) for task in tasks]
    teams = {(task.phase, task.case.threads): task.user for task in asked}
    choices = search_instances(asked, measurer, seconds / max(1, len(teams)))
    known = {(choice.phase, choice.threads) for choice in choices}
    ours = {c.phase for c in choices if not c.request.module.startswith(USER)}
    unknown = {phase: user for (phase, n), user in teams.items() if (phase, n) not in known}
    notes = (f"own gate of {u}: not measured in {p}; ours serves" for p, u in unknown.items())
    won = (choice for choice in choices if choice.phase not in {*ours, *unknown})
    return tuple(won), tuple(notes)


def gate_tables(
    choices: Sequence[InstanceChoice], apart: Sequence[ScheduleTable], target: Target
) -> Iterator[ScheduleTable]:
    """Yield the tables of the phases in which a user's gate was chosen.

    apart: those of the products before it.
    """
    for choice in choices:
        row = Row(
            m_lo=1,
            kernel=choice.request.name,
            schedule=make_schedule(),
            source="measured",
            seconds=choice.seconds,
        )
        yield ScheduleTable(
            target=target.name,
            op=OWN_GATE,
            n=0,
            k=0,
            dtype="f32",
            phase=choice.phase,
            threads=choice.threads,
            rows=(row,),
        )
    for phase in dict.fromkeys(choice.phase for choice in choices):
        mine = (table for table in apart if table.phase in (phase, "any"))
        yield from (replace_struct(table, phase=phase) for table in mine)
