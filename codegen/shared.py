"""Adds kernels to the libraries that all artifacts of a machine share (`ir/shared_kernels.py`).

In: kernel requests for a target. Out: their index entries; what no shared library has yet is built
into one more. A library is found again by what was asked for and by the sources that generate C
text, whatever compiler built it: one that a wheel carries serves where there is no compiler.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from filelock import FileLock
from msgspec.structs import replace

from dovetail.codegen.catalog import KernelRequest
from dovetail.codegen.isa.target import Target
from dovetail.codegen.library import (
    ABI,
    EmittedKernel,
    LibrarySpec,
    build_library,
    emit_kernels,
    request_key,
)
from dovetail.codegen.text_cache import generator_digest
from dovetail.codegen.toolchain import Advance, content_key, unheard
from dovetail.ir.artifact import KernelEntry
from dovetail.ir.errors import ToolchainError
from dovetail.ir.files import write_whole
from dovetail.ir.shared_kernels import SharedLibrary, cached_store, read_libraries


def share_kernels(
    target: Target,
    requests: Sequence[KernelRequest],
    cache: Path | None = None,
    store: Path | None = None,
    advance: Advance = unheard,
) -> tuple[KernelEntry, ...]:
    """Return the entries of kernels in shared libraries; those that none has are built.

    cache: the build cache. store: the only one to look in and add to, by default all are looked
    in and the cache's is added to. Raises what `build_library` raises, ToolchainError where the
    store cannot be written.
    """
    keys = [_request_key(target, request) for request in requests]
    stores = None if store is None else (store,)
    known = _known(target, stores, keys)
    if not known.keys() >= set(keys):
        root = (store or cached_store()).absolute()
        try:
            root.mkdir(parents=True, exist_ok=True)
            with FileLock(root / f"{target.name}.lock"):
                known = _known(target, stores, keys)
                lacking = {k: r for k, r in zip(keys, requests, strict=True) if k not in known}
                if lacking:
                    known |= _add_library(target, lacking, cache, root / target.name, advance)
        except OSError as error:
            raise ToolchainError(
                f"cannot write the shared kernels {root}: {error.strerror or error}; set "
                "DOVETAIL_CACHE to another directory"
            ) from error
    return tuple(known[key] for key in keys)


def _known(
    target: Target, stores: Sequence[Path] | None, keys: Iterable[str]
) -> dict[str, KernelEntry]:
    """Return the kernels of shared libraries that have some of these by the keys of requests."""
    wanted = set(keys)
    libraries = read_libraries(
        target.name, stores, lambda library: not wanted.isdisjoint(library.requests)
    )
    return {
        key: entry
        for _, library in libraries
        for key, entry in zip(library.requests, library.index.kernels, strict=True)
    }


def _request_key(target: Target, request: KernelRequest) -> str:
    return content_key([generator_digest(), ABI, target.name, request_key(request)])


def _add_library(
    target: Target,
    requests: dict[str, KernelRequest],
    cache: Path | None,
    folder: Path,
    advance: Advance,
) -> dict[str, KernelEntry]:
    """Build a library of these kernels, put it into a store, and return their entries.

    Its description is written last: a library without is none.
    """
    spec = LibrarySpec(target=target, kernels=tuple(requests.values()))
    built = build_library(spec, cache, advance)
    entries = tuple(
        replace(kernel.entry, shared=_text_hash(target, kernel))
        for kernel in emit_kernels(spec, cache)
    )
    data, name = built.path.read_bytes(), content_key(sorted(requests))[:32]
    library = SharedLibrary(
        sha256=hashlib.sha256(data).hexdigest(),
        requests=tuple(requests),
        index=replace(built.index, library=f"{name}.so", source="", kernels=entries),
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"{name}.so", data)
    write_whole(folder / f"{name}.json", msgspec.json.encode(library))
    return dict(zip(requests, entries, strict=True))


def _text_hash(target: Target, kernel: EmittedKernel) -> str:
    content = [ABI, target.name, target.cflags, msgspec.to_builtins(kernel.text)]
    return content_key(content)
