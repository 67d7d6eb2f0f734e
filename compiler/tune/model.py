"""Runs a tuning job: searches the schedules of a model's products and keeps every trial on record.

In: a model, a machine, a database and how much to spend. Out: a TuneReport; the records are in the
database as soon as each batch is timed, so that a killed job goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

import msgspec

from dovetail.codegen.isa.target import Target
from dovetail.codegen.library import build_library
from dovetail.codegen.targets import runs_on
from dovetail.compiler.formats.weight_formats import with_formats
from dovetail.compiler.measure.database import TuningDatabase, default_path
from dovetail.compiler.measure.jobs import TunedPoint, TuneProgress, allow, core_sets
from dovetail.compiler.measure.meter import Measurer, Meter, StoppableMeasurer, pool_bytes
from dovetail.compiler.measure.recorder import Allowance, NoMachine, Recorder, describe_disturbed
from dovetail.compiler.models.encoder_folder import is_encoder
from dovetail.compiler.models.hub import find_model, name_model
from dovetail.compiler.models.source import open_model
from dovetail.compiler.pipeline import calibrate_model
from dovetail.compiler.plan.calibrate import figures_of
from dovetail.compiler.plan.service import choose_plans, contenders, sample_trace, service_plans
from dovetail.compiler.request import (
    ModelOptions,
    ModelRequest,
    check_model_request,
    choose_targets,
    read_kernels,
)
from dovetail.compiler.rules.payload import make_payload
from dovetail.compiler.rules.tables import default_tables
from dovetail.compiler.rules.workload import WorkloadSpec, read_workload
from dovetail.compiler.search.choose import find_products
from dovetail.compiler.search.fit_cost_model import can_fit
from dovetail.compiler.search.gate_search import GateTask
from dovetail.compiler.search.instances import InstanceTask, search_instances
from dovetail.compiler.search.parts import (
    Item,
    SearchScope,
    TuningPart,
    job_name,
    plan_parts,
    spent_seconds,
)
from dovetail.compiler.search.policy import SearchTask
from dovetail.compiler.search.rows import find_alone
from dovetail.compiler.search.tables import EFFORTS
from dovetail.compiler.tune.job_file import JobFile, job_on_file, job_path, read_job
from dovetail.compiler.tune.workers import Board, Progress, run_items
from dovetail.ir.artifact import PHASES, ServicePlan
from dovetail.ir.cache import use_cache
from dovetail.ir.errors import ScheduleError, SpecError, install
from dovetail.ir.model import ModelSpec
from dovetail.topology.hardware import HardwareSpec, dump_hardware, read_hardware

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest(ModelRequest):
    """What to tune, by default into the database that compiles read.

    resume: a job like this that was interrupted goes on; else all trials are run anew. missing:
    none that is on record, of whatever job, is run again.
    workers: processes that measure at once, each on cores of its own; by default one, or all that
    a Ray cluster offers. ray: address of a cluster whose nodes measure instead of this machine.
    """

    resume: bool = True
    missing: bool = False
    workers: int | None = None
    ray: str | None = None
    target: str | None = None


class TuneOptions(ModelOptions, total=False):
    """Options of `tune`: the fields of TuneRequest."""

    resume: bool
    missing: bool
    workers: int | None
    ray: str | None
    target: str | None


class TuneReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a job did. trials: asked for; measured: run now, the others were on record."""

    database: str
    target: str
    machine: str
    effort: str
    workers: int
    trials: int
    measured: int
    seconds: float
    progress: TuneProgress
    points: tuple[TunedPoint, ...]
    notes: tuple[str, ...]


class ClusterReport(msgspec.Struct, frozen=True):
    """What the jobs for several kinds of machines did."""

    kinds: tuple[TuneReport, ...]


def tune_model(
    model: str | Path,
    *,
    progress: Progress | None = None,
    say: Say = lambda _: None,
    **options: Unpack[TuneOptions],
) -> TuneReport:
    """Tune the kernels of `model`; `options` are the fields of TuneRequest.

    model: as of `compile_model`, one that generates. say: is told what is done before there are
    trials. Raises SpecError for bad input. Interrupted, it leaves every finished trial in the
    database, and the next call like it goes on.
    """
    TuneRequest.check_options("tune", {"model": model, **options})
    if not can_fit():
        raise SpecError(f"tuning needs scikit-learn: {install('tune')}")
    request = TuneRequest(model=find_model(model), **options)
    with use_cache(request.cache):
        return run_tuning(request, progress, say)


def tune_kinds(
    model: str | Path,
    *,
    ray: str,
    progress: Progress | None = None,
    say: Say = lambda _: None,
    **options: Any,
) -> tuple[TuneReport, ...]:
    """Tune for each kind of machine that the Ray cluster at `ray` offers, one after the other.

    options: those of `tune_model` but `hardware`; a budget is each kind's. Every record names its
    machine class, so that one database serves all kinds.
    """
    jobs, reports = _import_ray_jobs(), []
    with jobs.connect(ray), TemporaryDirectory() as folder:
        for label, hardware in jobs.find_kinds().items():
            say(f"{label}: {hardware.cpu_model or hardware.arch}")
            file = Path(folder) / f"{label}.json"
            file.write_bytes(dump_hardware(hardware))
            asked = {**options, "ray": ray, "hardware": file}
            reports.append(tune_model(model, progress=progress, say=say, **asked))
    return tuple(reports)


def run_tuning(request: TuneRequest, progress: Progress | None, say: Say) -> TuneReport:
    """Run the job of `request`."""
    job = _prepare(request, say)
    database = TuningDatabase(job.database)
    start, notes, since = time.monotonic(), [database.warning], job.file.since
    used: list[Recorder] = []
    with job_on_file(job.path, job.file):
        allowance, left = Allowance(job.budget), job.budget
        if job.resumed:
            allowance = allow(job.budget, spent_seconds(database.trusted(), job.parts, since))
        board = Board(sum(len(part.items) for part in job.parts), allowance.seconds, progress)
        for part in job.parts:
            with ExitStack() as stack:
                say("building kernels")
                items = job.items(part, database)
                measurers, note = job.open_measurers(part, request, stack)
                recorders = [
                    Recorder(m, part.identity, database, since, allowance, board.add)
                    for m in measurers
                ]
                left -= run_items(items, recorders, job.search, left, board.finish)
            allowance = allowance.less(max(recorder.spent for recorder in recorders))
            notes.append(note)
            used += recorders
    notes.append(describe_disturbed(used))
    return TuneReport(
        database=str(job.database),
        target=job.scope.target.name,
        machine=job.parts[0].identity.machine(1).label,
        effort=request.effort,
        workers=len(recorders),
        trials=board.scores.trials,
        measured=sum(recorder.measured for recorder in used),
        seconds=time.monotonic() - start,
        progress=board.progress(),
        points=board.scores.points(),
        notes=tuple(dict.fromkeys(note for note in notes if note)),
    )


# ---- preparing ----


@dataclass(frozen=True, slots=True)
class TuningJob:
    """Everything that was read, checked and chosen before the first trial."""

    database: Path
    scope: SearchScope
    parts: tuple[TuningPart, ...]
    path: Path
    file: JobFile
    effort: str
    budget: float
    resumed: bool

    def items(self, part: TuningPart, database: TuningDatabase) -> tuple[Item, ...]:
        """Return what is searched of a part now: gates beside the products of the records so far.

        A compile that has these records asks for the same.
        """
        gates = [item for item in part.items if isinstance(item, GateTask)]
        if not gates:
            return part.items
        scope = self.scope
        products = next(p for p in self.parts if isinstance(p.items[0], SearchTask))
        known = Recorder(NoMachine(), products.identity, database, allowance=Allowance(0.0))
        found, _ = find_products(scope, known, database, self.effort, 0.0, stopped=True)
        rules = default_tables(scope.spec, scope.target, scope.plans, scope.hardware)
        return tuple(gate.beside((*found, *rules), scope.target) for gate in gates)

    def open_measurers(
        self, part: TuningPart, request: TuneRequest, stack: ExitStack
    ) -> tuple[Sequence[StoppableMeasurer], str | None]:
        """Return a measurer for each worker, which `stack` closes, and a note if they are few."""
        library = build_library(part.library, request.cache)
        threads = max(item.work.threads for item in part.items)
        if request.ray is not None:
            jobs = _import_ray_jobs()
            stack.enter_context(jobs.connect(request.ray))
            slots = jobs.count_slots(part.identity.machine(threads))
            count = min(slots, request.workers or slots, len(part.items))
            return jobs.open_measurers(library, part.identity, count), None
        cores, note = core_sets(self.scope.hardware, threads, request.workers or 1)
        pool = pool_bytes(self.scope.hardware)
        meters = (Meter(library.path, library.index, pool_bytes=pool, cpus=c) for c in cores)
        return [stack.enter_context(meter) for meter in meters], note

    def search(self, item: Item, measurer: Measurer, seconds: float) -> None:
        """Search one item; what it finds is in the records, also that no kernel is right."""
        with suppress(ScheduleError):
            if isinstance(item, InstanceTask):
                search_instances((item,), measurer, seconds)
                return
            effort = EFFORTS[self.effort]
            task = replace(item, seconds=(1 - effort.loss_share / 2) * seconds)
            end = measurer.now() + seconds
            found = effort.policy.search(task, measurer)
            find_alone(task, measurer, found.choices, max(0.0, end - measurer.now()))


def _import_ray_jobs() -> Any:
    try:
        from dovetail.compiler.tune import ray_jobs  # noqa: PLC0415 - an extra, and slow to load
    except ImportError:
        raise SpecError(f"Ray is not installed: {install('ray')}") from None
    return ray_jobs


def _prepare(request: TuneRequest, say: Say) -> TuningJob:
    _check_request(request)
    say(f"reading {name_model(request.model)}")
    hardware = read_hardware(request.hardware)
    (target,) = choose_targets((request.target,) if request.target else (), hardware)
    if not runs_on(target, hardware.arch, frozenset(hardware.isa_flags)):
        raise SpecError(f"the machine does not run {target.name}; tune for it where it does")
    spec, step = _read_spec(request, target), request.step
    effort, workload = EFFORTS[request.effort], read_workload(request.workload)
    database = Path(request.database or default_path(request.cache))
    # without bytes of memory: they may grow and shrink under a virtual machine or a container
    cores = msgspec.structs.replace(hardware, memory_bytes=0, memory_limit=None, nodes=())
    question = (request.effort, request.threads, target.name, cores, spec, workload, step)
    path = job_path(database, question)

    def plan(begun: JobFile | None) -> tuple[SearchScope, tuple[TuningPart, ...], JobFile]:
        if begun:
            plans = begun.plans
        else:
            say("choosing plans")
            plans = _choose_plans(request, hardware, spec, target, workload)
        counts = {plan.processes_of(phase) for plan in plans for phase in PHASES}
        payload = make_payload(spec, workload, *step, counts)
        scope = SearchScope(
            spec=spec,
            payload=payload,
            plans=plans,
            hardware=hardware,
            target=target,
            kernels=read_kernels(request, (target,), spec),
        )
        say("generating kernels")
        parts = plan_parts(scope, effort, request.cache)
        since = begun.since if begun else None if request.missing else datetime.now(UTC)
        return scope, parts, JobFile(since=since, plans=plans, name=job_name(parts, request.effort))

    begun = read_job(path) if request.resume and not request.missing else None
    scope, parts, file = plan(begun)
    if begun and begun.name != file.name:
        say("an interrupted job had other kernels; all is measured anew")
        begun = None
        scope, parts, file = plan(begun)
    elif begun:
        say("continuing the job that was interrupted")
    return TuningJob(
        database=database,
        scope=scope,
        parts=parts,
        path=path,
        file=file,
        effort=request.effort,
        budget=effort.seconds if request.budget is None else request.budget,
        resumed=begun is not None,
    )


def _read_spec(request: TuneRequest, target: Target) -> ModelSpec:
    """Return the model as a compile would store it."""
    source = open_model(request.model)
    spec = request.read_spec(target, source)
    quantised = request.quantise(spec, source, calibrate=calibrate_model)
    return spec if quantised is None else with_formats(spec, quantised.formats)


def _choose_plans(
    request: TuneRequest,
    hardware: HardwareSpec,
    spec: ModelSpec,
    target: Target,
    workload: WorkloadSpec,
) -> tuple[ServicePlan, ...]:
    trace = sample_trace(workload, request.max_step_sequences)
    measured = request.threads is None
    figures = figures_of(
        request.hardware, hardware, spec, target, trace, measured=measured, cache=request.cache
    )
    choice = choose_plans(hardware, spec, trace, request.threads, figures)
    return service_plans(contenders(choice, EFFORTS[request.effort].plan_slack))


def _check_request(request: TuneRequest) -> None:
    check_model_request(request, EFFORTS)
    if (Path(request.model) / "manifest.json").is_file():
        raise SpecError(f"{request.model} is an artifact; give the model that it was compiled from")
    if is_encoder(request.model):
        raise SpecError(
            f"{request.model} is an encoder; only models that generate are tuned, and a compile "
            "measures what an encoder needs"
        )
    if request.ray is not None:
        _import_ray_jobs()
    if request.workers is not None and request.workers < 1:
        raise SpecError(f"--workers must be at least 1, not {request.workers}")
    if request.budget is not None and not 0 < request.budget < 1e9:
        raise SpecError(f"a budget of {request.budget} seconds is not possible; give more than 0")
    if request.hardware != "auto" and request.ray is None:
        raise SpecError(
            "only this machine can be measured; omit --hardware, or give --ray a Ray cluster "
            "that has nodes of that kind"
        )
