"""What `dovetail inspect` shows: all that the files of an artifact decide, and tables of it.

In: an artifact directory, of any machine. Out: an `Inspection`, and its lines on a console.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from dovetail.cli.inspect_encoder import encoder_facts
from dovetail.cli.inspect_memory import describe_division, division_table
from dovetail.cli.inspect_plans import graph_table, plan_tables
from dovetail.cli.inspect_quantisation import quantisation_table
from dovetail.cli.inspect_workflows import describe_index, workflow_table
from dovetail.cli.profile_table import profile_table
from dovetail.cli.report import show_bytes, show_count
from dovetail.ir.artifact import KernelIndex, Manifest, PhasePlan, ServicePlan
from dovetail.ir.encoder import EncoderFile
from dovetail.ir.graph import GraphFile
from dovetail.ir.index_file import IndexManifest
from dovetail.ir.model import ModelFile, WeightEntry
from dovetail.ir.plans import PlanChoice
from dovetail.ir.profile import ProfileFile
from dovetail.ir.quantisation import QuantisationFile
from dovetail.ir.schedule import SCHEDULE_VALUES, Row, ScheduleTable
from dovetail.ir.schedule import ScheduleFile as Schedules
from dovetail.ir.tape import Tape
from dovetail.ir.workflow_file import WorkflowFile
from dovetail.runtime.artifact import Reader
from dovetail.runtime.cost_tables import kept_profiles
from dovetail.runtime.encoder import device_bytes
from dovetail.runtime.gpu_memory import MemoryDivision
from dovetail.topology.values import HardwareSpec

CHOICE = "plans/choice.json"


class TapeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One tape: kernel calls, barriers among them, and bytes of its activation arena."""

    name: str
    entries: int
    barriers: int
    arena_bytes: int
    max_tokens: int
    max_sequences: int


class ModelInspection(msgspec.Struct, frozen=True, kw_only=True):
    """One model of an artifact."""

    file: ModelFile
    schedules: tuple[ScheduleTable, ...]
    tapes: tuple[TapeSummary, ...]
    quantisation: QuantisationFile | None = None


class DeviceRoom(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that an encoder takes on an accelerator, beside what libraries and the driver take."""

    weights: int
    activations: int


class EncoderInspection(msgspec.Struct, frozen=True, kw_only=True):
    """One text encoder of an artifact."""

    file: EncoderFile
    room: DeviceRoom
    schedules: tuple[ScheduleTable, ...]
    tapes: tuple[TapeSummary, ...]
    quantisation: QuantisationFile | None = None


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an artifact decides; sizes in bytes, times in seconds."""

    path: str
    manifest: Manifest
    hardware: HardwareSpec | None
    plan: ServicePlan
    choice: PlanChoice | None
    graphs: dict[str, GraphFile]
    workflows: tuple[WorkflowFile, ...]
    indexes: dict[str, IndexManifest]
    models: tuple[ModelInspection, ...]
    encoders: tuple[EncoderInspection, ...]
    kernels: tuple[KernelIndex, ...]
    gpu_memory: MemoryDivision | None = None
    devices: tuple[ProfileFile, ...] = ()


def inspect_artifact(path: Path) -> Inspection:
    """Read what `path` decides; ArtifactError where it is no artifact or a file is damaged."""
    reader = Reader(path)
    listed, stored = reader.manifest.files, set(reader.manifest.workflows)
    return Inspection(
        path=str(path),
        manifest=reader.manifest,
        hardware=reader.json("hardware.json", HardwareSpec) if "hardware.json" in listed else None,
        plan=reader.json("plans/service.json", ServicePlan),
        choice=reader.json(CHOICE, PlanChoice) if CHOICE in listed else None,
        graphs={
            PurePosixPath(name).stem: reader.json(name, GraphFile)
            for name in sorted(listed)
            if name.startswith("graph/") and PurePosixPath(name).stem not in stored
        },
        workflows=tuple(reader.json(f"graph/{name}.json", WorkflowFile) for name in sorted(stored)),
        indexes={
            name: reader.json(f"indexes/{name}/manifest.json", IndexManifest)
            for name in reader.manifest.indexes
        },
        models=tuple(_inspect_model(reader, name) for name in reader.manifest.models),
        encoders=tuple(_inspect_encoder(reader, name) for name in reader.manifest.encoders),
        kernels=tuple(
            reader.json(f"kernels/{target}/index.json", KernelIndex)
            for target in reader.manifest.targets
        ),
        devices=kept_profiles(reader.manifest.model_fingerprint),
    )


def _inspect_model(reader: Reader, name: str) -> ModelInspection:
    file = reader.json(f"models/{name}/model.json", ModelFile)
    return ModelInspection(file=file, **_inspect_files(reader, name))


def _inspect_encoder(reader: Reader, name: str) -> EncoderInspection:
    file = reader.json(f"models/{name}/encoder.json", EncoderFile)
    return EncoderInspection(file=file, room=_room(reader, file), **_inspect_files(reader, name))


def _room(reader: Reader, file: EncoderFile) -> DeviceRoom:
    tape = reader.json(f"models/{file.name}/tapes/encode.json", Tape)
    weights, activations = device_bytes(file, tape)
    return DeviceRoom(weights=weights, activations=activations)


def _inspect_files(reader: Reader, name: str) -> dict[str, Any]:
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


def print_inspection(found: Inspection, console: Console) -> None:
    """Print the sections of an inspection as tables."""
    console.print(_facts_table("artifact", _artifact_facts(found)))
    if found.hardware is not None:
        console.print(_facts_table("planned for", _hardware_facts(found.hardware)))
    console.print(_facts_table("plan", _plan_facts(found.plan)))
    for part in plan_tables(found.choice) if found.choice else ():
        console.print(part)
    for name, graph in found.graphs.items():
        console.print(graph_table(name, graph))
    for workflow in found.workflows:
        console.print(workflow_table(workflow))
    for name, manifest in found.indexes.items():
        console.print(_facts_table(f"index {name}", describe_index(manifest)))
    for model in found.models:
        console.print(_facts_table(f"model {model.file.name}", _model_facts(model)))
        console.print(_weights_table(model.file.weights))
        if model.quantisation is not None:
            console.print(quantisation_table(model.quantisation))
        console.print(_schedule_table(model.schedules))
    for encoder in found.encoders:
        facts = encoder_facts(encoder.file) | _tape_facts(encoder.tapes)
        sizes = encoder.room.weights, encoder.room.activations
        facts["on an accelerator"] = "weights {}, activations {}".format(*map(show_bytes, sizes))
        console.print(_facts_table(f"encoder {encoder.file.name}", facts))
        console.print(_weights_table(encoder.file.weights))
        if encoder.quantisation is not None:
            console.print(quantisation_table(encoder.quantisation))
        console.print(_schedule_table(encoder.schedules))
    console.print(_kernel_table(found.kernels))
    for profile in found.devices:
        console.print(profile_table(profile))
    if (division := found.gpu_memory) is not None:
        console.print(_facts_table("memory of the GPU", describe_division(division)))
        console.print(division_table(division))


def _facts_table(title: str, facts: dict[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
    for name, value in facts.items():
        table.add_row(name, value)
    return table


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


def _hardware_facts(spec: HardwareSpec) -> dict[str, str]:
    caches = [f"L{level} {show_bytes(spec.cache_bytes(level))}" for level in (1, 2, 3)]
    quota = "none" if spec.cpu_quota is None else f"{spec.cpu_quota:.2f} cores"
    return {
        "cpu": f"{spec.cpu_model} ({spec.arch})",
        "shape": f"{show_count(spec.sockets, 'socket')}, "
        f"{show_count(len(spec.nodes), 'NUMA node')}, "
        f"{show_count(spec.cores, 'core')}, {show_count(len(spec.pus), 'PU')}",
        "allowed PUs": _show_ids(spec.allowed_pus),
        "CPU quota": quota,
        "caches": ", ".join(caches),
        "memory": show_bytes(spec.usable_memory),
    }


def _phase_facts(plan: PhasePlan) -> str:
    return f"{show_count(plan.threads, 'thread')} on PUs {_show_ids(plan.cpus)}"


def _plan_facts(plan: ServicePlan) -> dict[str, str]:
    return {
        "processes": str(plan.processes),
        "prefill": _phase_facts(plan.prefill),
        "decode": _phase_facts(plan.decode),
        "prefill plan from": f"{plan.prefill_token_threshold} prefill tokens in a step",
        "KV blocks": str(plan.kv_blocks) if plan.kv_blocks else "sized at load from free memory",
        "spin before sleep": f"{plan.spin_iterations} iterations",
    }


def _model_facts(model: ModelInspection) -> dict[str, str]:
    spec, file = model.file.spec, model.file
    rope = spec.rope
    facts = {
        "family": spec.family,
        "layers": f"{spec.n_layers} x (hidden {spec.hidden_size}, intermediate "
        f"{spec.intermediate_size})",
        "attention": f"{spec.n_heads} query heads, {spec.n_kv_heads} KV heads of {spec.head_dim}, "
        f"window {spec.sliding_window or 'off'}",
        "rope": f"{rope.kind}, theta {rope.theta:g}, factor {rope.factor:g}",
        "vocabulary": f"{spec.vocab_size}{', head tied' if spec.tied_head else ''}",
        "context": f"{spec.max_context} of {spec.max_position} positions",
        "dtypes": f"weights {spec.weight_dtype} (checkpoint {spec.checkpoint_dtype}), "
        f"KV {spec.kv_dtype}",
        "step limits": f"{file.max_step_tokens} tokens, {file.max_step_sequences} sequences",
        "tokenizer": file.tokenizer or "none in the checkpoint: prompts are token ids",
    }
    return facts | _tape_facts(model.tapes)


def _tape_facts(tapes: Sequence[TapeSummary]) -> dict[str, str]:
    return {
        f"tape {tape.name}": f"{tape.entries} kernel calls, {tape.barriers} barriers, "
        f"arena {show_bytes(tape.arena_bytes)}"
        for tape in tapes
    }


def _weights_table(weights: Sequence[WeightEntry]) -> Table:
    sizes: dict[tuple[str, str], list[int]] = defaultdict(list)
    for weight in weights:
        sizes[weight.layout, weight.dtype].append(weight.bytes)
    table = Table(title="weights", title_justify="left")
    for column in ("layout", "dtype", "tensors", "bytes"):
        table.add_column(column, justify="left" if column in ("layout", "dtype") else "right")
    for (layout, dtype), found in sorted(sizes.items()):
        table.add_row(layout, dtype, str(len(found)), show_bytes(sum(found)))
    total = sum(weight.bytes for weight in weights)
    table.add_row("total", "", str(len(weights)), show_bytes(total))
    return table


def _schedule_table(schedules: Sequence[ScheduleTable]) -> Table:
    table = Table(title="schedules", title_justify="left")
    for column in ("operator / from M", "kernel", "schedule", "source"):
        table.add_column(column, overflow="fold")
    for column in ("time", "GFLOP/s", "loss"):
        table.add_column(column, justify="right")
    for schedule in schedules:
        shape = f" {schedule.n} x {schedule.k}" if schedule.k else ""
        head = f"{schedule.op}{shape} {schedule.dtype}"
        where = f"{schedule.phase} phase, {show_count(schedule.threads, 'thread')}"
        table.add_row(head, schedule.target, where, style="bold")
        for row in schedule.rows:
            table.add_row(*_schedule_row(schedule, row))
        table.add_section()
    return table


def _schedule_row(table: ScheduleTable, row: Row) -> tuple[str, ...]:
    kernel = f"{row.kernel} + {row.reduce_kernel}" if row.reduce_kernel else row.kernel
    figures = _show_figures(table, row)
    return (f"{row.m_lo:>6}", kernel, _show_schedule(row), row.source, *figures)


def _show_schedule(row: Row) -> str:
    named = zip(SCHEDULE_VALUES, row.schedule, strict=False)
    return " ".join(f"{name}={value}" for name, value in named if value)


def _show_figures(table: ScheduleTable, row: Row) -> tuple[str, str, str]:
    """Return time, rate and loss of a row, blank where nothing was measured."""
    loss = "" if row.measured_loss is None else f"{row.measured_loss:.1%}"
    if not row.seconds:
        return "", "", loss
    rate = f"{2e-9 * row.m_lo * table.n * table.k / row.seconds:.1f}" if table.k else ""
    return f"{row.seconds * 1e6:.0f} us", rate, loss


def _kernel_table(indexes: tuple[KernelIndex, ...]) -> Table:
    table = Table(title="kernels", title_justify="left")
    for column in ("target", "kernels", "library", "compiler", "flags"):
        table.add_column(column, overflow="fold")
    for index in indexes:
        families = sorted({kernel.family for kernel in index.kernels})
        shown = f"{len(index.kernels)}: {', '.join(families)}"
        flags = " ".join(index.flags)
        library = " and ".join(part for part in (index.library, _count_shared(index)) if part)
        table.add_row(index.target, shown, library, index.compiler, flags)
    return table


def _count_shared(index: KernelIndex) -> str:
    shared = sum(bool(kernel.shared) for kernel in index.kernels)
    return f"{shared} shared by all models" if shared else ""


def _show_ids(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids)) or "any (unpinned)"
