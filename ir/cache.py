"""The folder in which what was built or measured is kept; all of it can be made again."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from pathlib import Path

from dovetail.ir.files import hold


def cache_directory() -> Path:
    """Return the cache: $DOVETAIL_CACHE, else `dovetail` in the user's cache directory."""
    chosen = os.environ.get("DOVETAIL_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dovetail"


def use_cache(cache: Path | None = None) -> ExitStack:
    """Keep what was built and measured from being cleared until what is returned is closed."""
    folder = cache or cache_directory()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return hold(folder)
