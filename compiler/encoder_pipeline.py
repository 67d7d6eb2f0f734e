"""The compile of a text encoder on one page: a model and a machine to an artifact directory.

The steps are those of `dovetail.compiler.pipeline`; one process runs all of a pass, so there is one
plan, and nothing to choose by replay.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from dovetail.codegen.catalog import model_kernels
from dovetail.codegen.isa.target import Target
from dovetail.codegen.library import BuiltLibrary, LibrarySpec, build_library
from dovetail.compiler.check_tape import verify_tape
from dovetail.compiler.checkpoint import open_checkpoint
from dovetail.compiler.choose import ChoiceRequest, Chosen, choose_schedules
from dovetail.compiler.config import read_bounded
from dovetail.compiler.database import default_path
from dovetail.compiler.encoder_spec import EncoderFolder, open_folder, read_encoder_spec
from dovetail.compiler.encoder_tape import build_encode_tape
from dovetail.compiler.encoder_tensors import encoder_sources, encoder_tables
from dovetail.compiler.parts import SearchScope
from dovetail.compiler.payload import make_encoder_payload
from dovetail.compiler.report import CompileReport, Steps, our_version
from dovetail.compiler.request import (
    COPIED_FILES,
    TOKENIZER,
    CompileRequest,
    can_measure,
    check_request,
    check_tokenizer,
    choose_targets,
)
from dovetail.compiler.schedules import gemm_kernels
from dovetail.compiler.search.tables import EFFORTS
from dovetail.compiler.service import plan_service
from dovetail.compiler.weights import pack_sources
from dovetail.compiler.writer import ArtifactWriter, write_artifact, write_libraries
from dovetail.ir.artifact import ServicePlan
from dovetail.ir.encoder import EncoderFile, EncoderSpec
from dovetail.ir.model import WeightChunks, WeightEntry
from dovetail.ir.schedule import ScheduleFile
from dovetail.ir.tuning import encode_record
from dovetail.runtime.encoder import PASS_TOKENS
from dovetail.topology.hardware import HardwareSpec, read_hardware

ENCODER_NAME = "embedder"


@dataclass(frozen=True, slots=True)
class EncoderInputs:
    """Everything that was read, checked and chosen before the work begins."""

    request: CompileRequest
    folder: EncoderFolder
    spec: EncoderSpec
    hardware: HardwareSpec
    targets: tuple[Target, ...]
    plan: ServicePlan

    @property
    def step_tokens(self) -> int:
        """Rows of the largest pass: it holds the longest text."""
        return max(PASS_TOKENS, self.spec.max_tokens)


def read_encoder_inputs(request: CompileRequest) -> EncoderInputs:
    """Read and check everything; raises SpecError for wrong input."""
    check_request(request)
    folder = open_folder(Path(request.model))
    spec = read_encoder_spec(
        request.model, weight_dtype=request.weight_dtype, max_tokens=request.max_context
    )
    check_tokenizer(folder.transformer / TOKENIZER)
    hardware = read_hardware(request.hardware)
    return EncoderInputs(
        request=request,
        folder=folder,
        spec=spec,
        hardware=hardware,
        targets=choose_targets(request.targets, hardware),
        plan=request.plan or plan_service(hardware, request.threads),
    )


def compile_encoder(request: CompileRequest, steps: Steps) -> CompileReport:
    """Compile and write the artifact of an encoder; it is there whole or not at all."""
    with steps.run("read"):
        inputs = read_encoder_inputs(request)
    with write_artifact(request.output) as artifact:
        with steps.run("schedules"):
            tuned = _make_schedules(inputs, steps)
        with steps.run("kernels"):
            libraries = _build_libraries(inputs, tuned, steps)
        with steps.run("weights"):
            weights, chunks = _pack(inputs, artifact, steps)
        with steps.run("write"):
            _write_encoder(artifact, inputs, weights, chunks, tuned)
            write_libraries(artifact, libraries)
            artifact.write_json("hardware.json", inputs.hardware)
            artifact.write_bytes("tuning.jsonl", b"".join(map(encode_record, tuned.records)))
        with steps.run("plans"):
            artifact.write_json("plans/service.json", inputs.plan)
            artifact.commit(
                producer=f"dovetail {our_version()}",
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                model_fingerprint=_fingerprint(inputs.spec, chunks),
                workload_fingerprint="",
                targets=tuple(target.name for target in inputs.targets),
                models=(),
                encoders=(ENCODER_NAME,),
                effort=request.effort,
            )
    return _report(inputs, tuned, libraries, chunks, steps)


def _make_schedules(inputs: EncoderInputs, steps: Steps) -> Chosen:
    request, effort = inputs.request, EFFORTS.get(inputs.request.effort)
    seconds = 0.0 if effort is None else effort.seconds
    budget = seconds if request.budget is None else request.budget
    found = [
        choose_schedules(
            SearchScope(
                spec=inputs.spec,
                payload=make_encoder_payload(inputs.spec, inputs.step_tokens),
                plans=(inputs.plan,),
                hardware=inputs.hardware,
                target=target,
            ),
            ChoiceRequest(
                effort=request.effort,
                database=Path(request.database or default_path(request.cache)),
                measurable=can_measure(target, request),
                budget=budget / len(inputs.targets),
                fixed_order=request.fixed_order,
                cache=request.cache,
            ),
            steps.advance,
        )
        for target in inputs.targets
    ]
    return Chosen.join(found)


def _build_libraries(inputs: EncoderInputs, tuned: Chosen, steps: Steps) -> dict[str, BuiltLibrary]:
    libraries = {}
    for number, target in enumerate(inputs.targets):
        products = gemm_kernels(inputs.spec, target, tuned.tables)
        kernels = (*model_kernels(inputs.spec, target), *products)
        wanted = LibrarySpec(target=target, kernels=kernels)
        libraries[target.name] = build_library(wanted, inputs.request.cache)
        steps.advance(number + 1, len(inputs.targets))
    return libraries


def _pack(
    inputs: EncoderInputs, artifact: ArtifactWriter, steps: Steps
) -> tuple[tuple[WeightEntry, ...], WeightChunks]:
    name = f"models/{ENCODER_NAME}/weights/weights.bin"
    spec, checkpoint = inputs.spec, open_checkpoint(inputs.folder.transformer)
    sources = encoder_sources(spec, checkpoint)
    path, tables = artifact.path_for(name), encoder_tables(spec)
    packed = pack_sources(sources, spec.weight_dtype, checkpoint, path, tables, steps.advance)
    artifact.add_weights(name)
    return packed


def _write_encoder(
    artifact: ArtifactWriter,
    inputs: EncoderInputs,
    weights: tuple[WeightEntry, ...],
    chunks: WeightChunks,
    tuned: Chosen,
) -> None:
    folder, sequences = f"models/{ENCODER_NAME}", inputs.request.max_step_sequences
    tape = build_encode_tape(inputs.spec, weights, inputs.step_tokens, sequences)
    for target in inputs.targets:
        verify_tape(tape, weights, [t for t in tuned.tables if t.target == target.name])
    source = inputs.folder.transformer / TOKENIZER
    if source.is_file():
        artifact.write_bytes(f"{folder}/{TOKENIZER}", read_bounded(source, COPIED_FILES[TOKENIZER]))
    file = EncoderFile(
        name=ENCODER_NAME,
        spec=inputs.spec,
        weights=weights,
        tokenizer=TOKENIZER if source.is_file() else None,
    )
    artifact.write_json(f"{folder}/encoder.json", file)
    artifact.write_json(f"{folder}/tapes/{tape.name}.json", tape)
    artifact.write_json(f"{folder}/schedules.json", ScheduleFile(tables=tuned.tables))
    artifact.write_json(f"{folder}/weights/chunks.json", chunks)


def _fingerprint(spec: EncoderSpec, chunks: WeightChunks) -> str:
    return hashlib.sha256(msgspec.json.encode(spec) + msgspec.json.encode(chunks)).hexdigest()


def _report(
    inputs: EncoderInputs,
    tuned: Chosen,
    libraries: dict[str, BuiltLibrary],
    chunks: WeightChunks,
    steps: Steps,
) -> CompileReport:
    spec, request = inputs.spec, inputs.request
    rows = Counter(row.source for table in tuned.tables for row in table.rows)
    threads = inputs.plan.prefill.threads
    missing = f"{inputs.folder.transformer} has no {TOKENIZER}: texts must be token ids"
    has_tokenizer = (inputs.folder.transformer / TOKENIZER).is_file()
    return CompileReport(
        path=str(request.output),
        family=spec.family,
        weight_bytes=chunks.total_bytes,
        weight_dtype=spec.weight_dtype,
        kv_dtype="no",
        max_context=spec.max_tokens,
        targets=tuple(libraries),
        kernels=sum(len(library.index.kernels) for library in libraries.values()),
        threads=threads,
        plan=f"1 process of {threads} threads",
        workload="passes of 8 to " + str(inputs.step_tokens) + " tokens",
        effort=request.effort,
        rows=dict(sorted(rows.items())),
        trials=len(tuned.records),
        measured=tuned.measured,
        gain=None,
        seconds=steps.seconds,
        notes=tuned.notes if has_tokenizer else (*tuned.notes, missing),
    )
