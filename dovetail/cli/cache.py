"""`dovetail cache list|clear`: what the build cache holds, and how to get rid of it.

In: names of models or of kinds. Out: a table of sizes and last uses; or what was removed, and what
was not, since a running process holds it. All of it can be made again.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from stat import S_ISDIR
from typing import Annotated

import filelock
import msgspec
import typer
from rich.console import RenderableType

from dovetail.cli.options import AsJson
from dovetail.cli.report import fail, make_table, show_bytes, show_report
from dovetail.errors import SpecError
from dovetail.ir.cache import cache_directory
from dovetail.ir.files import lock_unheld, remove_folder

MODELS, KERNELS, ALL = "models", "kernels", "all"
REST = {
    "builds": ("[0-9a-f][0-9a-f]", "text", "grammar", "zig"),
    "profiles": ("answers", "calibration", "profiles"),
    "tuning": ("tuning", "tuning.jsonl*"),
}
"""What else there is: C code and what it was compiled to; what was measured of this machine and its
devices; trials of schedules. Marks of trust (`ir/trust.py`) are no cache."""
_MODEL = re.compile(r"(?P<name>.+)-[0-9a-f]{16}(?:\.tuned)?\.dove")


class CacheEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is removed as one. paths: below the cache; held: by a running process.

    facts: of a model's artifact what it was made of and how, and last when.
    """

    kind: str
    name: str
    paths: tuple[str, ...]
    bytes: int
    used: datetime
    held: bool
    facts: tuple[str, ...] = ()


class CacheReport(msgspec.Struct, frozen=True):
    """What the cache holds. bytes: in all, a file with several links once."""

    folder: str
    bytes: int
    entries: tuple[CacheEntry, ...]


class ClearReport(msgspec.Struct, frozen=True):
    """What was removed, and what was kept because a running process holds it."""

    removed: tuple[CacheEntry, ...]
    kept: tuple[CacheEntry, ...]


def cache_list_command(*, json: AsJson = False) -> None:
    """List compiled models, kernels, builds, profiles and tuning records: sizes, last uses."""
    show_report(read_cache(), _describe_cache, json=json)


def cache_clear_command(
    names: Annotated[
        list[str],
        typer.Argument(help="Models by name, or: models, kernels, builds, profiles, tuning, all."),
    ],
    yes: Annotated[bool, "Remove without asking."] = False,
    json: AsJson = False,
) -> None:
    """Remove entries of the cache, except what a running process uses."""
    report = read_cache()
    chosen = [entry for entry in report.entries if {ALL, entry.kind, entry.name} & {*names}]
    unknown = {*names} - {ALL, MODELS, KERNELS, *REST, *(entry.name for entry in chosen)}
    if unknown:
        known = ", ".join(dict.fromkeys(entry.name for entry in report.entries)) or "nothing"
        raise SpecError(f"the cache has no {', '.join(sorted(unknown))}; it has {known}")
    if chosen and not yes:
        if not sys.stdin.isatty():
            raise SpecError("to remove without being asked on a terminal, give --yes")
        size = show_bytes(sum(entry.bytes for entry in chosen))
        if not typer.confirm(f"Remove {', '.join(e.name for e in chosen)} ({size})?", err=True):
            fail("nothing was removed")
    removed = clear_cache(chosen)
    kept = tuple(entry for entry in chosen if entry not in removed)
    show_report(ClearReport(removed, kept), _describe_clear, json=json)


def read_cache() -> CacheReport:
    """Return what the cache holds, by kinds and names."""
    root = cache_directory()
    entries = tuple(_read_entries(root)) if root.is_dir() else ()
    files = {file.st_ino: file.st_size for entry in entries for file in _stats(root, entry.paths)}
    return CacheReport(str(root), sum(files.values()), entries)


def clear_cache(entries: Sequence[CacheEntry]) -> tuple[CacheEntry, ...]:
    """Remove entries; return those that nobody held.

    Compiles and tuning jobs hold the cache, and all but models with it; whoever has loaded an
    artifact holds that and its kernels.
    """
    root = cache_directory()
    lock = lock_unheld(root) if entries else None
    with lock or nullcontext():
        return tuple(e for e in entries if (lock or e.kind == MODELS) and _remove(root, e))


def _read_entries(root: Path) -> Iterator[CacheEntry]:
    used = _is_held(root)
    for folder in sorted((root / MODELS).rglob("*.dove")):
        path = folder.relative_to(root / MODELS)
        if found := _MODEL.fullmatch(str(path)):
            entry = _describe(root, MODELS, found["name"], [folder], held=_is_held(folder))
            yield msgspec.structs.replace(entry, facts=_read_facts(folder))
    for folder in sorted(path for path in (root / KERNELS).glob("*") if path.is_dir()):
        yield _describe(root, KERNELS, folder.name, [folder], held=used or _is_held(folder))
    for kind, patterns in REST.items():
        paths = sorted(chain.from_iterable(map(root.glob, patterns)))
        if paths:
            yield _describe(root, kind, kind, paths, held=used)


def _describe(root: Path, kind: str, name: str, paths: Sequence[Path], *, held: bool) -> CacheEntry:
    """Return an entry; it was last used when any of its files was last read or written."""
    below = tuple(str(path.relative_to(root)) for path in paths)
    files = [*_stats(root, below), *(path.stat() for path in paths)]
    last = max(file.st_mtime if S_ISDIR(file.st_mode) else file.st_atime for file in files)
    size = sum(file.st_size for file in files[: -len(paths)])
    used = datetime.fromtimestamp(last, UTC)
    return CacheEntry(kind=kind, name=name, paths=below, bytes=size, used=used, held=held)


def _read_facts(folder: Path) -> tuple[str, ...]:
    """Return what tells an artifact from others of the same model."""
    from dovetail.ir.artifact import Manifest

    try:
        manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return ()
    words = [word for word in manifest.command if word.startswith("--")]
    flags = (word.removeprefix("--").replace("=", " ") for word in words)
    source = manifest.command[2:3]  # `dovetail compile MODEL`
    return (
        *manifest.targets,
        *flags,
        *source,
        f"compiled {manifest.created[:16].replace('T', ' ')}",
    )


def _stats(root: Path, paths: Sequence[str]) -> Iterator[os.stat_result]:
    """Yield the facts of every file in or at some paths; others may remove some meanwhile."""
    for path in map(root.joinpath, paths):
        for file in path.rglob("*") if path.is_dir() else [path]:
            with suppress(OSError):
                if file.is_file():
                    yield file.stat()


def _is_held(folder: Path) -> bool:
    lock = lock_unheld(folder)
    if lock is not None:
        lock.close()
    return lock is None


def _remove(root: Path, entry: CacheEntry) -> bool:
    remove = _remove_model if entry.kind == MODELS else _remove_path
    return all([remove(root / path) for path in entry.paths])


def _remove_model(folder: Path) -> bool:
    """Remove an artifact that is neither loaded nor being compiled again."""
    lock = filelock.FileLock(f"{folder}.lock", timeout=0)
    try:
        with lock:
            if not remove_folder(folder):
                return False
            Path(lock.lock_file).unlink(missing_ok=True)
    except filelock.Timeout:
        return False
    for parent in folder.parents[: folder.parts[::-1].index(MODELS) - 1]:
        with suppress(OSError):  # other models of the organisation are left
            parent.rmdir()
    return True


def _remove_path(path: Path) -> bool:
    if path.is_dir() and not path.is_symlink():
        return remove_folder(path)
    path.unlink(missing_ok=True)
    return True


def _describe_cache(report: CacheReport) -> list[RenderableType]:
    from dovetail.cli.model_cache import TUNED

    rows = []
    for entry in report.entries:
        twins = [e for e in report.entries if (e.kind, e.name) == (entry.kind, entry.name)]
        notes = ["tuned"] * entry.paths[0].endswith(TUNED) + ["in use"] * entry.held
        notes += _tell_apart(entry, twins)
        used = f"{entry.used.astimezone():%Y-%m-%d %H:%M}"
        rows.append((entry.kind, entry.name, show_bytes(entry.bytes), used, ", ".join(notes)))
    title = f"{report.folder}: {show_bytes(report.bytes)}"
    return [make_table(title, ("kind", "name", ">size", "last used", ""), rows)]


def _tell_apart(entry: CacheEntry, twins: Sequence[CacheEntry]) -> list[str]:
    """Return what an entry has and some others of its name have not, at least when it was made."""
    own = [fact for fact in entry.facts if not all(fact in twin.facts for twin in twins)]
    return own[:-1] or own


def _describe_clear(report: ClearReport) -> str:
    lines = [
        f"removed {entry.kind} {entry.name}, {show_bytes(entry.bytes)}" for entry in report.removed
    ]
    lines += [f"kept {e.kind} {e.name}: a running process uses it" for e in report.kept]
    return "\n".join(lines) or "nothing to remove"
