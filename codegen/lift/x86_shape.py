"""What the name of an x86 intrinsic tells: width, element, and the C types of registers."""

from __future__ import annotations

from typing import Any

from dovetail.codegen.lift.emit import Address
from dovetail.codegen.lift.lanes import Lanes, Register
from dovetail.codegen.lift.types import SIZES
from dovetail.ir.expr import NamedType

ELEMENTS = {
    **{f"ep{s}{b}": f"{'i' if s == 'i' else 'u'}{b}" for s in "iu" for b in (8, 16, 32)},
    "epi64": "i64",
    "epi64x": "i64",
    "epu64": "u64",
    "ps": "f32",
    "pd": "f64",
    "ph": "f16",
    "ss": "f32",
    "sd": "f64",
    **dict.fromkeys(("si128", "si256", "si512", "si64", "si32", "si16", "i128"), "u8"),
}
PLAIN = ("add", "sub", "mul", "div", "min", "max")
"""Operations on floats that vectors have, with a `v` before them."""


def vec(bits: int, elem: str) -> NamedType:
    """Return the C type of a register."""
    return NamedType(name=f"__m{bits}" + {"f32": "", "f64": "d"}.get(elem, "i"))


class Shape(Register):
    """Width and element of an instruction, and how many lanes that makes.

    integer: the element, its bits as an integer if it is a float. plain: bytes, unless of floats.
    """

    def __init__(self, lanes: Lanes, bits: int, elem: str, suffix: str) -> None:
        super().__init__(lanes, bits, elem)
        self.suffix = suffix
        self.integer = {"f32": "i32", "f64": "i64"}.get(elem, elem)
        self.plain = {"ps": "f32", "pd": "f64"}.get(suffix, "u8")

    def read(self, *operands: Any, elem: str = "") -> list[Address]:
        """Return the vectors among operands, counted in an element."""
        return [a.read_as(elem or self.elem) for a in operands if isinstance(a, Address)]

    def counted(self, elem: str) -> int:
        """Return how many of an element a register has."""
        return self.bits // 8 // SIZES[elem]
