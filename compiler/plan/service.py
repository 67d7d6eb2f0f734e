"""Plans how one machine serves a model: processes, threads and pinned PUs of each phase.

In: a HardwareSpec, a model, a workload. Out: a PlanChoice with the best pairs of configurations by
the contention model, and the ServicePlan of each. `dovetail.compiler.plan.replay` measures them.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from dovetail.compiler.rules.workload import WorkloadSpec
from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.graph import Placement
from dovetail.ir.model import ModelSpec
from dovetail.ir.plans import ASKED, SIMULATED, PairChoice, PlanCandidate, PlanChoice
from dovetail.topology.binding import choose_pus
from dovetail.topology.hardware import HardwareSpec
from dovetail.topology.parameters import MachineParameters
from dovetail.topology.plan import Candidate, TopologyPlan, plan_topology
from dovetail.topology.replay import Trace


def plan_service(hardware: HardwareSpec, threads: int | None = None) -> ServicePlan:
    """Return the plan of one process with `threads` in both phases.

    By default all cores this process may use at full speed. Raises SpecError when the machine
    allows fewer threads than asked for.
    """
    count = hardware.usable_threads if threads is None else threads
    phase = PhasePlan(threads=count, cpus=choose_pus(hardware, count))
    return ServicePlan(prefill=phase, decode=phase)


def place_searches(hardware: HardwareSpec) -> Placement:
    """Return where the process that searches indexes runs: on any CPU, its threads on half.

    Half of those that a quota keeps busy: more would be put aside by the system for most of a scan.
    """
    allowed = hardware.allowed_pus
    most = min(len(allowed), int(hardware.cpu_quota or len(allowed)))
    return Placement(threads=max(1, most // 2), cpus=allowed)


def sample_trace(workload: WorkloadSpec, sequences: int, batch: int | None = None) -> Trace:
    """Return the requests of a workload for the topology search.

    sequences: of a step at most. batch: of all decode steps; by default the workload's, which the
    payload of kernel search has too.
    """
    requests = tuple(zip(workload.prompt_lengths, workload.output_lengths, strict=True))
    batches = workload.batches(sequences) if batch is None else (batch,)
    return Trace(workload.source, requests, batches).sample()


def choose_plans(
    hardware: HardwareSpec,
    spec: ModelSpec,
    trace: Trace,
    threads: int | None = None,
    parameters: MachineParameters | None = None,
) -> PlanChoice:
    """Return the pairs of plans that the contention model finds best, or the one asked for.

    The first pair has all cores in both phases: that fewer are faster only measuring can tell.

    parameters: the model's figures, by default those of the machine's class.

    Raises SpecError when the machine allows fewer threads than asked for.
    """
    if threads is not None:
        return asked_choice(plan_service(hardware, threads), hardware)
    usable, notes = within_quota(hardware)
    found = plan_topology(usable, spec, trace, parameters=parameters)
    return whole_first(simulated_choice(found, notes), usable)


def simulated_choice(
    found: TopologyPlan, notes: tuple[str, ...] = (), *, every: bool = False
) -> PlanChoice:
    """Return what a search found, best pair first; `notes` come before its own.

    every: with the candidates that are in no pair, too.
    """
    others = (found.prefill, found.decode) if every else ((), ())
    prefill = tuple(dict.fromkeys((*(pair.prefill for pair in found.pairs), *others[0])))
    decode = tuple(dict.fromkeys((*(pair.decode for pair in found.pairs), *others[1])))
    return PlanChoice(
        source=SIMULATED,
        trace=found.trace.source,
        batches=found.trace.batches,
        prefill=tuple(map(_candidate, prefill)),
        decode=tuple(map(_candidate, decode)),
        pairs=tuple(
            PairChoice(
                prefill=prefill.index(pair.prefill),
                decode=decode.index(pair.decode),
                simulated=pair.score.total,
                switch=pair.score.switch,
            )
            for pair in found.pairs
        ),
        figures=found.parameters.sources(),
        cut=found.report.cut,
        notes=(*notes, *found.notes),
    )


def whole_first(choice: PlanChoice, hardware: HardwareSpec) -> PlanChoice:
    """Return the choice with the best pair first that has all cores in both phases.

    Where trees of equal branches leave cores out, that is one process with a thread on each.
    """
    core = {pu.id: pu.core for pu in hardware.pus}

    def is_whole(candidate: PlanCandidate) -> bool:
        return len({core[pu] for pu in candidate.cpus}) >= hardware.usable_threads

    for pair in choice.pairs:
        if is_whole(choice.prefill[pair.prefill]) and is_whole(choice.decode[pair.decode]):
            return replace(
                choice, pairs=(pair, *(other for other in choice.pairs if other != pair))
            )
    plain = asked_choice(plan_service(hardware), hardware)
    pair = PairChoice(prefill=len(choice.prefill), decode=len(choice.decode))
    return replace(
        choice,
        prefill=(*choice.prefill, *plain.prefill),
        decode=(*choice.decode, *plain.decode),
        pairs=(pair, *choice.pairs),
    )


def within_quota(hardware: HardwareSpec) -> tuple[HardwareSpec, tuple[str, ...]]:
    """Return the machine cut to as many PUs as its CPU quota keeps busy, and a note where it is."""
    quota, allowed = hardware.cpu_quota, len(hardware.allowed_pus)
    if quota is None or quota >= allowed:
        return hardware, ()
    count = hardware.usable_threads
    pus = tuple(sorted(choose_pus(hardware, count)))
    note = f"a CPU quota of {quota:g} cores: planned for {count} of {allowed} PUs"
    return replace(hardware, allowed_pus=pus, cpu_quota=None), (note,)


def service_plan(choice: PlanChoice, pair: PairChoice | None = None) -> ServicePlan:
    """Return how a pair of candidates, by default the chosen one, is served."""
    pair = pair or choice.pairs[0]
    prefill, decode = choice.prefill[pair.prefill], choice.decode[pair.decode]
    return ServicePlan(
        processes=decode.processes,
        prefill_processes=prefill.processes * (prefill.processes != decode.processes),
        nodes=_homes(decode),
        prefill=PhasePlan(threads=prefill.threads, cpus=prefill.cpus),
        decode=PhasePlan(threads=decode.threads, cpus=decode.cpus),
    )


def service_plans(choice: PlanChoice) -> tuple[ServicePlan, ...]:
    """Return how each pair is served, the chosen one first."""
    return tuple(service_plan(choice, pair) for pair in choice.pairs)


def alone(plan: ServicePlan) -> ServicePlan:
    """Return the plan of one process with the threads and PUs of the first one of `plan`."""
    prefill, decode = (
        PhasePlan(threads=phase.threads, cpus=phase.cpus[: phase.threads])
        for phase in (plan.prefill, plan.decode)
    )
    return ServicePlan(prefill=prefill, decode=decode)


def contenders(choice: PlanChoice, slack: float) -> PlanChoice:
    """Return the choice without pairs that are simulated to take over `slack` times the best.

    The first pair stays: it serves where nothing is measured.
    """
    first, *others = choice.pairs
    times = [pair.simulated for pair in choice.pairs if pair.simulated is not None]
    near = (pair for pair in others if (pair.simulated or 0.0) <= slack * min(times))
    return replace(choice, pairs=(first, *near))


def unmeasured(choice: PlanChoice) -> PlanChoice:
    """Return the choice without all that only measuring may prefer."""
    return replace(choice, pairs=choice.pairs[:1])


def mark_tuned(choice: PlanChoice, pairs: Sequence[PairChoice]) -> PlanChoice:
    """Return the choice with each candidate marked that runs kernels searched for `pairs`.

    Those of equal processes and threads in a phase have the same tables.
    """
    return replace(
        choice,
        prefill=_mark(choice.prefill, {pair.prefill for pair in pairs}),
        decode=_mark(choice.decode, {pair.decode for pair in pairs}),
    )


def _mark(candidates: Sequence[PlanCandidate], places: set[int]) -> tuple[PlanCandidate, ...]:
    teams = {(candidates[i].processes, candidates[i].threads) for i in places}
    return tuple(replace(c, tuned=(c.processes, c.threads) in teams) for c in candidates)


def describe_choice(choice: PlanChoice) -> str:
    """Return the chosen pair and where it comes from in one line."""
    pair = choice.pairs[0]
    prefill, decode = choice.prefill[pair.prefill], choice.decode[pair.decode]
    processes = "1 process" if decode.processes == 1 else f"{decode.processes} processes"
    threads = f"{prefill.threads} threads in prefill, {decode.threads} in decode"
    if prefill.processes != decode.processes:
        processes, threads = (
            f"{c.processes} x {c.threads} threads in {phase}"
            for c, phase in ((prefill, "prefill"), (decode, "decode"))
        )
    return f"{processes}, {threads} ({choice.source})"


def _homes(decode: PlanCandidate) -> tuple[int, ...]:
    """Return the node of each process's memory; () where a process uses several, or all use one.

    Decode reads weights and KV as fast as memory gives them, so its plan says where they lie.
    """
    if any(len(nodes) != 1 for nodes in decode.nodes) or len(set(decode.nodes)) == 1:
        return ()
    return tuple(nodes[0] for nodes in decode.nodes)


def _candidate(found: Candidate) -> PlanCandidate:
    """Return a candidate with its processes by memory node, so that phases pair up rank by rank."""
    processes = sorted(found.configuration.processes, key=lambda process: process.nodes)
    return PlanCandidate(
        processes=len(processes),
        threads=len(processes[0].pus),
        cpus=tuple(pu for process in processes for pu in process.pus),
        nodes=tuple(process.nodes for process in processes),
        levels=found.levels,
        simulated=found.seconds,
    )


def asked_choice(plan: ServicePlan, hardware: HardwareSpec) -> PlanChoice:
    """Return the choice of a plan that was asked for, with nothing to compare it to."""
    homes = {pu.id: pu.node for pu in hardware.pus}
    prefill, decode = (
        PlanCandidate(
            processes=plan.processes_of(name),
            threads=phase.threads,
            cpus=phase.cpus,
            nodes=tuple(
                tuple(sorted({homes[pu] for pu in phase.cpus[i:][: phase.threads] if pu in homes}))
                for i in range(0, plan.processes_of(name) * phase.threads, phase.threads)
            ),
            levels="",
        )
        for name, phase in (("prefill", plan.prefill), ("decode", plan.decode))
    )
    pairs = (PairChoice(prefill=0, decode=0),)
    return PlanChoice(source=ASKED, prefill=(prefill,), decode=(decode,), pairs=pairs)
