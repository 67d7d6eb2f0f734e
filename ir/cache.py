"""The folder in which what was built or measured is kept; all of it can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return the cache: $DOVETAIL_CACHE, else `dovetail` in the user's cache directory."""
    chosen = os.environ.get("DOVETAIL_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dovetail"
