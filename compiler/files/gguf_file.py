"""Reads the header of a GGUF file: its metadata, and where its tensors stand.

In: a path, of a whole file or of the first part of a split one. Out: a `GgufFile`. A reader of our
own, because a header may lie: every count, length, type and offset is checked against the file
before anything is made of it, and a fault is a SpecError with the file's name.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dovetail.compiler.files.checkpoint import TensorInfo
from dovetail.compiler.files.gguf_kinds import KINDS, PLAIN, name_kind
from dovetail.ir.dtypes import BY_SAFETENSORS, DTYPES
from dovetail.ir.errors import SpecError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 512 << 20
MAX_ENTRIES = 1 << 16
"""Keys, or tensors, of a file."""
MAX_STRINGS = 1 << 21
"""Of all arrays: each is an object in memory. Vocabularies with merges have up to a million."""
MAX_NAME_BYTES = 4096
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20
MAX_PARTS = 1000
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")

Array: TypeAlias = npt.NDArray[Any]
Value: TypeAlias = bool | int | float | str | list[str] | Array
"""Of a key. Arrays of numbers are numpy arrays, of texts lists."""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a file, of all its parts where it is split; tensors by llama.cpp's names."""

    path: Path
    values: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]
    parts: tuple[Path, ...]


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file and of the parts that go with it.

    Raises SpecError for what is no GGUF file, is damaged, or has tensors of other types.
    """
    first = _read_part(path)
    parts = _find_parts(path, first.values)
    tensors = dict(first.tensors)
    for part in parts[1:]:
        more = _read_part(part).tensors
        if twice := sorted(tensors.keys() & more.keys()):
            raise SpecError(f"{part}: tensor {twice[0]} is in another part of the model, too")
        tensors |= more
    return GgufFile(path, first.values, tensors, parts)


def _find_parts(path: Path, values: Mapping[str, Value]) -> tuple[Path, ...]:
    """Return the files of a model, `path` first."""
    count, number = values.get("split.count", 1), values.get("split.no", 0)
    if not isinstance(count, int) or not 0 <= count <= MAX_PARTS:
        raise SpecError(f"{path}: split.count is no number of files up to {MAX_PARTS}")
    if count <= 1:
        return (path,)
    named = _PART.fullmatch(path.name)
    if named is None or int(named[3]) != count:
        raise SpecError(
            f"{path} is one of {count} files of a model; they must be named as "
            f"NAME-00001-of-{count:05}.gguf"
        )
    parts = [path.with_name(f"{named[1]}-{i:05}-of-{named[3]}.gguf") for i in range(1, count + 1)]
    if number != 0 or int(named[2]) != 1:
        raise SpecError(f"{path} is a part of a model that begins elsewhere; give {parts[0]}")
    if lacking := [part for part in parts if not part.is_file()]:
        raise SpecError(f"{lacking[0]} is missing; the model has {count} files side by side")
    return tuple(parts)


def _read_part(path: Path) -> GgufFile:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise SpecError(f"{path} is not a GGUF file: it does not begin with GGUF")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror or error}") from error
    with mapped:
        cursor = _Cursor(path, mapped, min(size, MAX_HEADER_BYTES))
        _check_version(path, cursor.number("I"))
        n_tensors, n_keys = cursor.number("Q"), cursor.number("Q")
        for count, what in ((n_tensors, "tensors"), (n_keys, "keys")):
            if count > MAX_ENTRIES:
                raise SpecError(f"{path}: claims {count} {what}; up to {MAX_ENTRIES} are read")
        values = _read_values(cursor, n_keys)
        entries = [_read_entry(cursor) for _ in range(n_tensors)]
        end = cursor.at
    tensors = _place(path, entries, end, size, _alignment(path, values))
    return GgufFile(path, values, tensors, (path,))


def _check_version(path: Path, version: int) -> None:
    if version in VERSIONS:
        return
    if version and version & 0xFFFF == 0:
        raise SpecError(f"{path} is a big-endian GGUF file; only little-endian ones are read")
    raise SpecError(f"{path} has GGUF version {version}, not 2 or 3; convert the model again")


# ---- from bytes to values ----


@dataclass(slots=True)
class _Cursor:
    """Reads forward through a header that may not go past `end`; `at` is the next byte."""

    path: Path
    data: mmap.mmap
    end: int
    at: int = len(MAGIC)
    strings: int = 0

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        if count > self.end - self.at:
            raise SpecError(
                f"{self.path} is truncated or damaged: {count} bytes are claimed at byte "
                f"{self.at}, the header may end at {self.end}; download it again"
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> Any:
        """Return the next number, of a letter of `struct`."""
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def text(self, limit: int = MAX_HEADER_BYTES) -> str:
        """Return the next string of at most `limit` bytes."""
        start, length = self.at, self.number("Q")
        if length > limit:
            raise SpecError(f"{self.path}: the name at byte {start} claims {length} bytes")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise SpecError(
                f"{self.path}: the string at byte {start} is not UTF-8: {error}"
            ) from None


_NUMBERS = dict(enumerate("BbHhIif")) | {10: "Q", 11: "q", 12: "d"}
"""Type of a value -> its letter in `struct` and numpy; 7 is a boolean, 8 a string, 9 an array."""
_BOOL, _STRING, _ARRAY = 7, 8, 9


def _read_values(cursor: _Cursor, count: int) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for _ in range(count):
        key = cursor.text(MAX_NAME_BYTES)
        if key in values:
            raise SpecError(f"{cursor.path}: the key {key} is there twice")
        values[key] = _read_value(cursor, key)
    return values


def _read_value(cursor: _Cursor, key: str) -> Value:
    kind = cursor.number("I")
    if kind == _ARRAY:
        return _read_array(cursor, key)
    if kind == _STRING:
        return cursor.text()
    if kind == _BOOL:
        return bool(cursor.number("B"))
    if kind not in _NUMBERS:
        raise SpecError(f"{cursor.path}: {key} has the unknown type {kind}")
    value = cursor.number(_NUMBERS[kind])
    if _NUMBERS[kind] == "f":  # the decimal that was meant: 1e-05, not 9.99999975e-06
        return float(str(np.float32(value)))
    return value  # type: ignore[no-any-return]


def _read_array(cursor: _Cursor, key: str) -> Value:
    kind, count = cursor.number("I"), cursor.number("Q")
    if kind == _STRING:
        cursor.strings += count
        if cursor.strings > MAX_STRINGS:
            raise SpecError(f"{cursor.path}: {key} and others claim {cursor.strings} strings")
        return [cursor.text() for _ in range(count)]
    form = {**_NUMBERS, _BOOL: "B"}.get(kind)
    if form is None:
        raise SpecError(f"{cursor.path}: {key} is an array of type {kind}, which is not read")
    dtype = np.dtype("<" + form)
    return np.frombuffer(cursor.take(count * dtype.itemsize), dtype)


# ---- tensors ----


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor as the header has it: `shape` outermost first, `offset` from the data's begin."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def _read_entry(cursor: _Cursor) -> _Entry:
    name = cursor.text(MAX_NAME_BYTES)
    dims = cursor.number("I")
    if not 1 <= dims <= MAX_DIMS:
        raise SpecError(f"{cursor.path}: tensor {name} has {dims} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(dims))[::-1]
    return _Entry(name, shape, cursor.number("I"), cursor.number("Q"))


def _alignment(path: Path, values: Mapping[str, Value]) -> int:
    value = values.get("general.alignment", 32)
    if not isinstance(value, int) or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        raise SpecError(f"{path}: general.alignment is no power of two up to {MAX_ALIGNMENT}")
    return value


def _place(
    path: Path, entries: list[_Entry], end: int, size: int, alignment: int
) -> dict[str, TensorInfo]:
    """Return the tensors by name, none of which goes past the file or into another."""
    base = -(-end // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for entry in entries:
        if entry.name in tensors:
            raise SpecError(f"{path}: tensor {entry.name} is there twice")
        tensors[entry.name] = _locate(path, entry, base, size, alignment)
    position, before = base, ""
    for info in sorted(tensors.values(), key=lambda info: (info.start, info.end)):
        if info.start < position:
            raise SpecError(f"{path}: tensor {info.name} overlaps {before}; the file is damaged")
        position, before = info.end, info.name
    return tensors


def _locate(path: Path, entry: _Entry, base: int, size: int, alignment: int) -> TensorInfo:
    where = f"{path}: tensor {entry.name}"
    if entry.kind not in KINDS:
        known = ", ".join(kind.name for kind in KINDS.values())
        said = f"of type {name_kind(entry.kind)}, which is not supported; take a file of {known}"
        raise SpecError(f"{where} is {said}")
    kind = KINDS[entry.kind]
    if entry.shape[-1] % kind.values:
        raise SpecError(f"{where}: rows of {entry.shape[-1]} values are no blocks of {kind.values}")
    if kind.name not in PLAIN and len(entry.shape) < 2:
        raise SpecError(f"{where} is a vector of type {kind.name}; vectors are F32, F16 or BF16")
    start = base + entry.offset
    end = start + prod(entry.shape) // kind.values * kind.size
    if entry.offset % alignment or end > size:
        raise SpecError(
            f"{where} should be at bytes {start} to {end}, the file has {size}, in steps of "
            f"{alignment}; it is truncated or damaged: download it again"
        )
    dtype = BY_SAFETENSORS.get(kind.name, DTYPES["f32"])
    return TensorInfo(entry.name, path, dtype, entry.shape, start, end, kind.name)
