"""NEON intrinsics by the pattern of their names. In: a name. Out: the rule that writes it."""

from __future__ import annotations

from dovetail.codegen.lift.emit import Address, call, num, op, pick
from dovetail.codegen.lift.lanes import (
    BINARY,
    Arg,
    Lanes,
    Made,
    Rule,
    less,
    minus,
    saturate,
)
from dovetail.codegen.lift.neon_ops import (
    ELEMENTS,
    NAME,
    VOID,
    Handler,
    Shape,
    _across,
    _bitwise,
    _combine,
    _convert,
    _create,
    _dot,
    _doubling_high,
    _dup,
    _elementwise,
    _ext,
    _fixed,
    _floor,
    _get_lane,
    _half,
    _interleave,
    _left_wide,
    _load,
    _load_apart,
    _mask,
    _mmla,
    _muladd,
    _narrowing,
    _pair_sums,
    _pairwise,
    _reinterpret,
    _reverse,
    _round_to_int,
    _rounded_shift,
    _select,
    _set_lane,
    _shift,
    _shift_fixed,
    _store,
    _table,
    _transpose,
    _unzip,
    _widen,
    _widening,
    _zip,
    scalar_type,
)
from dovetail.ir.expr import Expr, Float, Unary


def neon_rule(name: str) -> Rule | None:
    """Return what an intrinsic of NEON writes."""
    found = NAME.fullmatch(name)
    if not found:
        return None
    operation, wide, high, form, kinds, group = found.groups()
    listed = kinds[1:].split("_")
    if operation not in HANDLERS and operation + wide in HANDLERS:  # vdupq: `q` may be of the name
        operation, wide = operation + wide, ""
    handler = HANDLERS.get(operation)
    if handler is None or listed[0] not in ELEMENTS:
        return None
    other = listed[1] if len(listed) > 1 else ""
    shape = Shape(listed[0], bool(wide), bool(high), form, other, int(group or 1))

    def rule(lanes: Lanes, args: list[Arg]) -> Made:
        made = handler(lanes, shape, args)
        if made is None:
            return VOID, None
        if isinstance(made, Address):
            return shape.same(made)
        return made if isinstance(made, tuple) else (scalar_type(shape.kind), made)

    return rule


def _nan_or(shape: Shape, a: Expr, b: Expr, made: Expr) -> Expr:
    """Return `made`, or the one of two floats that is no number."""
    if shape.elem[0] != "f":
        return made
    return pick(less(a, a, "!="), a, pick(less(b, b, "!="), b, made))


_ADD, _SUB, _MUL, _MAX, _MIN = (BINARY[n] for n in ("add", "sub", "mul", "max", "min"))
HANDLERS: dict[str, Handler] = {
    "add": _elementwise(lambda s, a, b: _ADD(a, b), "vadd"),
    "sub": _elementwise(lambda s, a, b: _SUB(a, b), "vsub"),
    "mul": _elementwise(lambda s, a, b: _MUL(a, b), "vmul"),
    "div": _elementwise(lambda s, a, b: op("/", a, b), "vdiv"),
    "max": _elementwise(lambda s, a, b: _nan_or(s, a, b, _MAX(a, b)), "vmax"),
    "min": _elementwise(lambda s, a, b: _nan_or(s, a, b, _MIN(a, b)), "vmin"),
    "maxnm": _elementwise(lambda s, a, b: _MAX(a, b), "vmax"),
    "minnm": _elementwise(lambda s, a, b: _MIN(a, b), "vmin"),
    **dict.fromkeys(("mla", "fma"), _muladd("+", "vfma")),
    **dict.fromkeys(("mls", "fms"), _muladd("-", "vfnma")),
    "abs": _elementwise(lambda s, a: call("abs", op("+", a, 0)), "vabs"),
    "neg": _elementwise(lambda s, a: minus(a), "vneg"),
    "sqrt": _elementwise(lambda s, a: call("sqrt", a), "vsqrt"),
    "rndn": _elementwise(lambda s, a: a, "vround"),
    "rndm": _floor(1),
    "rndp": _floor(-1),
    # estimates: the exact value is what the steps after them move towards
    "recpe": _elementwise(lambda s, a: op("/", Float(value=1.0), a)),
    "rsqrte": _elementwise(lambda s, a: op("/", Float(value=1.0), call("sqrt", a))),
    "recps": _elementwise(lambda s, a, b: op("-", Float(value=2.0), op("*", a, b))),
    "rsqrts": _elementwise(
        lambda s, a, b: op("/", op("-", Float(value=3.0), op("*", a, b)), Float(value=2.0))
    ),
    "abd": _elementwise(lambda s, a, b: call("abs", op("-", a, b))),
    "qadd": _elementwise(lambda s, a, b: saturate(_ADD(a, b), s.elem)),
    "qsub": _elementwise(lambda s, a, b: saturate(_SUB(a, b), s.elem)),
    "hadd": _elementwise(lambda s, a, b: op(">>", _ADD(a, b), num(1))),
    "rhadd": _elementwise(lambda s, a, b: op(">>", op("+", _ADD(a, b), 1), num(1))),
    "qdmulh": _elementwise(_doubling_high(rounds=False)),
    "qrdmulh": _elementwise(_doubling_high(rounds=True)),
    "shl": lambda lanes, shape, args: (
        _shift_fixed("<<") if shape.form == "_n" else _elementwise(_shift)
    )(lanes, shape, args),
    "rshl": _elementwise(_rounded_shift),
    "shr": _shift_fixed(">>"),
    "and": _bitwise(BINARY["and"]),
    "orr": _bitwise(BINARY["or"]),
    "eor": _bitwise(BINARY["xor"]),
    "bic": _bitwise(lambda a, b: op("&", a, Unary(op="~", operand=b))),
    "orn": _bitwise(lambda a, b: op("|", a, Unary(op="~", operand=b))),
    "mvn": _bitwise(lambda a: Unary(op="~", operand=a)),
    "bsl": _bitwise(_select),
    **{
        f"c{n}": _mask(s)
        for n, s in (("eq", "=="), ("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
    },
    **{
        f"c{n}z": _mask(s, with_zero=True)
        for n, s in (("eq", "=="), ("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
    },
    **{
        f"ca{n}": _mask(s, absolute=True)
        for n, s in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
    },
    **dict.fromkeys(("movl",), _widen),
    "mull": _widening(lambda a, b: op("*", a, b)),
    "mlal": _widening(lambda acc, a, b: op("+", acc, op("*", a, b)), kept=1),
    "mlsl": _widening(lambda acc, a, b: op("-", acc, op("*", a, b)), kept=1),
    "addl": _widening(lambda a, b: op("+", a, b)),
    "subl": _widening(lambda a, b: op("-", a, b)),
    "addw": _widening(lambda a, b: op("+", a, b), kept=1),
    "subw": _widening(lambda a, b: op("-", a, b), kept=1),
    "shll": _left_wide,
    **dict.fromkeys(("movn", "shrn"), _narrowing(lambda v, elem: v)),
    **dict.fromkeys(("qmovn", "qshrn"), _narrowing(saturate)),
    **dict.fromkeys(("qmovun", "qshrun"), _narrowing(saturate, unsigned=True)),
    "ld1": _load,
    "ld2": _load_apart(2),
    "ld3": _load_apart(3),
    "ld4": _load_apart(4),
    "st1": _store,
    **dict.fromkeys(("dup", "mov"), _dup),
    "get_low": _half(upper=False),
    "get_high": _half(upper=True),
    "get": _get_lane,
    "set": _set_lane,
    "combine": _combine,
    "create": _create,
    "reinterpret": _reinterpret,
    "cvt": _convert,
    "cvtn": _round_to_int,
    "padd": _pairwise(_ADD),
    "pmax": _pairwise(_MAX),
    "pmin": _pairwise(_MIN),
    "paddl": _pair_sums(adds=False),
    "padal": _pair_sums(adds=True),
    "addv": _across(_ADD),
    "addlv": _across(_ADD, wide=True),
    "maxv": _across(_MAX),
    "minv": _across(_MIN),
    "dot": _dot,
    "mmla": _mmla,
    "ext": _ext,
    "zip": _interleave(_zip, both=True),
    "uzp": _interleave(_unzip, both=True),
    "trn": _interleave(_transpose, both=True),
    **{
        f"{n}{k + 1}": _fixed(f, k)
        for n, f in (("zip", _zip), ("uzp", _unzip), ("trn", _transpose))
        for k in (0, 1)
    },
    **{f"rev{b}": _reverse(b) for b in (16, 32, 64)},
    "qtbl1": _table(16),
    "qtbl2": _table(32),
    "qtbl4": _table(64),
}
