"""Files that others see whole or not at all, files of others that may be no files, held folders."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from contextlib import ExitStack, suppress
from io import BufferedReader
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import msgspec

MAX_JSON_BYTES = 64 << 20

T = TypeVar("T")


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a file for reading; a pipe, a device or a folder is an OSError, and never waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_json(path: Path, kind: type[T], most: int = MAX_JSON_BYTES) -> T:
    """Return a file of JSON as `kind`; ValueError says what is wrong with it, to follow its name.

    most: bytes that it may have. Raises FileNotFoundError where there is none.
    """
    try:
        with open_regular(path) as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise ValueError(f"is larger than {most >> 20} MiB")
        return msgspec.json.decode(data, type=kind)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"cannot be decoded ({error})") from None


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path`; a write that fails leaves what was there, and nothing beside it.

    A link stays one, and a file that was there keeps its mode. What is no file (a pipe, a device)
    cannot be exchanged, so it is written to.

    Raises:
        OSError: as usual; it names `path`.
    """
    given, target = Path(path), Path(os.path.realpath(path))
    part = target.parent / f".{uuid4().hex}.part"
    try:
        if given.exists() and not given.is_file():  # the name of /dev/stdout's pipe leads nowhere
            given.write_bytes(data)
            return
        try:
            part.write_bytes(data)
            if target.exists():
                shutil.copymode(target, part)
            part.replace(target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def hold(*folders: Path) -> ExitStack:
    """Keep `remove_folder` off folders until what is returned is closed, or this process ends.

    One that is not there, or on a file system without locks, is not held.
    """
    held = ExitStack()
    for folder in folders:
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
    return held


def lock_unheld(folder: Path) -> ExitStack | None:
    """Return a lock that nobody can hold a folder beside, until it is closed; None where one does.

    Raises OSError for a folder that cannot be opened.
    """
    with ExitStack() as lock:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        lock.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        return lock.pop_all()


def remove_folder(folder: Path) -> bool:
    """Remove a folder, which vanishes at once; return False where somebody holds it."""
    lock = lock_unheld(folder)
    if lock is None:
        return False
    with lock:
        part = folder.with_name(f".{folder.name}.{uuid4().hex}.partial")
        folder.rename(part)
        shutil.rmtree(part)
    return True
