"""The whole compile on one page: a model, a machine and a workload to an artifact directory.

Each step is one function of another module; this one names them, hands their results on and
writes the files.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from dovetail.codegen.catalog import device_kernels, model_kernels
from dovetail.codegen.library import BuiltLibrary, LibrarySpec, build_library
from dovetail.compiler.attention_search import attention_kernels
from dovetail.compiler.check_tape import verify_tape
from dovetail.compiler.checkpoint import open_checkpoint
from dovetail.compiler.choose import ChoiceRequest, Chosen, choose_schedules
from dovetail.compiler.config import parse_json_object, read_bounded
from dovetail.compiler.database import default_path
from dovetail.compiler.encoder_pipeline import compile_encoder
from dovetail.compiler.encoder_spec import is_encoder
from dovetail.compiler.gain import Gain, measure_gain
from dovetail.compiler.memory import Memory
from dovetail.compiler.model_spec import read_generation_defaults
from dovetail.compiler.parts import SearchScope
from dovetail.compiler.payload import Payload
from dovetail.compiler.replay import measure_choice
from dovetail.compiler.report import CompileReport, Progress, Steps, our_version
from dovetail.compiler.request import (
    COPIED_FILES,
    TOKENIZER,
    CompileRequest,
    Inputs,
    can_measure,
    read_inputs,
)
from dovetail.compiler.schedules import deterministic_kernels, gemm_kernels, unique_tables
from dovetail.compiler.service import (
    describe_choice,
    mark_tuned,
    service_plan,
    service_plans,
)
from dovetail.compiler.tapes import build_forward_tape, build_sample_tape
from dovetail.compiler.weights import pack_weights
from dovetail.compiler.writer import ArtifactWriter, write_artifact, write_libraries
from dovetail.ir.errors import ArtifactError
from dovetail.ir.model import ModelFile, WeightChunks, WeightEntry
from dovetail.ir.place import place, serving_graph
from dovetail.ir.plans import PlanChoice
from dovetail.ir.schedule import ScheduleFile, ScheduleTable
from dovetail.ir.tape import Tape
from dovetail.ir.tuning import encode_record
from dovetail.runtime.tape import pick_tables

MODEL_NAME = "llm"


def compile_model(
    model: str | Path, *, output: str | Path, progress: Progress | None = None, **options: object
) -> CompileReport:
    """Compile `model` into the artifact `output`; `options` are the fields of CompileRequest."""
    CompileRequest.check_options("compile", options)
    request = CompileRequest(model=model, output=output, **options)  # type: ignore[arg-type]
    return compile_artifact(request, progress=progress)


def compile_artifact(request: CompileRequest, *, progress: Progress | None = None) -> CompileReport:
    """Compile and write an artifact; it is there whole or not at all.

    Raises SpecError for bad input, ToolchainError without a C compiler, ArtifactError when it
    cannot be written or was interrupted.
    """
    compile_kind = compile_encoder if is_encoder(request.model) else _compile
    try:
        return compile_kind(request, Steps(progress))
    except KeyboardInterrupt:
        raise ArtifactError(f"interrupted; nothing was written to {request.output}") from None


def _compile(request: CompileRequest, steps: Steps) -> CompileReport:
    with steps.run("read"):
        inputs = read_inputs(request)
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
            write_libraries(artifact, libraries)
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


# ---- the steps ----


def _build_libraries(
    inputs: Inputs, tables: tuple[ScheduleTable, ...], steps: Steps
) -> dict[str, BuiltLibrary]:
    libraries = {}
    for number, target in enumerate(inputs.targets):
        products = gemm_kernels(inputs.spec, target, tables)
        attention = attention_kernels(inputs.spec, target, tables)
        fixed = deterministic_kernels(inputs.spec, target)
        kernels = (*model_kernels(inputs.spec, target), *products, *attention, *fixed)
        wanted = LibrarySpec(target=target, kernels=kernels)
        libraries[target.name] = build_library(wanted, inputs.request.cache)
        steps.advance(number + 1, len(inputs.targets) + len(inputs.devices))
    for device in inputs.devices:
        wanted = LibrarySpec(target=device, kernels=device_kernels(inputs.spec, device))
        libraries[device.name] = build_library(wanted, inputs.request.cache)
    return libraries


def _make_schedules(inputs: Inputs, steps: Steps) -> Chosen:
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
                measurable=can_measure(target, request),
                budget=inputs.search_seconds,
                fixed_order=request.fixed_order,
                cache=request.cache,
            ),
            steps.advance,
        )
        for target in inputs.targets
    ]
    return Chosen.join(found)


def _measure_gain(inputs: Inputs, tuned: Chosen) -> Gain | None:
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
    inputs: Inputs, artifact: ArtifactWriter, steps: Steps
) -> tuple[tuple[WeightEntry, ...], WeightChunks]:
    name = f"models/{MODEL_NAME}/weights/weights.bin"
    checkpoint = open_checkpoint(inputs.directory)
    packed = pack_weights(inputs.spec, checkpoint, artifact.path_for(name), steps.advance)
    artifact.add_weights(name)
    return packed


def _build_tapes(
    inputs: Inputs, weights: tuple[WeightEntry, ...], tables: tuple[ScheduleTable, ...]
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
    inputs: Inputs,
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


def _write_plans(artifact: ArtifactWriter, choice: PlanChoice) -> None:
    plan = service_plan(choice)
    artifact.write_json("plans/service.json", plan)
    artifact.write_json("plans/choice.json", choice)
    artifact.write_json(
        "graph/serve.json", place(serving_graph(MODEL_NAME), {MODEL_NAME: plan}).file
    )


def _choose(inputs: Inputs, artifact: ArtifactWriter, manifest: dict[str, Any]) -> PlanChoice:
    """Return the plans measured with the kernels of the artifact, where this is their machine."""
    choice, seconds = inputs.choice, inputs.replay_seconds
    if seconds <= 0:
        return choice
    tuned = mark_tuned(choice, inputs.searched.pairs)
    where = artifact.seal(**manifest)
    memory = Memory.of(inputs.hardware, inputs.request.cache)
    return measure_choice(tuned, where, inputs.spec, inputs.trace, seconds, memory)


def _manifest(inputs: Inputs, chunks: WeightChunks) -> dict[str, Any]:
    content = msgspec.json.encode(inputs.spec) + msgspec.json.encode(chunks)
    return {
        "producer": f"dovetail {our_version()}",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model_fingerprint": hashlib.sha256(content).hexdigest(),
        "workload_fingerprint": inputs.workload.fingerprint,
        "targets": tuple(target.name for target in (*inputs.targets, *inputs.devices)),
        "models": (MODEL_NAME,),
        "effort": inputs.request.effort,
    }


def _notes(inputs: Inputs) -> tuple[str, ...]:
    if (inputs.directory / TOKENIZER).is_file():
        return ()
    return (f"{inputs.directory} has no {TOKENIZER}: prompts must be token ids",)
