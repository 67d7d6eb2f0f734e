"""Typing rules of the high IR: operand types in, result type out, or a `TypeFault`.

Types are their text (`f32`, `vec[f32]`, `ptr[bf16]`), and besides: `int` and `float` for literals
and compile-time values, which take the type they meet; `bool`; `text` for compile-time strings;
`null`; `void`; `tile[f32]`; `?` after a fault already reported, which fits everywhere. A pointer to
a dtype parameter (`ptr[W]`) fits pointers to every real element.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from dovetail.ir.expr import COMPARISONS
from dovetail.ir.high.ops import ELEMENTS, INTS, REALS, STORAGE, VECTORS, Op

UNKNOWN = "?"
_RANK = {"bool": 0, "int": 1, "u8": 2, "i8": 2, "u16": 2, "i16": 2, "i32": 2, "u32": 3, "i64": 4}
_RANK["u64"] = 5
NARROW = ("u8", "i8", "u16", "i16")
"""Integers that become i32 in arithmetic, as in C."""
_REAL_RANK = {"int": 0, "float": 1, "f32": 2, "f64": 2}
_INT_ONLY = ("//", "%", "<<", ">>", "&", "|", "^")


class TypeFault(Exception):
    """A rule is broken: diagnostic code, message and hint."""

    def __init__(self, code: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint


def is_pointer(type_: str) -> bool:
    """Tell whether `type_` is `ptr[...]`."""
    return type_.startswith("ptr[")


def element(type_: str) -> str:
    """Return T of `ptr[T]` or `tile[T]`."""
    return type_[type_.index("[") + 1 : -1]


def is_int(type_: str) -> bool:
    """Tell whether `type_` is an integer, compile-time ones and bool included."""
    return type_ in _RANK


def settled(type_: str) -> str:
    """Return the type a variable gets from a value: literals become i64 and f32."""
    return {"int": "i64", "float": "f32"}.get(type_, type_)


def value_of(elem: str) -> str:
    """Return the scalar type an element is worked with in: f32 for storage types."""
    return elem if elem in ELEMENTS and elem not in STORAGE else "f32"


def unify(left: str, right: str) -> str | None:
    """Return the type of arithmetic on two scalars, None where a cast is needed."""
    if left in _RANK and right in _RANK:
        wider = left if _RANK[left] >= _RANK[right] else right
        return "i32" if wider in NARROW else "int" if wider == "bool" else wider
    if left in _REAL_RANK and right in _REAL_RANK:
        if left != right and _REAL_RANK[left] == _REAL_RANK[right]:
            return None
        return left if _REAL_RANK[left] >= _REAL_RANK[right] else right
    return None


def assignable(target: str, value: str) -> bool:
    """Tell whether a `value` may be stored where a `target` is wanted, without a cast."""
    if UNKNOWN in (target, value) or target == value:
        return True
    if target in INTS:
        return value in ("int", "bool") or (value in _RANK and unify(target, value) == target)
    if target in REALS:
        return value in ("int", "float") or (target, value) == ("f64", "f32")
    if is_pointer(target):
        symbolic = is_pointer(value) and not {element(target), element(value)} <= {*ELEMENTS}
        return value == "null" or symbolic
    return (target, value) in (("int", "bool"), ("bool", "int"), ("float", "int"))


def check_condition(type_: str) -> None:
    """Raise unless `type_` can stand as a condition."""
    if type_ != UNKNOWN and not is_int(type_):
        raise TypeFault(
            "high-type-mismatch", f"a condition must be true or false, not {type_}", "compare it"
        )


def unary_type(op: str, operand: str) -> str:
    """Return the type of `op operand`."""
    if operand == UNKNOWN:
        return UNKNOWN
    _no_vector(op, (operand,))
    if op == "!":
        check_condition(operand)
        return "bool"
    if op == "~" and not is_int(operand):
        raise TypeFault("high-type-mismatch", f"`~` works on integers, not on {operand}")
    result = unify(operand, "int")
    if result is None:
        raise TypeFault("high-type-mismatch", f"`{op}` does not work on {operand}")
    return result


@cache
def binary_type(op: str, left: str, right: str) -> str:
    """Return the type of `left op right`."""
    if UNKNOWN in (left, right):
        return "bool" if op in COMPARISONS or op in ("&&", "||") else UNKNOWN
    if op in ("&&", "||"):
        check_condition(left)
        check_condition(right)
        return "bool"
    _no_vector(op, (left, right))
    if op in COMPARISONS:
        return _compare(op, left, right)
    if is_pointer(left) or is_pointer(right):
        return _pointer_arithmetic(op, left, right)
    result = unify(left, right)
    if result is None:
        raise _mismatch(op, left, right)
    if op in _INT_ONLY and not is_int(result):
        hint = "use `/` on floating values" if op == "//" else None
        raise TypeFault("high-type-mismatch", f"`{op}` works on integers, not on {result}", hint)
    if op == "/" and is_int(result) and "int" not in (left, right):
        raise TypeFault("high-int-division", "`/` on integers", "write `//` (C's division)")
    return "float" if op == "/" and is_int(result) else result


def _mismatch(op: str, left: str, right: str) -> TypeFault:
    return TypeFault(
        "high-type-mismatch",
        f"`{op}` between {left} and {right}",
        "convert one side with cast(type, x)",
    )


def _no_vector(op: str, operands: Sequence[str]) -> None:
    if any(o in VECTORS or o.startswith("tile[") for o in operands):
        raise TypeFault(
            "high-vector-operator",
            f"`{op}` does not work on vectors",
            "use vadd, vsub, vmul, vfma, vneg ...",
        )


def _compare(op: str, left: str, right: str) -> str:
    addresses = [t for t in (left, right) if is_pointer(t) or t == "null"]
    same_text = left == right == "text" and op in ("==", "!=")
    if len(addresses) == 2 or same_text or unify(left, right):
        return "bool"
    raise _mismatch(op, left, right)


def _pointer_arithmetic(op: str, left: str, right: str) -> str:
    if op in ("+", "-") and is_pointer(left) and is_int(right):
        return left
    if op == "+" and is_int(left) and is_pointer(right):
        return right
    if op == "-" and left == right:
        return "i64"
    raise _mismatch(op, left, right)


def ternary_type(cond: str, then: str, other: str) -> str:
    """Return the type of `then if cond else other`."""
    check_condition(cond)
    if UNKNOWN in (then, other) or then == other:
        return then
    for a, b in ((then, other), (other, then)):
        if is_pointer(a) and assignable(a, b):
            return a
    result = unify(then, other)
    if result is None:
        raise TypeFault(
            "high-type-mismatch", f"the two values differ: {then} and {other}", "convert one"
        )
    return result


def index_type(base: str, index: str) -> str:
    """Return the type of `base[index]` for a pointer."""
    if base == UNKNOWN:
        return UNKNOWN
    if not is_pointer(base):
        raise TypeFault("high-type-mismatch", f"a value of type {base} cannot be indexed")
    if index != UNKNOWN and not is_int(index):
        raise TypeFault("high-type-mismatch", f"an index must be an integer, not {index}")
    elem = element(base)
    if elem in STORAGE or elem not in ELEMENTS:
        raise TypeFault(
            "high-storage-access",
            f"{elem} elements cannot be accessed with `[]`",
            "use load(p + i) and store(p + i, x), which convert from and to f32",
        )
    return elem


def call_type(op: Op, args: Sequence[str]) -> str:
    """Return the result type of a builtin applied to argument types."""
    if not op.least <= len(args) <= len(op.params):
        wanted = str(op.least) if not op.optional else f"{op.least} or {len(op.params)}"
        raise TypeFault("high-arity", f"`{op.name}` takes {wanted} arguments, not {len(args)}")
    same = _common(
        [a for a, p in zip(args, op.params, strict=False) if p in ("number", "real")], op
    )
    for position, (arg, param) in enumerate(zip(args, op.params, strict=False), 1):
        wanted = value_of(element(args[0])) if param == "elem" and is_pointer(args[0]) else param
        if arg != UNKNOWN and not _fits(wanted, arg):
            what = _WORDS.get(wanted, wanted)
            message = f"argument {position} of `{op.name}` must be {what}, not {arg}"
            raise TypeFault("high-type-mismatch", message)
    if op.result == "elem":
        return value_of(element(args[0])) if is_pointer(args[0]) else UNKNOWN
    return same if op.result == "same" else op.result


_ALONE = ("i32", "u8", "i8", "bf16", "f32")
_WORDS = {
    "int": "an integer",
    "const": "a compile-time integer",
    "number": "a scalar",
    "real": "a floating scalar",
    "ptr.any": "a pointer",
    "ptr.real": "a pointer to f32, bf16 or f16",
    "ptr.byte": "a pointer to u8 or i8",
    **{f"ptr.{elem}": f"a pointer to {elem}" for elem in _ALONE},
}


_POINTEES = {
    "ptr.real": ("f32", *STORAGE),
    "ptr.byte": ("u8", "i8"),
    **{f"ptr.{elem}": (elem,) for elem in _ALONE},
}


def _common(types: Sequence[str], op: Op) -> str:
    result = types[0] if types else UNKNOWN
    for other in types[1:]:
        both = UNKNOWN if UNKNOWN in (result, other) else unify(result, other)
        if both is None:
            raise _mismatch(op.name, result, other)
        result = both
    return "float" if result == "int" and "real" in op.params else result


def _fits(param: str, arg: str) -> bool:
    if param in ("int", "const"):
        return is_int(arg)
    if param in ("number", "real"):
        return arg in ("int", "float", *REALS) or (param == "number" and is_int(arg))
    if param.startswith("ptr."):
        if not is_pointer(arg):
            return False
        elem = element(arg)
        symbolic = elem not in ELEMENTS
        allowed = _POINTEES.get(param, ELEMENTS)
        return elem in allowed or (symbolic and param != "ptr.i32")
    return assignable(param, arg)
