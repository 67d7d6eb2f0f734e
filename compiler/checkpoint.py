"""Reads safetensors checkpoints: a directory in, lazily mapped numpy views of its tensors out.

A reader of our own, because a header may lie: every length, offset and shape is checked against the
file before anything is mapped, and a fault is a SpecError naming the file and the tensor. No
pickle.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.compiler.config import Config, parse_json_object
from dovetail.ir.dtypes import BY_SAFETENSORS, DType
from dovetail.ir.errors import SpecError

MAX_HEADER_BYTES = 64 << 20
MAX_DIMS = 8
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor stands: `start` and `end` are absolute byte offsets in `path`."""

    name: str
    path: Path
    dtype: DType
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All tensors of a model directory. Nothing is read before `load` touches it."""

    directory: Path
    tensors: Mapping[str, TensorInfo]

    def info(self, name: str) -> TensorInfo:
        """Return where `name` stands. Raises SpecError when the checkpoint lacks it."""
        try:
            return self.tensors[name]
        except KeyError:
            raise SpecError(
                f"{self.directory} has no tensor {name}; its safetensors files are incomplete "
                "or do not belong to its config.json"
            ) from None

    def load(self, name: str) -> npt.NDArray[Any]:
        """Return a read-only view of a tensor's stored values (bf16 as uint16 bit patterns)."""
        info = self.info(name)
        count = prod(info.shape)
        if count == 0:
            return np.empty(info.shape, info.dtype.numpy)
        page_start = info.start - info.start % mmap.ALLOCATIONGRANULARITY
        try:
            with info.path.open("rb") as file:
                length = info.end - page_start
                mapped = mmap.mmap(
                    file.fileno(), length, access=mmap.ACCESS_READ, offset=page_start
                )
        except (OSError, ValueError) as error:
            raise SpecError(f"cannot read tensor {name} of {info.path}: {error}") from error
        flat = np.frombuffer(mapped, info.dtype.numpy, count, info.start - page_start)
        return flat.reshape(info.shape)


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read the headers of every safetensors file of a model directory.

    Takes `model.safetensors.index.json` where it exists, else `model.safetensors`. Raises SpecError
    for a missing, truncated or inconsistent file.
    """
    index = directory / INDEX_FILE
    if not index.is_file():
        return Checkpoint(directory, read_header(_single_file(directory)))
    listed = _read_weight_map(index)
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
                    f"{path} is truncated or no safetensors file: its header claims {length} "
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
    return TensorInfo(name, path, dtype, tuple(shape), base + start, base + end)


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


def _single_file(directory: Path) -> Path:
    path = directory / SINGLE_FILE
    if not path.is_file():
        hint = "; convert the .bin files with save_pretrained" * any(directory.glob("*.bin"))
        raise SpecError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")
    return path


def _read_weight_map(index: Path) -> dict[str, str]:
    listed = Config.read(index).section("weight_map").values
    for name, shard in listed.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise SpecError(f"{index}: tensor {name} is in {shard!r}, which is not a file name")
    return dict(listed)
