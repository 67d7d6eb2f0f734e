"""What the name of a NEON intrinsic tells: element, width and form, and the C types of registers.

`vmlal_high_s16` is `v`, operation, `q` for 128 bits, a form (`_n`, `_lane`, `_high`), an element.
"""

from __future__ import annotations

import re
from typing import Any

from dovetail.codegen.lift.emit import Address
from dovetail.codegen.lift.lanes import Lanes, Register, integer_at, read_all
from dovetail.codegen.lift.types import SIZES
from dovetail.ir.expr import Expr, NamedType

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


class Shape(Register):
    """The element, and the lanes of the register that the name speaks of."""

    def __init__(
        self, lanes: Lanes, kind: str, bits: int, high: bool, form: str, other: str, group: int
    ) -> None:
        super().__init__(lanes, bits, ELEMENTS[kind])
        self.kind, self.high, self.form, self.other, self.group = kind, high, form, other, group

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

    def grouped(self, group: int) -> NamedType:
        """Return the C type of so many such registers."""
        one = vec(self.kind, self.count)
        return one if group == 1 else NamedType(name=f"{one.name[:-2]}x{group}_t")

    def operands(self, *given: Any) -> list[Any]:
        """Return operands; the lane that a `_lane` form names stands for all lanes."""
        if self.form in ("_lane", "_laneq"):
            lane = given[-2].read_as(self.elem).item(integer_at(given[-1]))
            return [*given[:-2], self.lanes.held(lane, self.elem, "lane")]
        return list(given)

    def both(self, *vectors: Address) -> list[Expr]:
        """Return the lanes of vectors, one behind the other."""
        return [v.item(k) for v in read_all(vectors, self.elem) for k in range(self.count)]
