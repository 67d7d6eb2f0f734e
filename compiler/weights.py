"""Packs a checkpoint into one weights.bin: streamed in blocks, page-aligned, hashed on the way.

In: ModelSpec and Checkpoint. Out: the file, its WeightEntry index and its chunk hashes. Two blocks
(8 MiB of output) are held at a time, whatever the size of the model: one is read and packed while
the other one is hashed and written.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

from dovetail.compiler.checkpoint import Checkpoint
from dovetail.compiler.rope import rope_tables
from dovetail.compiler.tensors import WeightSource, weight_sources
from dovetail.ir.dtypes import DTYPES, narrow_bf16, widen_bf16
from dovetail.ir.errors import SpecError
from dovetail.ir.formats import FORMATS
from dovetail.ir.model import PANEL, ModelSpec, WeightChunks, WeightEntry

PAGE = 4096
CHUNK_BYTES = 16 << 20
BLOCK_BYTES = 8 << 20

T = TypeVar("T")
Array = npt.NDArray[Any]
Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


def plan_weights(spec: ModelSpec) -> tuple[WeightEntry, ...]:
    """Return where every packed weight goes: offsets are multiples of 4096, in the order of use."""
    entries, offset = [], 0
    for source in weight_sources(spec):
        dtype = spec.weight_dtype if _is_matrix(source) else "f32"
        n, count = _packed_extent(source, dtype)
        size = count * DTYPES[dtype].size
        layout = "vector" if source.layout == "pair_vector" else source.layout
        entries.append(
            WeightEntry(
                name=source.name,
                layout=layout,
                dtype=dtype,
                n=n,
                k=source.k,
                offset=offset,
                bytes=size,
            )
        )
        offset += _round_up(size, PAGE)
    return tuple(entries)


def total_bytes(entries: tuple[WeightEntry, ...]) -> int:
    """Return the size of weights.bin: the end of the last entry, rounded up to a page."""
    return _round_up(entries[-1].offset + entries[-1].bytes, PAGE)


def pack_weights(
    spec: ModelSpec, checkpoint: Checkpoint, path: Path, progress: Progress | None = None
) -> tuple[tuple[WeightEntry, ...], WeightChunks]:
    """Write `path`; return its index and the sha256 of every 16 MiB.

    Raises SpecError for weights with NaN or infinite values, OSError when the disk is full or
    read-only.
    """
    entries = plan_weights(spec)
    total = total_bytes(entries)
    tables = dict(
        zip(("rope_cos", "rope_sin"), rope_tables(spec.rope, spec.max_context), strict=True)
    )
    with ExitStack() as stack:
        file = stack.enter_context(path.open("wb", buffering=0))
        os.posix_fallocate(file.fileno(), 0, total)  # a full disk shows now, not after minutes
        pool = stack.enter_context(ThreadPoolExecutor(2))
        sink = _HashedFile(file, pool)
        found = (
            (entry.offset, _packed_blocks(source, entry.dtype, checkpoint))
            if source.name not in tables
            else (entry.offset, iter((tables[source.name],)))
            for source, entry in zip(weight_sources(spec), entries, strict=True)
        )
        placed = ((offset, block) for offset, blocks in found for block in blocks)
        for offset, block in _read_ahead(placed, pool):
            sink.pad_to(offset)
            sink.write(block)
            if progress:
                progress(sink.position, total)
        sink.pad_to(total)
        os.fsync(file.fileno())
    return entries, sink.finish()


def convert(values: Array, stored: str, wanted: str) -> Array:
    """Convert between the storage forms of f32, f16 and bf16 (rounding to nearest even)."""
    if stored == wanted:
        return values
    wide = widen_bf16(values) if stored == "bf16" else values.astype(np.float32)
    return narrow_bf16(wide) if wanted == "bf16" else wide


# ---- from tensors to blocks ----


def _read_ahead(items: Iterator[T], pool: ThreadPoolExecutor) -> Iterator[T]:
    """Yield `items`, whose next one a thread makes while the last one is used."""
    pending = pool.submit(next, items, None)
    while (item := pending.result()) is not None:
        pending = pool.submit(next, items, None)
        yield item


def _packed_blocks(source: WeightSource, dtype: str, checkpoint: Checkpoint) -> Iterator[Array]:
    """Yield the packed weight in consecutive blocks of about BLOCK_BYTES."""
    parts = [_Part(checkpoint, name, dtype) for name in source.tensors]
    if source.layout == "vector":
        yield np.concatenate([part.rows(0, n) for part, n in zip(parts, source.rows, strict=True)])
    elif source.layout == "pair_vector":
        n = source.rows[0]
        pair = [part.rows(0, n).reshape(n, 1) for part in parts]
        yield _interleave(pair, dtype)
    elif source.layout == "packed_pair":
        for first, last in _row_blocks(source.rows[0], 2 * source.k, dtype):
            yield _interleave([part.rows(first, last) for part in parts], dtype)
    else:
        for first, last in _row_blocks(source.n, source.k, dtype):
            rows = _stacked_rows(parts, source.rows, first, last)
            yield FORMATS[dtype].pack(rows) if source.layout == "packed" else rows


@dataclass(slots=True)
class _Part:
    """A tensor read in row ranges, converted and checked to be finite."""

    checkpoint: Checkpoint
    name: str
    wanted: str

    def rows(self, first: int, last: int) -> Array:
        info = self.checkpoint.info(self.name)
        values = self.checkpoint.load(self.name)[first:last]
        if not _all_finite(values, info.dtype.name):
            raise SpecError(f"{info.path}: tensor {self.name} has NaN or infinite values")
        return convert(values, info.dtype.name, self.wanted)


def _stacked_rows(parts: list[_Part], sizes: tuple[int, ...], first: int, last: int) -> Array:
    """Return rows [first, last) of the tensors stacked on one another."""
    pieces, base = [], 0
    for part, size in zip(parts, sizes, strict=True):
        low, high = max(first - base, 0), min(last - base, size)
        if low < high:
            pieces.append(part.rows(low, high))
        base += size
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _interleave(pair: list[Array], dtype: str) -> Array:
    """Return panels with 2j from the first and 2j+1 from the second of two row-major [n][K]."""
    gate, up = (FORMATS[dtype].pack(rows) for rows in pair)
    return np.stack((gate, up), axis=1)


def _row_blocks(n: int, k: int, dtype: str) -> Iterator[tuple[int, int]]:
    """Split n rows of k values into ranges of whole panels, about BLOCK_BYTES each."""
    step = PANEL * max(1, BLOCK_BYTES // FORMATS[dtype].panel_bytes(k))
    return ((first, min(first + step, n)) for first in range(0, n, step))


def _all_finite(values: Array, dtype: str) -> bool:
    if dtype == "bf16":
        return bool(((values & 0x7F80) != 0x7F80).all())
    return bool(np.isfinite(values).all())


def _is_matrix(source: WeightSource) -> bool:
    return bool(source.tensors) and not source.layout.endswith("vector")


def _packed_extent(source: WeightSource, dtype: str) -> tuple[int, int]:
    """Return (n as the index states it, stored elements)."""
    panel = FORMATS[dtype].panel_elements(source.k)
    if source.layout == "packed":
        return source.n, ceil(source.n / PANEL) * panel
    if source.layout in ("packed_pair", "pair_vector"):
        panels = 2 * ceil(source.n // 2 / PANEL)
        return (source.n if source.layout == "packed_pair" else panels * PANEL), panels * panel
    return source.n, source.n * source.k


def _round_up(value: int, multiple: int) -> int:
    return ceil(value / multiple) * multiple


@dataclass(slots=True)
class _HashedFile:
    """Appends bytes to a file while a thread of `hashing` hashes every CHUNK_BYTES of them."""

    file: BinaryIO | Any
    hashing: ThreadPoolExecutor
    position: int = 0
    _hash: Any = field(default_factory=hashlib.sha256)
    _digests: list[str] = field(default_factory=list)

    def write(self, block: Array) -> None:
        data = np.ascontiguousarray(block).data.cast("B")
        while data:
            piece = data[: CHUNK_BYTES - self.position % CHUNK_BYTES]
            hashed = self.hashing.submit(self._hash.update, piece)
            self.position += len(piece)
            data = data[len(piece) :]
            while piece:
                piece = piece[self.file.write(piece) :]
            hashed.result()
            if self.position % CHUNK_BYTES == 0:
                self._close_chunk()

    def pad_to(self, offset: int) -> None:
        if offset > self.position:
            self.write(np.zeros(offset - self.position, np.uint8))

    def finish(self) -> WeightChunks:
        if self.position % CHUNK_BYTES:
            self._close_chunk()
        return WeightChunks(
            chunk_bytes=CHUNK_BYTES, total_bytes=self.position, sha256=tuple(self._digests)
        )

    def _close_chunk(self) -> None:
        self._digests.append(self._hash.hexdigest())
        self._hash = hashlib.sha256()
