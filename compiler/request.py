"""What a compile is asked for, and all that it reads and decides before the work begins.

In: a CompileRequest. Out: `Inputs`: the model, the machine, the workload, the targets to build and
the plans that may be chosen. Wrong input ends here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypedDict, get_type_hints

from msgspec.structs import replace

from dovetail.codegen.isa.target import Target
from dovetail.codegen.targets import DEVICE_TARGETS, get_target, runs_on, target_for
from dovetail.codegen.user_file import read_around
from dovetail.compiler.formats.quantising import Advance, Calibration, Quantised, choose_formats
from dovetail.compiler.formats.weight_dtype import AUTO, QUANTISING, describe_weight_dtype
from dovetail.compiler.formats.weight_formats import matrices, with_formats
from dovetail.compiler.models.adapters import Stacked, adapter_sources, read_adapters
from dovetail.compiler.models.source import (
    CHAT_TEMPLATE,
    PROCESSOR_TEMPLATE,
    SPECIAL_TOKENS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    ModelDirectory,
    ModelSource,
    open_model,
    read_json,
)
from dovetail.compiler.models.spec import read_generation_defaults, read_model_spec
from dovetail.compiler.plan.calibrate import figures_of
from dovetail.compiler.plan.service import (
    alone,
    asked_choice,
    choose_plans,
    contenders,
    sample_trace,
    service_plan,
    service_plans,
    unmeasured,
)
from dovetail.compiler.rules.payload import Payload, make_payload
from dovetail.compiler.rules.workload import WorkloadSpec, read_workload
from dovetail.compiler.search.parts import SearchScope
from dovetail.compiler.search.tables import EFFORTS as SEARCH_EFFORTS
from dovetail.compiler.search.user_kernels import UserKernel, check_in_models, read_user_kernels
from dovetail.compiler.write.memory_check import check_fits
from dovetail.ir.artifact import PHASES, ServicePlan
from dovetail.ir.encoder import Spec
from dovetail.ir.errors import SpecError
from dovetail.ir.model import ModelSpec
from dovetail.ir.options import check_names, check_types
from dovetail.ir.plans import PlanChoice
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import Workflow
from dovetail.runtime.artifact import ModelPart, Part
from dovetail.runtime.text.tokenizer import Tokenizer
from dovetail.topology.configuration import allows_processes
from dovetail.topology.hardware import HardwareSpec, read_hardware
from dovetail.topology.replay import Trace

GivenWorkflow: TypeAlias = str | Path | RAGraph | Workflow
"""A workflow to compile: a graph, or a file (*.py, *.json, *.yaml) that makes or holds one."""
EFFORTS = ("none", *SEARCH_EFFORTS)
REPLAY_SECONDS = {"fast": 8.0, "full": 40.0}
REPLAY_SHARE = 0.2
"""How long plans are measured, and the share of a budget that this may take from the search."""
COMPARE_SECONDS = {"fast": 8.0, "full": 30.0}
COMPARE_SHARE = 0.1
"""As much of what the search found, end to end beside the rules' schedules."""
MAX_STEP_TOKENS = 512
MAX_STEP_SEQUENCES = 64
MODEL_NAME = "llm"
COPIED_FILES = (
    *(TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS),
    *(CHAT_TEMPLATE, PROCESSOR_TEMPLATE),
)
"""Files copied beside model.json where the model has them."""


class ModelOptions(TypedDict, total=False):
    """Options of `compile` and of `tune`: the fields of ModelRequest."""

    hardware: str | Path
    workload: str | Path | None
    effort: str
    budget: float | None
    database: str | Path | None
    threads: int | None
    max_context: int | None
    weight_dtype: str | None
    calibrate: str | Path | None
    kv_dtype: str | None
    max_step_tokens: int
    max_step_sequences: int
    cache: Path | None
    kernels: Sequence[str]
    prelude: Sequence[str | Path]
    include: Sequence[str | Path]


class CompileOptions(ModelOptions, total=False):
    """Options of `compile`: the fields of CompileRequest."""

    name: str | None
    beside: Mapping[str, str | Path]
    adapters: Mapping[str, str | Path]
    targets: tuple[str, ...]
    plan: ServicePlan | None
    workflows: Sequence[GivenWorkflow]
    index: str | Path | Sequence[str | Path] | None
    mix: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """What compiling and tuning are both asked: a model, a machine, and how much to measure.

    hardware: `auto` or a HardwareSpec file. workload: a trace. effort: `none` (schedules by rules),
    `fast` or `full` (and a search on this machine). budget: seconds to measure in all, by default
    the effort's own. database: of tuning records, by default the one in the build cache. threads:
    of both phases. weight_dtype: a weight format, or `auto` (`resolve_weight_dtype`). calibrate: a
    text file over which the inputs of products are measured where weights are quantised here.
    kernels: `OP=FILE` each, kernels of the user to be compared with ours (`user_kernels.py`), with
    texts before those that are C (prelude) and folders of what they include.
    """

    model: str | Path
    hardware: str | Path = "auto"
    workload: str | Path | None = None
    effort: str = "fast"
    budget: float | None = None
    database: str | Path | None = None
    threads: int | None = None
    max_context: int | None = None
    weight_dtype: str | None = AUTO
    calibrate: str | Path | None = None
    kv_dtype: str | None = None
    max_step_tokens: int = MAX_STEP_TOKENS
    max_step_sequences: int = MAX_STEP_SEQUENCES
    cache: Path | None = None
    kernels: Sequence[str] = ()
    prelude: Sequence[str | Path] = ()
    include: Sequence[str | Path] = ()

    @classmethod
    def check_options(cls, verb: str, options: Mapping[str, object]) -> None:
        """Raise SpecError for a name that is no field, or a value of another type than its."""
        check_names(verb, options, [field.name for field in fields(cls)], SpecError)
        check_types(options, get_type_hints(cls), SpecError)

    @property
    def step(self) -> tuple[int, int]:
        """Most tokens and sequences of a step."""
        return self.max_step_tokens, self.max_step_sequences

    def read_spec(self, target: Target, source: ModelSource | None = None) -> ModelSpec:
        """Read the model, or `source`, which is the model opened, to be stored as `target` likes.

        Raises SpecError where it is none.
        """
        return read_model_spec(
            source or self.model,
            max_context=self.max_context,
            kv_dtype=self.kv_dtype,
            weight_dtype=self.weight_dtype,
            target=target,
        )

    def quantise(
        self,
        spec: ModelSpec,
        source: ModelSource,
        advance: Advance = lambda *_: None,
        calibrate: Calibrate | None = None,
    ) -> Quantised | None:
        """Return the formats of matrices that are to be quantised, None where none is."""
        if self.weight_dtype not in QUANTISING:
            return None
        found = None
        if self.calibrate is not None:
            assert calibrate is not None, "a text was given, but nothing that runs the model on it"
            found = calibrate(self, spec, source, advance)
        return choose_formats(matrices(spec), source.checkpoint(), spec, found, advance)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest(ModelRequest):
    """What to compile, with a budget for the schedules of every target and plans together.

    targets: names of `dovetail.codegen.targets`, the best CPU target of the machine by default; an
    accelerator's adds its kernels. plan: to serve with; no other is looked for. name: of the model
    in the artifact, by default `llm` or `embedder`. beside: encoders for the same artifact, by
    name; they take `hardware`, `targets`, `effort`, `threads` and `weight_dtype` from here, and
    their own longest texts. adapters: folders of PEFT by the names that requests ask for.
    workflows: graphs, and files of them (`stored.py`). index: folders that these search, one or
    several, which become part of the artifact. mix: of requests that the CPU is divided for,
    `CHAT:RAG:EMBED`.
    """

    output: str | Path
    name: str | None = None
    beside: Mapping[str, str | Path] = field(default_factory=dict)
    adapters: Mapping[str, str | Path] = field(default_factory=dict)
    targets: tuple[str, ...] = ()
    plan: ServicePlan | None = None
    workflows: Sequence[GivenWorkflow] = ()
    index: str | Path | Sequence[str | Path] | None = None
    mix: str | None = None

    @property
    def command(self) -> tuple[str, ...]:
        """The words of the command that makes the artifact again, as far as files hold its inputs.

        Graphs are there by their names: the command knows the five, and refuses what only Python
        can give, rather than leave it out. Paths are absolute.
        """
        given: list[tuple[str, object]] = [
            (name, getattr(self, name)) for name in WORDS if getattr(self, name) != DEFAULTS[name]
        ]
        given += [("model", f"{name}={Path(path).resolve()}") for name, path in self.beside.items()]
        given += [("adapter", f"{n}={Path(path).resolve()}") for n, path in self.adapters.items()]
        given += [("target", target) for target in self.targets]
        given += [("kernel", _absolute(kernel)) for kernel in self.kernels]
        given += [("prelude", Path(path).resolve()) for path in self.prelude]
        given += [("include", Path(path).resolve()) for path in self.include]
        given += [
            ("workflow", Path(flow).resolve() if isinstance(flow, str | Path) else flow.name)
            for flow in self.workflows
        ]
        given += [("index", path.resolve()) for path in self.indexes]
        words = [f"--{name.replace('_', '-')}={value}" for name, value in given]
        output = Path(self.output).resolve()
        return ("dovetail", "compile", str(Path(self.model).resolve()), "-o", str(output), *words)

    @property
    def indexes(self) -> tuple[Path, ...]:
        """The folders of `index`."""
        given = self.index
        many = () if given is None else (given,) if isinstance(given, str | Path) else given
        return tuple(map(Path, many))


def _absolute(kernel: str) -> str:
    op, equals, file = kernel.rpartition("=")
    return f"{op}{equals}{Path(file).resolve()}"


WORDS = (
    *("hardware", "workload", "effort", "budget", "threads"),
    *("max_context", "weight_dtype", "calibrate", "kv_dtype", "mix"),
)
"""Fields of a request that are options of the command, too."""
DEFAULTS = {field.name: field.default for field in fields(CompileRequest)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadModel:
    """What was read, checked and chosen of any model before the work begins.

    source: of the tokenizer, and of the checkpoint, unless the weights are `packed` already.
    """

    request: CompileRequest
    name: str
    source: ModelSource
    spec: Spec
    hardware: HardwareSpec
    targets: tuple[Target, ...]
    devices: tuple[Target, ...]
    packed: Part | None = None
    quantised: Quantised | None = None
    user_kernels: tuple[UserKernel, ...] = ()
    remarks: tuple[str, ...] = ()
    reads: ClassVar[str] = "prompts"
    """What a tokenizer makes token ids of."""

    @property
    def plan_seconds(self) -> float:
        """How long plans are measured, which the search of schedules cannot have of a budget."""
        return 0.0

    @property
    def search_seconds(self) -> float:
        """How long to search the schedules of one target: an equal share of what is left."""
        effort, budget = SEARCH_EFFORTS.get(self.request.effort), self.request.budget
        if effort is None:
            return 0.0
        whole = effort.seconds if budget is None else budget - self.plan_seconds
        return whole / max(1, sum(can_measure(target, self.request) for target in self.targets))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of this model."""
        notes: tuple[str, ...] = ()
        if self.packed is None and self.request.weight_dtype in (None, AUTO):
            chosen, stored = self.spec.weight_dtype, self.spec.checkpoint_dtype
            notes = (describe_weight_dtype(self.name, chosen, stored, self.targets[0]),)
        if self.quantised is not None:
            notes += self.quantised.notes
        notes += self.remarks
        if self.source.file(TOKENIZER) is not None:
            return notes
        return (f"{self.source.path} has no {TOKENIZER}: {self.reads} must be token ids", *notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs(ReadModel):
    """Of a model that generates."""

    spec: ModelSpec
    workload: WorkloadSpec
    trace: Trace
    choice: PlanChoice
    payload: Payload
    packed: ModelPart | None = None
    adapters: Mapping[str, Stacked] = field(default_factory=dict)

    @property
    def generation(self) -> dict[str, Any]:
        """Sampling options of the checkpoint."""
        if self.packed is not None:
            return dict(self.packed.file.generation)
        return read_generation_defaults(self.source)

    @property
    def plan(self) -> ServicePlan:
        """The plan that serves where nothing is measured, or that was asked for."""
        return service_plan(self.choice)

    @property
    def measurable(self) -> bool:
        """Whether plans are measured: on the machine they are for, as schedules are."""
        return any(can_measure(target, self.request) for target in self.targets)

    @property
    def searched(self) -> PlanChoice:
        """The pairs whose kernels are searched for."""
        effort = SEARCH_EFFORTS.get(self.request.effort)
        return contenders(self.choice, effort.plan_slack) if effort else unmeasured(self.choice)

    @property
    def plans(self) -> tuple[ServicePlan, ...]:
        """The plans that may be chosen, the one that serves unmeasured first; one has one process.

        The artifact's tape is that of a whole model, and serves where CPUs are gone at load.
        """
        plans = service_plans(self.choice if self.measurable else unmeasured(self.choice))
        whole = any(plan.most_processes == 1 for plan in plans)
        return plans if whole else (*plans, alone(plans[0]))

    @property
    def replay_seconds(self) -> float:
        """How long to measure plans, if there are several: a share of a budget that was given."""
        if len(self.choice.pairs) < 2 or not self.measurable:
            return 0.0
        return self._seconds(REPLAY_SECONDS, REPLAY_SHARE)

    @property
    def compare_seconds(self) -> float:
        """How long to measure end to end what the search found, where this is the machine."""
        return self._seconds(COMPARE_SECONDS, COMPARE_SHARE) if self.measurable else 0.0

    def _seconds(self, by_effort: Mapping[str, float], share: float) -> float:
        seconds, budget = by_effort.get(self.request.effort, 0.0), self.request.budget
        return seconds if budget is None else min(seconds, share * budget)

    @property
    def plan_seconds(self) -> float:
        """How long plans are measured, alone and with what the search found."""
        return self.replay_seconds + self.compare_seconds

    def scope(self, target: Target) -> SearchScope:
        """Return what schedules are searched for."""
        return SearchScope(
            spec=self.spec,
            payload=self.payload,
            plans=service_plans(self.searched),
            others=self.plans,
            hardware=self.hardware,
            target=target,
            kernels=self.user_kernels,
        )


Calibrate = Callable[[ModelRequest, ModelSpec, ModelSource, Advance], Calibration]
"""Runs a model on the text that its request names, and finds how strong inputs are there."""


def read_inputs(
    request: CompileRequest,
    packed: ModelPart | None = None,
    advance: Advance = lambda *_: None,
    calibrate: Calibrate | None = None,
) -> Inputs:
    """Read and check everything; raises SpecError for wrong input, as `check_fits` for a large one.

    packed: the model in an artifact, in the place of the request's. advance: told how far measuring
    is where weights are to be quantised. calibrate: runs the model where a text is given.
    """
    check_request(request)
    source = open_model(request.model) if packed is None else ModelDirectory(packed.folder)
    hardware, targets, devices = read_machine(request)
    spec = request.read_spec(targets[0], source) if packed is None else packed.file.spec
    adapters = read_adapters(request.adapters, source, spec) if request.adapters else {}
    if adapters:
        spec = replace(spec, adapters=tuple(request.adapters))
    beside = adapters.values() if packed is None else packed.file.weights
    user_kernels = read_kernels(request, targets, spec)
    more, gated = tuple(adapter_sources(beside)), any(kernel.gates for kernel in user_kernels)
    check_fits(request.model, spec, hardware, request.step, more, gated=gated)
    workload = read_workload(request.workload)
    check_tokenizer(source)
    quantised = None if packed is not None else request.quantise(spec, source, advance, calibrate)
    if quantised is not None:
        spec = with_formats(spec, quantised.formats)
    trace = sample_trace(workload, request.max_step_sequences)
    searched = request.threads is None and request.plan is None
    measured = searched and can_measure(targets[0], request)
    figures = figures_of(
        request.hardware, hardware, spec, targets[0], trace, measured=measured, cache=request.cache
    )
    if request.plan is None:
        choice = choose_plans(hardware, spec, trace, request.threads, figures)
    else:
        for phase in PHASES:
            if not allows_processes(spec, processes := request.plan.processes_of(phase)):
                raise SpecError(
                    f"the model cannot be split evenly over {processes} processes; use a divisor "
                    f"of its {spec.n_kv_heads} KV heads"
                )
        choice = asked_choice(request.plan, hardware)
    return Inputs(
        request=request,
        name=request.name or MODEL_NAME,
        source=source,
        spec=spec,
        hardware=hardware,
        workload=workload,
        targets=targets,
        devices=devices,
        trace=trace,
        choice=choice,
        payload=make_payload(spec, workload, *request.step, choice.processes),
        packed=packed,
        adapters=adapters,
        quantised=quantised,
        user_kernels=user_kernels,
    )


def read_kernels(
    request: ModelRequest, targets: Sequence[Target], spec: ModelSpec
) -> tuple[UserKernel, ...]:
    """Return the user's kernels; SpecError where they cannot be measured before they serve."""
    kernels = read_user_kernels(request.kernels, read_around(request.prelude, request.include))
    check_in_models(kernels, spec)
    fitted = [kernel.file for kernel in kernels if kernel.op]
    if fitted and not all(can_measure(target, request) for target in targets):
        raise SpecError(
            f"{', '.join(fitted)} must be measured before it serves: compile for this machine, "
            "with --effort fast or full"
        )
    return kernels


def choose_targets(names: tuple[str, ...], hardware: HardwareSpec) -> tuple[Target, ...]:
    """Return the CPU targets to build: those named, else the forced or best one of the machine."""
    if names:
        targets = tuple(get_target(name) for name in dict.fromkeys(names))
        for target in targets:
            if target.device:
                raise SpecError(f"schedules are for CPUs; {target.name} is not a CPU target")
        return targets
    return (target_for(hardware.arch, frozenset(hardware.isa_flags)),)


def read_machine(
    request: CompileRequest,
) -> tuple[HardwareSpec, tuple[Target, ...], tuple[Target, ...]]:
    """Return the machine that a request names, the CPU targets to build, and the accelerators."""
    hardware = read_hardware(request.hardware)
    devices = tuple(t for name, t in DEVICE_TARGETS.items() if name in request.targets)
    cpus = tuple(name for name in request.targets if name not in DEVICE_TARGETS)
    return hardware, choose_targets(cpus, hardware), devices


def check_request(request: CompileRequest) -> None:
    """Raise SpecError for options that are out of their ranges or exclude each other."""
    for name in (*request.beside, *([request.name] if request.name is not None else [])):
        check_name("a model", name)
    check_model_request(request, EFFORTS)
    if request.plan is not None and request.threads is not None:
        raise SpecError("a plan contains the number of threads; give either plan or threads")
    if request.budget is not None and not 0 <= request.budget < math.inf:
        raise SpecError(
            f"a budget of {request.budget} seconds is not possible; it may be 0 or more"
        )


def check_model_request(request: ModelRequest, efforts: Collection[str]) -> None:
    """Raise SpecError for options of compiling and tuning that are out of their ranges."""
    if request.effort not in efforts:
        raise SpecError(f"effort {request.effort!r} is unknown; choose one of {', '.join(efforts)}")
    if not 1 <= request.max_step_sequences <= request.max_step_tokens <= 1 << 16:
        raise SpecError(
            f"a step of {request.max_step_tokens} tokens and {request.max_step_sequences} "
            "sequences is not possible; tokens may be up to 65536 and no fewer than sequences"
        )
    if request.calibrate is not None and request.weight_dtype not in QUANTISING:
        raise SpecError(f"--calibrate needs --weight-dtype {' or '.join(QUANTISING)}")


def check_name(what: str, name: str) -> None:
    """Raise SpecError for a name that is no plain part of a path."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name):
        raise SpecError(f"{what} cannot be called {name!r}; use letters, digits, - and _")


def check_tokenizer(source: ModelSource) -> None:
    """Raise an error for a tokenizer.json that is there and cannot be read."""
    if read_json(source, TOKENIZER) is not None:
        Tokenizer(source.path / TOKENIZER, source.file(TOKENIZER)).check()


def can_measure(target: Target, request: ModelRequest) -> bool:
    """Tell whether schedules of a target can be timed: only on the machine they are planned for."""
    return request.effort != "none" and is_here(target, request)


def is_here(target: Target, request: ModelRequest) -> bool:
    """Tell whether the machine that is planned for is this one, and runs a target."""
    if request.hardware != "auto":
        return False
    here = read_hardware("auto")
    return runs_on(target, here.arch, frozenset(here.isa_flags))
