"""The steps of a compile that are about a text encoder: read, pack, write.

`dovetail.compiler.pipeline` has them in order. One process runs all of a pass, so there is one
plan, and nothing to choose by replay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from dovetail.codegen.isa.target import Target
from dovetail.compiler.families.encoder_tensors import encoder_sources
from dovetail.compiler.formats.encoder_formats import TABLES, products, tell_widened
from dovetail.compiler.formats.quantising import Advance, choose_formats
from dovetail.compiler.formats.weight_dtype import QUANTISING
from dovetail.compiler.models.encoder_folder import is_encoder, open_folder
from dovetail.compiler.models.encoder_spec import read_encoder_spec
from dovetail.compiler.models.source import TOKENIZER, ModelDirectory, ModelSource
from dovetail.compiler.plan.service import plan_service
from dovetail.compiler.request import (
    CompileRequest,
    Inputs,
    ReadModel,
    check_request,
    check_tokenizer,
    read_machine,
)
from dovetail.compiler.rules.payload import make_encoder_payload
from dovetail.compiler.search.parts import SearchScope
from dovetail.compiler.write.memory_check import check_encoder_fits
from dovetail.compiler.write.weights import plan_sources
from dovetail.compiler.write.writer import ArtifactWriter
from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.encoder import EncoderFile, EncoderSpec
from dovetail.ir.errors import SpecError
from dovetail.ir.model import WeightEntry
from dovetail.runtime.artifact import EncoderPart
from dovetail.runtime.native.encoder import PASS_TOKENS

ENCODER_NAME = "embedder"


@dataclass(frozen=True, slots=True)
class EncoderWorkload:
    """What an encoder's schedules are searched for, in words; it is no user's."""

    source: str
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInputs(ReadModel):
    """Of a text encoder."""

    spec: EncoderSpec
    plan: ServicePlan
    packed: EncoderPart | None = None
    tokenizer: bytes | None
    reads: ClassVar[str] = "texts"

    @property
    def step_tokens(self) -> int:
        """Rows of the largest pass: it holds the longest text."""
        return _step_tokens(self.spec)

    @property
    def workload(self) -> EncoderWorkload:
        """What schedules are searched for."""
        return EncoderWorkload(f"passes of 8 to {self.step_tokens} tokens")

    def scope(self, target: Target) -> SearchScope:
        """Return what schedules are searched for."""
        return SearchScope(
            spec=self.spec,
            payload=make_encoder_payload(self.spec, self.step_tokens),
            plans=(self.plan,),
            hardware=self.hardware,
            target=target,
        )


def _step_tokens(spec: EncoderSpec) -> int:
    return max(PASS_TOKENS, spec.max_tokens)


def read_encoder_inputs(
    request: CompileRequest,
    packed: EncoderPart | None = None,
    advance: Advance = lambda *_: None,
) -> EncoderInputs:
    """Read and check everything; raises SpecError for wrong input, CapacityError for a large one.

    packed: the encoder in an artifact, in the place of the request's model. advance: as of
    `read_inputs`.
    """
    check_request(request)
    if request.calibrate is not None:
        raise SpecError(
            f"{request.model} is a text encoder, which cannot be calibrated; omit --calibrate"
        )
    hardware, targets, devices = read_machine(request)
    folder = None if packed else open_folder(Path(request.model))
    source: ModelSource
    if folder:
        source = folder.source
        spec = read_encoder_spec(
            request.model,
            weight_dtype=request.weight_dtype,
            max_tokens=request.max_context,
            target=targets[0],
        )
    else:
        assert packed
        source, spec = ModelDirectory(packed.folder), packed.file.spec
    weights = packed.file.weights if packed else _plan_weights(request, spec, source)
    step = _step_tokens(spec), request.max_step_sequences
    check_encoder_fits(request.model, spec, weights, hardware, step)
    check_tokenizer(source)
    quantised = None
    remarks = () if packed else tell_widened(spec, source.checkpoint())
    if packed is None and request.weight_dtype in QUANTISING:
        checkpoint = source.checkpoint()
        quantised = choose_formats(products(spec, checkpoint), checkpoint, spec, None, advance)
        spec = spec.with_formats(TABLES | dict(quantised.formats))
    return EncoderInputs(
        request=request,
        name=request.name or ENCODER_NAME,
        source=source,
        spec=spec,
        hardware=hardware,
        targets=targets,
        devices=devices,
        plan=request.plan or plan_service(hardware, request.threads),
        packed=packed,
        tokenizer=folder.tokenizer() if folder else source.file(TOKENIZER),
        quantised=quantised,
        remarks=remarks,
    )


def _plan_weights(
    request: CompileRequest, spec: EncoderSpec, source: ModelSource
) -> tuple[WeightEntry, ...]:
    """Return the weights as they are to be stored, as far as that is known before quantising."""
    if request.weight_dtype in QUANTISING:
        spec = spec.with_formats(TABLES)
    return plan_sources(encoder_sources(spec, source.checkpoint()), spec.weight_format)


def read_beside(request: CompileRequest, first: Inputs | EncoderInputs) -> list[EncoderInputs]:
    """Read the encoders that go beside the first model, on all threads that its prompts have.

    Raises SpecError for a directory that holds something else.
    """
    found: list[EncoderInputs] = []
    for name, path in request.beside.items():
        if not is_encoder(path):
            what = "holds no text encoder" if Path(path).exists() else "does not exist"
            raise SpecError(
                f"{path} {what}; an artifact has one model that generates, and encoders beside it"
            )
        if name in (first.name, *(other.name for other in found)):
            raise SpecError(f"two models have the name {name}; give them different names")
        own = replace(
            request,
            model=path,
            name=name,
            beside={},
            plan=whole_plan(first.plan),
            threads=None,
            max_context=None,
            calibrate=None,
        )
        found.append(read_encoder_inputs(own))
    return found


def whole_plan(plan: ServicePlan) -> ServicePlan:
    """Return the plan of one process with the threads that all processes have for prompts."""
    threads = plan.processes_of("prefill") * plan.prefill.threads
    phase = PhasePlan(threads=threads, cpus=plan.prefill.cpus)
    return ServicePlan(prefill=phase, decode=phase)


def write_encoder(
    artifact: ArtifactWriter, inputs: EncoderInputs, weights: tuple[WeightEntry, ...]
) -> None:
    """Write encoder.json and the tokenizer."""
    folder = f"models/{inputs.name}"
    if inputs.tokenizer is not None:
        artifact.write_bytes(f"{folder}/{TOKENIZER}", inputs.tokenizer)
    file = EncoderFile(
        name=inputs.name,
        spec=inputs.spec,
        weights=weights,
        tokenizer=None if inputs.tokenizer is None else TOKENIZER,
    )
    artifact.write_json(f"{folder}/encoder.json", file)
