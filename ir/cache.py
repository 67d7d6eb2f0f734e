"""The folder in which what was built or measured is kept; all of it can be made again."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from pathlib import Path

from dovetail.ir.errors import SpecError
from dovetail.ir.files import hold


def cache_directory() -> Path:
    """Return the cache: $DOVETAIL_CACHE, else `dovetail` in the user's cache directory.

    Raises SpecError where there is neither.
    """
    chosen = os.environ.get("DOVETAIL_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "dovetail"
    except RuntimeError:  # a user without an entry in the system's list, and no HOME
        raise SpecError("this user has no home; set DOVETAIL_CACHE to a folder") from None


def use_cache(cache: Path | None = None) -> ExitStack:
    """Keep what was built and measured from being cleared until what is returned is closed."""
    folder = cache or cache_directory()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return hold(folder)
