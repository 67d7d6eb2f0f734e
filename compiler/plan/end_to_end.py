"""What a search bought end to end: its schedules and the rules' serve the same work in turns.

In: an artifact with the kernels of both, its plan, and the tables of both. Out: tokens/s before and
after, and which tables serve: the found ones of a phase only where they are surely faster, so that
a search never makes a model slower than its rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec
from msgspec.structs import replace

from dovetail.compiler.measure.answers import Memory
from dovetail.compiler.measure.paired import pair_times
from dovetail.compiler.plan.replay import ReplayJob, ReplayTimes, choose_prompts, replay_once
from dovetail.compiler.rules.tables import unique_tables
from dovetail.ir.artifact import PHASES, ServicePlan
from dovetail.ir.model import OWN_GATE, ModelSpec
from dovetail.ir.plans import PlanChoice
from dovetail.ir.schedule import ScheduleTable
from dovetail.runtime.native.tape import pick_tables
from dovetail.topology.replay import Trace

ROUNDS, LEAST_ROUNDS = 15, 8
"""Rounds at most and at least, the first of which warms up: a sure answer takes seven."""
LONGEST_PROMPT = 128

Tables = tuple[ScheduleTable, ...]


class PhaseGain(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens/s of a phase with the rules' schedules (before) and the found ones (after).

    gain: median ratio of times of the same rounds; least: what it surely is, 0 where rounds are too
    few to tell. kept: whether the found schedules serve.
    """

    before: float
    after: float
    gain: float
    least: float
    kept: bool


class EndToEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What a search bought, by phase; None of a phase in which it kept all that the rules have.

    note: where the times are from, or why there are none; then the rules serve.
    """

    prefill: PhaseGain | None = None
    decode: PhaseGain | None = None
    note: str = ""


def compare_tables(
    found: Tables,
    rules: Tables,
    target: str,
    plan: ServicePlan,
    artifact: Path,
    spec: ModelSpec,
    choice: PlanChoice,
    trace: Trace,
    seconds: float,
    memory: Memory | None,
) -> tuple[Tables, EndToEnd | None]:
    """Return the tables that serve `plan`, and what was measured; None where nothing differs.

    artifact: a folder that can be opened, with kernels for both. Takes about `seconds`, longer
    where a large model needs that for LEAST_ROUNDS.
    """
    plain = put_rules(found, rules, target, plan, PHASES)
    phases = [phase for phase in PHASES if differ(found, plain, target, phase, plan)]
    if not phases:
        return found, None
    pairs = (choice.pairs[0],) * 2
    prompts = choose_prompts(choice, pairs, trace, seconds, spec.max_context)
    batches = tuple(sorted({trace.batches[0], trace.batches[len(trace.batches) // 2]}))
    job = ReplayJob(
        artifact=str(artifact),
        plans=(plan, plan),
        tables=(found, plain),
        prompts=tuple(min(n, LONGEST_PROMPT) for n in prompts),
        batches=batches,
        steps=1,
        vocab_size=spec.vocab_size,
        rounds=ROUNDS,
        least_rounds=LEAST_ROUNDS,
        seconds=seconds,
    )
    times, source = replay_once(job, artifact, memory)
    if times is None:
        note = "what the search found could not be run end to end, so that the rules serve"
        return plain, EndToEnd(note=note + source)
    gains = judge(times, phases)
    lost = [phase for phase, gain in gains.items() if not gain.kept]
    quiet = len(times.quiet().others)
    note = f"{len(times.others)} rounds in turns, {quiet} of them on a quiet machine{source}"
    return put_rules(found, rules, target, plan, lost), EndToEnd(**gains, note=note)


def judge(times: ReplayTimes, phases: Iterable[str]) -> dict[str, PhaseGain]:
    """Return what each phase gained, from times of the found tables (first) and of the rules'.

    Both ran in each round, so that other load hits both. Rounds beside other work count only where
    too few are quiet; where load leaves doubt, the found tables are not kept.
    """
    gains, quiet = {}, times.quiet()
    times = quiet if len(quiet.others) >= LEAST_ROUNDS - 1 else times
    for phase in phases:
        after, before = getattr(times, phase)
        ratio = pair_times(after, before)
        gains[phase] = PhaseGain(
            before=1 / median(before),
            after=1 / median(after),
            gain=1 / ratio.median,
            least=1 / ratio.bound if ratio.bound else 0.0,
            kept=0 < ratio.bound < 1,
        )
    return gains


def put_rules(
    found: Tables, rules: Tables, target: str, plan: ServicePlan, phases: Sequence[str]
) -> Tables:
    """Return `found` with the rules' tables where `plan` serves these phases.

    A table of both phases stays for the other one: that of the phase itself goes first. A user's
    gate, of which rules know nothing, goes, and with the last one of a target the products for it.
    """
    threads = _threads(plan)
    shared = set(phases) == set(PHASES) and len(set(threads.values())) == 1
    taken = (
        table if shared else replace(table, phase=phase)
        for phase in phases
        for table in rules
        if table.target == target
        and table.threads == threads[phase]
        and table.phase in (phase, "any")
    )
    kept = [table for table in found if table.op != OWN_GATE or table.phase not in phases]
    gated = {table.target for table in kept if table.op == OWN_GATE}
    known = {table.op for table in rules}
    kept = [table for table in kept if table.op in known or table.target in gated]
    return unique_tables((*taken, *kept))


def differ(one: Tables, other: Tables, target: str, phase: str, plan: ServicePlan) -> bool:
    """Tell whether two sets of tables have a phase of `plan` run other kernels or schedules."""
    mine, theirs = (
        set(_calls(pick_tables(tables, target, phase, _threads(plan)[phase])))
        for tables in (one, other)
    )
    return mine != theirs


def _threads(plan: ServicePlan) -> dict[str, int]:
    return {"prefill": plan.prefill.threads, "decode": plan.decode.threads}


def _calls(picked: Mapping[str, Sequence[ScheduleTable]]) -> Iterator[tuple[object, ...]]:
    """Yield what tables run; rows that go on with what was run before say nothing."""
    for op, tables in picked.items():
        for table in tables:
            last: tuple[object, ...] = ()
            for row in table.rows:
                call = row.kernel, row.schedule, row.reduce_kernel
                if call != last:
                    yield op, table.n, table.k, table.dtype, row.m_lo, *call
                last = call
