"""A user's gate is weighed against what was found, and serves a phase at all threads or none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from dovetail.codegen.library import index_library
from dovetail.codegen.targets import host_target
from dovetail.compiler.measure.jobs import flops
from dovetail.compiler.measure.meter import SKIPPED, Candidate, GateCase, Measurement
from dovetail.compiler.measure.paired import PairedRatio
from dovetail.compiler.measure.recorder import Identity, Recorder
from dovetail.compiler.measure.row_ops import row_bytes
from dovetail.compiler.rules.payload import GemmUse, Payload
from dovetail.compiler.rules.schedules import GemmOp, default_gemm_rows, gemm_requests
from dovetail.compiler.rules.tables import gemm_table
from dovetail.compiler.search.gate_search import GateTask, gate_library, gate_tasks, search_gates
from dovetail.compiler.search.user_kernels import UserKernel, read_user_kernel
from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.schedule import ScheduleTable
from dovetail.topology.hardware import read_hardware
from tests.compiler.records import TrustingRecords
from tests.compiler.search.test_user_kernels import KERNELS, write

TARGET, HARDWARE = host_target(), read_hardware()
PRODUCT = GemmOp("gate_up", "silu", 64, 64, "f32")
Status = Callable[[GateCase], str]


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> UserKernel:
    folder = tmp_path_factory.mktemp("gate")
    return read_user_kernel(f"silu_mul={write(folder, 'own.c', KERNELS['silu_mul'])}")


def tasks_of(user: UserKernel, *threads: int) -> tuple[GateTask, ...]:
    """Return searches for M 2 and 3 in decode, 21 in prefill, under plans of so many threads."""
    head = GemmOp("head", "linear", 16, 64, "f32")
    sizes = {2: 0.4, 3: 0.2, 21: 0.4}
    payload = Payload((GemmUse(PRODUCT, 1, sizes), GemmUse(head, 1, {4: 1.0})))
    teams = [PhasePlan(threads=n, cpus=()) for n in threads]
    plans = [ServicePlan(processes=1, prefill=team, decode=team) for team in teams]
    return gate_tasks(user, payload, plans, HARDWARE, TARGET)


def tables_of(*threads: int) -> list[ScheduleTable]:
    return [
        gemm_table(PRODUCT, TARGET, "any", n, default_gemm_rows(PRODUCT, TARGET, n, HARDWARE))
        for n in threads
    ]


class Script:
    """A measurer on which a gate takes `ratio` of our product's time, or ends otherwise."""

    def __init__(self, ratio: Callable[[GateCase], float], status: Status = lambda _: "ok") -> None:
        self.ratio, self.status = ratio, status
        self.asked: list[tuple[GateCase, tuple[Candidate, ...]]] = []

    def now(self) -> float:
        return 0.0

    def stop(self) -> None:
        """Nothing runs."""

    def measure(self, case, candidates, *, rounds, seconds):  # type: ignore[no-untyped-def]
        self.asked.append((case, tuple(candidates)))
        ratios = [1.0] + [self.ratio(case)] * (len(candidates) - 1)
        return tuple(
            Measurement(
                candidate=candidate,
                status=self.status(case) if i else "ok",
                seconds=ratio,
                low=ratio,
                high=ratio,
                runs=rounds,
                ratio=PairedRatio(ratio, ratio),
            )
            for i, (candidate, ratio) in enumerate(zip(candidates, ratios, strict=True))
        )


def searched(user: UserKernel, script: Script) -> tuple[set[tuple[str, int]], tuple[str, ...]]:
    """Return the phases and threads that got a user's gate, and notes."""
    won, notes = search_gates(tasks_of(user, 1, 2), tables_of(1, 2), script, 1.0, TARGET)
    return {(choice.phase, choice.threads) for choice in won}, notes


def test_a_gate_that_lost_at_one_number_of_threads_serves_none(user: UserKernel) -> None:
    every = {(phase, n) for phase in ("prefill", "decode") for n in (1, 2)}
    assert searched(user, Script(lambda _: 0.5)) == (every, ())

    def slow(case: GateCase) -> float:
        return 2.0 if case.m <= 3 and case.threads == 1 else 0.5

    assert searched(user, Script(slow)) == ({("prefill", 1), ("prefill", 2)}, ())


def test_a_phase_of_which_a_part_was_not_measured_keeps_ours_and_says_so(user: UserKernel) -> None:
    def status(case: GateCase) -> str:
        return SKIPPED if case.m == 3 and case.threads == 2 else "ok"

    won, notes = searched(user, Script(lambda _: 0.5, status))
    assert won == {("prefill", 1), ("prefill", 2)}
    assert notes == (f"own gate of {user.file}: not measured in decode; ours serves",)


def test_its_rival_is_the_schedule_that_was_found(user: UserKernel) -> None:
    (table,) = tables_of(2)
    kernel = gemm_requests(["f32"], TARGET, ["silu"])[-1].name
    rows = tuple(
        msgspec.structs.replace(row, kernel=kernel, schedule=(*row.schedule[:-1], 7))
        for row in table.rows
    )
    script = Script(lambda _: 0.5)
    found = [msgspec.structs.replace(table, rows=rows), table]
    search_gates(tasks_of(user, 2), found, script, 1.0, TARGET)
    assert len(script.asked) == 3
    for case, (ours, *own) in script.asked:
        row = [row for row in rows if row.m_lo <= case.m][-1]
        assert ours == Candidate(kernel, row.schedule)
        assert {candidate.schedule for candidate in own}.isdisjoint({row.schedule})
    built = {request.name for request in gate_library([user], tasks_of(user, 2), TARGET).kernels}
    assert kernel in built


def test_a_record_names_the_products_before_and_beside_it(user: UserKernel) -> None:
    task = tasks_of(user, 2)[0]
    others = gemm_requests(["f32"], TARGET, ["linear"])
    library = gate_library([user], [task], TARGET)
    kernels = tuple({request.name: request for request in (*library.kernels, *others)}.values())
    library = replace(library, kernels=kernels)
    identity, records = Identity.of(HARDWARE, index_library(library)), TrustingRecords()

    def ask(case: GateCase, *candidates: Candidate) -> int:
        recorder = Recorder(Script(lambda _: 0.5), identity, records)
        recorder.measure(case, candidates, rounds=3, seconds=1.0)
        return recorder.measured

    case, (ours, own, *_) = task.case, task.candidates
    assert isinstance(case, GateCase)
    assert (ask(case, ours, own), ask(case, ours, own)) == (2, 0)
    found = Candidate(ours.kernel, (*ours.schedule[:-1], 7))
    assert (ask(case, found, own), ask(case, found, own)) == (2, 0)  # a ratio to another product
    other = next(r.name for r in others if r.name not in (case.apart, ours.kernel))
    assert ask(msgspec.structs.replace(case, apart=other), found, own) == 1
    every = list(records.records())
    assert list(identity.matching(every)) == every
    identity.builds[case.apart] = "built anew"
    assert len(list(identity.matching(every))) == len(every) - 2


def test_operations_are_told_of_products_and_attention_only() -> None:
    assert flops("silu_mul", {"n": 3, "k": 5, "m": 7}) == 420.0
    rows = {"rows": 16, "width": 64, "eps_nano": 10_000}
    assert flops("rmsnorm", rows) == 0.0
    assert row_bytes("rmsnorm", rows) == 4 * 64 * (2 * 16 + 1)
    assert row_bytes("silu_mul", rows) == 4 * 64 * 3 * 16
    assert row_bytes("silu_mul", {"n": 3, "k": 5, "m": 7}) == row_bytes("own", rows) == 0
