"""Where C keeps values in memory: sizes, alignments, fields of structs, elements of the high IR.

In: C types and the structs of a text. Out: bytes, and element types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dovetail.codegen.lift.types import refuse
from dovetail.ir.expr import ArrayType, NamedType, PointerType, Type
from dovetail.ir.low import nodes as low
from dovetail.ir.low.types import VECTOR_GROUPS, VECTORS, Scalar, constant, scalar, vector

_INTEGERS = {(1, True): "i8", (1, False): "u8", (2, True): "i16", (2, False): "u16"}
_WIDER = {(4, True): "i32", (4, False): "u32", (8, True): "i64", (8, False): "u64"}
_REALS = {"float": "f32", "float32_t": "f32", "double": "f64", "float64_t": "f64"}
_HALVES = {
    "_Float16": "f16",
    "__fp16": "f16",
    "float16_t": "f16",
    "__bf16": "bf16",
    "bfloat16_t": "bf16",
}


def element_of(found: Scalar) -> str:
    """Return the element type in memory of a C scalar."""
    if found.floating:
        made = _REALS.get(found.name) or _HALVES.get(found.name)
        if made is None:
            raise refuse(f"{found.name} values")
        return made
    return {**_INTEGERS, **_WIDER}[found.size, found.signed]


def value_of(elem: str) -> str:
    """Return the type in which values of an element are computed."""
    return {"i8": "i32", "u8": "i32", "i16": "i32", "u16": "i32", "f16": "f32", "bf16": "f32"}.get(
        elem, elem
    )


def pointee_element(type_: Type) -> str:
    """Return the element that a pointer to a C type counts in: bytes for structs and vectors."""
    if isinstance(type_, PointerType):
        return "i64"  # an address, as memory holds it
    found = scalar(type_)
    return element_of(found) if found is not None else "u8"


def vector_element(name: str) -> str:
    """Return the element of the array that holds a C vector."""
    shape = VECTORS[name]
    found = scalar(NamedType(name=shape.lane)) if shape.lane else None
    return element_of(found) if found is not None else "u8"


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes and offsets; `structs` by their tag, `constants` the integers known by name."""

    structs: Mapping[str, low.StructDef]
    constants: Mapping[str, int]

    def size(self, type_: Type) -> int:
        """Return the bytes of a C type; SpecError where it is incomplete."""
        return self.measure(type_)[0]

    def measure(self, type_: Type) -> tuple[int, int]:
        """Return the size and the alignment of a C type, in bytes."""
        if isinstance(type_, PointerType):
            return 8, 8
        if isinstance(type_, ArrayType):
            count = constant(type_.size, self.constants) if type_.size is not None else None
            if count is None:
                raise refuse("an array whose length is not constant here")
            size, align = self.measure(type_.of)
            return count * size, align
        found = scalar(type_) or vector(type_)
        if found is not None:
            return found.size, found.size
        assert isinstance(type_, NamedType)
        if type_.name in VECTOR_GROUPS:
            of, count = VECTOR_GROUPS[type_.name]
            return VECTORS[of].size * count, VECTORS[of].size
        if type_.name == "void":
            return 1, 1
        end, align = 0, 1
        for offset, field in self.fields(type_).values():
            size, each = self.measure(field)
            end, align = max(end, offset + size), max(align, each)
        return -(-end // align) * align, align

    def fields(self, type_: Type) -> dict[str, tuple[int, Type]]:
        """Return the offset and the type of each field; those without a name are opened."""
        name = type_.name if isinstance(type_, NamedType) else ""
        if name in VECTOR_GROUPS:
            of, _ = VECTOR_GROUPS[name]
            return {"val": (0, ArrayType(of=NamedType(name=of), size=None))}
        definition = self.structs.get(name.partition(" ")[2])
        if definition is None:
            raise refuse(f"{name} is not defined", "give it in a prelude")
        out: dict[str, tuple[int, Type]] = {}
        at = 0
        for field in definition.fields:
            size, align = self.measure(field.type)
            start = 0 if definition.kind == "union" else -(-at // align) * align
            if field.name:
                out[field.name] = start, field.type
            else:
                out.update({n: (start + o, t) for n, (o, t) in self.fields(field.type).items()})
            at = max(at, start + size)
        return out
