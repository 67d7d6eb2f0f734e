"""How C types and operators read in the high IR: tables, and the scope that keeps names apart.

All integer variables become i64: kernels index memory with them and C leaves overflow undefined.
"""

from __future__ import annotations

import keyword
from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, count

from dovetail.ir.errors import SpecError
from dovetail.ir.expr import ArrayType, NamedType, PointerType, Type
from dovetail.ir.high.ops import CONSTANTS, ELEMENTS, OPS, REAL_FUNCTIONS, REAL_PAIRS
from dovetail.ir.low.types import Scalar, scalar, vector

COUNTS = ("size_t", "uintptr_t")
"""Unsigned types that count: taken as signed ones, since no array has 2 ** 63 bytes."""
TAGGED = ("struct ", "union ")
"""How the names of structs begin."""
POINTED = ("f32", "f64", "i32", "u32", "u16", "i64")
"""Elements of the pointers of kernels that are understood."""
SIZES = {elem: int(elem.lstrip("biuf")) // 8 for elem in ELEMENTS}
"""Bytes of an element."""
WORKS_IN = dict.fromkeys(("i8", "u8", "i16", "u16"), "i32")
"""Elements narrower than an int to the type in which they are computed."""

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
VOID, INT, LONG, FLOAT, DOUBLE = (
    NamedType(name=name) for name in ("void", "int", "long", "float", "double")
)
VECTOR_OPS = {"+": "vadd", "-": "vsub", "*": "vmul", "/": "vdiv"}
"""Operator on floats to builtin of vectors."""
VECTOR_CALLS = {
    **{f"{name}f": f"v{name}" for name in (*REAL_FUNCTIONS, *REAL_PAIRS)},
    **dict.fromkeys((f for f, op in MATH.items() if op == "rint" and f[-1] == "f"), "vround"),
    **{"roundf": "vround_away", "fabsf": "vabs", "fmaxf": "vmax", "fminf": "vmin"},
}
"""C math function to function of vectors."""
NAMES = {"NULL": "null", "INFINITY": "inf", "HUGE_VALF": "inf"}
RESERVED = {*keyword.kwlist, *OPS, *CONSTANTS, *ELEMENTS, "cast", "regs", "local", "param"}
REFUSED = "this cannot be lifted: "


class Unliftable(SpecError):
    """A pattern does not apply; the reason says why. Never leaves this package."""


def refuse(what: str, hint: str = "") -> SpecError:
    """Return the error for C that has no high form at all."""
    return SpecError(f"{REFUSED}{what}" + (f"; {hint}" if hint else ""))


def reason_of(error: SpecError) -> str:
    """Return what stands against lifting."""
    return str(error).removeprefix(REFUSED)


def value_type(type_: Type) -> str:
    """Return the high type of a variable of C type `type_`."""
    if isinstance(type_, PointerType | ArrayType):
        return f"ptr[{element_type(type_.of)}]"
    found = scalar(type_)
    if found is not None:
        if found.floating and found.size not in (4, 8):
            raise refuse(f"{found.name} variables")
        if not (found.signed or found.name in COUNTS) and found.rank > 0:
            raise refuse(f"{found.name} variables, whose overflow wraps around", "use int64_t")
        return element_of(found) if found.floating else "i64"
    if vector(type_) is not None:
        return "vec"
    assert isinstance(type_, NamedType)
    raise refuse(f"{type_.name} values")


def element_of(found: Scalar) -> str:
    """Return the element type in memory of a C scalar."""
    if found.size > 8:
        raise refuse(f"{found.name} values")
    if found.name in ("__bf16", "bfloat16_t"):
        return "bf16"
    return f"{'f' if found.floating else 'i' if found.signed else 'u'}{8 * found.size}"


def element_type(type_: Type) -> str:
    """Return the element of a pointer to `type_`; a struct counts as an array of its floats."""
    if not isinstance(type_, NamedType):
        raise refuse("pointers to pointers")
    if type_.name.startswith(TAGGED):
        return "f32"
    found = scalar(type_)
    elem = "i64" if type_.name in COUNTS else element_of(found) if found is not None else ""
    if elem not in POINTED:
        raise refuse(f"pointers to {type_.name}")
    return elem


@dataclass(slots=True)
class Names:
    """C scopes to the function scope of the high IR: each variable gets a name of its own type."""

    used: dict[str, str] = field(default_factory=dict)  # high name -> type
    own: set[str] = field(default_factory=set)  # of no C variable
    loops: set[str] = field(default_factory=set)
    scopes: ChainMap[str, str] = field(default_factory=ChainMap)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Open a scope: what is declared in it ends with it."""
        outer, self.scopes = self.scopes, self.scopes.new_child()
        try:
            yield
        finally:
            self.scopes = outer

    def declare(self, name: str, type_: str, *, loop: bool = False) -> str:
        """Return the high name of a new C variable; loop variables share no name with others."""
        shadows = name in self.scopes

        def serves(made: str) -> bool:
            alike = self.used.get(made) == type_ and loop == (made in self.loops)
            return made not in self.used or (alike and not shadows and made not in self.own)

        made = next(filter(serves, spellings(name)))
        self.used[made] = type_
        if loop:
            self.loops.add(made)
        self.scopes[name] = made
        return made

    def fresh(self, name: str, type_: str) -> str:
        """Return an unused high name for a value that no C variable holds."""
        made = next(made for made in spellings(name) if made not in self.used)
        self.used[made] = type_
        self.own.add(made)
        return made

    def find(self, name: str) -> str | None:
        """Return the high name of a visible C variable."""
        return self.scopes.get(name)


def spellings(name: str) -> Iterator[str]:
    """Yield names like `name` that mean nothing else in the high IR: itself, then with a number."""
    spelled = chain((name,), (f"{name}_{n}" for n in count(2)))
    return (made for made in spelled if made not in RESERVED)
