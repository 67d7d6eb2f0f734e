"""An artifact in the place of a checkpoint: compiled anew with what is in it, for this machine.

In: a CompileRequest whose model is an artifact. Out: its models as a compile reads them; packed
weights are linked, workflows and indexes taken over as they are.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dovetail.compiler.encoder_pipeline import EncoderInputs, read_encoder_inputs, whole_plan
from dovetail.compiler.formats.weight_dtype import AUTO
from dovetail.compiler.request import CompileRequest, Inputs, read_inputs
from dovetail.compiler.write.writer import MANIFEST, ArtifactWriter
from dovetail.ir.artifact import SERVE, FileEntry, ServicePlan
from dovetail.ir.errors import SpecError
from dovetail.ir.model import WeightChunks, WeightEntry
from dovetail.ir.plans import ASKED
from dovetail.runtime.artifact import Artifact, ArtifactReader, Part, open_artifact
from dovetail.runtime.machine.isa import kept_targets
from dovetail.topology.hardware import HardwareSpec, read_hardware

SETTLED = (
    "name",
    "beside",
    "adapters",
    "max_context",
    "weight_dtype",
    "calibrate",
    "kv_dtype",
    "workflows",
    "index",
)
"""Options of a compile that an artifact leaves no choice of."""
_LEFT_OPEN: tuple[object, ...] = (None, AUTO, (), [], {})
TAKEN = ("graph/", "indexes/")
"""Folders of what does not depend on kernels."""
MIX, KERNEL = "--mix=", "--kernel="
QUANTISATION = "/quantisation.json"
"""Of a model: how far off its weights are, which are linked."""


def is_artifact(path: str | Path) -> bool:
    """Tell whether a directory is an artifact rather than a model."""
    return (Path(path) / MANIFEST).is_file()


def read_artifact(request: CompileRequest) -> tuple[Inputs | EncoderInputs, ...]:
    """Read the models of an artifact, as `read_inputs` and its like read checkpoints.

    Targets that can be kept and sizes of steps are the artifact's, its plan where that was asked
    for. Raises SpecError for options that are settled, ArtifactError for a damaged artifact.
    """
    if given := [name for name in SETTLED if getattr(request, name) not in _LEFT_OPEN]:
        raise SpecError(
            f"{request.model} is an artifact, in which {', '.join(given)} cannot change; "
            "compile its checkpoint"
        )
    hardware = read_hardware(request.hardware)
    held = ArtifactReader(Path(request.model)).manifest.targets
    artifact = open_artifact(request.model, hardware, kernels=False, target=next(iter(held), ""))
    request = replace(
        request,
        targets=request.targets or kept_targets(held, hardware),
        budget=None if request.budget is None else request.budget / len(artifact.parts),
        plan=request.plan or (_kept_plan(artifact, hardware) if request.threads is None else None),
    )
    members: list[Inputs | EncoderInputs] = []
    for part in artifact.models.values():
        own = replace(
            request,
            name=part.name,
            max_step_tokens=part.file.max_step_tokens,
            max_step_sequences=part.file.max_step_sequences,
        )
        members.append(read_inputs(own, part))
    for encoder in artifact.encoders.values():
        own = replace(request, name=encoder.name)
        if members:
            own = replace(own, plan=whole_plan(members[0].plan), threads=None)
        members.append(read_encoder_inputs(own, encoder))
    return tuple(members)


def link_weights(
    artifact: ArtifactWriter, part: Part
) -> tuple[tuple[WeightEntry, ...], WeightChunks]:
    """Have an artifact share the packed weights of another; return their index and hashes."""
    entry = FileEntry(bytes=part.chunks.total_bytes, sha256=None)
    artifact.link(f"models/{part.name}/weights/weights.bin", part.weights, entry)
    return part.file.weights, part.chunks


def kept_mix(path: Path) -> str | None:
    """Return the mix of requests that an artifact was compiled for, None where none was given."""
    words = ArtifactReader(path).manifest.command
    return next((word.removeprefix(MIX) for word in words if word.startswith(MIX)), None)


def own_kernels(path: Path) -> tuple[str, ...]:
    """Return the kernels of a user's own that an artifact was compiled with, as OP=FILE.

    Their files may have changed since, so that they are not taken over.
    """
    words = ArtifactReader(path).manifest.command
    return tuple(word.removeprefix(KERNEL) for word in words if word.startswith(KERNEL))


def take_over(artifact: ArtifactWriter, path: Path, mix: str | None) -> dict[str, tuple[str, ...]]:
    """Link workflows and indexes of the artifact at `path`; return their names, and its command.

    mix: that this one is compiled for, which the command tells.
    """
    manifest = ArtifactReader(path).manifest
    words = tuple(word for word in manifest.command if not word.startswith(MIX))
    for name, entry in manifest.files.items():
        taken = name.startswith(TAKEN) or name.endswith(QUANTISATION)
        if taken and name != SERVE:
            artifact.link(name, path / name, entry)
    names = {"workflows": manifest.workflows, "indexes": manifest.indexes}
    return names | {"command": (*words, f"{MIX}{mix}") if mix else words}


def _kept_plan(artifact: Artifact, hardware: HardwareSpec) -> ServicePlan | None:
    """Return the plan of an artifact that nothing else was compared with, if the machine has it."""
    plan = artifact.service
    if artifact.choice is not None and artifact.choice.source != ASKED:
        return None
    known = {*plan.prefill.cpus, *plan.decode.cpus} <= set(hardware.allowed_pus)
    return plan if known else None
