"""How C types and operators read in the high IR: tables, and the scope that keeps names apart.

All integer variables become i64: kernels index memory with them and C leaves overflow undefined.
"""

from __future__ import annotations

import keyword
from dataclasses import dataclass, field

from dovetail.ir.errors import SpecError
from dovetail.ir.expr import ArrayType, NamedType, PointerType, Type
from dovetail.ir.high.ops import CONSTANTS, ELEMENTS, OPS, REAL_FUNCTIONS, REAL_PAIRS
from dovetail.ir.low import nodes as low
from dovetail.ir.low.types import SCALARS, scalar, vector

COUNTS = ("size_t", "uintptr_t")
"""Unsigned types that count: taken as signed ones, since no array has 2 ** 63 bytes."""

ELEMENT_OF = {
    "float": "f32",
    "float32_t": "f32",
    "double": "f64",
    "float64_t": "f64",
    "int": "i32",
    "int32_t": "i32",
    "unsigned": "u32",
    "uint32_t": "u32",
    "unsigned short": "u16",
    "uint16_t": "u16",
    **dict.fromkeys(COUNTS, "i64"),
    **{s.name: "i64" for s in SCALARS.values() if s.size == 8 and s.signed and not s.floating},
}
"""C scalar to the element type of a pointer to it."""

MATH = {
    **{name + f: name for name in (*REAL_FUNCTIONS, *REAL_PAIRS) for f in ("f", "")},
    **{name + f: "rint" for name in ("nearbyint", "roundeven") for f in ("f", "")},
    **dict.fromkeys(("fabsf", "fabs", "abs"), "abs"),
    **{f"f{name}{f}": name for name in ("max", "min") for f in ("f", "")},
}
"""C math function to scalar builtin."""

LIMITS = {
    "FLT_MAX": 3.4028234663852886e38,
    "FLT_MIN": 1.1754943508222875e-38,
    "FLT_EPSILON": 1.1920928955078125e-07,
}
NAMES = {"NULL": "null", "INFINITY": "inf", "HUGE_VALF": "inf"}
RESERVED = {*keyword.kwlist, *OPS, *CONSTANTS, *ELEMENTS, "cast", "regs", "local", "param"}


REFUSED = "this cannot be lifted: "


class Unliftable(Exception):
    """A pattern does not apply; the reason says why. Never leaves this package."""


def refuse(what: str, hint: str = "") -> SpecError:
    """Return the error for C that has no high form at all."""
    return SpecError(f"{REFUSED}{what}" + (f"; {hint}" if hint else ""))


def value_type(type_: Type) -> str:
    """Return the high type of a variable of C type `type_`."""
    if isinstance(type_, PointerType | ArrayType):
        return f"ptr[{element_type(type_.of)}]"
    found = scalar(type_)
    if found is not None:
        if found.floating and found.name not in ELEMENT_OF:
            raise refuse(f"{found.name} variables")
        if not (found.signed or found.name in COUNTS) and found.rank > 0:
            raise refuse(f"{found.name} variables, whose overflow wraps around", "use int64_t")
        return ELEMENT_OF[found.name] if found.floating else "i64"
    if vector(type_) is not None:
        return "vec"
    assert isinstance(type_, NamedType)
    raise refuse(f"{type_.name} values")


def element_type(type_: Type) -> str:
    """Return the element of a pointer to `type_`; a struct counts as an array of its floats."""
    if isinstance(type_, NamedType):
        if type_.name in ELEMENT_OF:
            return ELEMENT_OF[type_.name]
        if type_.name.startswith(("struct ", "union ")):
            return "f32"
        raise refuse(f"pointers to {type_.name}")
    raise refuse("pointers to pointers")


def float_offsets(structs: dict[str, low.StructDef], name: str) -> dict[tuple[str, ...], int]:
    """Return, for each path of fields of a struct of floats, its index in floats."""
    out: dict[tuple[str, ...], int] = {}
    at = 0
    definition = structs.get(name.split()[1])
    if definition is None:
        raise refuse(f"{name} is not defined", "give it in a prelude")
    for item in definition.fields:
        base = 0 if definition.kind == "union" else at
        if isinstance(item.type, NamedType) and item.type.name == "float":
            out[(item.name,)] = base
            size = 1
        elif isinstance(item.type, NamedType) and item.type.name.startswith(("struct", "union")):
            inner = float_offsets(structs, item.type.name)
            out.update({(item.name, *path): base + i for path, i in inner.items()})
            size = 1 + max(inner.values(), default=-1)
        else:
            raise refuse(f"{name} holds more than floats")
        at += size
    return out


@dataclass(slots=True)
class Names:
    """C scopes to the function scope of the high IR: each variable gets a name of its own type."""

    used: dict[str, str] = field(default_factory=dict)  # high name -> type
    loops: set[str] = field(default_factory=set)
    scopes: list[dict[str, str]] = field(default_factory=lambda: [{}])

    def declare(self, name: str, type_: str, *, loop: bool = False) -> str:
        """Return the high name of a new C variable; loop variables share no name with others."""
        shadows = any(name in scope for scope in self.scopes)
        made = name
        count = 1
        while made in RESERVED or (
            made in self.used
            and (shadows or self.used[made] != type_ or loop != (made in self.loops))
        ):
            count += 1
            made = f"{name}_{count}"
        self.used[made] = type_
        if loop:
            self.loops.add(made)
        self.scopes[-1][name] = made
        return made

    def fresh(self, name: str, type_: str) -> str:
        """Return an unused high name for a value that no C variable holds."""
        count = 1
        made = name
        while made in RESERVED or made in self.used:
            count += 1
            made = f"{name}_{count}"
        self.used[made] = type_
        return made

    def find(self, name: str) -> str | None:
        """Return the high name of a visible C variable."""
        return next((s[name] for s in reversed(self.scopes) if name in s), None)

    def type_of(self, name: str) -> str:
        """Return the type of a high name."""
        return self.used[name]
