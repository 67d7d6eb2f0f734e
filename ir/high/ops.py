"""The one table of builtins: name, argument kinds and result kind.

Kinds: `f32`, `i32`, `vec[f32]`, `vec[i32]` as written; `int` any integer; `const` a compile-time
integer; `number` any scalar and `real` any floating scalar, all such arguments alike; `ptr.any` a
pointer, `ptr.real` to f32, bf16 or f16, `ptr.byte` to u8 or i8, `ptr.i32` to i32, `ptr.bf16` and
so on to those.
Results: a type, `same` as the number or real arguments, `elem` of the pointer as a scalar, or
`void`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Op:
    """A builtin. `optional` trailing parameters may be left out."""

    name: str
    params: tuple[str, ...]
    result: str
    optional: int = 0
    family: str = ""

    @property
    def least(self) -> int:
        """The smallest number of arguments."""
        return len(self.params) - self.optional


F, I = "vec[f32]", "vec[i32]"  # noqa: E741
REAL_FUNCTIONS = (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "cbrt"),
    *("erf", "erfc"),
    *("cos", "sin", "tan", "acos", "asin", "atan"),
    *("cosh", "sinh", "tanh", "acosh", "asinh", "atanh"),
    *("floor", "ceil", "trunc", "round", "rint"),
)
REAL_PAIRS = ("pow", "fmod", "atan2", "copysign", "hypot")
"""Functions of the C library on one number, and on two."""

_SCALAR = (
    Op("min", ("number", "number"), "same"),
    Op("max", ("number", "number"), "same"),
    Op("abs", ("number",), "same"),
    *(Op(name, ("real",), "same") for name in REAL_FUNCTIONS),
    *(Op(name, ("real", "real"), "same") for name in REAL_PAIRS),
    Op("load", ("ptr.any",), "elem"),
    Op("store", ("ptr.any", "elem"), "void"),
    Op("prefetch", ("ptr.any",), "void"),
    Op("prefetch_l2", ("ptr.any",), "void"),
    Op("keep_order", (), "void"),
)
_MEMORY = (
    Op("vload", ("ptr.real", "int"), F, optional=1, family="vload"),
    Op("vstore", ("ptr.real", F, "int"), "void", optional=1, family="vstore"),
    Op("vload_i32", ("ptr.i32", "int"), I, optional=1, family="vload"),
    Op("vstore_i32", ("ptr.i32", I, "int"), "void", optional=1, family="vstore"),
    Op("vload_pairs", ("ptr.bf16",), I),
    Op("vbroadcast_pair", ("ptr.bf16",), I),
    Op("vload_quads", ("ptr.byte",), I),
    Op("vbroadcast_quad", ("ptr.byte",), I),
    Op("vload_u8", ("ptr.u8",), I),
    Op("vload_i8", ("ptr.i8",), I),
    Op("vstore_i8", ("ptr.i8", I), "void"),
    Op("vload_strips", ("ptr.f16", "int"), F),
    Op("vload_strips_i32", ("ptr.i32", "int"), I),
    Op("vload_strips_i8", ("ptr.i8", "int"), I),
)
_VECTOR = (
    Op("vzero", (), F),
    Op("vbroadcast", ("f32",), F),
    *(Op(name, (F, F), F) for name in ("vadd", "vsub", "vmul", "vdiv", "vmin", "vmax")),
    *(Op(name, (F, F, F), F) for name in ("vfma", "vfnma")),
    *(Op(name, (F,), F) for name in ("vabs", "vneg", "vsqrt")),
    *(Op(name, (F,), F) for name in ("vround", "vfloor", "vceil", "vtrunc")),
    *(Op(name, (F,), "f32") for name in ("vreduce_add", "vreduce_max", "vreduce_min")),
    Op("vreduce_add16", ("ptr.f32", "int", *(F,) * 16), "void"),
    Op("vreduce_add4", ("ptr.f32", F, F, F, F), "void"),
    Op("vselect_gt", (F, F, F, F), F),
    Op("vtail", (F, "f32"), F),
    Op("vcvt_i32", (F,), I),
    Op("vcvt_f32", (I,), F),
    *(Op(f"v{name}_i32", (I, I), I) for name in ("add", "sub", "mul", "and", "or", "xor")),
    *(Op(name, (I, "const"), I) for name in ("vshl_i32", "vshr_i32")),
    Op("vbitcast_f32", (I,), F),
    Op("vbitcast_i32", (F,), I),
    Op("vbroadcast_i32", ("i32",), I),
    Op("viota", (), I),
    *(Op(name, (I,), F) for name in ("vpair_low", "vpair_high")),
    *(Op(name, (I, I), I) for name in ("vpair_firsts", "vpair_seconds")),
    Op("vdot_pairs", (I, I, F), F),
    *(Op(name, (I, I, I), I) for name in ("vdot_quads", "vdot_quads_signed")),
    *(Op(name, (I, I), I) for name in ("vmul_quads", "vadd_i16")),
    Op("vfold_i16", (I,), I),
    Op("vlook_quads", (I, *("i32",) * 4), I),
)
_PLACE = ("ptr.bf16", "int")
_TILE = (
    Op("tiles_begin", (), "void"),
    Op("tiles_end", (), "void"),
    Op("tile_dots", ("ptr.f32", *("int",) * 4, *_PLACE * 3), "void"),
)
OPS: dict[str, Op] = {op.name: op for op in (*_SCALAR, *_MEMORY, *_VECTOR, *_TILE)}
"""Every builtin by name. `cast(type, x)` is syntax, not in the table."""

FOLDABLE = frozenset(("min", "max", "abs", *REAL_FUNCTIONS))
"""Builtins whose result is compile-time when all arguments are."""

INTS = ("u8", "i8", "u16", "i16", "i32", "u32", "i64", "u64")
REALS = ("f32", "f64")
STORAGE = ("bf16", "f16")
"""Types that exist in memory only: loads and stores convert from and to f32."""
SCALARS = (*INTS, *REALS)
VECTORS = (F, I)
ELEMENTS = (*SCALARS, *STORAGE)
"""Types a pointer may point to."""
CONSTANTS = {"inf": "float", "null": "null", "VL": "int"}
"""Names known everywhere and their types."""
