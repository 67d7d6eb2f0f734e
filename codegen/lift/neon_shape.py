"""What the name of a NEON intrinsic tells: element, width and form, and the C types of registers.

`vmlal_high_s16` is `v`, operation, `q` for 128 bits, a form (`_n`, `_lane`, `_high`), an element.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from dovetail.codegen.lift.emit import Address
from dovetail.codegen.lift.lanes import Lanes, Made, integer_at
from dovetail.codegen.lift.types import SIZES
from dovetail.ir.expr import NamedType

ELEMENTS = {
    **{f"{s}{b}": f"{'i' if s == 's' else 'u'}{b}" for s in "su" for b in (8, 16, 32, 64)},
    **{elem: elem for elem in ("f16", "f32", "f64")},
}
KINDS = {"s": "int", "u": "uint", "f": "float"}
NAME = re.compile(
    r"v(get_low|get_high|[a-z0-9]+?)(q?)(_high)?(_n|_lane|_laneq|_dup|)((?:_[suf](?:8|16|32|64))+)(?:_x([234]))?"
)


def vec(kind: str, count: int) -> NamedType:
    """Return the C type of a register: `vec("s8", 16)` is int8x16_t."""
    return NamedType(name=f"{KINDS[kind[0]]}{kind[1:]}x{count}_t")


def scalar_type(kind: str) -> NamedType:
    """Return the C type of a lane."""
    return NamedType(name=f"{KINDS[kind[0]]}{kind[1:]}_t")


class Shape:
    """The element, and the lanes of the register that the name speaks of."""

    def __init__(
        self, kind: str, wide: bool, high: bool, form: str, other: str, group: int
    ) -> None:
        self.kind, self.high, self.form, self.other, self.group = kind, high, form, other, group
        self.elem = ELEMENTS[kind]
        self.bits = 128 if wide else 64
        self.count = self.bits // 8 // SIZES[self.elem]

    @property
    def wider(self) -> str:
        """The kind of lanes twice as wide."""
        return f"{self.kind[0]}{2 * int(self.kind[1:])}"

    @property
    def narrower(self) -> str:
        """The kind of lanes half as wide."""
        return f"{self.kind[0]}{int(self.kind[1:]) // 2}"

    def upper(self, at: Address) -> Address:
        """Return the upper half of a register for a `_high` form."""
        return at.moved(8 // SIZES[at.elem]) if self.high else at

    def same(self, made: Address) -> Made:
        """Return a vector of the register that the name speaks of."""
        return vec(self.kind, self.count), made

    def grouped(self) -> NamedType:
        """Return the C type of as many such registers as the name says."""
        one = vec(self.kind, self.count)
        return one if self.group == 1 else NamedType(name=f"{one.name[:-2]}x{self.group}_t")


Handler = Callable[[Lanes, Shape, list[Any]], Any]


def operands(lanes: Lanes, shape: Shape, args: list[Any]) -> list[Any]:
    """Return the operands; the lane that a `_lane` form names stands for all lanes."""
    if shape.form in ("_lane", "_laneq"):
        lane = args[-2].read_as(shape.elem).item(integer_at(args[-1]))
        return [*args[:-2], lanes.held(lane, shape.elem, "lane")]
    return args
