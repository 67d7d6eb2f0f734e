"""Checks an artifact completely: every hash, the weights' chunks, the tapes, and this machine.

Nothing of the artifact runs: its libraries are read as data, its Python files are hashed.

In: a path. Out: a VerifyReport with every fault found, or none.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from dovetail.ir.errors import ArtifactError, CapacityError
from dovetail.ir.model import OWN_GATE, ModelSpec
from dovetail.ir.tape import GATED
from dovetail.runtime.artifact import Artifact, ArtifactReader, check_chunks, open_artifact
from dovetail.runtime.machine.elf import ReadLibrary
from dovetail.runtime.machine.isa import supports
from dovetail.runtime.machine.memory import allocate
from dovetail.runtime.native.tape import BoundTape, KvArrays, Operands, pick_tables
from dovetail.runtime.native.weights import Weights
from dovetail.topology.hardware import HardwareSpec, read_hardware


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was checked. `faults` is empty for a sound artifact that runs here."""

    path: str
    ok: bool
    faults: tuple[str, ...]
    files: int = 0
    bytes: int = 0
    targets: tuple[str, ...] = ()
    runs_here: tuple[str, ...] = ()
    models: tuple[str, ...] = ()


def verify_artifact(path: str | os.PathLike[str]) -> VerifyReport:
    """Check every file of the artifact at `path` against its manifest, and that it runs here.

    Faults are reported, not raised; reading the weights takes seconds per gigabyte.
    """
    machine = read_hardware()
    try:
        reader = ArtifactReader(Path(path))
    except ArtifactError as error:
        return VerifyReport(path=str(path), ok=False, faults=(str(error),))
    faults = _file_faults(reader)
    if not faults:
        faults = _content_faults(reader.path, machine)
    manifest = reader.manifest
    return VerifyReport(
        path=str(path),
        ok=not faults,
        faults=tuple(faults),
        files=len(manifest.files),
        bytes=sum(entry.bytes for entry in manifest.files.values()),
        targets=manifest.targets,
        runs_here=tuple(t for t in manifest.targets if supports(t, machine)),
        models=(*manifest.models, *manifest.encoders),
    )


def _file_faults(reader: ArtifactReader) -> list[str]:
    faults = []
    for name, entry in reader.manifest.files.items():
        try:
            reader.check(name, entry)
        except ArtifactError as error:
            faults.append(str(error))
    return faults


def _content_faults(path: Path, machine: HardwareSpec) -> list[str]:
    try:
        artifact = open_artifact(path, machine)
        for part in artifact.parts:
            check_chunks(path, part)
        _bind_all(artifact)
    except (ArtifactError, CapacityError) as error:
        return [str(error)]
    return []


def _bind_all(artifact: Artifact) -> None:
    """Bind every tape in both phases, with a KV pool of no blocks: nothing is run."""
    library, service = ReadLibrary(*artifact.libraries), artifact.service
    for part in artifact.parts:
        spec = part.file.spec
        layers = allocate(spec.n_layers)
        states = allocate(spec.state_bytes) if isinstance(spec, ModelSpec) else None
        for tape in part.tapes.values():
            operands = Operands(
                Weights(part),
                allocate(tape.arena_bytes),
                KvArrays(layers, layers, range(len(layers) + 1)),
                states,
            )
            for phase, plan in (("prefill", service.prefill), ("decode", service.decode)):
                tables = pick_tables(part.schedules.tables, artifact.target, phase, plan.threads)
                if tape.name != GATED or OWN_GATE in tables:
                    BoundTape(library, tape, tables, operands, plan)
