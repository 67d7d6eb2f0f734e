"""Values of C types at run time: conversions, wrapping, loads and stores, struct layouts.

Integers are Python ints (or a `Pointer` while an address is held in one), floats numpy scalars,
vectors numpy arrays, pointers `Pointer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dovetail.codegen.isa.intrinsics import SCALAR_TYPES
from dovetail.ir.diagnostics import Span
from dovetail.ir.errors import DovetailError
from dovetail.ir.expr import ArrayType, NamedType, PointerType, Type
from dovetail.ir.low.nodes import StructDef
from dovetail.ir.low.types import constant, scalar, size_of, vector
from tests.codegen.interp.memory import NULL, MemoryFault, Pointer
from tests.codegen.interp.vectors import VECTOR_TYPES

Convert = Callable[[Any], Any]


class InterpretError(DovetailError):
    """The text does what C leaves undefined or the interpreter does not know; names the span."""

    def __init__(self, message: str, span: Span) -> None:
        self.span = span
        super().__init__(f"{span}: {message}")


@dataclass(frozen=True, slots=True)
class Layout:
    """A struct or union in memory: field name to byte offset and type, and the padded size."""

    fields: Mapping[str, tuple[int, Type]]
    size: int


class Layouts:
    """The structs of a unit, and sizes of all its types."""

    def __init__(self, structs: Mapping[str, StructDef], constants: Mapping[str, int]) -> None:
        self._structs = structs
        self._constants = constants

    def of(self, type_: Type) -> Layout | None:
        """Return the layout of `struct NAME` or `union NAME`, None for another type."""
        name = type_.name.partition(" ")[2] if isinstance(type_, NamedType) else ""
        found = self._structs.get(name)
        return self._lay_out(found) if found is not None else None

    def size(self, type_: Type) -> int:
        """Return the size of a complete type in bytes."""
        layout = self.of(type_)
        if layout is not None:
            return layout.size
        if isinstance(type_, ArrayType):
            return self.count(type_) * self.size(type_.of)
        return size_of(type_, self._constants) or 1  # void* steps by bytes, as in GNU C

    def count(self, type_: ArrayType) -> int:
        """Return the element count of an array type."""
        found = None if type_.size is None else constant(type_.size, self._constants)
        if found is None:
            raise InterpretError("the size of an array must be a constant", type_.span)
        return found

    def _alignment(self, type_: Type) -> int:
        layout = self.of(type_)
        if layout is not None:
            return max(self._alignment(t) for _, t in layout.fields.values())
        return self._alignment(type_.of) if isinstance(type_, ArrayType) else self.size(type_)

    def _lay_out(self, struct: StructDef) -> Layout:
        fields: dict[str, tuple[int, Type]] = {}
        end, widest = 0, 1
        for field in struct.fields:
            alignment = self._alignment(field.type)
            start = 0 if struct.kind == "union" else -(-end // alignment) * alignment
            fields[field.name] = (start, field.type)
            end = max(end, start + self.size(field.type))
            widest = max(widest, alignment)
        return Layout(fields, -(-end // widest) * widest)


def wrapper(name: str) -> Convert:
    """Return the function that brings an integer into a type's range, modulo 2^bits."""
    dtype = np.dtype(SCALAR_TYPES[name])
    bits = 8 * dtype.itemsize
    mask, half = (1 << bits) - 1, 1 << (bits - 1)
    if name in ("_Bool", "bool"):
        return lambda v: int(v != 0)
    if bits == 64:
        signed = dtype.kind == "i"
        return lambda v: v if isinstance(v, Pointer) else _wrap_64(v, signed)
    if dtype.kind == "u":
        return lambda v: v & mask
    return lambda v: ((v + half) & mask) - half


def _wrap_64(v: int, signed: bool) -> int:
    low = v & 0xFFFF_FFFF_FFFF_FFFF
    return low - (1 << 64) if signed and low >> 63 else low


def convert(source: Type, target: Type) -> Convert | None:
    """Return the conversion of a value between two types; None where the value stays as it is."""
    wanted = scalar(target)
    if isinstance(target, PointerType):
        return _to_pointer if scalar(source) is not None else None
    if wanted is None or source == target:
        return None
    if wanted.floating:
        real: Convert = np.dtype(SCALAR_TYPES[wanted.name]).type
        return real
    wrap = wrapper(wanted.name)
    found = scalar(source)
    if found is not None and found.floating:
        return lambda v: wrap(_truncate(v))
    return wrap


def _truncate(value: Any) -> int:
    if not np.isfinite(value):
        raise MemoryFault(f"{value} is converted to an integer, which C leaves undefined")
    return int(value)


def _to_pointer(value: Any) -> Pointer:
    if isinstance(value, Pointer):
        return value
    if value != 0:
        raise MemoryFault(f"the integer {value} is made a pointer")
    return NULL


def loader(type_: Type) -> Callable[[Pointer], Any]:
    """Return the function that reads a value of `type_`; structs and arrays stay addresses."""
    found = scalar(type_)
    if found is not None:
        dtype = np.dtype(SCALAR_TYPES[found.name])
        if found.floating:
            return lambda p: p.view(dtype, 1)[0]
        return lambda p: int(p.view(dtype, 1)[0])
    if vector(type_) is not None and isinstance(type_, NamedType):
        shape = VECTOR_TYPES[type_.name]
        return lambda p: p.load(shape.dtype, shape.lanes)
    if isinstance(type_, PointerType):
        return Pointer.load_pointer
    return lambda p: p


def storer(type_: Type) -> Callable[[Pointer, Any], None]:
    """Return the function that writes a value of `type_`."""
    found = scalar(type_)
    if found is not None:
        dtype = np.dtype(SCALAR_TYPES[found.name])

        def put(p: Pointer, v: Any) -> None:
            p.view(dtype, 1)[0] = v

        return put
    if isinstance(type_, PointerType):
        return Pointer.store_pointer
    return Pointer.store


def undefined(type_: Type) -> Any:
    """Return what an uninitialised variable holds: NaN, all bits set, or an address that faults."""
    found = scalar(type_)
    if found is not None:
        return np.dtype(SCALAR_TYPES[found.name]).type(np.nan) if found.floating else -1
    if vector(type_) is not None and isinstance(type_, NamedType):
        shape = VECTOR_TYPES[type_.name]
        size = np.dtype(shape.dtype).itemsize * shape.lanes
        return np.full(size, 0xFF, np.uint8).view(shape.dtype)
    return NULL
