"""Packs a checkpoint into one weights.bin: page-aligned, in chunks that threads pack side by side.

In: ModelSpec and Checkpoint. Out: the file, its WeightEntry index and its chunk hashes. A thread
packs, hashes and writes a chunk of 4 MiB at a time, whatever the size of the model.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dovetail.compiler.families.encoder_tensors import encoder_sources, encoder_tables
from dovetail.compiler.families.rope import named_tables
from dovetail.compiler.families.sources import WeightSource
from dovetail.compiler.families.tensors import weight_sources
from dovetail.compiler.files.checkpoint import Checkpoint
from dovetail.compiler.formats.quantise import quantise_rows
from dovetail.compiler.formats.quantising import Advance
from dovetail.compiler.formats.weight_formats import is_copied, order_tables
from dovetail.compiler.models.adapters import Stacked, adapter_sources
from dovetail.ir.block_format import BlockFormat, Blocks, stack_blocks
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.encoder import EncoderSpec
from dovetail.ir.formats import FORMATS, WeightFormat
from dovetail.ir.model import PANEL, ModelSpec, WeightChunks, WeightEntry

PAGE = 4096
CHUNK_BYTES = 4 << 20
"""Small enough to stay in a cache while it is packed, hashed and written."""
THREADS = (2, 4)
"""At least, at most: a second one packs while the first waits for the disk, and each holds twice
a chunk of memory."""

Array = npt.NDArray[Any]
NO_POWERS: Mapping[str, Array] = MappingProxyType({})
NO_ADAPTERS: Mapping[str, Stacked] = MappingProxyType({})


class Rows(Protocol):
    """Rows of a weight that no tensor holds."""

    def __getitem__(self, rows: slice, /) -> Array:
        """Return rows [start, stop)."""


def plan_sources(
    sources: Sequence[WeightSource], format_of: Callable[[str], str]
) -> tuple[WeightEntry, ...]:
    """Return where the packed weights go: offsets are multiples of 4096, in the order given.

    format_of: name of a weight to its format; what is no matrix is float32.
    """
    entries, offset = [], 0
    for source in sources:
        dtype = format_of(source.name) if source.is_matrix else source.dtype
        n, count = _packed_extent(source, dtype)
        size = count * FORMATS[dtype].dtype.size
        layout = _STORED.get(source.layout, source.layout)
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


_STORED = {"pair_vector": "vector", "taps": "rows"}
"""Layout of a source to that of its weight, where it is another."""


def total_bytes(entries: tuple[WeightEntry, ...]) -> int:
    """Return the size of weights.bin: the end of the last entry, rounded up to a page."""
    return _round_up(entries[-1].offset + entries[-1].bytes, PAGE)


def pack_weights(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    path: Path,
    advance: Advance | None = None,
    powers: Mapping[str, Array] = NO_POWERS,
    adapters: Mapping[str, Stacked] = NO_ADAPTERS,
) -> tuple[tuple[WeightEntry, ...], WeightChunks]:
    """Write `path` for a decoder; see `pack_sources`. adapters: their weights, by name."""
    tables: dict[str, Rows] = {**named_tables(spec.ropes(), spec.max_context), **adapters}
    tables |= order_tables(spec, checkpoint)
    sources = (*weight_sources(spec), *adapter_sources(adapters.values()))
    given = sources, spec.weight_format, checkpoint, path, tables, advance, powers
    return pack_sources(*given, ordered=spec.ordered)


def pack_encoder(
    spec: EncoderSpec, checkpoint: Checkpoint, path: Path, advance: Advance
) -> tuple[tuple[WeightEntry, ...], WeightChunks]:
    """Write `path` for an encoder; see `pack_sources`."""
    sources, tables = encoder_sources(spec, checkpoint), encoder_tables(spec, checkpoint)
    return pack_sources(sources, spec.weight_format, checkpoint, path, tables, advance)


def pack_sources(
    sources: tuple[WeightSource, ...],
    format_of: Callable[[str], str],
    checkpoint: Checkpoint,
    path: Path,
    tables: Mapping[str, Rows],
    advance: Advance | None = None,
    powers: Mapping[str, Array] = NO_POWERS,
    ordered: Collection[str] = (),
) -> tuple[tuple[WeightEntry, ...], WeightChunks]:
    """Write `path`; return its index and the sha256 of every 4 MiB.

    tables: the weights that no tensor holds, by name. advance: gets bytes done, and all. powers:
    weight -> float32 [k], what an error of each value of K costs where values are quantised.
    ordered: weights whose codes may have an order of K of their own.

    Raises SpecError for weights with NaN or infinite values, OSError when the disk is full or
    read-only.
    """
    entries = plan_sources(sources, format_of)
    total = total_bytes(entries)
    packer = _Packer(sources, entries, checkpoint, tables, powers, ordered)
    least, most = THREADS
    pool = ThreadPoolExecutor(min(max(len(os.sched_getaffinity(0)), least), most))
    digests: list[str] = []
    with path.open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, total)  # a full disk shows now, not after minutes

        def write_chunk(start: int) -> str:
            chunk = packer.pack(start, min(start + CHUNK_BYTES, total)).data
            digest = hashlib.sha256(chunk).hexdigest()
            while chunk:
                written = os.pwrite(file.fileno(), chunk, start)
                chunk, start = chunk[written:], start + written
            return digest

        try:
            for digest in pool.map(write_chunk, range(0, total, CHUNK_BYTES)):
                digests.append(digest)
                if advance:
                    advance(min(len(digests) * CHUNK_BYTES, total), total)
        finally:
            pool.shutdown(cancel_futures=True)
        os.fsync(file.fileno())
    return entries, WeightChunks(chunk_bytes=CHUNK_BYTES, total_bytes=total, sha256=tuple(digests))


def convert(values: Array, stored: str, wanted: str) -> Array:
    """Convert between the storage forms of f32, f16 and bf16 (rounding to nearest even)."""
    if stored == wanted:
        return values
    return DTYPES[wanted].narrow(DTYPES[stored].widen(values))


# ---- from tensors to bytes ----


@dataclass(frozen=True, slots=True)
class _Packer:
    """Makes any range of weights.bin; `tables` are the weights that no tensor holds."""

    sources: tuple[WeightSource, ...]
    entries: tuple[WeightEntry, ...]
    checkpoint: Checkpoint
    tables: Mapping[str, Rows]
    powers: Mapping[str, Array]
    ordered: Collection[str]

    def pack(self, start: int, end: int) -> npt.NDArray[np.uint8]:
        """Return the bytes [start, end) of the file; what lies between weights is zero."""
        out = np.zeros(end - start, np.uint8)
        for source, entry in zip(self.sources, self.entries, strict=True):
            low, high = max(start, entry.offset), min(end, entry.offset + entry.bytes)
            if low < high:
                part = self._bytes(source, entry, low - entry.offset, high - entry.offset)
                out[low - start : high - start] = part
        return out

    def _bytes(
        self, source: WeightSource, entry: WeightEntry, low: int, high: int
    ) -> npt.NDArray[np.uint8]:
        """Return the bytes [low, high) of a weight, from the whole units that hold them."""
        unit = _unit_bytes(entry)
        first, last = low // unit, ceil(high / unit)
        values = np.ascontiguousarray(self._units(source, entry.dtype, first, last))
        return values.reshape(-1).view(np.uint8)[low - first * unit : high - first * unit]

    def _units(self, source: WeightSource, dtype: str, first: int, last: int) -> Array:
        """Return rows, panels or pairs of panels [first, last); a vector is one unit.

        Of a pair, panel 2j is of the first half of the tensors and 2j + 1 of the second.
        """
        if source.name in self.tables:
            return self.tables[source.name][first:last]
        if source.layout == "taps":
            taps: Array = self.checkpoint.floats(source.tensors[0]).reshape(source.k, source.n).T
            return taps[first:last]
        power, form = self.powers.get(source.name), FORMATS[dtype]
        ordered = source.name in self.ordered
        parts = [_Part(self.checkpoint, form, power, ordered, *part) for part in source.parts]
        top, bottom = first * PANEL, last * PANEL
        if source.layout == "vector":  # float32, unlike rows, which may be bits of bfloat16
            vector: Array = (_stack(parts, 0, source.n) + source.plus) * source.times
            return vector
        if source.layout == "rows":
            rows: Array = _stack(parts, first, last)
            return rows
        if source.layout == "packed":
            return form.pack(_stack(parts, top, bottom))
        half = len(parts) // 2
        halves = parts[:half], parts[half:]
        if source.layout == "pair_vector":
            pair = [_stack(each, 0, source.n).reshape(-1, 1) for each in halves]
        else:
            pair = [_stack(each, top, bottom) for each in halves]
        return np.stack([form.pack(each) for each in pair], axis=1)


def _unit_bytes(entry: WeightEntry) -> int:
    """Return the bytes of the least that is packed at once."""
    form = FORMATS[entry.dtype]
    sizes = {
        "vector": entry.bytes,
        "rows": entry.k * form.dtype.size,
        "packed": form.panel_bytes(entry.k),
        "packed_pair": 2 * form.panel_bytes(entry.k),
    }
    return sizes[entry.layout]


@dataclass(frozen=True, slots=True)
class _Part:
    """`count` rows of a tensor, read in ranges and checked to be finite, in the format `form`.

    power: as of `powers`. ordered: whether codes may have an order of K of their own.
    """

    checkpoint: Checkpoint
    form: WeightFormat
    power: Array | None
    ordered: bool
    name: str
    start: int
    count: int

    def rows(self, first: int, last: int) -> Any:
        """Return float rows converted, or `Blocks`: as the file has them, else quantised."""
        first, last = (self.start + min(row, self.count) for row in (first, last))
        info = self.checkpoint.info(self.name)
        if is_copied(info, self.form.name, self.ordered):
            found = self.checkpoint.coded(self.name, first, last)
            factors = (found.scales, found.minimums)
            finite = all(np.isfinite(each).all() for each in factors if each is not None)
            self.checkpoint.require_finite(self.name, finite)
            return found
        values = self.checkpoint.rows(self.name, first, last)
        self.checkpoint.require_finite(self.name, info.dtype.all_finite(values))
        if isinstance(self.form, BlockFormat):
            return quantise_rows(info.dtype.widen(values), self.form, self.power)
        return convert(values, info.dtype.name, self.form.name)


def _stack(parts: list[_Part], first: int, last: int) -> Any:
    """Return rows [first, last) of the parts stacked on one another, as `_Part.rows` does."""
    pieces, base = [], 0
    for part in parts:
        low, high = max(first - base, 0), min(last - base, part.count)
        if low < high:
            pieces.append(part.rows(low, high))
        base += part.count
    if isinstance(pieces[0], Blocks):
        return stack_blocks(pieces)
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


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
