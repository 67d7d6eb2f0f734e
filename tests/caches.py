"""Build caches of tests' own, in which nothing is compiled that was compiled before."""

from __future__ import annotations

from pathlib import Path

from dovetail.ir.cache import cache_directory

BUILDS = ("text", *(f"{byte:02x}" for byte in range(256)))
"""Folders by content: of generated texts, and of what compilers made of them."""


def link_cache(folder: Path, *, kernels: bool = True) -> Path:
    """Return a cache with all that has been built, without artifacts, records and answers.

    kernels: whether it has the libraries that models share; else they are made anew, of objects
    that are there already.
    """
    cache = folder / "cache"
    cache.mkdir()
    for name in (*BUILDS, *("kernels",) * kernels):
        (cache_directory() / name).mkdir(parents=True, exist_ok=True)
        (cache / name).symlink_to(cache_directory() / name)
    return cache
