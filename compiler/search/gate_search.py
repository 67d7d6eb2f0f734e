"""Searches for a user's own gate in a model: behind a product of gates and ups, or ours within one.

In: a kernel that was fitted, and the gated products of a model's steps. Out: for each phase a table
of the operator OWN_GATE where the user's is surely faster together with its product, both products
by the rules. A runtime takes the tape `GATED` in the phases that have such a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dovetail.codegen.catalog import KernelRequest
from dovetail.codegen.isa.target import Target
from dovetail.compiler.measure.meter import Candidate, GateCase
from dovetail.compiler.rules.payload import Payload
from dovetail.compiler.rules.schedules import (
    GemmOp,
    default_row,
    gemm_requests,
    make_schedule,
    take_apart,
)
from dovetail.compiler.search.attention_search import USER, AttentionChoice, AttentionTask
from dovetail.compiler.search.user_kernels import UserKernel
from dovetail.ir.artifact import PHASES, PhasePlan, ServicePlan
from dovetail.ir.model import OWN_GATE
from dovetail.ir.schedule import Row, ScheduleTable
from dovetail.topology.hardware import HardwareSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GateTask(AttentionTask):
    """One M of a gated product in a phase: ours first, then the user's gates.

    schedules: of our product, and of `apart`, the one before the user's.
    """

    apart: KernelRequest

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Each instance with the schedule of its product."""
        ours, apart = self.schedules
        schedules = (ours, *[apart] * (len(self.rivals) - 1))
        return tuple(Candidate(r.name, s) for r, s in zip(self.rivals, schedules, strict=True))


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
    return GateTask(case, rivals, schedules, user=kernel.file, phase=phase, apart=products[1])


def _request(op: GemmOp, name: str, target: Target) -> KernelRequest:
    requests = gemm_requests([op.dtype], target, [op.kind])
    return next(request for request in requests if request.name == name)


def gate_tables(choices: Iterable[AttentionChoice], target: Target) -> Iterator[ScheduleTable]:
    """Yield the tables of the phases in which a user's gate was chosen."""
    for choice in choices:
        if choice.phase and choice.request.module.startswith(USER):
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
