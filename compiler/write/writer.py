"""Writes an artifact directory so that it is there whole or not at all.

Everything goes to a temporary sibling, is flushed to the disk, and takes the place of an older
artifact in one rename at the end. A failure, a full disk or Ctrl-C removes the sibling; one left
by a killed process is swept by the next compile.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from dovetail.compiler.files.config import read_bounded
from dovetail.compiler.rules.shared_kernels import TargetKernels
from dovetail.ir.artifact import FileEntry, Manifest
from dovetail.ir.errors import ArtifactError, SpecError
from dovetail.ir.files import lock_unheld
from dovetail.ir.index_file import IndexManifest
from dovetail.ir.trust import remember

MANIFEST = "manifest.json"
SUFFIX = ".partial"
BUILDING = ".building"
"""How folders end that hold what an index is being built from."""
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@dataclass(slots=True)
class ArtifactWriter:
    """An artifact in the making: `root` is the temporary directory, `files` the manifest's list."""

    target: Path
    root: Path
    files: dict[str, FileEntry] = field(default_factory=dict)
    kind: type[Manifest | IndexManifest] = Manifest

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write one file; `name` is its path in the artifact."""
        path = self.path_for(name)
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.files[name] = FileEntry(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    def write_json(self, name: str, value: msgspec.Struct) -> None:
        """Write a value of the schemas in `dovetail.ir` as indented JSON."""
        self.write_bytes(name, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")

    def link(self, name: str, source: Path, entry: FileEntry) -> None:
        """List a file of others that never changes, without a copy where the disk is the same."""
        path = self.path_for(name)
        try:
            os.link(source.resolve(), path)  # a link's own would point elsewhere from there
        except OSError:
            shutil.copyfile(source, path)
            with path.open("rb") as file:
                os.fsync(file.fileno())
        self.files[name] = entry

    def path_for(self, name: str) -> Path:
        """Return where to write a file; announce it with `add_weights` or `add_file` afterwards."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def add_file(self, name: str) -> None:
        """List a file that was written in its place by others, with its hash."""
        path = self.root / name
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        self.files[name] = FileEntry(bytes=path.stat().st_size, sha256=digest)

    def discard(self, name: str) -> None:
        """Remove a file that turned out to serve nothing, if it is there."""
        if self.files.pop(name, None):
            (self.root / name).unlink()

    def add_weights(self, name: str) -> None:
        """List a weights file; its hashes stand in its chunks.json."""
        self.files[name] = FileEntry(bytes=(self.root / name).stat().st_size, sha256=None)

    def seal(self, **manifest: Any) -> Path:
        """Write the manifest over all files so far and return where the artifact can be tried."""
        files = {name: self.files[name] for name in sorted(self.files.keys() - {MANIFEST})}
        self.write_json(MANIFEST, self.kind(files=files, **manifest))
        return self.root

    def commit(self, *, foreign: bool = False, **manifest: Any) -> None:
        """Write the manifest and put the artifact in its place, marked as made here.

        foreign: it holds code of others, as it was; then it is not marked.
        """
        self.seal(**manifest)
        _check_replaceable(self.target, self.kind)
        for folder in (self.root, *(p for p in self.root.rglob("*") if p.is_dir())):
            _sync_folder(folder)
        os.umask(mask := os.umask(0))
        self.root.chmod(0o777 & ~mask)  # it was made private
        if not foreign:
            remember((self.root / MANIFEST).read_bytes())
        replace_folder(self.root, self.target)
        _sync_folder(self.target.parent)


def write_libraries(artifact: ArtifactWriter, kernels: Mapping[str, TargetKernels]) -> None:
    """Write the index of each target's kernels, and the library of its own ones with its text."""
    for target, found in kernels.items():
        folder, index = f"kernels/{target}", found.index
        if found.own is not None:
            artifact.write_bytes(f"{folder}/{index.library}", found.own.path.read_bytes())
            artifact.write_bytes(f"{folder}/{index.source}", found.own.source.encode())
        artifact.write_json(f"{folder}/index.json", index)


@contextmanager
def write_artifact(
    output: str | Path, *, kind: type[Manifest | IndexManifest] = Manifest
) -> Iterator[ArtifactWriter]:
    """Open a writer for `output`; nothing is there before its `commit`.

    An artifact (or index, as `kind` says) that is there already is replaced, anything else is
    refused. Raises SpecError when the output cannot be written to or is something else,
    ArtifactError when writing fails later (a full disk).
    """
    target = Path(output).absolute()
    if target.is_symlink():
        target = target.resolve()
    _check_replaceable(target, kind)
    with ExitStack() as stack:
        try:
            sweep(target.parent, f".{target.name}.")
            root = stack.enter_context(half_made(target.parent, f".{target.name}."))
        except OSError as error:
            reason = error.strerror or error
            raise SpecError(
                f"cannot write to {target.parent}: {reason}; choose another output"
            ) from error
        try:
            yield ArtifactWriter(target, root, kind=kind)
        except OSError as error:
            raise ArtifactError(
                f"cannot write {output}: {error.strerror or error}; nothing was written"
            ) from error


def check_output(output: str | Path, *, kind: type[Manifest | IndexManifest] = Manifest) -> None:
    """Raise SpecError as `write_artifact` does: before the work that it would be in vain after."""
    with write_artifact(output, kind=kind):
        pass


@contextmanager
def half_made(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a new directory in `parent`, locked so that nobody sweeps it; it is removed after."""
    with ExitStack() as stack:
        while True:
            root = parent / f"{prefix}{secrets.token_hex(4)}{SUFFIX}"
            # Before it is there: a signal may come in between
            stack.callback(shutil.rmtree, root, ignore_errors=True)
            root.mkdir(0o700)
            with suppress(FileNotFoundError):
                descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                root.stat()  # it may have been swept before it was locked: then another one
                break
        yield root


def sweep(folder: Path, prefix: str = "") -> None:
    """Remove what killed compiles left half-made in a folder: nobody holds its lock."""
    found = [path for path in folder.iterdir() if path.name.endswith(SUFFIX)]
    for left in (path for path in found if path.name.startswith(prefix)):
        with suppress(OSError):
            if lock := lock_unheld(left):
                with lock:
                    shutil.rmtree(left, ignore_errors=True)


KINDS = {Manifest: "artifact", IndexManifest: "index"}


class _Version(msgspec.Struct):
    format_major: int
    files: dict[str, Any]
    kind: str = "artifact"


def _check_replaceable(target: Path, kind: type[Manifest | IndexManifest]) -> None:
    """Refuse to replace what is not an artifact, or no index where an index is to be."""
    if target.exists() and kind_of(target) != KINDS[kind]:
        raise SpecError(
            f"{target} exists and is not an {KINDS[kind]}; choose another output or remove it"
        )


def kind_of(folder: Path) -> str:
    """Return which of KINDS a folder is, "" for none."""
    try:
        data = read_bounded(folder / MANIFEST, 64 << 20)
        return msgspec.json.decode(data, type=_Version).kind
    except (SpecError, msgspec.DecodeError, RecursionError):
        return ""


def replace_folder(root: Path, target: Path) -> None:
    """Rename `root` to `target`; where that exists the two change places in one step."""
    if not target.exists():
        root.rename(target)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    exchange = getattr(libc, "renameat2", None)
    names = (os.fsencode(root), os.fsencode(target))
    if exchange and exchange(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return  # the older artifact now bears the temporary name and is removed with it
    older = root.with_name(root.name + ".old")  # a file system without exchange
    target.rename(older)
    try:
        root.rename(target)
    except BaseException:
        older.rename(target)
        raise
    shutil.rmtree(older, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
