"""Artifacts of what verbs are given: artifacts as they are, models compiled into the cache first.

In: paths, and ids of the hub. Out: artifacts; for a server by the ids they have there. A model is
compiled by a child process, by rules alone (`--effort none`), once: the next start finds the
artifact. Where schedules were measured since for a model, or for an artifact that is served, what
the cache has of it stands in.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, cast

import filelock
import msgspec

from dovetail.cli.compile_child import CompileChild, child_command
from dovetail.cli.options import flag_of
from dovetail.cli.report import tell
from dovetail.errors import ArtifactError, DovetailError, SpecError
from dovetail.runtime.artifact import open_artifact
from dovetail.topology.hardware import read_hardware

IDLE = 19
"""Niceness of compiles while a server is idle."""
TUNED = ".tuned.dove"
"""How artifacts end whose schedules were measured while a server was idle."""


def find_artifacts(
    given: Sequence[str | Path], names: Sequence[str], options: Mapping[str, object]
) -> dict[str, Path]:
    """Return the artifact of each model by its id, which `names` has.

    `options` are those of a compile. Raises SpecError where ids collide or a path is nothing to
    serve, and what the compile says.
    """
    if len(names) > len(given):
        raise SpecError(f"{len(names)} names were given for {len(given)} models")
    if "" in names:
        raise SpecError("a model needs a name: give --served-model-name a text, or omit it")
    fixed = {key: value for key, value in options.items() if key != "max_context"}
    if fixed and all(is_artifact(Path(text)) for text in given):  # a load may shorten the context
        _refuse(given[0], fixed)
    found: dict[str, Path] = {}
    for name, text in zip(names, given, strict=True):
        path = Path(text)
        if name in found:
            raise SpecError(f"two models have the name {name!r}; give each a --served-model-name")
        found[name] = _find_tuned(path) if is_artifact(path) else find_artifact(text, options)
    return found


def _find_tuned(given: Path) -> Path:
    """Return what was tuned of an artifact, else the artifact."""
    tuned = _tuned_copy(given)
    if not _fits(tuned):
        return given
    tell(f"serving {tuned}, tuned on this machine, instead of {given}")
    return tuned


def find_artifact(given: str | os.PathLike[str], options: Mapping[str, object]) -> Path:
    """Return an artifact as it is, and that of a model from the cache; it is compiled first.

    given: a path, or a text that may be an id of the hub. What was tuned of it since stands in.
    `options` are those of a compile; an artifact takes none. Raises SpecError where it is neither,
    DovetailError where the model cannot be compiled; what the compiler says goes to stderr.
    """
    if is_artifact(Path(given)):
        if options:
            _refuse(given, options)
        return Path(given)
    from dovetail.compiler.models.hub import find_model, name_model

    model = find_model(given)
    if not is_model(model):
        raise SpecError(_tell_no_model(model))
    artifact = _folder() / f"{name_model(model)}-{_key(model, options)}.dove"
    if _fits(tuned := _tuned(artifact)):
        return _mark_used(tuned)
    if _fits(artifact):  # also in a cache that cannot be written
        return _mark_used(artifact)
    with _lock(artifact, name_model(given)):
        if not _fits(artifact):
            tell(f"compiling {name_model(given)} into {artifact}")
            command = child_command(model, artifact, options, ["--effort", "none"])
            if CompileChild(command, artifact).wait():
                raise DovetailError(f"{given} could not be compiled; see the lines above")
    return _mark_used(artifact)


def _lock(artifact: Path, name: str) -> filelock.AcquireReturnProxy[filelock.FileLock]:
    """Hold an artifact's place in the cache; say so where that is to wait for a compile."""
    lock = filelock.FileLock(f"{artifact}.lock")
    try:
        artifact.parent.mkdir(parents=True, exist_ok=True)  # names at the hub have several parts
        try:
            return lock.acquire(timeout=0)
        except filelock.Timeout:
            tell(f"another process compiles {name}; waiting for it")
            return lock.acquire()
    except OSError as error:
        raise _unusable(artifact.parent, error) from None


def _unusable(folder: Path, error: OSError) -> SpecError:
    return SpecError(
        f"cannot use the cache {folder}: {error.strerror}; set DOVETAIL_CACHE to a folder"
    )


def _refuse(artifact: str | os.PathLike[str], options: Mapping[str, object]) -> NoReturn:
    flag = flag_of(min(options))
    raise SpecError(f"{artifact} is compiled already and takes no {flag}; omit this option")


def _tell_no_model(path: Path) -> str:
    """Return why a path is no model, and what to give instead."""
    if not path.exists():
        return (
            f"there is no file or directory {path}; give an artifact, a model directory, a GGUF "
            "file, or the name of a model at the hub (org/name)"
        )
    if files := sorted(path.glob("*.gguf")):
        return f"{path} is a directory with {len(files)} GGUF files; give one, such as {files[0]}"
    return (
        f"{path} is neither an artifact (manifest.json), nor a model directory (config.json), "
        "nor a GGUF file"
    )


def _mark_used(artifact: Path) -> Path:
    """Return an artifact of the cache, which remembers when it was last asked for."""
    with suppress(OSError):
        os.utime(artifact)
    return artifact


def is_model(given: str | os.PathLike[str]) -> bool:
    """Tell whether this names a model: a directory, a GGUF file, or one of the hub."""
    from dovetail.compiler.models.hub import HubModel
    from dovetail.compiler.models.merged_adapter import is_adapter

    path = Path(given)
    if path.is_file() or (path / "config.json").is_file() or is_adapter(path):
        return True
    return HubModel.read(given) is not None


@dataclass(frozen=True, slots=True)
class TuningJob:
    """A model served under `name`: the command that compiles it with measured schedules."""

    name: str
    command: tuple[str, ...]
    output: Path


def find_untuned(
    given: Sequence[str | Path],
    artifacts: Mapping[str, Path],
    options: Mapping[str, object],
    budget: float | None,
) -> list[TuningJob]:
    """Return jobs for those of `artifacts` whose schedules are by rules, or of another machine.

    budget: seconds to measure, by default as `--effort fast`. What is on record is not measured
    again. An artifact with kernels of a user's own is left as it is.
    """
    from dovetail.compiler.reopen import own_kernels

    flags = ["--effort", "fast", *([] if budget is None else ["--budget", f"{budget}s"])]
    jobs = []
    for text, (name, artifact) in zip(given, artifacts.items(), strict=True):
        if _is_measured(artifact):
            continue
        path = Path(text)
        of_checkpoint = not is_artifact(path)
        if not of_checkpoint and own_kernels(path):
            tell(f"{path} is not tuned, since it has kernels of your own: compile it with these")
            continue
        output = _tuned(artifact) if of_checkpoint else _tuned_copy(path)
        known = options if of_checkpoint else {}
        command = child_command(path, output, known, flags, nice=IDLE)
        jobs.append(TuningJob(name, command, output))
    return jobs


def is_artifact(path: Path) -> bool:
    """Tell whether a path is an artifact."""
    return (path / "manifest.json").is_file()


def _absolute(path: Path) -> Path:
    """Return a path from the root. What it links to may have no name that tells what it is."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - Path has nothing that keeps links


def _is_measured(artifact: Path) -> bool:
    """Tell whether an artifact's schedules were measured on a machine like this one."""
    from dovetail.compiler.measure.recorder import hardware_key

    effort = open_artifact(artifact, read_hardware()).manifest.effort
    made_for = read_hardware(artifact / "hardware.json")
    here, there = (hardware_key(machine, 1, 0) for machine in (read_hardware(), made_for))
    return effort != "none" and here == there


def _tuned_copy(given: Path) -> Path:
    """Return where the cache has a given artifact with schedules measured while it was served."""
    from dovetail.compiler.models.hub import name_model

    manifest = (given / "manifest.json").read_bytes()  # has the hashes of all files
    key = _source_key(hashlib.sha256(manifest).hexdigest())
    return _folder() / f"{name_model(given)}-{key}{TUNED}"


def _folder() -> Path:
    """Return the cache's folder of artifacts, made, and without what killed compiles left there."""
    from dovetail.compiler.write.writer import sweep
    from dovetail.ir.cache import cache_directory

    folder = cache_directory() / "models"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
    except OSError as error:
        raise _unusable(folder, error) from None
    return folder


def _tuned(artifact: Path) -> Path:
    """Return where the cache has a model's artifact, or its tuned one, with measured schedules."""
    name = artifact.name.removesuffix(TUNED).removesuffix(".dove")
    return artifact.with_name(name + TUNED)


def _key(model: Path, options: Mapping[str, object]) -> str:
    """Return what an artifact is known by: target, the model's files, options, and more."""
    from dovetail.codegen.targets import host_target
    from dovetail.compiler.models.merged_adapter import find_base, is_adapter

    root = _absolute(model)
    found = _parts(root)
    if is_adapter(root):
        found += _parts(find_base(root))
    for name in ("adapter", "model"):
        for text in cast("tuple[str, ...]", options.get(name, ())):
            found += _parts(Path(text.partition("=")[2]))
    files = [_facts(file) for file in found if file.is_file()]
    texts = (path for path in options.values() if isinstance(path, Path))
    files += [_facts(_absolute(text)) for text in texts if text.is_file()]
    named = {name: str(value) for name, value in options.items()}
    return _source_key([host_target().name, str(root), files, named])


def _parts(file: Path) -> list[Path]:
    """Return a GGUF file, and the other parts of one that is split; of a folder all in it."""
    if not file.is_file():
        return sorted(file.rglob("*"))
    head, cut, last = file.name.partition("-00001-of-")
    return sorted(file.parent.glob(f"{glob.escape(head)}-*-of-{last}")) if cut else [file]


def _source_key(content: object) -> str:
    """Return a key of `content`, our own files, and this machine, which plans are made for."""
    import dovetail.codegen
    import dovetail.compiler
    import dovetail.ir
    import dovetail.topology
    from dovetail.codegen.text_cache import digest_sources
    from dovetail.codegen.toolchain import content_key
    from dovetail.compiler.measure.recorder import hardware_key

    ours = digest_sources(dovetail.codegen, dovetail.compiler, dovetail.ir, dovetail.topology)
    hardware = read_hardware()
    machine = hardware_key(hardware, hardware.usable_threads, 0)
    return content_key([ours, msgspec.to_builtins(machine), content])[:16]


def _facts(file: Path) -> tuple[str, int, int]:
    return str(file), file.stat().st_size, file.stat().st_mtime_ns


def _fits(artifact: Path) -> bool:
    """Tell whether there is an artifact that this version runs on this machine."""
    try:
        open_artifact(artifact, read_hardware())
    except ArtifactError:
        return False
    return True
