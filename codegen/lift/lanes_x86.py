"""The meaning of SSE, AVX and AVX-512 intrinsics by the pattern of their names, for any width.

`_mm256_adds_epi16` is width, operation, element; an operation is one entry, whatever the width. In:
a name. Out: the rule that writes it, or None.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from dovetail.codegen.lift.emit import Address, num, op, pick, zero_of
from dovetail.codegen.lift.lanes import Handler, Lanes, Made, Rule, item, less, wide
from dovetail.codegen.lift.types import VOID, refuse
from dovetail.codegen.lift.x86_lanes import FUSED, LANEWISE, MASKS, mask_of
from dovetail.codegen.lift.x86_moves import MOVES
from dovetail.codegen.lift.x86_named import SPECIAL
from dovetail.codegen.lift.x86_shape import ELEMENTS, Shape, vec
from dovetail.codegen.lift.x86_whole import WHOLE
from dovetail.ir.expr import Expr

HANDLERS = LANEWISE | MOVES | WHOLE

NAME = re.compile(
    r"_mm(256|512|)_(maskz_|mask_|)([a-z0-9]+?(?:_[a-z0-9]+)*?)_?"
    r"(ep[iu](?:8|16|32|64x?)|p[sdh]|s[sd]|si(?:16|32|64|128|256|512)|i128)?(_mask)?"
)


def x86_rule(name: str) -> Rule | None:
    """Return what an intrinsic of x86 writes."""
    if name in SPECIAL:
        return lambda lanes, args: SPECIAL[name](lanes, *args)
    found = NAME.fullmatch(name)
    if not found:
        return None
    width, masked, operation, suffix, to_mask = found.groups(default="")
    bits, elem = int(width or 128), ELEMENTS.get(suffix, "u8")
    handler = _handler(operation, suffix, to_mask)
    if handler is None:
        return None

    def rule(lanes: Lanes, args: list[Any]) -> Made:
        shape = Shape(lanes, bits, elem, suffix)
        if masked:
            return _masked(shape, operation, masked, handler, args)
        made = handler(shape, *args)
        return (vec(bits, elem), made) if isinstance(made, Address) else made or (VOID, None)

    return rule


def _masked(
    shape: Shape, operation: str, masked: str, handler: Handler, operands: list[Any]
) -> Made:
    """Write an operation under a mask: lanes without a bit keep the first operand, or are 0."""
    if shape.suffix in ("ss", "sd"):  # it is for the first lane alone
        raise refuse(f"a mask on one lane of {operation}")
    if operation == "blend":  # its mask comes first
        operands, handler = [operands[1], operands[0], operands[2]], HANDLERS["mov"]
    source = None if masked == "maskz_" else operands[0]
    mask, *rest = operands if source is None else operands[1:]
    held = shape.lanes.w.temporary(wide(mask), "i64", "mask")

    def chosen(i: Expr) -> Expr:
        return less(op("&", op(">>", held, i), num(1)), 0, "!=")

    if "store" in operation:
        to, value = shape.read(operands[0], rest[0])
        shape.lanes.store_where(shape.count, chosen, to, value)
        return VOID, None
    if operation in (*FUSED, "permutex2var") and source is not None:
        rest = [source, *rest]  # it is an operand, too
    if "load" in operation:
        made = rest[0].read_as(shape.elem)
    else:
        made = handler(shape, *rest)
        if isinstance(made, tuple):  # the size of its lanes is not the one that the name ends with
            raise refuse(f"a mask on {operation}")
        made = made.read_as(shape.elem)
    kept = zero_of(shape.elem) if source is None else source.read_as(shape.elem)
    lane = shape.each(lambda i: pick(chosen(i), made.item(i), item(kept, i)))
    return vec(shape.bits, shape.elem), lane


def _handler(operation: str, suffix: str, to_mask: str) -> Handler | None:
    if suffix in ("ss", "sd"):  # what computes on one lane keeps the others
        return HANDLERS.get("store" if operation == "store" else f"{operation}_{suffix}")
    if to_mask:
        return partial(mask_of, operation) if operation in MASKS else None
    return HANDLERS.get(f"{operation}_{suffix}") or HANDLERS.get(operation)
