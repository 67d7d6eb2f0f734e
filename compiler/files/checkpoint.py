"""Checkpoints: named tensors, whose rows are mapped when asked for; reads those of safetensors.

In: a model directory. Out: a `Checkpoint`, as `gguf_tensors.py` makes one of a GGUF file. A reader
of our own, because a header may lie: every length, offset and shape is checked against the file
before anything is mapped, and a fault is a SpecError naming the file and the tensor. No pickle.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from dovetail.compiler.files.config import Config, parse_json_object
from dovetail.compiler.files.gguf_blocks import read_blocks
from dovetail.ir.block_format import Blocks
from dovetail.ir.dtypes import BY_SAFETENSORS, DType
from dovetail.ir.errors import SpecError

MAX_HEADER_BYTES = 64 << 20
MAX_DIMS = 8
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LENGTH_BYTES = 8


class Packed(Protocol):
    """Reads rows of a matrix that several stored tensors hold."""

    def values(self, first: int, last: int) -> npt.NDArray[Any]:
        """Return rows [first, last) as their tensor's dtype stores them."""
        ...


class Rearranged:
    """What reads plain values of one tensor in another order, or times factors."""

    __slots__ = ()


@runtime_checkable
class Coded(Packed, Protocol):
    """Reads rows of integers with scales."""

    def blocks(self, first: int, last: int) -> Blocks:
        """Return the same rows as codes and scales, of the format that its kind names."""
        ...


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor stands: `start` and `end` are absolute byte offsets in `path`.

    kind: how a row is stored, as the file calls it: a safetensors dtype or a type of GGUF. dtype:
    of the values that `Checkpoint.rows` returns, float32 for a quantised kind. heads: not 0 where
    the rows of each of so many heads stand as rotated pairs, (0, d/2), (1, d/2 + 1), ..., as
    llama.cpp has them; turned: d, where that is a part of a head, 0 for all of it; skipped: rows
    of a head before these. packed: what reads its rows where several stored tensors hold them.
    """

    name: str
    path: Path
    dtype: DType
    shape: tuple[int, ...]
    start: int
    end: int
    kind: str
    heads: int = 0
    turned: int = 0
    skipped: int = 0
    packed: Packed | None = None

    @property
    def quantised(self) -> bool:
        """Whether a row is blocks of a quantised type rather than plain values."""
        return self.kind != self.dtype.safetensors

    @property
    def order(self) -> npt.NDArray[np.int64] | None:
        """Where the values of K stand that `Checkpoint.coded` gives, in `rows`; None if there."""
        return getattr(self.packed, "order", None)

    @property
    def height(self) -> int:
        """Rows: the first dimension; each value of a vector is a row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Stored bytes of a row."""
        return (self.end - self.start) // self.height if self.height else 0

    def stored_rows(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Return where rows [first, last) stand among the stored rows."""
        rows = np.arange(first, last)
        if not self.heads:
            return rows
        size = self.height // self.heads
        head, within = np.divmod(rows, size)
        turned = self.turned or size
        behind = within - self.skipped
        half, pair = np.divmod(behind, turned // 2)
        inside = (behind >= 0) & (behind < turned)
        within = np.where(inside, self.skipped + 2 * pair + half, within)
        stored: npt.NDArray[np.int64] = head * size + within
        return stored


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All tensors of a model by their Hugging Face names. Nothing is read before it is asked for.

    path: the directory or file, as messages name it.
    """

    path: Path
    tensors: Mapping[str, TensorInfo]

    @property
    def packs_matrices(self) -> bool:
        """Whether any matrix is not stored as its values."""
        held = (info.packed for info in self.tensors.values() if len(info.shape) > 1)
        return any(packed and not isinstance(packed, Rearranged) for packed in held)

    def info(self, name: str) -> TensorInfo:
        """Return where `name` stands. Raises SpecError when the checkpoint lacks it."""
        try:
            return self.tensors[name]
        except KeyError:
            raise SpecError(
                f"{self.path} has no tensor {name}; its weights are incomplete or do not belong "
                "to its configuration"
            ) from None

    def load(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor's values, as `rows` returns them."""
        return self.rows(name, 0, self.info(name).height).reshape(self.info(name).shape)

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        """Return a tensor's values as float32, all of which must be finite."""
        info, values = self.info(name), self.load(name)
        self.require_finite(name, info.dtype.all_finite(values))
        return info.dtype.widen(values)

    def require_finite(self, name: str, finite: bool) -> None:
        """Raise SpecError for a tensor that is not finite."""
        if not finite:
            path = self.info(name).path
            raise SpecError(f"{path}: tensor {name} has NaN or infinite values")

    def rows(self, name: str, first: int, last: int) -> npt.NDArray[Any]:
        """Return the values of rows [first, last), of dtype `info(name).dtype`.

        A read-only view where they are stored so (bf16 as uint16 bit patterns), else a copy.
        """
        info = self.info(name)
        if info.packed is not None:
            return info.packed.values(first, last)
        stored = self.blocks(name, first, last)
        shape = (last - first, *info.shape[1:])
        if not prod(shape):
            return np.empty(shape, info.dtype.numpy)
        if info.quantised:
            from dovetail.compiler.files.gguf_kinds import dequantise  # noqa: PLC0415 - most need it not

            return dequantise(info.kind, stored)
        return stored.view(info.dtype.numpy).reshape(shape)

    def coded(self, name: str, first: int, last: int) -> Blocks:
        """Return rows [first, last) of a quantised kind as codes and scales."""
        info = self.info(name)
        if isinstance(info.packed, Coded):
            return info.packed.blocks(first, last)
        return read_blocks(info.kind, self.blocks(name, first, last))

    def blocks(self, name: str, first: int, last: int) -> npt.NDArray[np.uint8]:
        """Return the stored bytes of rows [first, last), uint8 [rows][row_bytes], in row order.

        A read-only view of the file where its rows stand in this order, else a copy.
        """
        info = self.info(name)
        if not info.heads:
            return _map_rows(info, first, last)
        size = info.height // info.heads  # rows of a head stand together
        top = first - first % size
        around = _map_rows(info, top, min(-(-last // size) * size, info.height))
        return around[info.stored_rows(first, last) - top]


def map_tensor(info: TensorInfo) -> npt.NDArray[Any]:
    """Return a read-only view of a whole stored tensor; bf16 as uint16 bit patterns."""
    return _map_rows(info, 0, info.height).view(info.dtype.numpy).reshape(info.shape)


def _map_rows(info: TensorInfo, first: int, last: int) -> npt.NDArray[np.uint8]:
    """Return stored rows [first, last)."""
    shape = (last - first, info.row_bytes)
    if not prod(shape):
        return np.empty(shape, np.uint8)
    start = info.start + first * info.row_bytes
    page_start = start - start % mmap.ALLOCATIONGRANULARITY
    try:
        with info.path.open("rb") as file:
            length = start + prod(shape) - page_start
            mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=page_start)
    except (OSError, ValueError) as error:
        raise SpecError(f"cannot read tensor {info.name} of {info.path}: {error}") from error
    return np.frombuffer(mapped, np.uint8, prod(shape), start - page_start).reshape(shape)


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read the headers of every safetensors file of a model directory.

    Takes `model.safetensors` where it exists, else `model.safetensors.index.json`, as transformers
    does: a model that was saved again in one file leaves an older index there. Raises SpecError
    for a missing, truncated or inconsistent file.
    """
    index = directory / INDEX_FILE
    if (single := directory / SINGLE_FILE).is_file():
        return Checkpoint(directory, read_header(single))
    if not index.is_file():
        hint = "; convert the .bin files with save_pretrained" * any(directory.glob("*.bin"))
        raise SpecError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")
    listed = read_weight_map(index)
    headers = {shard: read_header(directory / shard) for shard in sorted(set(listed.values()))}
    tensors = {}
    for name, shard in listed.items():
        if name not in headers[shard]:
            raise SpecError(f"{index} says tensor {name} is in {shard}, which does not have it")
        tensors[name] = headers[shard][name]
    return Checkpoint(directory, tensors)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of one safetensors file, checked against the file's size."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(_LENGTH_BYTES)
            if len(prefix) < _LENGTH_BYTES:
                raise SpecError(f"{path} is truncated: {size} bytes cannot hold a header")
            (length,) = struct.unpack("<Q", prefix)
            if length > min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
                raise SpecError(
                    f"{path} is truncated or not a safetensors file: its header claims {length} "
                    f"bytes, the file has {size}"
                )
            header = file.read(length)
    except OSError as error:
        reason = error.strerror or error
        raise SpecError(f"cannot read {path}: {reason}; is the model complete?") from error
    entries = parse_json_object(header, f"the header of {path}")
    entries.pop("__metadata__", None)
    base = _LENGTH_BYTES + length
    tensors = {name: _read_entry(path, name, entry, base) for name, entry in entries.items()}
    _check_layout(path, tensors.values(), base, size)
    return tensors


def _read_entry(path: Path, name: str, entry: object, base: int) -> TensorInfo:
    where = f"{path}: tensor {name}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise SpecError(f"{where} needs dtype, shape and data_offsets in the header")
    spelled, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(spelled, str) or spelled not in BY_SAFETENSORS:
        known = ", ".join(sorted(BY_SAFETENSORS))
        raise SpecError(f"{where} has dtype {spelled!r}; supported: {known}")
    if not _naturals(shape) or len(shape) > MAX_DIMS:
        raise SpecError(f"{where} has a malformed shape {shape!r}")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise SpecError(f"{where} has malformed data_offsets {offsets!r}")
    dtype = BY_SAFETENSORS[spelled]
    start, end = offsets
    if prod(shape) * dtype.size != end - start:
        raise SpecError(
            f"{where}: shape {shape} of {spelled} needs {prod(shape) * dtype.size} bytes, "
            f"the header gives it {end - start}"
        )
    return TensorInfo(name, path, dtype, tuple(shape), base + start, base + end, spelled)


def _check_layout(path: Path, tensors: Iterable[TensorInfo], base: int, size: int) -> None:
    """Require the tensors to fill the file from the header's end on, without holes or overlaps."""
    position = base
    for info in sorted(tensors, key=lambda t: (t.start, t.end)):
        if info.start != position:
            fault = "overlaps the one before it" if info.start < position else "follows a hole"
            raise SpecError(f"{path}: tensor {info.name} {fault}; the file is damaged")
        if info.end > size:
            raise SpecError(
                f"{path} is truncated: tensor {info.name} ends at byte {info.end}, "
                f"the file has {size}; download it again"
            )
        position = info.end
    if position != size:
        raise SpecError(
            f"{path}: {size - position} bytes after the last tensor; the file is damaged"
        )


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1 << 62
        for item in value
    )


def read_weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor, beside the index that lists them."""
    listed = Config.read(index).section("weight_map").values
    for name, shard in listed.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise SpecError(f"{index}: tensor {name} is in {shard!r}, which is not a file name")
    return dict(listed)
