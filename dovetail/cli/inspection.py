"""What `dovetail inspect` shows: all that the files of an artifact decide, and tables of it.

In: an artifact directory, of any machine. Out: an `Inspection`, and its lines on a console.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import msgspec
from rich.console import RenderableType
from rich.table import Table

from dovetail.cli.inspect_memory import division_tables
from dovetail.cli.inspect_parts import (
    describe_index,
    encoder_facts,
    transformation_table,
    workflow_table,
)
from dovetail.cli.inspect_plans import graph_table, plan_tables, show_cpus
from dovetail.cli.profile_table import profile_table
from dovetail.cli.report import facts_table, make_table, show_bytes, show_count
from dovetail.ir.artifact import MACHINE, SERVE, KernelIndex, Manifest, PhasePlan, ServicePlan
from dovetail.ir.encoder import EncoderFile
from dovetail.ir.graph import ExecutionGraph, GraphFile, GraphNode
from dovetail.ir.index_file import IndexManifest
from dovetail.ir.model import DELTA, GATES, KV_BLOCK, SCAN, ModelFile, ModelSpec, WeightEntry
from dovetail.ir.place import find_nodes, read_plan
from dovetail.ir.plans import CHOICE, PlanChoice
from dovetail.ir.profile import ProfileFile
from dovetail.ir.quantisation import QuantisationFile, QuantisedWeight
from dovetail.ir.schedule import SCHEDULE_VALUES, Row, ScheduleTable
from dovetail.ir.schedule import ScheduleFile as Schedules
from dovetail.ir.tape import Tape
from dovetail.ir.template import WorkflowFile, raise_file
from dovetail.runtime.artifact import ArtifactReader, read_serve
from dovetail.runtime.flows.gpu_memory import MemoryDivision
from dovetail.runtime.flows.stored_workflows import models_by_kind
from dovetail.runtime.native.encoder import device_bytes
from dovetail.runtime.native.forward import kv_block_bytes
from dovetail.runtime.native.step import step_bytes
from dovetail.runtime.schedule.cost_tables import kept_profiles
from dovetail.runtime.schedule.kv_pool import blocks_for
from dovetail.topology.values import HardwareSpec


class TapeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One tape: kernel calls, barriers among them, and bytes of its activation arena."""

    name: str
    entries: int
    barriers: int
    arena_bytes: int
    max_tokens: int
    max_sequences: int


class PartInspection(msgspec.Struct, frozen=True, kw_only=True):
    """What every kind of model has."""

    schedules: tuple[ScheduleTable, ...]
    tapes: tuple[TapeSummary, ...]
    quantisation: QuantisationFile | None = None


class ModelInspection(PartInspection, frozen=True, kw_only=True):
    """One model of an artifact."""

    file: ModelFile


class DeviceRoom(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that an encoder takes on an accelerator, beside what libraries and the driver take."""

    weights: int
    activations: int


class EncoderInspection(PartInspection, frozen=True, kw_only=True):
    """One text encoder of an artifact."""

    file: EncoderFile
    room: DeviceRoom


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an artifact decides; sizes in bytes, times in seconds.

    places: by workflow and node, the nodes of the graph that serves as which it runs.
    """

    path: str
    manifest: Manifest
    hardware: HardwareSpec | None
    plan: ServicePlan
    choice: PlanChoice | None
    graphs: dict[str, GraphFile]
    workflows: tuple[WorkflowFile, ...]
    places: dict[str, dict[str, tuple[GraphNode, ...]]]
    indexes: dict[str, IndexManifest]
    models: tuple[ModelInspection, ...]
    encoders: tuple[EncoderInspection, ...]
    kernels: tuple[KernelIndex, ...]
    gpu_memory: MemoryDivision | None = None
    devices: tuple[ProfileFile, ...] = ()

    @property
    def parts(self) -> tuple[ModelInspection | EncoderInspection, ...]:
        """All models, those that generate first."""
        return (*self.models, *self.encoders)


def inspect_artifact(path: Path) -> Inspection:
    """Read what `path` decides; ArtifactError where it is no artifact or a file is damaged."""
    reader = ArtifactReader(path)
    stored = set(reader.manifest.workflows)
    models = (*reader.manifest.models, *reader.manifest.encoders)
    serve = read_serve(reader, models)
    workflows = [raise_file(reader.graph(f"graph/{name}.json")) for name in sorted(stored)]
    encoders = tuple(_inspect_encoder(reader, name) for name in reader.manifest.encoders)
    specs = {encoder.file.name: encoder.file.spec for encoder in encoders}
    able = models_by_kind(reader.manifest.models, specs)
    return Inspection(
        path=str(path),
        manifest=reader.manifest,
        hardware=reader.find_json(MACHINE, HardwareSpec),
        plan=read_plan(serve, models[0]),
        choice=reader.find_json(CHOICE, PlanChoice),
        graphs={PurePosixPath(SERVE).stem: serve.file},
        workflows=tuple(workflows),
        places={file.name: _find_places(file, serve, able) for file in workflows},
        indexes={
            name: reader.json(f"indexes/{name}/manifest.json", IndexManifest)
            for name in reader.manifest.indexes
        },
        models=tuple(
            ModelInspection(
                file=reader.json(f"models/{name}/model.json", ModelFile),
                **_inspect_files(reader, name),
            )
            for name in reader.manifest.models
        ),
        encoders=encoders,
        kernels=tuple(
            reader.json(f"kernels/{target}/index.json", KernelIndex)
            for target in reader.manifest.targets
        ),
        devices=kept_profiles(reader.manifest.model_fingerprint),
    )


def _find_places(
    file: WorkflowFile, serve: ExecutionGraph, able: Mapping[str, Sequence[str]]
) -> dict[str, tuple[GraphNode, ...]]:
    """Return as which nodes of `serve` each node of a workflow runs; able: models by kind."""
    found = {}
    for node in file.nodes:
        kind = str(node.__struct_config__.tag)
        model = getattr(node, "model", None) or next(iter(able.get(kind, ())), None)
        found[str(node.name)] = find_nodes(serve, kind, model)
    return found


def _inspect_encoder(reader: ArtifactReader, name: str) -> EncoderInspection:
    file = reader.json(f"models/{name}/encoder.json", EncoderFile)
    tape = reader.json(f"models/{name}/tapes/encode.json", Tape)
    weights, activations = device_bytes(file, tape)
    room = DeviceRoom(weights=weights, activations=activations)
    return EncoderInspection(file=file, room=room, **_inspect_files(reader, name))


def _inspect_files(reader: ArtifactReader, name: str) -> dict[str, Any]:
    """Return what every kind of model has."""
    folder = PurePosixPath("models", name)
    tapes = [f for f in sorted(reader.manifest.files) if f.startswith(f"{folder}/tapes/")]
    errors = f"{folder}/quantisation.json"
    has_errors = errors in reader.manifest.files
    return {
        "quantisation": reader.json(errors, QuantisationFile) if has_errors else None,
        "schedules": reader.json(f"{folder}/schedules.json", Schedules).tables,
        "tapes": tuple(_summarise_tape(reader.json(f, Tape)) for f in tapes),
    }


def _summarise_tape(tape: Tape) -> TapeSummary:
    return TapeSummary(
        name=tape.name,
        entries=len(tape.entries),
        barriers=sum(entry.barrier for entry in tape.entries),
        arena_bytes=tape.arena_bytes,
        max_tokens=tape.max_tokens,
        max_sequences=tape.max_sequences,
    )


class Section(NamedTuple):
    """A part of what is shown; name is unique, and fit for a link."""

    name: str
    title: str
    parts: tuple[RenderableType, ...]


def read_sections(found: Inspection) -> Iterator[Section]:
    """Yield the sections of an inspection that have anything in them."""
    for (name, title), describe in _SECTIONS.items():
        if parts := tuple(describe(found)):
            yield Section(name, title, parts)


def describe_inspection(found: Inspection) -> Iterator[RenderableType]:
    """Yield all that is shown of an inspection, section by section."""
    for section in read_sections(found):
        yield from section.parts


def _describe_plans(found: Inspection) -> Iterator[RenderableType]:
    if found.hardware is not None:
        yield facts_table("planned for", hardware_facts(found.hardware))
    yield facts_table("plan", _plan_facts(found.plan))
    if found.choice:
        yield from plan_tables(found.choice)
    for name, graph in found.graphs.items():
        yield graph_table(name, graph)


def _describe_workflows(found: Inspection) -> Iterator[RenderableType]:
    yield from (workflow_table(file, found.places[file.name]) for file in found.workflows)
    if found.workflows:
        yield transformation_table()
    for name, manifest in found.indexes.items():
        yield facts_table(f"index {name}", describe_index(manifest))


def _describe_models(found: Inspection) -> Iterator[RenderableType]:
    for part in found.parts:
        tapes = {
            f"tape {tape.name}": f"{tape.entries} kernel calls, {tape.barriers} barriers, "
            f"arena {show_bytes(tape.arena_bytes)}"
            for tape in part.tapes
        }
        if isinstance(part, ModelInspection):
            kind, facts = "model", _model_facts(part.file)
        else:
            kind, facts = "encoder", encoder_facts(part.file)
        yield facts_table(f"{kind} {part.file.name}", facts | tapes)


def _describe_schedules(found: Inspection) -> Iterator[RenderableType]:
    for part in found.parts:
        if part.quantisation is not None:
            yield _quantisation_table(part.quantisation)
            yield layer_table(part.file.name, part.quantisation)
        yield _schedule_table(part.file.name, part.schedules)


def _describe_memory(found: Inspection) -> Iterator[RenderableType]:
    for part in found.parts:
        yield _weights_table(part.file.name, part.file.weights)
    yield memory_table(memory_rows(found))
    if found.gpu_memory is not None:
        yield from division_tables(found.gpu_memory)


_SECTIONS: dict[tuple[str, str], Callable[[Inspection], Iterable[RenderableType]]] = {
    ("artifact", "Artifact"): lambda found: [facts_table("artifact", _artifact_facts(found))],
    ("plans", "Machine and plans"): _describe_plans,
    ("workflows", "Workflows and indexes"): _describe_workflows,
    ("models", "Models"): _describe_models,
    ("schedules", "Schedules and formats"): _describe_schedules,
    ("memory", "Memory"): _describe_memory,
    ("kernels", "Kernels"): lambda found: [
        _kernel_table(found.kernels),
        *map(profile_table, found.devices),
    ],
}


def memory_rows(found: Inspection) -> Iterator[tuple[str, int, str]]:
    """Yield what takes memory at load: its name, its bytes, and where they come from."""
    for part in found.parts:
        name = part.file.name
        if isinstance(part, EncoderInspection):
            yield f"{name}: weights", part.room.weights, "mapped from the artifact"
            yield f"{name}: activations", part.room.activations, "of the largest batch"
            continue
        spec, file = part.file.spec, part.file
        sizes = {tape.name: tape.arena_bytes for tape in part.tapes}
        arenas = sizes.pop("sample", 0) + max(sizes.values(), default=0)  # a step runs one of them
        steps = step_bytes(spec, file.max_step_tokens, file.max_step_sequences)
        context = blocks_for(spec.max_context) * kv_block_bytes(spec)
        yield f"{name}: weights", sum(w.bytes for w in file.weights), "mapped from the artifact"
        largest = f"a step of {file.max_step_tokens} tokens, {file.max_step_sequences} sequences"
        yield f"{name}: activations", arenas + steps, largest
        per_token = context // (blocks_for(spec.max_context) * KV_BLOCK)
        words = f"one context of {spec.max_context} tokens, {show_bytes(per_token)} a token"
        yield f"{name}: KV", context, f"{words}; the pool is {_plan_facts(found.plan)['KV blocks']}"


def memory_table(rows: Iterable[tuple[str, int, str]]) -> Table:
    """Return what takes memory, and the sum."""
    known = list(rows)
    total = ("total", show_bytes(sum(size for _, size, _ in known)), "")
    shown = [(name, show_bytes(size), words) for name, size, words in known]
    return make_table("memory on the CPU", ("memory for", ">bytes", "origin"), [*shown, total])


def layer_table(name: str, file: QuantisationFile) -> Table:
    """Return format and error of every quantised matrix, a row for each layer."""
    layers: dict[str, dict[str, str]] = defaultdict(dict)
    for weight in file.weights:
        layer, _, kind = weight.name.rpartition(".")
        layers[layer or "model"][kind] = f"{weight.format} {weight.error:.2%}"
    kinds = list(dict.fromkeys(kind for cells in layers.values() for kind in cells))
    rows = [(layer, *(cells.get(k, "") for k in kinds)) for layer, cells in layers.items()]
    return make_table(f"formats and errors of {name}", ("layer", *(f">{k}" for k in kinds)), rows)


GATED_OPS = ("gate_up",)
"""Products that have two weights of the size they are told with."""


def flops_of(table: ScheduleTable, m: int) -> int:
    """Return the floating-point operations of a product of m rows."""
    return 2 * m * table.n * table.k * (2 if table.op in GATED_OPS else 1)


def rate_of(table: ScheduleTable, row: Row) -> float | None:
    """Return the measured GFLOP/s of a row; None where nothing was, or it is no product."""
    if not (row.seconds and table.k):
        return None
    return 1e-9 * flops_of(table, row.m_lo) / row.seconds


def _artifact_facts(found: Inspection) -> dict[str, str]:
    manifest = found.manifest
    size = sum(entry.bytes for entry in manifest.files.values())
    return {
        "path": found.path,
        "format": f"{manifest.format_major}.{manifest.format_minor}",
        "written by": f"{manifest.producer} at {manifest.created}",
        "effort": manifest.effort,
        "targets": ", ".join(manifest.targets),
        "model fingerprint": manifest.model_fingerprint,
        "workload fingerprint": manifest.workload_fingerprint,
        "files": f"{len(manifest.files)}, {show_bytes(size)}",
    }


def hardware_facts(spec: HardwareSpec) -> dict[str, str]:
    """Return what there is to say of a machine."""
    caches = [f"L{level} {show_bytes(spec.cache_bytes(level))}" for level in (1, 2, 3)]
    quota = "none" if spec.cpu_quota is None else f"{spec.cpu_quota:.2f} cores"
    return {
        "cpu": f"{spec.cpu_model} ({spec.arch})",
        "shape": f"{show_count(spec.sockets, 'socket')}, "
        f"{show_count(len(spec.nodes), 'NUMA node')}, "
        f"{show_count(spec.cores, 'core')}, {show_count(len(spec.pus), 'PU')}",
        "allowed PUs": show_cpus(spec.allowed_pus),
        "CPU quota": quota,
        "caches": ", ".join(caches),
        "memory": show_bytes(spec.usable_memory),
    }


def _phase_facts(plan: PhasePlan, processes: int) -> str:
    team = f"{show_count(processes, 'process')} of {show_count(plan.threads, 'thread')}"
    return f"{team} on PUs {show_cpus(plan.cpus)}"


def _plan_facts(plan: ServicePlan) -> dict[str, str]:
    return {
        "prefill": _phase_facts(plan.prefill, plan.processes_of("prefill")),
        "decode": _phase_facts(plan.decode, plan.processes),
        "prefill plan from": f"{plan.prefill_token_threshold} prefill tokens in a step",
        "KV blocks": str(plan.kv_blocks) if plan.kv_blocks else "sized at load from free memory",
        "spin before sleep": f"{plan.spin_iterations} iterations",
    }


def _show_heads(spec: ModelSpec) -> str:
    """Return the heads of a model's layers, and how many layers have K and V of their own."""
    if spec.latent:
        return f"{spec.n_heads} query heads over one vector of {spec.head_dim} values"
    shapes = spec.head_shapes
    heads = " or ".join(f"{kv} KV heads of {size}" for _, kv, size in shapes)
    own = spec.n_layers - spec.shared_kv
    shared = f", those of {own} layers for all {spec.n_layers}" if spec.shared_kv else ""
    return f"{spec.n_heads} query heads, {heads}{shared}"


def _model_facts(file: ModelFile) -> dict[str, str]:
    spec = file.spec
    layers = range(spec.n_layers)
    windows = sum(spec.layer_window(layer) > 0 for layer in layers)
    window = f"{spec.sliding_window} in {windows} of {spec.n_layers} layers" if windows else "off"
    turning = Counter(spec.layer_rope(layer) for layer in layers)
    ropes = spec.ropes()
    return {
        "family": spec.family,
        "layers": f"{spec.n_layers} x (hidden {spec.hidden_size}, intermediate "
        f"{spec.intermediate_size})",
        **_expert_facts(spec),
        **_state_facts(spec),
        "attention": f"{_show_heads(spec)}, window {window}",
        "rope": "; ".join(
            f"{(rope := ropes[name]).kind}, theta {rope.theta:g}, factor {rope.factor:g}, "
            f"turns {turned} of {rope.span or spec.head_dim} in {count} of {spec.n_layers} layers"
            for (name, turned), count in turning.items()
        ),
        "vocabulary": f"{spec.vocab_size}{', head tied' if spec.tied_head else ''}",
        "context": f"{spec.max_context} of {spec.max_position} positions",
        "dtypes": f"weights {spec.weight_dtype} (checkpoint {spec.checkpoint_dtype}), "
        f"KV {spec.kv_dtype}",
        "step limits": f"{file.max_step_tokens} tokens, {file.max_step_sequences} sequences",
        "tokenizer": file.tokenizer or "none in the checkpoint: prompts are token ids",
    }


def _state_facts(spec: ModelSpec) -> dict[str, str]:
    recurrent = spec.recurrent
    if recurrent is None:
        return {}
    rule, count = _RULES[recurrent.rule], sum(recurrent.layers)
    how = f"{rule} of {recurrent.taps} tokens in {count} of {spec.n_layers} layers"
    return {"states": f"{how}, {show_bytes(spec.state_bytes)} a sequence"}


_RULES = {
    GATES: "a gated convolution",
    DELTA: "the gated delta rule behind one",
    SCAN: "the scan of Mamba-2 behind one",
}


def _expert_facts(spec: ModelSpec) -> dict[str, str]:
    experts = spec.experts
    if experts is None:
        return {}
    where = f"in {experts.dense_layers.count(False)} layers" if experts.dense else "in each layer"
    beside = f", beside an MLP of {experts.shared} for all" if experts.shared else ""
    return {"experts": f"{experts.count} {where}, {experts.used} for each token{beside}"}


def _weights_table(name: str, weights: Sequence[WeightEntry]) -> Table:
    sizes: dict[tuple[str, str], list[int]] = defaultdict(list)
    for weight in weights:
        sizes[weight.layout, weight.dtype].append(weight.bytes)
    rows = [*sorted(sizes.items()), (("total", ""), [weight.bytes for weight in weights])]
    return make_table(
        f"weights of {name}",
        ("layout", "dtype", ">tensors", ">bytes"),
        [(*names, str(len(found)), show_bytes(sum(found))) for names, found in rows],
    )


def _quantisation_table(file: QuantisationFile) -> Table:
    """Return a row for the matrices of a kind and format, and one for each in a finer format."""
    title = "quantised here, errors of weights"
    if file.calibration is not None:
        title += f" as {file.calibration_tokens} tokens of {file.calibration} weigh them"
    groups: dict[tuple[str, str], list[QuantisedWeight]] = defaultdict(list)
    for weight in file.weights:
        groups[weight.name.rpartition(".")[2], weight.format].append(weight)
    rows = []
    for (kind, form), found in groups.items():
        worst = max(found, key=lambda weight: weight.error)
        mean = sum(weight.error for weight in found) / len(found)
        bound = f"{file.bounds[form]:.2%}" if form in file.bounds else ""
        shown = f"{worst.error:.2%} {worst.name}"
        rows.append((kind, form, bound, str(len(found)), f"{mean:.2%}", shown))
    for weight in file.kept:
        why = f"{weight.wanted_error:.2%} in {weight.wanted}"
        rows.append((weight.name, weight.format, why, "", f"{weight.error:.2%}", ""))
    columns = ("matrix", "format", "bound", ">matrices", ">mean error", ">worst error")
    return make_table(title, columns, rows)


def _schedule_table(name: str, schedules: Sequence[ScheduleTable]) -> Table:
    columns = ("operator / from M", "kernel", "schedule", "source", ">time", ">GFLOP/s", ">loss")
    table = make_table(f"schedules of {name}", columns, ())
    for schedule in schedules:
        shape = f" {schedule.n} x {schedule.k}" if schedule.k else ""
        head = f"{schedule.op}{shape} {schedule.dtype}"
        where = f"{schedule.phase} phase, {show_count(schedule.threads, 'thread')}"
        table.add_row(head, schedule.target, where, style="bold")
        for row in schedule.rows:
            kernel = f"{row.kernel} + {row.reduce_kernel}" if row.reduce_kernel else row.kernel
            named = zip(SCHEDULE_VALUES, row.schedule, strict=False)
            values = " ".join(f"{name}={value}" for name, value in named if value)
            rate = rate_of(schedule, row)
            table.add_row(
                *(f"{row.m_lo:>6}", kernel, values, row.source),
                f"{row.seconds * 1e6:.0f} us" if row.seconds else "",
                "" if rate is None else f"{rate:.1f}",
                "" if row.measured_loss is None else f"{row.measured_loss:.1%}",
            )
        table.add_section()
    return table


def _kernel_table(indexes: tuple[KernelIndex, ...]) -> Table:
    rows = []
    for index in indexes:
        families = sorted({kernel.family for kernel in index.kernels})
        shared = sum(bool(kernel.shared) for kernel in index.kernels)
        what = f"{len(index.kernels)}: {', '.join(families)}"
        beside = [f"{shared} shared by all models"] if shared else []
        library = " and ".join(filter(None, (index.library, *beside)))
        rows.append((index.target, what, library, index.compiler, " ".join(index.flags)))
    return make_table("kernels", ("target", "kernels", "library", "compiler", "flags"), rows)
