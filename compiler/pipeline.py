"""The whole compile on one page: a model, a machine and a workload to an artifact directory.

Each step is one function of another module; this one names them, hands their results on and
writes the files.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from dovetail.codegen.catalog import device_kernels, model_kernels
from dovetail.codegen.isa.target import Target
from dovetail.codegen.library import BuiltLibrary, LibrarySpec, build_library
from dovetail.codegen.targets import DEVICE_TARGETS, TARGETS, get_target, runs_on
from dovetail.compiler.attention_search import attention_kernels
from dovetail.compiler.calibrate import figures_of
from dovetail.compiler.check_tape import verify_tape
from dovetail.compiler.checkpoint import open_checkpoint
from dovetail.compiler.choose import ChoiceRequest, Chosen, choose_schedules
from dovetail.compiler.config import parse_json_object, read_bounded
from dovetail.compiler.database import default_path
from dovetail.compiler.gain import Gain, measure_gain
from dovetail.compiler.model_spec import read_generation_defaults, read_model_spec
from dovetail.compiler.parts import SearchScope
from dovetail.compiler.payload import Payload, make_payload
from dovetail.compiler.replay import measure_choice
from dovetail.compiler.schedules import gemm_kernels, unique_tables
from dovetail.compiler.search.tables import EFFORTS as SEARCH_EFFORTS
from dovetail.compiler.service import (
    choose_plans,
    contenders,
    describe_choice,
    mark_tuned,
    sample_trace,
    service_plan,
    service_plans,
)
from dovetail.compiler.tapes import build_forward_tape, build_sample_tape
from dovetail.compiler.weights import pack_weights
from dovetail.compiler.workload import WorkloadSpec, read_workload
from dovetail.compiler.writer import ArtifactWriter, write_artifact
from dovetail.ir.artifact import ServicePlan
from dovetail.ir.errors import ArtifactError, SpecError
from dovetail.ir.model import ModelFile, ModelSpec, WeightChunks, WeightEntry
from dovetail.ir.place import place, serving_graph
from dovetail.ir.plans import PlanChoice
from dovetail.ir.schedule import ScheduleFile, ScheduleTable
from dovetail.ir.tape import Tape
from dovetail.ir.tuning import encode_record
from dovetail.runtime.tape import pick_tables
from dovetail.runtime.tokenizer import Tokenizer
from dovetail.topology.hardware import HardwareSpec, read_hardware
from dovetail.topology.replay import Trace

MODEL_NAME = "llm"
EFFORTS = ("none", *SEARCH_EFFORTS)
REPLAY_SECONDS = {"fast": 8.0, "full": 40.0}
REPLAY_SHARE = 0.2
"""How long plans are measured, and the share of a budget that this may take beside the search."""
MAX_STEP_TOKENS = 512
MAX_STEP_SEQUENCES = 64
TOKENIZER = "tokenizer.json"
COPIED_FILES = {
    TOKENIZER: 64 << 20,
    "tokenizer_config.json": 4 << 20,
    "chat_template.jinja": 1 << 20,
}
"""Files copied beside model.json where the model has them, and the bytes they may have."""

Progress = Callable[[str, int, int], None]
"""Called with (step, done, total); the steps' names are those of `STEPS`, in that order."""
STEPS = ("read", "schedules", "kernels", "weights", "write", "plans")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest:
    """What to compile. `hardware` is `auto` or a HardwareSpec file, `workload` a trace.

    targets: names of `dovetail.codegen.targets`, the best CPU target of the machine by default; an
    accelerator's adds its kernels. effort: `none` (schedules by rules), `fast` or `full` (and a
    search on this machine of at most `budget` seconds, by default the effort's own). database: of
    tuning records, by default the one in the build cache; what it holds is not measured again.
    threads: of both phases. deterministic: sums of float32 matrix products run in one order,
    however requests meet in a batch.
    """

    model: str | Path
    output: str | Path
    hardware: str | Path = "auto"
    workload: str | Path | None = None
    targets: tuple[str, ...] = ()
    effort: str = "fast"
    budget: float | None = None
    deterministic: bool = False
    database: str | Path | None = None
    threads: int | None = None
    max_context: int | None = None
    weight_dtype: str | None = None
    kv_dtype: str | None = None
    max_step_tokens: int = MAX_STEP_TOKENS
    max_step_sequences: int = MAX_STEP_SEQUENCES
    cache: Path | None = None


class CompileReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a compile did: `seconds` by step, `rows` of the schedules by where they come from.

    threads: of a decode step, in all processes. plan: both phases' in words. trials: the
    measurements behind the schedules. measured: how many of them were made now; the others come
    from the tuning database.
    """

    path: str
    family: str
    weight_bytes: int
    weight_dtype: str
    kv_dtype: str
    max_context: int
    targets: tuple[str, ...]
    kernels: int
    threads: int
    plan: str
    workload: str
    effort: str
    rows: dict[str, int]
    trials: int
    measured: int
    gain: Gain | None
    seconds: dict[str, float]
    notes: tuple[str, ...]

    def __fspath__(self) -> str:
        """Return the artifact's path, so that `dovetail.load(report)` opens it."""
        return self.path


def compile_model(
    model: str | Path, *, output: str | Path, progress: Progress | None = None, **options: object
) -> CompileReport:
    """Compile `model` into the artifact `output`; `options` are the fields of CompileRequest."""
    unknown = options.keys() - CompileRequest.__slots__
    if unknown:
        raise SpecError(f"compile has no option {', '.join(sorted(unknown))}")
    request = CompileRequest(model=model, output=output, **options)  # type: ignore[arg-type]
    return compile_artifact(request, progress=progress)


def compile_artifact(request: CompileRequest, *, progress: Progress | None = None) -> CompileReport:
    """Compile and write an artifact; it is there whole or not at all.

    Raises SpecError for bad input, ToolchainError without a C compiler, ArtifactError when it
    cannot be written or was interrupted.
    """
    try:
        return _compile(request, _Steps(progress))
    except KeyboardInterrupt:
        raise ArtifactError(f"interrupted; nothing was written to {request.output}") from None


def _compile(request: CompileRequest, steps: _Steps) -> CompileReport:
    with steps.run("read"):
        inputs = _read_inputs(request)
    with write_artifact(request.output) as artifact:
        with steps.run("schedules"):
            tuned = _make_schedules(inputs, steps)
        with steps.run("kernels"):
            libraries = _build_libraries(inputs, tuned.tables, steps)
        with steps.run("weights"):
            weights, chunks = _pack(inputs, artifact, steps)
        with steps.run("write"):
            tapes = _build_tapes(inputs, weights, tuned.tables)
            _write_model(artifact, inputs, weights, tapes)
            _write_libraries(artifact, libraries)
            artifact.write_json("hardware.json", inputs.hardware)
            _write_plans(artifact, inputs.choice)
            artifact.write_json(
                f"models/{MODEL_NAME}/schedules.json", ScheduleFile(tables=tuned.tables)
            )
            artifact.write_json(f"models/{MODEL_NAME}/weights/chunks.json", chunks)
            artifact.write_bytes("tuning.jsonl", b"".join(map(encode_record, tuned.records)))
        with steps.run("plans"):
            manifest = _manifest(inputs, chunks)
            choice = _choose(inputs, artifact, manifest)
            _write_plans(artifact, choice)
            artifact.commit(**manifest)
    plan = service_plan(choice)
    rows = Counter(row.source for table in tuned.tables for row in table.rows)
    return CompileReport(
        path=str(request.output),
        family=inputs.spec.family,
        weight_bytes=chunks.total_bytes,
        weight_dtype=inputs.spec.weight_dtype,
        kv_dtype=inputs.spec.kv_dtype,
        max_context=inputs.spec.max_context,
        targets=tuple(libraries),
        kernels=sum(len(library.index.kernels) for library in libraries.values()),
        threads=plan.processes * plan.decode.threads,
        plan=describe_choice(choice),
        workload=inputs.workload.source,
        effort=request.effort,
        rows=dict(sorted(rows.items())),
        trials=len(tuned.records),
        measured=tuned.measured,
        gain=_measure_gain(inputs, tuned),
        seconds=steps.seconds,
        notes=(*_notes(inputs), *tuned.notes),
    )


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Everything that was read, checked and chosen before the work begins."""

    request: CompileRequest
    directory: Path
    spec: ModelSpec
    hardware: HardwareSpec
    workload: WorkloadSpec
    targets: tuple[Target, ...]
    devices: tuple[Target, ...]
    trace: Trace
    choice: PlanChoice
    payload: Payload

    @property
    def plan(self) -> ServicePlan:
        """The plan that the contention model finds best, or that was asked for."""
        return service_plan(self.choice)

    @property
    def measurable(self) -> bool:
        """Whether plans are measured: on the machine they are for, as schedules are."""
        return any(_measurable(target, self.request) for target in self.targets)

    @property
    def searched(self) -> PlanChoice:
        """The pairs whose kernels are searched for."""
        effort = SEARCH_EFFORTS.get(self.request.effort)
        return contenders(self.choice, effort.plan_slack if effort else 1.0)

    @property
    def plans(self) -> tuple[ServicePlan, ...]:
        """The plans that may be chosen, the one simulated to be best first."""
        choice = self.choice if self.measurable else contenders(self.choice, 1.0)
        return service_plans(choice)

    @property
    def replay_seconds(self) -> float:
        """How long to measure plans: a share of the budget where one was given."""
        seconds, budget = REPLAY_SECONDS.get(self.request.effort, 0.0), self.request.budget
        return seconds if budget is None else min(seconds, REPLAY_SHARE * budget)


def _read_inputs(request: CompileRequest) -> _Inputs:
    _check_request(request)
    spec = read_model_spec(
        request.model,
        max_context=request.max_context,
        kv_dtype=request.kv_dtype,
        weight_dtype=request.weight_dtype,
    )
    hardware = read_hardware(request.hardware)
    workload = read_workload(request.workload)
    _check_tokenizer(Path(request.model) / TOKENIZER)
    cpus = tuple(name for name in request.targets if name not in DEVICE_TARGETS)
    trace = sample_trace(workload)
    targets = choose_targets(cpus, hardware)
    measured = request.threads is None and _measurable(targets[0], request)
    figures = figures_of(
        request.hardware, hardware, spec.weight_dtype, targets[0], measured, request.cache
    )
    choice = choose_plans(hardware, spec, trace, request.threads, figures)
    processes = {candidate.processes for candidate in choice.decode}
    step = (request.max_step_tokens, request.max_step_sequences)
    return _Inputs(
        request=request,
        directory=Path(request.model),
        spec=spec,
        hardware=hardware,
        workload=workload,
        targets=targets,
        devices=tuple(device for name, device in DEVICE_TARGETS.items() if name in request.targets),
        trace=trace,
        choice=choice,
        payload=make_payload(spec, workload, *step, processes),
    )


# ---- choosing ----


def choose_targets(names: tuple[str, ...], hardware: HardwareSpec) -> tuple[Target, ...]:
    """Return the CPU targets to build: those named, else the best one that the machine runs."""
    if names:
        targets = tuple(get_target(name) for name in dict.fromkeys(names))
        for target in targets:
            if target.device:
                raise SpecError(f"schedules are for CPUs, which {target.name} is none of")
        return targets
    features = frozenset(hardware.isa_flags)
    return (next(t for t in TARGETS.values() if runs_on(t, hardware.arch, features)),)


def _check_request(request: CompileRequest) -> None:
    if request.effort not in EFFORTS:
        raise SpecError(f"effort {request.effort!r} is unknown; choose one of {', '.join(EFFORTS)}")
    if request.budget is not None and not 0 <= request.budget < math.inf:
        raise SpecError(
            f"a budget of {request.budget} seconds is not possible; it may be 0 or more"
        )
    if not 1 <= request.max_step_sequences <= request.max_step_tokens <= 1 << 16:
        raise SpecError(
            f"a step of {request.max_step_tokens} tokens and {request.max_step_sequences} "
            "sequences is not possible; tokens may be up to 65536 and no fewer than sequences"
        )


def _check_tokenizer(path: Path) -> None:
    if path.is_file():
        parse_json_object(read_bounded(path, COPIED_FILES[TOKENIZER]), str(path))
        Tokenizer(path).check()


def _measurable(target: Target, request: CompileRequest) -> bool:
    """Tell whether schedules of a target can be timed: only on the machine they are planned for."""
    here = read_hardware("auto")
    runs = runs_on(target, here.arch, frozenset(here.isa_flags))
    return request.effort != "none" and request.hardware == "auto" and runs


# ---- the steps ----


def _build_libraries(
    inputs: _Inputs, tables: tuple[ScheduleTable, ...], steps: _Steps
) -> dict[str, BuiltLibrary]:
    libraries = {}
    for number, target in enumerate(inputs.targets):
        products = gemm_kernels(inputs.spec, target, tables)
        attention = attention_kernels(inputs.spec, target, tables)
        kernels = (*model_kernels(inputs.spec, target), *products, *attention)
        wanted = LibrarySpec(target=target, kernels=kernels)
        libraries[target.name] = build_library(wanted, inputs.request.cache)
        steps.advance(number + 1, len(inputs.targets) + len(inputs.devices))
    for device in inputs.devices:
        wanted = LibrarySpec(target=device, kernels=device_kernels(inputs.spec, device))
        libraries[device.name] = build_library(wanted, inputs.request.cache)
    return libraries


def _make_schedules(inputs: _Inputs, steps: _Steps) -> Chosen:
    request = inputs.request
    found = [
        choose_schedules(
            SearchScope(
                spec=inputs.spec,
                payload=inputs.payload,
                plans=service_plans(inputs.searched),
                others=inputs.plans,
                hardware=inputs.hardware,
                target=target,
            ),
            ChoiceRequest(
                effort=request.effort,
                database=Path(request.database or default_path(request.cache)),
                measurable=_measurable(target, request),
                budget=request.budget,
                fixed_order=request.deterministic,
                cache=request.cache,
            ),
            steps.advance,
        )
        for target in inputs.targets
    ]
    return Chosen(
        tables=tuple(table for chosen in found for table in chosen.tables),
        records=tuple(record for chosen in found for record in chosen.records),
        measured=sum(chosen.measured for chosen in found),
        notes=tuple(dict.fromkeys(note for chosen in found for note in chosen.notes)),
    )


def _measure_gain(inputs: _Inputs, tuned: Chosen) -> Gain | None:
    """Return what the search won for the plan that it began with."""
    plan = inputs.plan
    picked = (
        pick_tables(tuned.tables, target.name, phase, threads)
        for target in inputs.targets
        for phase, threads in (("prefill", plan.prefill.threads), ("decode", plan.decode.threads))
    )
    tables = [table for tables in picked for found in tables.values() for table in found]
    uses = Payload(inputs.payload.of(plan.processes))
    return measure_gain(uses, unique_tables(tables), tuned.records)


def _pack(
    inputs: _Inputs, artifact: ArtifactWriter, steps: _Steps
) -> tuple[tuple[WeightEntry, ...], WeightChunks]:
    name = f"models/{MODEL_NAME}/weights/weights.bin"
    checkpoint = open_checkpoint(inputs.directory)
    packed = pack_weights(inputs.spec, checkpoint, artifact.weights_path(name), steps.advance)
    artifact.add_weights(name)
    return packed


def _build_tapes(
    inputs: _Inputs, weights: tuple[WeightEntry, ...], tables: tuple[ScheduleTable, ...]
) -> tuple[Tape, ...]:
    tokens, sequences = inputs.request.max_step_tokens, inputs.request.max_step_sequences
    tapes = (
        build_forward_tape(inputs.spec, weights, tokens, sequences),
        build_sample_tape(inputs.spec, sequences),
    )
    for tape in tapes:
        for target in inputs.targets:
            of_target = [table for table in tables if table.target == target.name]
            verify_tape(tape, weights, of_target)
    return tapes


# ---- writing ----


def _write_model(
    artifact: ArtifactWriter,
    inputs: _Inputs,
    weights: tuple[WeightEntry, ...],
    tapes: tuple[Tape, ...],
) -> None:
    folder = f"models/{MODEL_NAME}"
    for name, limit in COPIED_FILES.items():
        if (source := inputs.directory / name).is_file():
            data = read_bounded(source, limit)
            if name.endswith(".json"):
                parse_json_object(data, str(source))
            artifact.write_bytes(f"{folder}/{name}", data)
    model = ModelFile(
        name=MODEL_NAME,
        spec=inputs.spec,
        weights=weights,
        max_step_tokens=inputs.request.max_step_tokens,
        max_step_sequences=inputs.request.max_step_sequences,
        tokenizer=TOKENIZER if f"{folder}/{TOKENIZER}" in artifact.files else None,
        generation=read_generation_defaults(inputs.directory),
    )
    artifact.write_json(f"{folder}/model.json", model)
    for tape in tapes:
        artifact.write_json(f"{folder}/tapes/{tape.name}.json", tape)


def _write_libraries(artifact: ArtifactWriter, libraries: dict[str, BuiltLibrary]) -> None:
    for target, library in libraries.items():
        folder, index = f"kernels/{target}", library.index
        artifact.write_bytes(f"{folder}/{index.library}", library.path.read_bytes())
        artifact.write_bytes(f"{folder}/{index.source}", library.source.encode())
        artifact.write_json(f"{folder}/index.json", index)


def _write_plans(artifact: ArtifactWriter, choice: PlanChoice) -> None:
    plan = service_plan(choice)
    artifact.write_json("plans/service.json", plan)
    artifact.write_json("plans/choice.json", choice)
    artifact.write_json(
        "graph/serve.json", place(serving_graph(MODEL_NAME), {MODEL_NAME: plan}).file
    )


def _choose(inputs: _Inputs, artifact: ArtifactWriter, manifest: dict[str, Any]) -> PlanChoice:
    """Return the plans measured with the kernels of the artifact, where this is their machine."""
    choice, seconds = inputs.choice, inputs.replay_seconds
    if len(choice.pairs) < 2 or seconds <= 0 or not inputs.measurable:
        return choice
    tuned = mark_tuned(choice, inputs.searched.pairs)
    where = artifact.seal(**manifest)
    return measure_choice(tuned, where, inputs.spec, inputs.trace, seconds)


def _manifest(inputs: _Inputs, chunks: WeightChunks) -> dict[str, Any]:
    content = msgspec.json.encode(inputs.spec) + msgspec.json.encode(chunks)
    return {
        "producer": f"dovetail {_version()}",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model_fingerprint": hashlib.sha256(content).hexdigest(),
        "workload_fingerprint": inputs.workload.fingerprint,
        "targets": tuple(target.name for target in (*inputs.targets, *inputs.devices)),
        "models": (MODEL_NAME,),
        "effort": inputs.request.effort,
    }


def _notes(inputs: _Inputs) -> tuple[str, ...]:
    if (inputs.directory / TOKENIZER).is_file():
        return ()
    return (f"{inputs.directory} has no {TOKENIZER}: prompts must be token ids",)


def _version() -> str:
    try:
        return version("dovetail")
    except PackageNotFoundError:
        return "from source"


@dataclass(slots=True)
class _Steps:
    """Times the steps and passes their progress on."""

    progress: Progress | None
    seconds: dict[str, float] = field(default_factory=dict)
    current: str = ""

    @contextmanager
    def run(self, name: str) -> Iterator[None]:
        """Run one step of STEPS."""
        assert name == STEPS[len(self.seconds)], name
        self.current = name
        self.advance(0, 1)
        start = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - start
        self.advance(1, 1)

    def advance(self, done: int, total: int) -> None:
        """Report progress inside the current step."""
        if self.progress:
            self.progress(self.current, done, total)
