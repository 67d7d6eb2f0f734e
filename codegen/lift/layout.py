"""Where C keeps values in memory: sizes, alignments, fields of structs, elements of the high IR.

In: C types and the structs of a text. Out: bytes, and element types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dovetail.codegen.lift.types import TAGGED, WORKS_IN, element_of, refuse
from dovetail.ir.expr import ArrayType, NamedType, PointerType, Type
from dovetail.ir.low import nodes as low
from dovetail.ir.low.types import VECTOR_GROUPS, VECTORS, constant, scalar, vector


def value_of(elem: str) -> str:
    """Return the type in which values of an element are computed."""
    return {**WORKS_IN, "f16": "f32", "bf16": "f32"}.get(elem, elem)


def kind_of(type_: Type) -> str:
    """Return the type in which numbers of a C type are computed."""
    found = scalar(type_)
    assert found is not None
    return value_of(element_of(found))


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

    def floats(self, type_: NamedType, start: int = 0) -> dict[tuple[str, ...], int]:
        """Return, for each path of fields of a struct of floats, its index in floats."""
        out: dict[tuple[str, ...], int] = {}
        for name, (offset, of) in self.fields(type_).items():
            if isinstance(of, NamedType) and of.name.startswith(TAGGED):
                inner = self.floats(of, start + offset)
                out.update({(name, *path): at for path, at in inner.items()})
            elif isinstance(of, NamedType) and of.name == "float":
                out[(name,)] = (start + offset) // 4
            else:
                raise refuse(f"{type_.name} holds more than floats")
        return out
