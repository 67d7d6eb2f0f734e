"""What was made here, or loaded here before: marks that only this user can have made.

A mark is an HMAC of a manifest, which has the hashes of all other files, under a key of this user
in the cache. So what is carried to another machine, or to another user, is unknown there, and what
is copied or moved on this one stays known. Where the cache cannot be written nothing is known.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from dovetail.ir.cache import cache_directory

KEY_BYTES = 32


def is_known(manifest: bytes) -> bool:
    """Tell whether what has this manifest was marked by this user."""
    key = _read_key()
    return key is not None and _mark(key, manifest).is_file()


def remember(manifest: bytes) -> None:
    """Mark what has this manifest, if the cache can be written."""
    with suppress(OSError):
        mark = _mark(_read_key() or _make_key(), manifest)
        os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _folder() -> Path:
    return cache_directory() / "trust" / str(os.getuid())


def _mark(key: bytes, manifest: bytes) -> Path:
    return _folder() / hmac.digest(key, manifest, "sha256").hex()


def _read_key() -> bytes | None:
    """Return the key; None where there is none, or others may have written or read it."""
    try:
        descriptor = os.open(_folder() / "key", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        facts = os.fstat(descriptor)
        private = facts.st_uid == os.getuid() and not facts.st_mode & 0o077
        if not stat.S_ISREG(facts.st_mode) or not private or facts.st_size != KEY_BYTES:
            return None
        return os.read(descriptor, KEY_BYTES)
    finally:
        os.close(descriptor)


def _make_key() -> bytes:
    """Put a new key in its place, whole and private from the start; return the one that is there.

    Of several processes that do so at once all return the same.
    """
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = folder / f".{uuid4().hex}"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, secrets.token_bytes(KEY_BYTES))
        os.fsync(descriptor)
        try:
            os.link(part, folder / "key")  # unlike a rename, fails where there is one
        except FileExistsError:
            if _read_key() is None:
                part.replace(folder / "key")  # unfit: what it marked is void
    finally:
        os.close(descriptor)
        part.unlink(missing_ok=True)
    key = _read_key()
    if key is None:
        raise PermissionError(f"{folder / 'key'} cannot be kept private")
    return key
