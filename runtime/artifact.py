"""Opens an artifact directory: reads and checks everything but the weights, and picks the target.

In: the path of an `app.dove` folder and this machine. Out: a frozen `Artifact`; every fault is an
`ArtifactError` that names the file and the command that mends it.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeAlias, TypeVar

import msgspec

from dovetail.ir.artifact import (
    FORMAT_MAJOR,
    MACHINE,
    SERVE,
    FileEntry,
    KernelIndex,
    Manifest,
    ServicePlan,
)
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.encoder import EncoderFile, encoder_shapes
from dovetail.ir.errors import ArtifactError, WorkflowError
from dovetail.ir.files import open_regular, read_json
from dovetail.ir.formats import FORMATS
from dovetail.ir.graph import ExecutionGraph, GraphFile, make_graph
from dovetail.ir.model import PANEL, ModelFile, WeightChunks, WeightEntry, weight_shapes
from dovetail.ir.place import find_searches, read_plan
from dovetail.ir.plans import CHOICE, PlanChoice
from dovetail.ir.schedule import ScheduleFile
from dovetail.ir.shared_kernels import find_shared
from dovetail.ir.tape import Tape
from dovetail.ir.template import raise_file
from dovetail.runtime.machine.isa import choose_target
from dovetail.runtime.machine.library import KernelLibrary
from dovetail.topology.hardware import HardwareSpec

MAX_FILES = 4096
HASH_STEP = 1 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ArtifactPart:
    """What models and encoders have. `tapes` by name; `weights` and `tokenizer` are files."""

    name: str
    folder: Path
    schedules: ScheduleFile
    tapes: dict[str, Tape]
    weights: Path
    chunks: WeightChunks
    tokenizer: Path | None


@dataclass(frozen=True, slots=True)
class ModelPart(ArtifactPart):
    """One model of an artifact that generates."""

    file: ModelFile


@dataclass(frozen=True, slots=True)
class EncoderPart(ArtifactPart):
    """One encoder of an artifact."""

    file: EncoderFile


Part: TypeAlias = ModelPart | EncoderPart


@dataclass(frozen=True, slots=True)
class StoredWorkflow:
    """A workflow of an artifact. source: the Python file that makes it, where it calls functions.

    template: of the graphs of its requests. See `stored_workflows.py`.
    """

    name: str
    template: ExecutionGraph
    source: Path | None


@dataclass(frozen=True, slots=True)
class Artifact:
    """An opened artifact, with the kernels of the target chosen for this machine.

    It has at least one model that generates, or one encoder. own: the library that it carries.
    shared: the library of each other kernel, by its name. serve: where models, encoders and
    searches run. indexes: folders by name. machine, choice: what it was compiled for, and why its
    plan was chosen, as far as it tells.
    """

    path: Path
    manifest: Manifest
    target: str
    own: Path | None
    kernels: KernelIndex
    serve: ExecutionGraph
    models: dict[str, ModelPart]
    encoders: dict[str, EncoderPart]
    workflows: tuple[StoredWorkflow, ...] = ()
    indexes: Mapping[str, Path] = field(default_factory=dict)
    shared: Mapping[str, Path] = field(default_factory=dict)
    machine: HardwareSpec | None = None
    choice: PlanChoice | None = None

    def plan(self, model: str) -> ServicePlan:
        """Return how a model or an encoder is served."""
        return read_plan(self.serve, model)

    @property
    def service(self) -> ServicePlan:
        """How its first model is served."""
        return self.plan(self.parts[0].name)

    def open_kernels(self) -> KernelLibrary:
        """Load the libraries of its kernels."""
        return KernelLibrary(*self.libraries)

    @property
    def libraries(self) -> tuple[Path, KernelIndex, Mapping[str, Path]]:
        """What a KernelLibrary is made of."""
        return self.own or next(iter(self.shared.values())), self.kernels, self.shared

    @property
    def code(self) -> str:
        """Which kinds of code it holds; tapes say where kernels read and write."""
        python = any(workflow.source for workflow in self.workflows)
        return "native code and Python" if python else "native code"

    @property
    def parts(self) -> tuple[Part, ...]:
        """All models, those that generate first."""
        return (*self.models.values(), *self.encoders.values())


class _FormatVersion(msgspec.Struct):
    format_major: int
    command: tuple[str, ...] = ()
    kind: str = ""


def damaged(artifact: Path, file: str, problem: str) -> ArtifactError:
    """Return the error for a file of an artifact that is not what it should be."""
    return ArtifactError(
        f"{artifact / file}: {problem}; write it again by `dovetail compile MODEL -o {artifact}`"
    )


def outdated(artifact: Path, file: str, problem: str, command: Iterable[str]) -> ArtifactError:
    """Return the error for a file that another version wrote; command: what makes it again."""
    again = shlex.join(command) or f"dovetail compile MODEL -o {artifact}"
    return ArtifactError(
        f"{artifact / file}: {problem}; another version wrote it: install a matching one or "
        f"compile the model again by `{again}`"
    )


def check_folder(path: Path) -> None:
    """Raise ArtifactError where there is no directory of that name, but a file, or nothing."""
    if not path.is_dir():
        model = path if path.is_file() else "MODEL"
        why = "is not an artifact directory" if path.exists() else "does not exist"
        raise ArtifactError(
            f"{path} {why}; run `dovetail compile {model} -o app.dove` to "
            "make one, and give app.dove"
        )


class ArtifactReader:
    """Reads the files of one artifact that its manifest lists, within size limits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = self._read_manifest()

    def file(self, name: str) -> Path:
        """Return the path of a listed file; refuses names that lead out of the artifact."""
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name:
            raise damaged(self.path, "manifest.json", f"{name!r} leads out of the artifact")
        if name not in self.manifest.files:
            raise damaged(self.path, name, "is not listed in manifest.json")
        found = self.path / pure
        if not found.resolve().is_relative_to(self.path.resolve()):
            raise damaged(self.path, name, "is a link that leads out of the artifact")
        return found

    def json(self, name: str, kind: type[T]) -> T:
        """Return a listed JSON file as `kind`."""
        return self._read(name, self.file(name), kind)

    def find_json(self, name: str, kind: type[T]) -> T | None:
        """Return a JSON file as `kind`, None where it is not listed."""
        return self.json(name, kind) if name in self.manifest.files else None

    def graph(self, name: str) -> ExecutionGraph:
        """Return a listed execution graph."""
        try:
            return make_graph(self.json(name, GraphFile))
        except WorkflowError as error:
            raise damaged(self.path, name, str(error)) from None

    def check(self, name: str, entry: FileEntry, *, contents: bool = True) -> None:
        """Raise ArtifactError where a file's size, or with `contents` sha256, is not as listed."""
        if problem := find_damage(self.file(name), entry, contents=contents):
            raise damaged(self.path, name, problem)

    def _read_manifest(self) -> Manifest:
        check_folder(self.path)
        if not (self.path / "manifest.json").exists():
            if (self.path / "config.json").exists():
                raise ArtifactError(
                    f"{self.path} is a model, not an artifact; run `dovetail compile {self.path} "
                    "-o app.dove` and give app.dove"
                )
            raise ArtifactError(
                f"{self.path / 'manifest.json'} is missing: {self.path} is not an artifact; "
                "give a directory that `dovetail compile` wrote"
            )
        version = self._read("manifest.json", self.path / "manifest.json", _FormatVersion)
        if version.kind == "index":
            raise ArtifactError(f"{self.path} is an index, not an artifact; give it by --index")
        if version.format_major != FORMAT_MAJOR:
            problem = f"format {version.format_major} is not supported, only {FORMAT_MAJOR}"
            raise outdated(self.path, "manifest.json", problem, version.command)
        manifest = self._read("manifest.json", self.path / "manifest.json", Manifest)
        if len(manifest.files) > MAX_FILES:
            raise damaged(self.path, "manifest.json", f"lists more than {MAX_FILES} files")
        return manifest

    def _read(self, name: str, found: Path, kind: type[T]) -> T:
        try:
            return read_json(found, kind)
        except (FileNotFoundError, ValueError) as error:
            raise damaged(self.path, name, str(error)) from None


def find_damage(path: Path, entry: FileEntry, *, contents: bool) -> str:
    """Return how a file differs from what a manifest says of it, "" where it does not."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
        if size != entry.bytes:
            return f"has {size} bytes where the manifest says {entry.bytes}"
        if contents and entry.sha256 is not None and hash_file(path) != entry.sha256:
            return "does not have the sha256 the manifest gives"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return ""


def hash_file(path: Path) -> str:
    """Return the sha256 of a file as hexadecimal text."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_artifact(
    path: str | os.PathLike[str],
    hardware: HardwareSpec,
    *,
    check_weights: bool = False,
    kernels: bool = True,
    target: str = "",
) -> Artifact:
    """Open the artifact at `path` for the machine `hardware`.

    Checks the format, the size of every file, and the sha256 of every file but the weights
    (`check_weights` adds their chunk hashes) and those of indexes, which are checked as these are
    opened against manifests of their own. kernels: False leaves out the
    shared libraries, for one who runs nothing. target: one of the artifact's, by default the best
    that the machine runs.

    Raises:
        MissingKernelsError: this machine lacks kernels that artifacts share.
        ArtifactError: anything is missing, damaged, too new, or does not fit the machine.
    """
    reader = ArtifactReader(Path(path))
    for name, entry in reader.manifest.files.items():
        listed = name.startswith("indexes/") and not name.endswith("/manifest.json")
        reader.check(name, entry, contents=not listed)  # the manifest of an index has its hashes
    target = target or choose_target(reader.path, reader.manifest.targets, hardware)
    index = reader.json(f"kernels/{target}/index.json", KernelIndex)
    models = {name: _read_model(reader, name) for name in reader.manifest.models}
    encoders = {name: _read_encoder(reader, name) for name in reader.manifest.encoders}
    if not models and not encoders:
        raise damaged(reader.path, "manifest.json", "names no model")
    own = reader.file(f"kernels/{target}/{index.library}") if index.library else None
    shared = find_shared(reader.path, target, index.kernels) if kernels else {}
    if own is None and not all(kernel.shared for kernel in index.kernels):
        raise damaged(reader.path, f"kernels/{target}/index.json", "names no library")
    artifact = Artifact(
        path=reader.path,
        manifest=reader.manifest,
        target=target,
        own=own,
        shared=shared,
        kernels=index,
        serve=read_serve(reader, (*models, *encoders)),
        models=models,
        encoders=encoders,
        workflows=tuple(_read_workflow(reader, name) for name in reader.manifest.workflows),
        indexes={
            name: reader.file(f"indexes/{name}/manifest.json").parent
            for name in reader.manifest.indexes
        },
        machine=reader.find_json(MACHINE, HardwareSpec),
        choice=reader.find_json(CHOICE, PlanChoice),
    )
    for part in artifact.parts if check_weights else ():
        check_chunks(reader.path, part)
    return artifact


def open_same(path: str | os.PathLike[str], hardware: HardwareSpec, fingerprint: str) -> Artifact:
    """Open an artifact again, in a process that serves it: token ids mean others to other models.

    fingerprint: of its models, "" for any. Raises as `open_artifact`, and ArtifactError where
    others have taken their place.
    """
    artifact = open_artifact(path, hardware)
    if fingerprint not in ("", artifact.manifest.model_fingerprint):
        raise ArtifactError(
            f"{path} was replaced by another model while it was served; close it and load it "
            "again, or start the server again"
        )
    return artifact


def device_module(artifact: Artifact) -> tuple[Path, KernelIndex] | None:
    """Return the module for NVIDIA's GPUs, and its index; None where the artifact has none."""
    if "cuda" not in artifact.manifest.targets:
        return None
    reader = ArtifactReader(artifact.path)
    index = reader.json("kernels/cuda/index.json", KernelIndex)
    return reader.file(f"kernels/cuda/{index.library}"), index


def read_serve(reader: ArtifactReader, models: Iterable[str]) -> ExecutionGraph:
    """Return the graph of what serves; it must place these models and encoders, and searches."""
    graph = reader.graph(SERVE)
    try:
        find_searches(graph)
        for model in models:
            read_plan(graph, model)
    except WorkflowError as error:
        raise damaged(reader.path, SERVE, str(error)) from None
    return graph


def _read_model(reader: ArtifactReader, name: str) -> ModelPart:
    file = reader.json(f"models/{name}/model.json", ModelFile)
    part = ModelPart(file=file, **_read_files(reader, name, file.tokenizer))
    _check_weight_table(reader, part, "model.json", weight_shapes(file.spec))
    return part


def _read_encoder(reader: ArtifactReader, name: str) -> EncoderPart:
    file = reader.json(f"models/{name}/encoder.json", EncoderFile)
    if lost := file.spec.tables.keys() - {weight.name for weight in file.weights}:
        raise damaged(reader.path, f"models/{name}/encoder.json", f"lists no {min(lost)!r}")
    part = EncoderPart(file=file, **_read_files(reader, name, file.tokenizer))
    _check_weight_table(reader, part, "encoder.json", encoder_shapes(file.spec))
    return part


def _read_workflow(reader: ArtifactReader, name: str) -> StoredWorkflow:
    source, template = f"graph/{name}.py", reader.graph(f"graph/{name}.json")
    try:
        raise_file(template)
    except WorkflowError as error:
        raise damaged(reader.path, f"graph/{name}.json", str(error)) from None
    has_source = source in reader.manifest.files
    return StoredWorkflow(name, template, reader.file(source) if has_source else None)


def _read_files(reader: ArtifactReader, name: str, tokenizer: str | None) -> dict[str, Any]:
    """Return the fields that every kind of model has."""
    folder = f"models/{name}"
    listed = [f for f in reader.manifest.files if f.startswith(f"{folder}/tapes/")]
    return {
        "name": name,
        "folder": reader.path / folder,
        "schedules": reader.json(f"{folder}/schedules.json", ScheduleFile),
        "tapes": {PurePosixPath(f).stem: reader.json(f, Tape) for f in listed},
        "weights": reader.file(f"{folder}/weights/weights.bin"),
        "chunks": reader.json(f"{folder}/weights/chunks.json", WeightChunks),
        "tokenizer": reader.file(f"{folder}/{tokenizer}") if tokenizer else None,
    }


def _check_weight_table(
    reader: ArtifactReader, part: Part, file: str, described: Mapping[str, tuple[int, int]]
) -> None:
    """Hold the index of the weights to their file, and to the `described` (n, k) of each."""
    size = reader.manifest.files[f"models/{part.name}/weights/weights.bin"].bytes
    model_json = f"models/{part.name}/{file}"
    if part.chunks.total_bytes != size:
        raise damaged(reader.path, model_json, "disagrees with weights/chunks.json about the size")
    for weight in part.file.weights:
        if weight.offset < 0 or weight.bytes < 0 or weight.offset + weight.bytes > size:
            raise damaged(reader.path, model_json, f"places {weight.name!r} outside weights.bin")
        if weight.offset % 64:
            raise damaged(reader.path, model_json, f"places {weight.name!r} off a cache line")
        known = FORMATS if weight.layout.startswith("packed") else DTYPES
        if weight.dtype not in known:
            problem = f"the format {weight.dtype!r} of {weight.name!r} is not supported"
            raise outdated(reader.path, model_json, problem, reader.manifest.command)
        if weight.bytes < _least_bytes(weight):
            raise damaged(reader.path, model_json, f"gives {weight.name!r} too few bytes")
        if described.get(weight.name, (weight.n, weight.k)) != (weight.n, weight.k):
            problem = f"lists {weight.name!r} in another shape than its dimensions give"
            raise damaged(reader.path, model_json, problem)


def _least_bytes(weight: WeightEntry) -> int:
    """Return the bytes that n x k values take, whole panels where they are packed."""
    pairs = {"packed": 1, "packed_pair": 2}.get(weight.layout)
    if pairs is None:
        return weight.n * weight.k * DTYPES[weight.dtype].size
    return -(-weight.n // (pairs * PANEL)) * pairs * FORMATS[weight.dtype].panel_bytes(weight.k)


def check_chunks(artifact: Path, part: Part) -> None:
    """Raise ArtifactError at the first chunk of weights.bin whose sha256 is wrong."""
    chunks = part.chunks
    name = str(part.weights.relative_to(artifact))
    expected = -(-chunks.total_bytes // chunks.chunk_bytes) if chunks.chunk_bytes > 0 else -1
    if expected != len(chunks.sha256):
        raise damaged(artifact, f"models/{part.name}/weights/chunks.json", "has too few chunks")
    with part.weights.open("rb") as file:
        for i, sha256 in enumerate(chunks.sha256):
            if _hash_next(file, chunks.chunk_bytes) != sha256:
                raise damaged(artifact, name, f"is corrupted in chunk {i}")


def _hash_next(file: BinaryIO, length: int) -> str:
    """Return the sha256 of the next `length` bytes, of which there may be fewer."""
    digest = hashlib.sha256()
    while data := file.read(min(HASH_STEP, length)):
        digest.update(data)
        length -= len(data)
    return digest.hexdigest()
