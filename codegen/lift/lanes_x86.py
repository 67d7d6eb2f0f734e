"""The meaning of SSE, AVX and AVX-512 intrinsics by the pattern of their names, for any width.

`_mm256_adds_epi16` is width, operation, element; an operation is one entry, whatever the width. In:
a name. Out: the rule that writes it, or None.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from dovetail.codegen.lift.emit import Address, call, cast, num, op, pick
from dovetail.codegen.lift.lanes import (
    BINARY,
    COMPARED,
    SIZES,
    WORKS_IN,
    Arg,
    Lanes,
    Made,
    Rule,
    halves,
    integer_at,
    less,
    minus,
    saturate,
    wide,
)
from dovetail.codegen.lift.types import refuse
from dovetail.ir.expr import Expr, Float, NamedType, Unary

VOID = NamedType(name="void")
INT = NamedType(name="int")
ELEMENTS = {
    **{f"ep{s}{b}": f"{'i' if s == 'i' else 'u'}{b}" for s in "iu" for b in (8, 16, 32)},
    "epi64": "i64",
    "epi64x": "i64",
    "epu64": "i64",
    "ps": "f32",
    "pd": "f64",
    "ph": "f16",
    "ss": "f32",
    "sd": "f64",
    **dict.fromkeys(("si128", "si256", "si512", "si64", "si32", "si16", "i128"), "u8"),
}
NAME = re.compile(
    r"_mm(256|512|)_(maskz_|mask_|)([a-z0-9]+?(?:_[a-z0-9]+)*?)_?"
    r"(ep[iu](?:8|16|32|64x?)|p[sdh]|s[sd]|si(?:16|32|64|128|256|512)|i128)?(_mask)?"
)
FUSED = {
    "fmadd": lambda v, a, b, c: call("vfma", a, b, c),
    "fnmadd": lambda v, a, b, c: call("vfnma", a, b, c),
    "fmsub": lambda v, a, b, c: call("vneg", call("vfnma", a, b, c)),
}
FUSED_SCALAR: dict[str, Callable[[Expr, Expr, Expr], Expr]] = {
    "fmadd": lambda a, b, c: op("+", op("*", a, b), c),
    "fnmadd": lambda a, b, c: op("-", c, op("*", a, b)),
    "fmsub": lambda a, b, c: op("-", op("*", a, b), c),
}
PLAIN = {"add": "vadd", "sub": "vsub", "mul": "vmul", "div": "vdiv", "min": "vmin", "max": "vmax"}


def vec(bits: int, elem: str) -> NamedType:
    """Return the C type of a register."""
    return NamedType(name=f"__m{bits}" + {"f32": "", "f64": "d"}.get(elem, "i"))


Handler = Callable[[Lanes, "Shape", list[Any]], Any]


class Shape:
    """Width and element of an instruction, and how many lanes that makes."""

    def __init__(self, bits: int, elem: str, suffix: str) -> None:
        self.bits, self.elem, self.suffix = bits, elem, suffix
        self.count = bits // 8 // SIZES[elem]

    def read(self, args: list[Any], elem: str | None = None) -> list[Address]:
        """Return the vectors among the arguments, counted in an element."""
        return [a.read_as(elem or self.elem) for a in args if isinstance(a, Address)]


def x86_rule(name: str) -> Rule | None:
    """Return what an intrinsic of x86 writes."""
    special = SPECIAL.get(name)
    if special is not None:
        return special
    found = NAME.fullmatch(name)
    if not found:
        return None
    width, masked, operation, suffix, to_mask = found.groups()
    bits = int(width or 128)
    elem = ELEMENTS.get(suffix or "", "u8")
    handler = _handler(operation, suffix or "", elem, to_mask)
    if handler is None:
        return None
    shape = Shape(bits, elem, suffix or "")
    result = elem

    def rule(lanes: Lanes, args: list[Arg]) -> Made:
        if masked:
            return _masked(lanes, shape, operation, masked, handler, args)
        made = handler(lanes, shape, args)
        if isinstance(made, tuple):
            return made
        if made is None:
            return VOID, None
        if isinstance(made, Address):
            return vec(bits, _result_element(operation, result)), made
        return _number_type(elem, operation), made

    return rule


def _result_element(operation: str, elem: str) -> str:
    if operation.startswith("cvt") and elem not in ("f32", "f64"):
        return "i8"
    return elem


def _number_type(elem: str, operation: str) -> NamedType:
    if operation == "movemask" or operation.startswith("cvttss"):
        return INT
    names = {"f32": "float", "f64": "double", "i64": "long long"}
    return NamedType(name=names.get(elem, "int"))


def _masked(
    lanes: Lanes, shape: Shape, operation: str, masked: str, handler: Handler, args: list[Any]
) -> Made:
    """Write an operation under a mask: lanes without a bit keep the first argument, or are 0."""
    source = None if masked == "maskz_" else args[0]
    mask, rest = (args[0], args[1:]) if source is None else (args[1], args[2:])
    held = lanes.w.temporary(cast("i64", mask), "i64", "mask")

    def chosen(i: Expr) -> Expr:
        return less(op("&", op(">>", held, i), num(1)), 0, "!=")

    if "store" in operation:
        to, value = args[0].read_as(shape.elem), rest[0].read_as(shape.elem)
        held = lanes.w.temporary(cast("i64", args[1]), "i64", "mask")

        def put(i: Expr) -> None:
            with lanes.w.inside() as inner:
                lanes.w.set(to.item(i), value.item(i))
            lanes.w.branch(less(op("&", op(">>", held, i), num(1)), 0, "!="), inner, ())

        lanes.w.loop(shape.count, put)
        return VOID, None
    if "load" in operation:
        made = rest[0].read_as(shape.elem)
    else:
        made = handler(lanes, shape, rest).read_as(shape.elem)
    zero: Expr = Float(value=0.0) if shape.elem in ("f32", "f64") else num(0)
    kept = source.read_as(shape.elem) if source is not None else None
    out = lanes.each(
        shape.elem,
        shape.count,
        lambda i: pick(chosen(i), made.item(i), kept.item(i) if kept else zero),
    )
    return vec(shape.bits, shape.elem), out


# ---- what an operation is ----


def _handler(operation: str, suffix: str, elem: str, to_mask: str | None) -> Handler | None:
    if to_mask:
        return _to_mask(operation)
    for key in (f"{operation}_{suffix}", operation):
        if key in HANDLERS:
            return HANDLERS[key]
    if suffix in ("ps", "pd") and operation in PLAIN:
        return _float_binary(operation)
    if operation in FUSED:
        return _fused(operation)
    if operation in LANEWISE and suffix[:2] == "ep":
        return _lanewise(LANEWISE[operation])
    if operation in BITS and (suffix[:2] == "si" or suffix in ("ps", "pd", "epi32", "epi64")):
        return _bits(operation)
    if re.fullmatch(r"cvtep[iu]\d+", operation) or re.fullmatch(r"cvtt?p[sdh]", operation):
        return _convert(operation, suffix)
    if re.fullmatch(r"cast(ps|pd|si)\d*(_p[sd]|_si\d+)?|castps|castsi\d+|castpd", operation):
        return lambda lanes, shape, args: _cast(lanes, shape, args)
    return None


def _float_binary(operation: str) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        a, b = shape.read(args)
        if shape.elem == "f32":
            return lanes.calls(PLAIN[operation], shape.count, a, b)
        return lanes.each(shape.elem, shape.count, lambda i: BINARY[operation](a.item(i), b.item(i)))

    return handler


def _fused(operation: str) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        a, b, c = shape.read(args)
        if shape.elem == "f32":
            return lanes.floats(
                shape.count, lambda load: FUSED[operation](None, load(a), load(b), load(c))
            )
        return lanes.each(
            shape.elem,
            shape.count,
            lambda i: FUSED_SCALAR[operation](a.item(i), b.item(i), c.item(i)),
        )

    return handler


def _lanewise(lane: Callable[..., Expr]) -> Handler:
    """Return the handler of an operation on lanes; numbers among the arguments are the same."""

    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        held = [a.read_as(shape.elem) if isinstance(a, Address) else a for a in args]
        return lanes.each(
            shape.elem,
            shape.count,
            lambda i: lane(shape, *(a.item(i) if isinstance(a, Address) else a for a in held)),
        )

    return handler


def _bits(operation: str) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        a, b = shape.read(args, "u32")
        made = lanes.each(
            "u32", shape.bits // 32, lambda i: BINARY[BITS[operation]](a.item(i), b.item(i))
        )
        return made.read_as(shape.elem if shape.elem in ("f32", "f64") else "u8")

    return handler


def _convert(operation: str, suffix: str) -> Handler:
    source = ELEMENTS[re.sub("^cvtt?", "", operation)]

    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address | Made:
        a = args[0].read_as(source)
        if suffix == "ps" and source == "i32":
            return lanes.floats(
                shape.count,
                lambda load: call("vcvt_f32", call("vload_i32", *load_i32(load, a))),
            )
        if source == "f32" and shape.elem == "i32":
            if "cvtt" in operation:
                return lanes.each("i32", shape.count, lambda i: cast("i32", a.item(i)))
            return round_lanes(lanes, shape.count, a)
        count = shape.count
        if SIZES[source] > SIZES[shape.elem]:  # narrowing: the width named is the source's
            count = shape.bits // 8 // SIZES[source]
            if shape.elem == "f32":
                count = shape.bits // 8 // SIZES[source]
            made = lanes.each(shape.elem, count, lambda i: cast_to(shape.elem, a.item(i)))
            return vec(max(128, count * SIZES[shape.elem] * 8), shape.elem), _padded(lanes, made, count)
        return lanes.each(shape.elem, count, lambda i: cast_to(shape.elem, halves(a, i)))

    return handler


def load_i32(load: Any, a: Address) -> tuple[Expr, ...]:
    """Return the arguments of vload_i32 for a vector of a group."""
    made = load(a)  # vload(pointer, lanes) with the pointer cast to f32
    pointer = made.args[0]
    return Address(pointer, "f32").read_as("i32").pointer(), made.args[1]


def round_lanes(lanes: Lanes, count: int, a: Address) -> Address:
    """Return f32 lanes to the nearest integers, even ones at ties."""
    from dovetail.codegen.lift.emit import VL  # noqa: PLC0415

    out = lanes.new("i32", count)
    used = call("min", VL, num(count))

    def group(u: Expr) -> None:
        step = op("*", u, VL)
        made = call("vcvt_i32", call("vload", a.moved(step).pointer(), used))
        lanes.w.do(call("vstore_i32", out.moved(step).pointer(), made, used))

    lanes.loop_groups(call("max", num(1), op("//", num(count), VL)), group)
    return out


def cast_to(elem: str, value: Expr) -> Expr:
    """Return a lane as another element."""
    return value if elem == "f16" else cast(elem, value)


def _padded(lanes: Lanes, made: Address, count: int) -> Address:
    total = max(16, count * SIZES[made.elem]) // SIZES[made.elem]
    if total == count:
        return made
    zero: Expr = Float(value=0.0) if made.elem in ("f32", "f64") else num(0)
    out = lanes.new(made.elem, total)
    lanes.w.loop(total, lambda i: lanes.w.set(out.item(i), zero))
    lanes.move(out.read_as("u8"), made.read_as("u8"), count * SIZES[made.elem])
    return out


def _cast(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    return args[0].read_as(shape.elem)


def _to_mask(operation: str) -> Handler | None:
    found = re.fullmatch(r"cmp(eq|gt|ge|lt|le|neq)?", operation)
    if not found and operation not in ("test", "testn", "mov", "movepi8"):
        return None

    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
        total = lanes.w.temporary(cast("i64", num(0)), "i64", "mask")
        a = args[0].read_as(shape.elem)
        b = args[1].read_as(shape.elem) if len(args) > 1 else a
        sign = COMPARED.get(found[1], "") if found else ""
        if found and not sign:
            signs = {0: "==", 1: "<", 2: "<=", 4: "!=", 5: ">=", 6: ">"}
            if shape.elem in ("f32", "f64"):
                signs = {0: "==", 1: "<", 2: "<=", 4: "!=", 12: "!=", 13: ">=", 14: ">", 6: ">"}
            sign = signs[integer_at(args[2]) & 15]

        def one(i: Expr) -> None:
            if sign:
                holds = less(a.item(i), b.item(i), sign)
            elif operation in ("test", "testn"):
                holds = less(op("&", a.item(i), b.item(i)), 0, "!=" if operation == "test" else "==")
            else:
                holds = less(a.item(i), 0)
            lanes.w.set(total, op("|", total, op("<<", cast("i64", holds), i)))

        lanes.w.loop(shape.count, one)
        name = f"__mmask{max(8, shape.count)}"
        return NamedType(name=name), total if shape.count > 32 else _mask_value(total, shape.count)

    return handler


def _mask_value(total: Expr, count: int) -> Expr:
    return cast("u32" if count == 32 else "i32", total)


def shifted(sign: str) -> Callable[..., Expr]:
    """Return the shift of a lane by a number, or by a lane of another vector."""

    def lane(shape: Shape, a: Expr, n: Expr) -> Expr:
        bits = 8 * SIZES[shape.elem]
        unsigned = f"u{bits}"
        if sign == "sra":
            return op(">>", a, call("min", n, num(bits - 1)))
        if bits == 64:
            mask = op("<<", op("<<", cast("i64", num(-1)), op("-", num(63), n)), num(1))
            right = op("&", op(">>", a, n), Unary(op="~", operand=mask))
            return pick(less(n, bits), right if sign == "srl" else op("<<", a, n), num(0))
        made = op("<<" if sign == "sll" else ">>", cast("u32", cast(unsigned, a)), n)
        return pick(less(n, bits), made, cast("u32", num(0)))

    return lane


def _absolute(shape: Shape, a: Expr) -> Expr:
    return pick(less(a, 0), minus(a), op("+", a, 0))


LANEWISE: dict[str, Callable[..., Expr]] = {
    **{name: (lambda f: lambda s, a, b: f(a, b))(f) for name, f in BINARY.items() if name != "mul"},
    "mullo": lambda s, a, b: op("*", a, b),
    "adds": lambda s, a, b: saturate(op("+", a, b), s.elem),
    "subs": lambda s, a, b: saturate(op("-", a, b), s.elem),
    "avg": lambda s, a, b: op(">>", op("+", op("+", a, b), 1), num(1)),
    "mulhi": lambda s, a, b: op(">>", op("*", cast("i64", a), b), num(8 * SIZES[s.elem])),
    "mulhrs": lambda s, a, b: op(">>", op("+", op(">>", op("*", a, b), num(14)), 1), num(1)),
    "sign": lambda s, a, b: pick(
        less(b, 0), minus(a), pick(less(b, 0, "=="), cast("i32", num(0)), op("+", a, 0))
    ),
    "abs": _absolute,
    **{f"cmp{n}": (lambda g: lambda s, a, b: pick(less(a, b, g), num(-1), num(0)))(g) for n, g in COMPARED.items()},
    **{f"{n}{form}": shifted(n) for n in ("sll", "srl", "sra") for form in ("i", "v")},
}
"""Operation to what it makes of lanes; the shape comes first."""
BITS = {"and": "and", "or": "or", "xor": "xor", "andnot": "andnot"}


# ---- handlers of whole vectors ----


def _store(lanes: Lanes, shape: Shape, args: list[Any]) -> None:
    bits = {"si16": 16, "si32": 32, "si64": 64, "ss": 32, "sd": 64}.get(shape.suffix, shape.bits)
    elem = {"ss": "f32", "sd": "f64"}.get(shape.suffix, shape.elem)
    to, source = args[0].read_as(elem), args[1].read_as(elem)
    lanes.move(to, source, bits // 8 // SIZES[elem])


def _storel(lanes: Lanes, shape: Shape, args: list[Any]) -> None:
    lanes.move(args[0].read_as("u8"), args[1].read_as("u8"), 8)


def _storeh(lanes: Lanes, shape: Shape, args: list[Any]) -> None:
    lanes.move(args[0].read_as("u8"), args[1].read_as("u8").moved(8), 8)


def _load(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    out = lanes.new(shape.elem, shape.count)
    lanes.move(out, args[0].read_as(shape.elem), shape.count)
    return out


def _load_part(size: int) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
        out = lanes.new("u8", 16)
        lanes.w.loop(16, lambda i: lanes.w.set(out.item(i), num(0)))
        lanes.move(out, args[0].read_as("u8"), size)
        elem = {"ss": "f32", "ps": "f32", "sd": "f64", "pd": "f64"}.get(shape.suffix, "u8")
        return vec(128, elem), out.read_as(elem)

    return handler


def _set1(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    return lanes.spread(args[0], shape.elem, shape.count)


def _zero(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    zero: Expr = Float(value=0.0) if shape.elem in ("f32", "f64") else num(0)
    return lanes.spread(zero, shape.elem, shape.count)


def _setr(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    return lanes.listed(shape.elem, args)


def _set(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    return lanes.listed(shape.elem, args[::-1])


def _sqrt(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    a = args[0].read_as(shape.elem)
    if shape.elem == "f32":
        return lanes.calls("vsqrt", shape.count, a)
    return lanes.each(shape.elem, shape.count, lambda i: call("sqrt", a.item(i)))


def _round(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    a, mode = args[0].read_as("f32"), integer_at(args[1]) & 7 if len(args) > 1 else 1
    if mode in (0, 4):
        return lanes.calls("vround", shape.count, a)
    down: Callable[[Expr], Expr] = lambda x: call("floor", x)  # noqa: E731
    up: Callable[[Expr], Expr] = lambda x: minus(call("floor", minus(x)))  # noqa: E731
    zero = Float(value=0.0)
    to_zero: Callable[[Expr], Expr] = lambda x: pick(less(x, zero), up(x), down(x))  # noqa: E731
    lane = {1: down, 2: up, 3: to_zero}[mode & 3]
    return lanes.each("f32", shape.count, lambda i: lane(a.item(i)))


def _ceil(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    return _round(lanes, shape, [args[0], num(2)])


def _compare(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    control = integer_at(args[2]) & 15
    sign = {0: "==", 1: "<", 2: "<=", 4: "!=", 12: "!=", 13: ">=", 14: ">"}.get(control)
    if sign is None:
        raise refuse(f"comparison {control} of vectors")
    a, b = shape.read(args[:2])
    out = lanes.new(shape.elem, shape.count)
    bits = out.read_as("i32" if shape.elem == "f32" else "i64")
    lanes.w.loop(
        shape.count,
        lambda i: lanes.w.set(bits.item(i), pick(less(a.item(i), b.item(i), sign), num(-1), num(0))),
    )
    return out


def _blendv(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    elem = {"f32": "i32", "f64": "i64"}.get(shape.elem, shape.elem)
    a, b, mask = shape.read(args, elem)
    made = lanes.each(elem, shape.count, lambda i: pick(less(mask.item(i), 0), b.item(i), a.item(i)))
    return made.read_as(shape.elem)


def _blend(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    control = integer_at(args[2])
    a, b = shape.read(args[:2])
    return lanes.listed(
        shape.elem, [(b if control >> (i % 8) & 1 else a).item(i) for i in range(shape.count)]
    )


def _permuted(elem: str | None, source: Callable[[int, int, int], tuple[int, int]]) -> Handler:
    """Return the handler of a fixed shuffle: lane, lanes, control -> which vector, which lane."""

    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        kind = elem or shape.elem
        vectors = shape.read(args, kind)
        control = integer_at(args[-1]) if not isinstance(args[-1], Address) else 0
        count = shape.bits // 8 // SIZES[kind]
        picked = [source(i, count, control) for i in range(count)]
        made = lanes.listed(kind, [vectors[v % len(vectors)].item(j) for v, j in picked])
        return made.read_as(shape.elem)

    return handler


def _fields(i: int, n: int, control: int) -> tuple[int, int]:
    return 0, (i & ~3) + (control >> (2 * (i & 3)) & 3)


def _unpack(high_half: int) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        a, b = shape.read(args)
        block = 16 // SIZES[shape.elem]
        picked = []
        for i in range(shape.count):
            base, j = i // block * block, i % block
            at = base + high_half * block // 2 + j // 2
            picked.append((b if j % 2 else a).item(at))
        return lanes.listed(shape.elem, picked)

    return handler


def _pack(elem_of: Callable[[str], str]) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
        wide_elem = "i" + shape.elem[1:]
        a, b = shape.read(args, wide_elem)
        narrow = elem_of(wide_elem)
        block = 16 // SIZES[wide_elem]
        out = lanes.new(narrow, shape.bits // 8 // SIZES[narrow])
        for base in range(0, shape.count, block):
            for half, source in enumerate((a, b)):
                to = out.moved(2 * base + half * block)
                lanes.w.loop(
                    block,
                    lambda i, to=to, source=source, base=base: lanes.put(
                        to, i, saturate(source.item(op("+", i, base)), narrow)
                    ),
                )
        return vec(shape.bits, narrow), out

    return handler


def _narrow(kind: str) -> str:
    return {"i16": "i8", "i32": "i16"}[kind]


def _narrow_unsigned(kind: str) -> str:
    return {"i16": "u8", "i32": "u16"}[kind]


def _narrowed_lanes(lanes: Lanes, shape: Shape, args: list[Any], source: str) -> Made:
    a = args[0].read_as(source)
    count = shape.bits // 8 // SIZES[source]
    made = lanes.each(shape.elem, count, lambda i: saturate(a.item(i), shape.elem))
    return vec(max(128, count * SIZES[shape.elem] * 8), "u8"), _padded(lanes, made, count)


def _shuffle_bytes(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    a, b = shape.read(args, "u8")
    return lanes.each(
        "u8",
        shape.count,
        lambda i: pick(
            less(op("&", b.item(i), num(128)), 0, "!="),
            cast("i32", num(0)),
            op("+", a.item(op("+", op("&", i, num(-16)), op("&", b.item(i), num(15)))), 0),
        ),
    )


def _permutexvar(index_first: bool) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        kind = {"f32": "i32", "f64": "i64"}.get(shape.elem, shape.elem)
        index, source = (args[0], args[1]) if index_first else (args[1], args[0])
        at, a = index.read_as(kind), source.read_as(shape.elem)
        return lanes.each(
            shape.elem, shape.count, lambda i: a.item(op("&", at.item(i), num(shape.count - 1)))
        )

    return handler


def _permute_two(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    kind = {"f32": "i32", "f64": "i64"}.get(shape.elem, shape.elem)
    a, b = args[0].read_as(shape.elem), args[2].read_as(shape.elem)
    at, last = args[1].read_as(kind), shape.count - 1

    def lane(i: Expr) -> Expr:
        index = op("&", at.item(i), num(last))
        other = less(op("&", at.item(i), num(shape.count)), 0, "!=")
        return pick(other, b.item(index), a.item(index))

    return lanes.each(shape.elem, shape.count, lane)


def _pairs(left: str, right: str, to: str, saturates: bool = False) -> Handler:
    """Return the handler of sums of products of neighbours: madd, maddubs."""

    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        a, b = args[0].read_as(left), args[1].read_as(right)

        def lane(i: Expr) -> Expr:
            j = op("*", i, 2)
            first = op("*", a.item(j), b.item(j))
            made = op("+", first, op("*", a.item(op("+", j, 1)), b.item(op("+", j, 1))))
            return saturate(made, to) if saturates else made

        return lanes.each(to, shape.bits // 8 // SIZES[to], lane)

    return handler


def dots(left: str, right: str, each: int) -> Handler:
    """Return the handler of acc + dot products of `each` neighbours."""

    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        acc, a, b = args[0].read_as("i32"), args[1].read_as(left), args[2].read_as(right)

        def lane(i: Expr) -> Expr:
            made = acc.item(i)
            for k in range(each):
                j = op("+", op("*", i, each), k)
                made = op("+", made, op("*", a.item(j), b.item(j)))
            return made

        return lanes.each("i32", shape.bits // 32, lane)

    return handler


def _hadd(sign: str) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        a, b = shape.read(args)
        block = 16 // SIZES[shape.elem]
        values = []
        for i in range(shape.count):
            base, j = i // block * block, i % block
            source = a if j < block // 2 else b
            at = base + j % (block // 2) * 2
            values.append(op(sign, source.item(at), source.item(at + 1)))
        return lanes.listed(shape.elem, values)

    return handler


def _sad(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    a, b = shape.read(args, "u8")
    sums = []
    for i in range(shape.bits // 64):
        made: Expr = cast("i64", num(0))
        for k in range(8):
            gap = op("-", a.item(8 * i + k), b.item(8 * i + k))
            made = op("+", made, call("max", gap, minus(gap)))
        sums.append(made)
    return lanes.listed("i64", sums).read_as("u8")


def _alignr(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    a, b, n = args[0].read_as("u8"), args[1].read_as("u8"), integer_at(args[2])
    values: list[Expr] = []
    for i in range(shape.bits // 8):
        base, j = i & ~15, (i & 15) + n
        values.append(b.item(base + j) if j < 16 else a.item(base + j - 16) if j < 32 else num(0))
    return lanes.listed("u8", values)


def _byte_shift(sign: int) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        a, n = args[0].read_as("u8"), integer_at(args[1])
        values: list[Expr] = []
        for i in range(shape.bits // 8):
            j = (i & 15) + sign * n
            values.append(a.item((i & ~15) + j) if 0 <= j < 16 else num(0))
        return lanes.listed("u8", values)

    return handler


def _shift_count(sign: str) -> Handler:
    """Return the handler of shifts by the low lane of a vector."""

    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        a, n = args[0].read_as(shape.elem), cast("i32", args[1].read_as("i64").item())
        held = lanes.w.temporary(n, "i32", "count")
        return lanes.each(shape.elem, shape.count, lambda i: shifted(sign)(shape, a.item(i), held))

    return handler


def _mul_wide(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    if shape.elem in ("f32", "f64"):
        return _float_binary("mul")(lanes, shape, args)
    a, b = shape.read(args, shape.elem)
    return lanes.each(
        "i64",
        shape.bits // 64,
        lambda i: op("*", wide(a.item(op("*", i, 2))), wide(b.item(op("*", i, 2)))),
    ).read_as("u8")


def _extract(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    elem = {"i8": "u8", "i16": "u16", "f32": "i32"}.get(shape.elem, shape.elem)
    made = args[0].read_as(elem).item(integer_at(args[1]))
    return (NamedType(name="long long") if elem == "i64" else INT), cast(
        "i64" if elem == "i64" else "i32", made
    )


def _insert(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    out = lanes.new(shape.elem, shape.count)
    lanes.move(out, args[0].read_as(shape.elem), shape.count)
    lanes.put(out, num(integer_at(args[2]) % shape.count), args[1])
    return out


def _part(bits: int) -> Handler:
    """Return the handler that takes 128 or 256 bits out."""

    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
        elem = "f32" if shape.suffix == "ps" else "f64" if shape.suffix == "pd" else "u8"
        size = bits // 8 // SIZES[elem]
        at = integer_at(args[1]) if len(args) > 1 else 0
        return vec(bits, elem), args[0].read_as(elem).moved(at * size)

    return handler


def _insert_part(bits: int) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
        elem = "f32" if shape.suffix == "ps" else "f64" if shape.suffix == "pd" else "u8"
        total, size = shape.bits // 8 // SIZES[elem], bits // 8 // SIZES[elem]
        out = lanes.new(elem, total)
        lanes.move(out, args[0].read_as(elem), total)
        lanes.move(out.moved(integer_at(args[2]) * size), args[1].read_as(elem), size)
        return vec(shape.bits, elem), out

    return handler


def _repeat(bits: int) -> Handler:
    """Return the handler that repeats 128 or 256 bits, from a register or from memory."""

    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
        elem = "f32" if shape.suffix == "ps" else "f64" if shape.suffix == "pd" else "u8"
        size, source = bits // 8 // SIZES[elem], args[0].read_as(elem)
        out = lanes.new(elem, shape.bits // 8 // SIZES[elem])
        for i in range(shape.bits // bits):
            lanes.move(out.moved(i * size), source, size)
        return vec(shape.bits, elem), out

    return handler


def _first_lane(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    source = args[0].read_as(shape.elem)
    held = lanes.w.temporary(source.item(), WORKS_IN.get(shape.elem, shape.elem))
    return lanes.spread(held, shape.elem, shape.count)


def _joined(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    low, top = args[1], args[0]
    elem = low.elem
    half = shape.bits // 16 // SIZES[elem]
    out = lanes.new(elem, 2 * half)
    lanes.move(out, low, half)
    lanes.move(out.moved(half), top.read_as(elem), half)
    return vec(shape.bits, elem if elem in ("f32", "f64") else "u8"), out


def _reduce(name: str) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Expr:
        return lanes.total(shape.elem, shape.count, args[0].read_as(shape.elem), BINARY[name])

    return handler


def _movemask(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    elem = {"f32": "i32", "f64": "i64"}.get(shape.elem, shape.elem)
    a = args[0].read_as(elem)
    total = lanes.w.temporary(cast("i64", num(0)), "i64", "mask")
    lanes.w.loop(
        shape.count,
        lambda i: lanes.w.set(
            total, op("|", total, op("<<", cast("i64", less(a.item(i), 0)), i))
        ),
    )
    return INT, cast("i32", total)


def _halves_to(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    a = args[0].read_as("f16")
    return lanes.floats(shape.count, lambda load: _load_halves(load, a))


def _load_halves(load: Any, a: Address) -> Expr:
    made = load(Address(a.base, "f32", a.at))  # keeps the step; elements are halves
    return call("vload", Address(made.args[0], "f16").pointer(), made.args[1])


def _to_halves(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    a = args[0].read_as("f32")
    made = lanes.each("f16", shape.count, lambda i: a.item(i))
    padded = _padded(lanes, made.read_as("u16"), shape.count)
    return vec(max(128, 16 * shape.count), "u8"), padded.read_as("u8")


def _undefined(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    return _zero(lanes, shape, args)


def _mov_shuffle(odd: int) -> Handler:
    return _permuted("f32", lambda i, n, c: (0, (i & ~1) + odd))


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(("loadu", "load", "lddqu", "stream_load", "maskload"), _load),
    **dict.fromkeys(("storeu", "store", "stream"), _store),
    **dict.fromkeys(("storel", "storel_pi"), _storel),
    **dict.fromkeys(("storeh", "storeh_pi"), _storeh),
    "loadl": _load_part(8),
    "load_ss": _load_part(4),
    "load_sd": _load_part(8),
    "loadu_si32": _load_part(4),
    "loadu_si64": _load_part(8),
    "loadu_si16": _load_part(2),
    **dict.fromkeys(("set1", "set_ps1"), _set1),
    "setzero": _zero,
    "undefined": _undefined,
    "setr": _setr,
    "set": _set,
    "sqrt": _sqrt,
    **dict.fromkeys(("round", "roundscale"), _round),
    "floor": _round,
    "ceil": _ceil,
    "cmp": _compare,
    "blendv": _blendv,
    "blend": _blend,
    "permute": _permuted(None, _fields),
    "permute4x64": _permuted("i64", _fields),
    "shuffle_epi32": _permuted("i32", _fields),
    "unpacklo": _unpack(0),
    "unpackhi": _unpack(1),
    "packs": _pack(_narrow),
    "packus": _pack(_narrow_unsigned),
    "cvtsepi32": lambda lanes, shape, args: _narrowed_lanes(lanes, shape, args, "i32"),
    "cvtsepi16": lambda lanes, shape, args: _narrowed_lanes(lanes, shape, args, "i16"),
    "permutex2var": lambda lanes, shape, args: _permute_two(lanes, shape, args),
    "permutexvar": _permutexvar(True),
    "permutevar8x32": _permutexvar(False),
    "madd": _pairs("i16", "i16", "i32"),
    "maddubs": _pairs("u8", "i8", "i16", saturates=True),
    **dict.fromkeys(("dpbusd", "dpbusd_avx"), dots("u8", "i8", 4)),
    **dict.fromkeys(("dpbssd",), dots("i8", "i8", 4)),
    **dict.fromkeys(("dpwssd", "dpwssd_avx"), dots("i16", "i16", 2)),
    "hadd": _hadd("+"),
    "hsub": _hadd("-"),
    "sad": _sad,
    "alignr": _alignr,
    **dict.fromkeys(("srli_si128", "bsrli"), _byte_shift(1)),
    **dict.fromkeys(("slli_si128", "bslli"), _byte_shift(-1)),
    **{name: _shift_count(name) for name in ("sll", "srl", "sra")},
    "mul": _mul_wide,
    "extract": _extract,
    "insert": _insert,
    **{f"extract{k}128": _part(128) for k in "fi"},
    **{f"extract{k}{s}": _part(128) for k in "fi" for s in ("32x4", "64x2")},
    **{f"extract{k}{s}": _part(256) for k in "fi" for s in ("64x4", "32x8")},
    **{f"insert{k}128": _insert_part(128) for k in "fi"},
    **{f"insert{k}{s}": _insert_part(128) for k in "fi" for s in ("32x4", "64x2")},
    **{f"insert{k}{s}": _insert_part(256) for k in "fi" for s in ("64x4", "32x8")},
    **{f"broadcast_{k}{s}": _repeat(128) for k in "fi" for s in ("32x4", "64x2")},
    **{f"broadcast_{k}{s}": _repeat(256) for k in "fi" for s in ("64x4", "32x8")},
    **dict.fromkeys(("broadcastsi128", "broadcast_ps", "broadcast_pd"), _repeat(128)),
    **dict.fromkeys(("broadcastb", "broadcastw", "broadcastd", "broadcastq"), _first_lane),
    **dict.fromkeys(("broadcastss", "broadcastsd", "broadcast_ss", "broadcast_sd"), _first_lane),
    **{f"reduce_{name}": _reduce(name) for name in ("add", "max", "min", "mul")},
    "movemask": _movemask,
    "cvtph": _halves_to,
    "movehdup": _mov_shuffle(1),
    "moveldup": _mov_shuffle(0),
    "movehl": _permuted("f32", lambda i, n, c: (1, i + 2) if i < 2 else (0, i)),
    "movelh": _permuted("f32", lambda i, n, c: (0, i) if i < 2 else (1, i - 2)),
    "shuffle": lambda lanes, shape, args: _shuffle(lanes, shape, args),
    "shuffle_i32x4": _permuted("i64", lambda i, n, c: _blocks(i, n, c)),
    "shuffle_f32x4": _permuted("i64", lambda i, n, c: _blocks(i, n, c)),
    "permute2f128": lambda lanes, shape, args: _permute2(lanes, shape, args),
    "permute2x128": lambda lanes, shape, args: _permute2(lanes, shape, args),
    "ternarylogic": lambda lanes, shape, args: _ternary_logic(lanes, shape, args),
    "gf2p8affine_epi64": lambda lanes, shape, args: _affine(lanes, shape, args),
}


def _blocks(i: int, n: int, control: int) -> tuple[int, int]:
    block, blocks = i // 2, n // 2
    field = control >> (2 * block) & 3 if blocks == 4 else control >> block & 1
    return (0 if block < blocks // 2 else 1), 2 * field + i % 2


def _shuffle(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    if shape.suffix == "epi8":
        return _shuffle_bytes(lanes, shape, args)
    if shape.suffix == "epi32":
        return _permuted(None, _fields)(lanes, shape, args)
    if shape.suffix == "pd":
        picks: Callable[[int, int, int], tuple[int, int]] = lambda i, n, c: (  # noqa: E731
            i % 2,
            (i & ~1) + (c >> i & 1),
        )
        return _permuted(None, picks)(lanes, shape, args)
    return _permuted(
        None, lambda i, n, c: ((i & 3) // 2, (i & ~3) + (c >> (2 * (i & 3)) & 3))
    )(lanes, shape, args)


def _permute2(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    elem = "f32" if shape.suffix == "ps" else "u8"
    half, control = 16 // SIZES[elem], integer_at(args[2])
    out = lanes.new(elem, 2 * half)
    for i in range(2):
        field = control >> (4 * i) & 15
        if field & 8:
            zero: Expr = Float(value=0.0) if elem == "f32" else num(0)
            at = out.moved(i * half)
            lanes.w.loop(half, lambda k, at=at: lanes.w.set(at.item(k), zero))
        else:
            source = args[field >> 1 & 1].read_as(elem).moved((field & 1) * half)
            lanes.move(out.moved(i * half), source, half)
    return vec(shape.bits, elem), out


def _ternary_logic(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    a, b, c = shape.read(args[:3], "u32")
    table = integer_at(args[3])

    def lane(i: Expr) -> Expr:
        made: Expr = cast("u32", num(0))
        for row in range(8):
            if table >> row & 1:
                bits = [
                    v.item(i) if row >> k & 1 else Unary(op="~", operand=v.item(i))
                    for v, k in ((a, 2), (b, 1), (c, 0))
                ]
                made = op("|", made, op("&", op("&", bits[0], bits[1]), bits[2]))
        return made

    return lanes.each("u32", shape.bits // 32, lane).read_as("u8")


def _affine(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    x, rows, added = args[0].read_as("u8"), args[1].read_as("u8"), integer_at(args[2])

    def lane(i: Expr) -> Expr:
        made: Expr = cast("i32", num(added & 255))
        for bit in range(8):
            row = rows.item(op("+", op("&", i, num(-8)), 7 - bit))
            held = op("&", row, x.item(i))
            for shift in (4, 2, 1):
                held = op("^", held, op(">>", held, num(shift)))
            made = op("^", made, op("<<", op("&", held, num(1)), num(bit)))
        return made

    return lanes.each("u8", shape.bits // 8, lane)


# ---- names with a shape of their own ----


def _scalar_rule(type_: str, make: Callable[[Lanes, list[Any]], Expr]) -> Rule:
    return lambda lanes, args: (NamedType(name=type_), make(lanes, args))


def _half_to_float(lanes: Lanes, args: list[Any]) -> Expr:
    bits = lanes.new("u16", 1)
    lanes.w.set(bits.item(), cast("u16", args[0]))
    return lanes.w.temporary(call("load", bits.read_as("f16").pointer()), "f32")


def _float_to_half(lanes: Lanes, args: list[Any]) -> Expr:
    bits = lanes.new("u16", 1)
    lanes.w.do(call("store", bits.read_as("f16").pointer(), args[0]))
    return lanes.w.temporary(cast("i32", bits.item()), "i32")


def _low(elem: str, lanes_: int, first: Callable[[Lanes, Any], Expr]) -> Rule:
    def rule(lanes: Lanes, args: list[Any]) -> Made:
        out = lanes.new(elem, lanes_)
        zero: Expr = Float(value=0.0) if elem in ("f32", "f64") else num(0)
        lanes.w.loop(lanes_, lambda i: lanes.w.set(out.item(i), zero))
        lanes.put(out, num(0), first(lanes, args))
        return vec(128, elem), out

    return rule


def _scalar_op(name: str, elem: str) -> Rule:
    def rule(lanes: Lanes, args: list[Any]) -> Made:
        a, b = (v.read_as(elem) for v in args)
        out = lanes.new(elem, 16 // SIZES[elem])
        lanes.move(out, a, 16 // SIZES[elem])
        lanes.put(out, num(0), BINARY[name](a.item(), b.item()))
        return vec(128, elem), out

    return rule


def _cast_width(bits: int, elem: str) -> Rule:
    def rule(lanes: Lanes, args: list[Any]) -> Made:
        source = args[0].read_as(elem)
        if bits == 128:
            return vec(bits, elem), source
        out = lanes.new(elem, bits // 8 // SIZES[elem])
        lanes.move(out, source, bits // 16 // SIZES[elem])
        return vec(bits, elem), out

    return rule


def _narrowed_type(bits: int, elem: str) -> Rule:
    return lambda lanes, args: (vec(bits, elem), args[0].read_as(elem if elem != "i8" else "u8"))


def _nothing(lanes: Lanes, args: list[Any]) -> Made:
    return VOID, None


SPECIAL: dict[str, Rule] = {
    "_cvtsh_ss": _scalar_rule("float", _half_to_float),
    "_cvtss_sh": _scalar_rule("unsigned short", _float_to_half),
    "_mm_cvtss_f32": _scalar_rule("float", lambda l, a: a[0].read_as("f32").item()),
    "_mm256_cvtss_f32": _scalar_rule("float", lambda l, a: a[0].read_as("f32").item()),
    "_mm512_cvtss_f32": _scalar_rule("float", lambda l, a: a[0].read_as("f32").item()),
    "_mm_cvtsd_f64": _scalar_rule("double", lambda l, a: a[0].read_as("f64").item()),
    **{
        f"_mm{w}_cvtsi{s}_si32": _scalar_rule("int", lambda l, a: a[0].read_as("i32").item())
        for w, s in (("", 128), ("256", 256), ("512", 512))
    },
    "_mm_cvtsi128_si64": _scalar_rule("long long", lambda l, a: a[0].read_as("i64").item()),
    "_mm_cvtsi128_si64x": _scalar_rule("long long", lambda l, a: a[0].read_as("i64").item()),
    "_mm_cvtsi32_si128": _low("i32", 4, lambda l, a: a[0]),
    "_mm_cvtsi64_si128": _low("i64", 2, lambda l, a: a[0]),
    "_mm_set_ss": _low("f32", 4, lambda l, a: a[0]),
    "_mm_load1_ps": lambda l, a: (vec(128, "f32"), l.spread(a[0].read_as("f32").item(), "f32", 4)),
    "_mm_load_ps1": lambda l, a: (vec(128, "f32"), l.spread(a[0].read_as("f32").item(), "f32", 4)),
    **{f"_mm_{n}_ss": _scalar_op(n, "f32") for n in PLAIN},
    **{f"_mm_{n}_sd": _scalar_op(n, "f64") for n in PLAIN},
    **{f"_mm256_cast{a}128_{b}256": _cast_width(256, e) for a, b, e in (("ps", "ps", "f32"), ("si", "si", "u8"), ("pd", "pd", "f64"))},
    **{f"_mm512_cast{a}256_{b}512": _cast_width(512, e) for a, b, e in (("ps", "ps", "f32"), ("si", "si", "u8"), ("pd", "pd", "f64"))},
    **{f"_mm256_cast{a}256_{b}128": _narrowed_type(128, e) for a, b, e in (("ps", "ps", "f32"), ("si", "si", "u8"), ("pd", "pd", "f64"))},
    **{f"_mm512_cast{a}512_{b}{w}": _narrowed_type(w, e) for w in (128, 256) for a, b, e in (("ps", "ps", "f32"), ("si", "si", "u8"), ("pd", "pd", "f64"))},
    **{
        f"_mm{w}_cast{s}_{t}": _narrowed_type(int(w or 128), e)
        for w in ("", "256", "512")
        for s in ("ps", "pd", f"si{w or 128}")
        for t, e in (("ps", "f32"), ("pd", "f64"), (f"si{w or 128}", "u8"))
        if s != t
    },
    **{
        f"_mm{w}_cvtps_ph": (lambda b: lambda l, a: _to_halves(l, Shape(b, "f32", "ps"), a))(int(w or 128))
        for w in ("", "256", "512")
    },
    **{f"_mm256_set_m128{k}": (lambda l, a: _joined(l, Shape(256, "u8", ""), a)) for k in ("", "i", "d")},
    "_mm256_setr_m128i": lambda l, a: _joined(l, Shape(256, "u8", ""), a[::-1]),
    "_mm256_zeroupper": _nothing,
    **{f"_cvtu32_mask{b}": _scalar_rule(f"__mmask{b}", lambda l, a: cast("i64", a[0])) for b in (8, 16, 32)},
    "_cvtu64_mask64": _scalar_rule("__mmask64", lambda l, a: cast("i64", a[0])),
    **{f"_cvtmask{b}_u32": _scalar_rule("unsigned", lambda l, a: cast("u32", a[0])) for b in (8, 16, 32)},
    "_mm256_testz_si256": lambda l, a: (INT, _test_zero(l, a)),
    "_mm512_kortestz": lambda l, a: (INT, cast("i32", less(op("|", cast("i64", a[0]), cast("i64", a[1])), 0, "=="))),
}


def _test_zero(lanes: Lanes, args: list[Any]) -> Expr:
    a, b = (v.read_as("u32") for v in args)
    both = lanes.each("u32", 8, lambda i: op("&", a.item(i), b.item(i)))
    return cast("i32", less(lanes.total("u32", 8, both, BINARY["or"]), 0, "=="))
