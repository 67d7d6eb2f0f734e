"""The whole compile on one page: a model, a machine and a workload to an artifact directory.

Each step is one function of another module; this one names them, hands their results on and
writes the files.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias, Unpack

import msgspec

from dovetail.codegen.catalog import KernelRequest, device_kernels, model_kernels
from dovetail.codegen.isa.target import Target
from dovetail.codegen.library import LibrarySpec, build_library
from dovetail.codegen.targets import host_target
from dovetail.codegen.toolchain import find_compiler
from dovetail.compiler.encoder_pipeline import (
    ENCODER_NAME,
    EncoderInputs,
    read_beside,
    read_encoder_inputs,
    whole_plan,
    write_encoder,
)
from dovetail.compiler.files.config import parse_json_object
from dovetail.compiler.formats.quantising import Advance, Calibration
from dovetail.compiler.input_powers import calibrate
from dovetail.compiler.measure.answers import Memory
from dovetail.compiler.measure.database import default_path
from dovetail.compiler.models.encoder_folder import is_encoder
from dovetail.compiler.models.hub import find_adapters, find_model, find_models
from dovetail.compiler.models.source import TOKENIZER, ModelSource, without_lengths
from dovetail.compiler.plan.division import Mix, divide_graph, read_mix
from dovetail.compiler.plan.end_to_end import EndToEnd, compare_tables
from dovetail.compiler.plan.replay import measure_choice
from dovetail.compiler.plan.service import describe_choice, mark_tuned, place_searches, service_plan
from dovetail.compiler.reopen import (
    is_artifact,
    kept_mix,
    link_weights,
    own_kernels,
    read_artifact,
    take_over,
)
from dovetail.compiler.request import (
    COPIED_FILES,
    MODEL_NAME,
    CompileOptions,
    CompileRequest,
    Inputs,
    ModelRequest,
    can_measure,
    is_here,
    read_inputs,
)
from dovetail.compiler.rules.payload import Payload
from dovetail.compiler.rules.schedules import gemm_kernels, option_kernels
from dovetail.compiler.rules.shared_kernels import TargetKernels, target_kernels
from dovetail.compiler.rules.tables import unique_tables
from dovetail.compiler.search.attention_search import attention_kernels
from dovetail.compiler.search.choose import ChoiceRequest, Chosen, choose_schedules
from dovetail.compiler.search.gain import Gain, measure_gain
from dovetail.compiler.stored import (
    Stored,
    check_indexes,
    check_models,
    read_indexes,
    read_workflows,
    write_indexes,
    write_workflows,
)
from dovetail.compiler.tape.adapted import build_adapted_tape
from dovetail.compiler.tape.encoder import build_encode_tape
from dovetail.compiler.tape.forward import build_forward_tape, build_sample_tape
from dovetail.compiler.tape.gates import build_gated_tape
from dovetail.compiler.write.report import (
    CompileReport,
    EncoderReport,
    Progress,
    Steps,
    our_version,
)
from dovetail.compiler.write.weights import pack_encoder, pack_weights
from dovetail.compiler.write.writer import (
    ArtifactWriter,
    check_output,
    write_artifact,
    write_libraries,
)
from dovetail.ir.artifact import MACHINE, SERVE, ServicePlan
from dovetail.ir.cache import use_cache
from dovetail.ir.encoder import EncoderSpec
from dovetail.ir.errors import ArtifactError, SpecError, ToolchainError
from dovetail.ir.graph import EMBEDDING, GENERATION, RERANK
from dovetail.ir.model import OWN_GATE, ModelFile, ModelSpec, WeightChunks, WeightEntry
from dovetail.ir.place import place, serving_graph
from dovetail.ir.plans import CHOICE, DivisionChoice, PlanChoice
from dovetail.ir.schedule import ScheduleFile, ScheduleTable
from dovetail.ir.tape import GATED, Tape
from dovetail.ir.tuning import encode_record
from dovetail.runtime.flows.stored_workflows import INSTRUCTED, models_by_kind
from dovetail.runtime.index.manifest import read_manifest
from dovetail.runtime.machine.isa import choose_target
from dovetail.runtime.machine.trust import is_known_folder
from dovetail.runtime.native.tape import pick_tables

Member: TypeAlias = Inputs | EncoderInputs
"""What was read of one model."""


def compile_model(
    model: str | Path | Mapping[str, str | Path],
    *,
    output: str | Path,
    progress: Progress | None = None,
    **options: Unpack[CompileOptions],
) -> CompileReport:
    """Compile `model` into the artifact `output`.

    model: a directory, a GGUF file, an id of the hub (`find_model`), or an artifact, which is
    compiled anew; or several by name, at most one of which generates, the others being encoders.
    options: the fields of CompileRequest.
    """
    if isinstance(model, Mapping):
        CompileRequest.check_options("compile", {"output": output, **options})
        check_output(output)
        named = _first_and_others(find_models(model))
    else:
        CompileRequest.check_options("compile", {"model": model, "output": output, **options})
        check_output(output)
        named = {"model": find_model(model)}
    if isinstance(beside := options.get("beside"), Mapping):
        options["beside"] = find_models(beside)
    if isinstance(adapters := options.get("adapters"), Mapping):
        options["adapters"] = find_adapters(adapters)
    request = CompileRequest(output=output, **{**named, **options})  # type: ignore[arg-type]
    return compile_artifact(request, progress=progress)


def compile_artifact(request: CompileRequest, *, progress: Progress | None = None) -> CompileReport:
    """Compile and write an artifact; it is there whole or not at all.

    Raises SpecError for bad input, CapacityError for a model that does not fit into memory,
    ToolchainError without a C compiler, ArtifactError when it cannot be written or was interrupted.
    """
    try:
        with use_cache(request.cache):
            return _compile(request, Steps(progress))
    except KeyboardInterrupt:
        raise ArtifactError(f"interrupted; nothing was written to {request.output}") from None


def _compile(request: CompileRequest, steps: Steps) -> CompileReport:
    request, lacking = _fit_compiler(request)
    notes = [*lacking]
    with steps.run("read"):
        workflows = _read_workflows(request)
        members = _read(request, steps)
        _check_nodes(workflows, members)
        indexes = read_indexes(request.indexes)
        again = Path(request.model) if is_artifact(request.model) else None
        wanted = request.mix or (kept_mix(again) if again else None)
        if again and not request.kernels and (own := own_kernels(again)):
            flags = " ".join(f"--kernel {kernel}" for kernel in own)
            notes.append(f"kernels of your own were not taken over; to have them, give {flags}")
        mix = read_mix(wanted)
    with write_artifact(request.output) as artifact:
        with steps.run("schedules"):
            tuned = [_make_schedules(member, steps) for member in members]
        with steps.run("kernels"):
            libraries = _build_libraries(members, tuned, request.cache, steps)
        with steps.run("weights"):
            packed = [_pack(member, artifact, steps) for member in members]
        with steps.run("write"):
            for member, (weights, chunks), chosen in zip(members, packed, tuned, strict=True):
                _write_member(artifact, member, weights, chunks, chosen)
            write_libraries(artifact, libraries)
            write_workflows(artifact, workflows)
            write_indexes(artifact, indexes)
            flows = tuple(stored.workflow.name for stored in workflows)
            stored = {"workflows": flows, "indexes": tuple(indexes)}
            if again is not None:
                stored = take_over(artifact, again, wanted)
            artifact.write_json(MACHINE, members[0].hardware)
            records = [record for chosen in tuned for record in chosen.records]
            artifact.write_bytes("tuning.jsonl", b"".join(map(encode_record, records)))
        first, *encoders = members
        with steps.run("plans"):
            manifest = _manifest(members, [chunks for _, chunks in packed]) | stored
            stored_in = artifact.root / "indexes"
            mix = mix.of([read_manifest(stored_in / name) for name in manifest["indexes"]])
            plan, words = _write_plans(members, artifact, manifest, mix)
            if manifest["indexes"] and any(is_here(t, request) for t in first.targets):
                check_indexes(artifact.seal(**manifest))
            tuned[0], end_to_end = _keep_better(first, tuned[0], plan, artifact, manifest)
            artifact.commit(foreign=_holds_foreign(request, indexes), **manifest)
    notes += dict.fromkeys(note for part in (*members, *tuned) for note in part.notes)
    return CompileReport(
        path=str(request.output),
        targets=tuple(libraries),
        kernels=sum(len(library.index.kernels) for library in libraries.values()),
        threads=plan.processes * plan.decode.threads,
        plan=words,
        effort=request.effort,
        end_to_end=end_to_end,
        seconds=steps.seconds,
        notes=tuple(notes),
        workflows=manifest["workflows"],
        indexes=manifest["indexes"],
        **_describe_first(first, packed[0][1], tuned[0]),
        **_describe_schedules(Chosen.join(tuned)),
        encoders=tuple(map(_describe, encoders, (chunks for _, chunks in packed[1:]))),
    )


def _describe_first(first: Member, chunks: WeightChunks, tuned: Chosen) -> dict[str, Any]:
    """Return the fields of the report that tell of the first model."""
    spec = first.spec
    return {
        "family": spec.family,
        "weight_bytes": chunks.total_bytes,
        "weight_dtype": spec.weight_dtype,
        "kv_dtype": "no" if isinstance(spec, EncoderSpec) else spec.kv_dtype,
        "max_context": spec.max_tokens if isinstance(spec, EncoderSpec) else spec.max_context,
        "workload": first.workload.source,
        "gain": _measure_gain(first, tuned) if isinstance(first, Inputs) else None,
    }


def _describe_schedules(chosen: Chosen) -> dict[str, Any]:
    """Return the fields of the report that tell of the schedules of all models."""
    sources = Counter(row.source for table in chosen.tables for row in table.rows)
    return {
        "rows": dict(sorted(sources.items())),
        "trials": len(chosen.records),
        "measured": chosen.measured,
    }


def _fit_compiler(request: CompileRequest) -> tuple[CompileRequest, tuple[str, ...]]:
    """Return the request as it can be done here, and why it is another one.

    Schedules are searched for among kernels that are built for it; those of the rules may lie in
    the package already.
    """
    if request.effort == "none":
        return request, ()
    try:
        find_compiler(host_target())
    except ToolchainError as error:
        note = f"schedules by rules, nothing was measured: {error}, and compile again"
        return replace(request, effort="none"), (note,)
    return request, ()


def _holds_foreign(request: CompileRequest, indexes: Mapping[str, tuple[Path, Any]]) -> bool:
    """Tell whether what is taken over as it is, with code in it, comes from elsewhere."""
    taken = [folder for folder, manifest in indexes.values() if manifest.targets]
    if is_artifact(request.model):
        taken.append(Path(request.model))
    return not all(map(is_known_folder, taken))


# ---- the steps ----


def _first_and_others(models: Mapping[str, str | Path]) -> dict[str, object]:
    """Return the fields of a request for several models: the first is the one that generates."""
    if not models:
        raise SpecError("there is no model to compile; give a directory, or several by name")
    generating = [name for name, path in models.items() if not is_encoder(path)]
    first = next(iter(generating or models))
    others = {name: path for name, path in models.items() if name != first}
    return {"model": models[first], "name": first, "beside": others}


def _read_workflows(request: CompileRequest) -> tuple[Stored, ...]:
    """Read the workflows before the models, which take long: a wrong one is told at once."""
    if not request.workflows:
        return ()
    encoder = is_encoder(request.model)
    name = request.name or (ENCODER_NAME if encoder else MODEL_NAME)
    adapters = None if encoder else tuple(request.adapters)
    first = EMBEDDING if encoder else GENERATION
    models = {GENERATION: list[str](), EMBEDDING: [*request.beside]}
    models[first].insert(0, name)
    # which of them rank, `_check_nodes` looks at
    models[RERANK] = models[INSTRUCTED] = models[EMBEDDING]
    return read_workflows(request.workflows, models, adapters)


def _check_nodes(workflows: Sequence[Stored], members: Sequence[Member]) -> None:
    """Raise WorkflowError for a node whose model does not do what the node does."""
    encoders = {m.name: m.spec for m in members if isinstance(m.spec, EncoderSpec)}
    generating = [member for member in members if member.name not in encoders]
    adapters = tuple(generating[0].request.adapters) if generating else None
    models = models_by_kind((member.name for member in generating), encoders)
    check_models(workflows, models, adapters)


def _read(request: CompileRequest, steps: Steps) -> tuple[Member, ...]:
    """Read the first model, then those beside it, which share a budget with it."""
    if is_artifact(request.model):
        return read_artifact(request)
    first: Member
    if request.budget is not None:
        request = replace(request, budget=request.budget / (1 + len(request.beside)))
    if is_encoder(request.model):
        if request.adapters:
            raise SpecError("adapters serve models that generate; omit --adapter")
        if request.kernels:
            raise SpecError("kernels of your own serve models that generate; omit --kernel")
        first = read_encoder_inputs(request, advance=steps.advance)
    else:
        first = read_inputs(request, advance=steps.advance, calibrate=calibrate_model)
    return (first, *read_beside(request, first))


def calibrate_model(
    request: ModelRequest, spec: ModelSpec, source: ModelSource, advance: Advance
) -> Calibration:
    """Return how strong the inputs of products are on the request's text; see `input_powers`."""
    return calibrate(request, spec, source, advance, compile_artifact)


def _make_schedules(member: Member, steps: Steps) -> Chosen:
    request = member.request
    found = [
        choose_schedules(
            member.scope(target),
            ChoiceRequest(
                effort=request.effort,
                database=Path(request.database or default_path(request.cache)),
                measurable=can_measure(target, request),
                budget=member.search_seconds,
                cache=request.cache,
            ),
            steps.advance,
        )
        for target in member.targets
    ]
    return Chosen.join(found)


def _build_libraries(
    members: Sequence[Member], tuned: Sequence[Chosen], cache: Path | None, steps: Steps
) -> dict[str, TargetKernels]:
    """Return the kernels of all models, each once, for each target."""
    first, libraries = members[0], {}
    for number, target in enumerate(first.targets):
        kernels = {
            kernel.name: kernel
            for member, chosen in zip(members, tuned, strict=True)
            for kernel in _kernels(member, target, (*chosen.tables, *chosen.rules))
        }
        own = first.user_kernels
        for kernel in (request for k in own for request in k.served(tuned[0].tables)):
            if kernels.setdefault(kernel.name, kernel) != kernel:
                raise SpecError(f"a kernel of the model is called {kernel.name}; rename yours")
        here = is_here(target, first.request)
        modules = {k.module: k.unit for k in own}
        every = tuple(kernels.values())
        found = target_kernels(
            target, every, cache, here=here, modules=modules, advance=steps.advance
        )
        libraries[target.name] = found
        steps.advance(number + 1, len(first.targets) + len(first.devices))
    for device in first.devices:
        formats = {member.spec.weight_dtype for member in members}
        formats |= {form for member in members for _, form in member.spec.formats}
        built = build_library(LibrarySpec(target=device, kernels=device_kernels(formats)), cache)
        libraries[device.name] = TargetKernels(built.index, built)
    return libraries


def _kernels(
    member: Member, target: Target, tables: tuple[ScheduleTable, ...]
) -> tuple[KernelRequest, ...]:
    spec = member.spec
    common = (*model_kernels(spec, target), *gemm_kernels(spec, target, tables))
    if isinstance(spec, EncoderSpec):
        return common
    return (*common, *attention_kernels(spec, target, tables), *option_kernels(spec, target))


def _describe(encoder: Member, chunks: WeightChunks) -> EncoderReport:
    assert isinstance(encoder, EncoderInputs), "only the first may generate"
    return EncoderReport(
        name=encoder.name,
        family=encoder.spec.family,
        weight_bytes=chunks.total_bytes,
        weight_dtype=encoder.spec.weight_dtype,
        max_tokens=encoder.spec.max_tokens,
    )


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
    member: Member, artifact: ArtifactWriter, steps: Steps
) -> tuple[tuple[WeightEntry, ...], WeightChunks]:
    if member.packed is not None:
        return link_weights(artifact, member.packed)
    name = f"models/{member.name}/weights/weights.bin"
    checkpoint = member.source.checkpoint()
    path = artifact.path_for(name)
    if isinstance(member, EncoderInputs):
        packed = pack_encoder(member.spec, checkpoint, path, steps.advance)
    else:
        powers = {} if member.quantised is None else member.quantised.powers
        given = member.spec, checkpoint, path, steps.advance, powers
        packed = pack_weights(*given, member.adapters)
    artifact.add_weights(name)
    return packed


def _build_tapes(
    member: Member, weights: tuple[WeightEntry, ...], tables: Sequence[ScheduleTable]
) -> tuple[Tape, ...]:
    tokens, sequences = member.request.max_step_tokens, member.request.max_step_sequences
    if isinstance(member, EncoderInputs):
        return (build_encode_tape(member.spec, weights, member.step_tokens, sequences),)
    given = member.spec, weights, tokens, sequences
    whole = (build_forward_tape(*given, whole=True),) if member.spec.shared_kv else ()
    adapted = (build_adapted_tape(*given),) if member.spec.adapters else ()
    gated = (build_gated_tape(*given),) if _has_own_gate(tables) else ()
    sample = build_sample_tape(member.spec, sequences)
    return (build_forward_tape(*given), *whole, *adapted, *gated, sample)


def _has_own_gate(tables: Iterable[ScheduleTable]) -> bool:
    return any(table.op == OWN_GATE for table in tables)


# ---- writing ----


def _write_member(
    artifact: ArtifactWriter,
    member: Member,
    weights: tuple[WeightEntry, ...],
    chunks: WeightChunks,
    chosen: Chosen,
) -> None:
    folder = f"models/{member.name}"
    for tape in _build_tapes(member, weights, chosen.tables):
        artifact.write_json(f"{folder}/tapes/{tape.name}.json", tape)
    if isinstance(member, EncoderInputs):
        write_encoder(artifact, member, weights)
    else:
        _write_model(artifact, member, weights)
    artifact.write_json(f"{folder}/schedules.json", ScheduleFile(tables=chosen.tables))
    if member.quantised is not None:
        artifact.write_json(f"{folder}/quantisation.json", member.quantised.file)
    artifact.write_json(f"{folder}/weights/chunks.json", chunks)


def _write_model(
    artifact: ArtifactWriter, inputs: Inputs, weights: tuple[WeightEntry, ...]
) -> None:
    folder = f"models/{inputs.name}"
    for name in COPIED_FILES:
        data = inputs.source.file(name)
        if data is not None:
            if name.endswith(".json"):
                found = parse_json_object(data, str(inputs.source.path / name))
                data = (name == TOKENIZER and without_lengths(found)) or data
            artifact.write_bytes(f"{folder}/{name}", data)
    model = ModelFile(
        name=inputs.name,
        spec=inputs.spec,
        weights=weights,
        max_step_tokens=inputs.request.max_step_tokens,
        max_step_sequences=inputs.request.max_step_sequences,
        tokenizer=TOKENIZER if f"{folder}/{TOKENIZER}" in artifact.files else None,
        generation=inputs.generation,
    )
    artifact.write_json(f"{folder}/model.json", model)


def _write_plans(
    members: Sequence[Member], artifact: ArtifactWriter, manifest: dict[str, Any], mix: Mix
) -> tuple[ServicePlan, str]:
    """Write where all is served, as its first model is best; return its plan, also in words."""
    first = members[0]
    if isinstance(first, EncoderInputs):
        _write_places(members, artifact, first.plan, mix)
        return first.plan, f"1 process of {first.plan.prefill.threads} threads"
    choice, seconds = first.choice, first.replay_seconds
    _write_choice(members, artifact, choice, mix)
    if seconds > 0:  # with the kernels of the artifact, where this is their machine
        tuned = mark_tuned(choice, first.searched.pairs)
        where, memory = artifact.seal(**manifest), Memory.of(first.hardware, first.request.cache)
        choice = measure_choice(tuned, where, first.spec, first.trace, seconds, memory)
        _write_choice(members, artifact, choice, mix)
    return service_plan(choice), describe_choice(choice)


def _write_choice(
    members: Sequence[Member], artifact: ArtifactWriter, choice: PlanChoice, mix: Mix
) -> None:
    divisions = _write_places(members, artifact, service_plan(choice), mix, choice)
    artifact.write_json(CHOICE, msgspec.structs.replace(choice, divisions=divisions))


def _write_places(
    members: Sequence[Member],
    artifact: ArtifactWriter,
    plan: ServicePlan,
    mix: Mix,
    choice: PlanChoice | None = None,
) -> tuple[DivisionChoice, ...]:
    """Write the execution graph of what serves: the first model by its plan, encoders beside it.

    Return how the CPU was divided among the workers, and the alternatives.
    """
    models = {member.name: member for member in members if isinstance(member, Inputs)}
    encoders = {member.name: member for member in members if isinstance(member, EncoderInputs)}
    hardware = members[0].hardware
    graph = serving_graph(models, encoders, place_searches(hardware))
    plans = dict.fromkeys(models, plan) | dict.fromkeys(encoders, whole_plan(plan))
    specs = [each.spec for each in models.values()], [each.spec for each in encoders.values()]
    trace = next((each.trace for each in models.values()), None)
    shared, divisions = divide_graph(place(graph, plans), hardware, *specs, trace, choice, mix)
    artifact.write_json(SERVE, shared.file)
    return divisions


def _keep_better(
    first: Member,
    tuned: Chosen,
    plan: ServicePlan,
    artifact: ArtifactWriter,
    manifest: dict[str, Any],
) -> tuple[Chosen, EndToEnd | None]:
    """Write the schedules with which the plan is surely no slower than with the rules'."""
    if not isinstance(first, Inputs) or first.compare_seconds <= 0:
        return tuned, None
    where = artifact.seal(**manifest)
    names = tuple(target.name for target in first.targets)
    tables, found = compare_tables(
        tuned.tables,
        tuned.rules,
        choose_target(where, names, first.hardware),
        plan,
        where,
        first.spec,
        first.choice,
        first.trace,
        first.compare_seconds,
        Memory.of(first.hardware, first.request.cache),
    )
    folder = f"models/{first.name}"
    artifact.write_json(f"{folder}/schedules.json", ScheduleFile(tables=tables))
    if not _has_own_gate(tables):
        artifact.discard(f"{folder}/tapes/{GATED}.json")
    return replace(tuned, tables=tables), found


def _manifest(members: Sequence[Member], chunks: Sequence[WeightChunks]) -> dict[str, Any]:
    content = b"".join(
        msgspec.json.encode(member.spec) + msgspec.json.encode(packed)
        for member, packed in zip(members, chunks, strict=True)
    )
    first = members[0]
    return {
        "producer": f"dovetail {our_version()}",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model_fingerprint": hashlib.sha256(content).hexdigest(),
        "workload_fingerprint": first.workload.fingerprint,
        "targets": tuple(target.name for target in (*first.targets, *first.devices)),
        "models": tuple(m.name for m in members if isinstance(m, Inputs)),
        "encoders": tuple(m.name for m in members if isinstance(m, EncoderInputs)),
        "effort": first.request.effort,
        "command": first.request.command,
    }
