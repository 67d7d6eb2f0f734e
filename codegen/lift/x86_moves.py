"""x86 operations that move lanes: loads, stores, shuffles, parts of registers.

In: what tells operations of a kind apart, the shape and the operands. Out: a new vector, or nothing
for stores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dovetail.codegen.lift.emit import NOTHING, Address, cast, num, op, pick, zero_of
from dovetail.codegen.lift.lanes import Handler, Made, Register, integer_at, less, saturate
from dovetail.codegen.lift.types import INT, SIZES
from dovetail.codegen.lift.x86_lanes import Shape, padded_register, vec
from dovetail.ir.expr import Expr, NamedType

Source = Callable[[int, int, int], tuple[int, int]]
"""Of a fixed shuffle: lane, lanes, control -> which vector, which lane; vector NONE is 0."""
NONE = -1


# ---- memory, and vectors of given lanes ----


def _store(shape: Shape, to: Address, source: Address) -> None:
    bits = {"si16": 16, "si32": 32, "si64": 64, "ss": 32, "sd": 64}.get(shape.suffix, shape.bits)
    to, source = shape.read(to, source)
    shape.lanes.move(to, source, bits // 8 // SIZES[shape.elem])


def _store_half(first: int, shape: Shape, to: Address, source: Address) -> None:
    shape.lanes.move(to.read_as("u8"), source.read_as("u8").moved(first), 8)


def _mask_load(shape: Shape, at: Address, mask: Address) -> Address:
    zero, held = zero_of(shape.elem), (at.read_as(shape.elem), mask.read_as(shape.integer))
    return shape.map(lambda x, m: pick(less(m, 0), x, zero), *held)


def _mask_store(shape: Shape, at: Address, given: Address, source: Address) -> None:
    mask = given.read_as(shape.integer)
    to = shape.read(at, source)
    shape.lanes.store_where(shape.count, lambda i: less(mask.item(i), 0), *to)


def _load_half(first: int, shape: Shape, kept: Address, at: Address) -> Made:
    out = Register(shape.lanes, 128, "f32").copy(kept)
    shape.lanes.move(out.moved(first), at.read_as("f32"), 2)
    return vec(128, "f64" if shape.suffix == "pd" else "f32"), out


def _load_part(size: int, shape: Shape, at: Address) -> Address:
    return shape.lanes.padded(at.read_as("u8"), size).read_as(shape.elem)


def _first_lane(shape: Shape, a: Address) -> Address:
    return shape.spread(shape.lanes.held(a.read_as(shape.elem).item(), shape.elem))


# ---- shuffles ----


def _permuted(elem: str, source: Source, shape: Shape, *operands: Any) -> Address:
    kind, last = elem or shape.elem, operands[-1]
    vectors = shape.read(*operands, elem=kind)
    if not vectors:
        raise ValueError("no vector among the operands")
    control = integer_at(last) if not isinstance(last, Address) else 0
    count = shape.counted(kind)
    picked = [source(i, count, control) for i in range(count)]
    values = [num(0) if v == NONE else vectors[v % len(vectors)].item(j) for v, j in picked]
    return shape.lanes.listed(kind, values).read_as(shape.elem)


def _fields(i: int, n: int, control: int) -> tuple[int, int]:
    return 0, (i & ~3) + (control >> (2 * (i & 3)) & 3)


def _bits(i: int, n: int, control: int) -> tuple[int, int]:
    return i % 2, (i & ~1) + (control >> i & 1)


def _fields_of_two(i: int, n: int, control: int) -> tuple[int, int]:
    return (i & 3) // 2, _fields(i, n, control)[1]


def _blocks(i: int, n: int, control: int) -> tuple[int, int]:
    block, blocks = i // 2, n // 2
    field = control >> (2 * block) & 3 if blocks == 4 else control >> block & 1
    return (0 if block < blocks // 2 else 1), 2 * field + i % 2


def _bytes_after(i: int, n: int, control: int) -> tuple[int, int]:
    """The bytes of two registers in blocks of 16, the second one's first, from one on."""
    at = (i & 15) + control
    return (NONE, 0) if at > 31 else (1 - at // 16, (i & ~15) + at % 16)


def _byte_shift(sign: int, i: int, n: int, control: int) -> tuple[int, int]:
    at = (i & 15) + sign * control
    return (0, (i & ~15) + at) if 0 <= at < 16 else (NONE, 0)


def _shuffle_bytes(shape: Shape, *operands: Address) -> Address:
    a, b = shape.read(*operands, elem="u8")

    def lane(i: Expr) -> Expr:
        moved = a.item(op("+", op("&", i, num(-16)), op("&", b.item(i), num(15))))
        return pick(less(op("&", b.item(i), num(128)), 0, "!="), cast("i32", num(0)), moved)

    return shape.lanes.each("u8", shape.count, lane)


def _unpack(upper: int, shape: Shape, *operands: Address) -> Address:
    n = 16 // SIZES[shape.elem]

    def source(i: int, count: int, control: int) -> tuple[int, int]:
        return i % 2, i // n * n + (upper * n + i % n) // 2

    return _permuted("", source, shape, *operands)


def _permute_all(shape: Shape, at: Address, source: Address) -> Address:
    a, last = source.read_as(shape.elem), num(shape.count - 1)
    return shape.map(lambda j: a.item(op("&", j, last)), at.read_as(shape.integer))


def _permute_in_blocks(shape: Shape, source: Address, by: Address) -> Address:
    a, at = source.read_as("f32"), by.read_as("i32")

    def lane(i: Expr) -> Expr:
        return a.item(op("|", op("&", i, num(-4)), op("&", at.item(i), num(3))))

    return shape.lanes.each("f32", shape.count, lane)


def _permute_two(shape: Shape, first: Address, at: Address, second: Address) -> Address:
    a, b = shape.read(first, second)

    def lane(j: Expr) -> Expr:
        index = op("&", j, num(shape.count - 1))
        return pick(less(op("&", j, num(shape.count)), 0, "!="), b.item(index), a.item(index))

    return shape.map(lane, at.read_as(shape.integer))


# ---- narrower lanes ----


def _pack(narrower: dict[str, str], shape: Shape, *operands: Address) -> Made:
    wide = "i" + shape.elem[1:]
    narrow, block = narrower[wide], 16 // SIZES[wide]
    a, b = shape.read(*operands, elem=wide)
    out = shape.lanes.new(narrow, shape.counted(narrow))
    for base in range(0, shape.count, block):
        for half, source in enumerate((a, b)):
            to = out.moved(2 * base + half * block)
            shape.lanes.saturate(to, source.moved(base), block)
    return vec(shape.bits, narrow), out


def _narrowed_lanes(source: str, shape: Shape, a: Address) -> Made:
    count, lanes = shape.counted(source), shape.lanes
    made = lanes.map(shape.elem, count, lambda x: saturate(x, shape.elem), a.read_as(source))
    return padded_register(lanes, made, count)


def _halves_to(elem: str, shape: Shape, a: Address) -> Address:
    return shape.lanes.floats(shape.count, lambda load: load(a.read_as(elem)))


def _to_halves(elem: str, shape: Shape, a: Address, rounding: Any = None) -> Made:
    count = shape.counted("f32")
    made = shape.lanes.each(elem, count, a.read_as("f32").item)
    return padded_register(shape.lanes, made.read_as("u16"), count)


def _to_pairs(shape: Shape, high: Address, low: Address) -> Address:
    """Return bfloat16 of two vectors of floats, the second's first."""
    half = shape.count // 2
    values = [part.read_as("f32").item(i) for part in (low, high) for i in range(half)]
    return shape.listed(values)


# ---- parts of registers ----


def _extract(shape: Shape, a: Address, at: Any) -> Made:
    elem = {"i8": "u8", "i16": "u16", "f32": "i32"}.get(shape.elem, shape.elem)
    made = a.read_as(elem).item(integer_at(at))
    if elem == "i64":
        return NamedType(name="long long"), cast("i64", made)
    return INT, cast("i32", made)


def _insert(shape: Shape, a: Address, value: Expr, at: Any) -> Address:
    out = shape.copy(a)
    shape.lanes.put(out, num(integer_at(at) % shape.count), value)
    return out


def _part(bits: int, shape: Shape, a: Address, at: Any = NOTHING) -> Made:
    """Return 128 or 256 bits."""
    size = bits // 8 // SIZES[shape.plain]
    return vec(bits, shape.plain), a.read_as(shape.plain).moved(integer_at(at) * size)


def _insert_part(bits: int, shape: Shape, a: Address, part: Address, at: Any) -> Made:
    elem, size = shape.plain, bits // 8 // SIZES[shape.plain]
    out = Register(shape.lanes, shape.bits, elem).copy(a)
    shape.lanes.move(out.moved(integer_at(at) * size), part.read_as(elem), size)
    return vec(shape.bits, elem), out


def _repeat(bits: int, shape: Shape, a: Address) -> Made:
    """Return 128 or 256 bits repeated, from a register or from memory."""
    elem = shape.plain
    size, source = bits // 8 // SIZES[elem], a.read_as(elem)
    out = shape.lanes.new(elem, shape.counted(elem))
    for i in range(shape.bits // bits):
        shape.lanes.move(out.moved(i * size), source, size)
    return vec(shape.bits, elem), out


def _joined(shape: Shape, top: Address, low: Address) -> Made:
    out = shape.lanes.joined(low, top.read_as(low.elem), shape.bits // 16 // SIZES[low.elem])
    return vec(shape.bits, low.elem if low.elem in ("f32", "f64") else "u8"), out


def _permute_halves(shape: Shape, a: Address, b: Address, at: Any) -> Made:
    elem = "f32" if shape.suffix == "ps" else "u8"
    half, control = 16 // SIZES[elem], integer_at(at)
    out = shape.lanes.new(elem, 2 * half)
    for i in range(2):
        field = control >> (4 * i) & 15
        if field & 8:
            shape.lanes.clear(out.moved(i * half), half)
        else:
            source = (b if field & 2 else a).read_as(elem).moved((field & 1) * half)
            shape.lanes.move(out.moved(i * half), source, half)
    return vec(shape.bits, elem), out


_BYTES_DOWN, _BYTES_UP = (partial(_permuted, "u8", partial(_byte_shift, sign)) for sign in (1, -1))
_QUARTERS, _HALVES = ("32x4", "64x2"), ("64x4", "32x8")
MOVES: dict[str, Handler] = {
    **dict.fromkeys(("loadu", "load", "lddqu", "stream_load"), Shape.copy),
    "maskload": _mask_load,
    "maskstore": _mask_store,
    **dict.fromkeys(("loadl_pi", "loadl_pd"), partial(_load_half, 0)),
    **dict.fromkeys(("loadh_pi", "loadh_pd"), partial(_load_half, 2)),
    "mov": lambda shape, a: a,  # under a mask
    **dict.fromkeys(("storeu", "store", "stream"), _store),
    **dict.fromkeys(("storel", "storel_pi"), partial(_store_half, 0)),
    **dict.fromkeys(("storeh", "storeh_pi"), partial(_store_half, 8)),
    **dict.fromkeys(("loadl_epi64", "load_sd", "loadu_si64"), partial(_load_part, 8)),
    **dict.fromkeys(("load_ss", "loadu_si32"), partial(_load_part, 4)),
    "loadu_si16": partial(_load_part, 2),
    "set1": Shape.spread,
    **dict.fromkeys(("setzero", "undefined"), lambda shape: shape.spread(zero_of(shape.elem))),
    "set4": lambda shape, *values: shape.listed(values[::-1] * (shape.count // 4)),
    "setr": lambda shape, *values: shape.listed(values),
    "set": lambda shape, *values: shape.listed(values[::-1]),
    "permute_ps": partial(_permuted, "", _fields),
    **dict.fromkeys(("permute_pd", "shuffle_pd"), partial(_permuted, "", _bits)),
    "shuffle_ps": partial(_permuted, "", _fields_of_two),
    "shuffle_epi8": _shuffle_bytes,
    "permute4x64": partial(_permuted, "i64", _fields),
    "shuffle_epi32": partial(_permuted, "i32", _fields),
    **dict.fromkeys(("shuffle_i32x4", "shuffle_f32x4"), partial(_permuted, "i64", _blocks)),
    "movehdup": partial(_permuted, "f32", lambda i, n, c: (0, (i & ~1) + 1)),
    "moveldup": partial(_permuted, "f32", lambda i, n, c: (0, i & ~1)),
    "movehl": partial(_permuted, "f32", lambda i, n, c: (1, i + 2) if i < 2 else (0, i)),
    "movelh": partial(_permuted, "f32", lambda i, n, c: (0, i) if i < 2 else (1, i - 2)),
    "move_ss": partial(_permuted, "", lambda i, n, c: (int(i == 0), i)),
    "shufflelo": partial(
        _permuted, "i16", lambda i, n, c: _fields(i, n, c) if i & 4 == 0 else (0, i)
    ),
    "shufflehi": partial(_permuted, "i16", lambda i, n, c: _fields(i, n, c) if i & 4 else (0, i)),
    "unpacklo": partial(_unpack, 0),
    "unpackhi": partial(_unpack, 1),
    "permutex2var": _permute_two,
    "permutexvar": _permute_all,
    "permutevar8x32": lambda shape, a, at: _permute_all(shape, at, a),
    "permutevar_ps": _permute_in_blocks,
    "alignr_epi8": partial(_permuted, "u8", _bytes_after),
    **dict.fromkeys(("srli_si128", "bsrli_si128", "bsrli_epi128"), _BYTES_DOWN),
    **dict.fromkeys(("slli_si128", "bslli_si128", "bslli_epi128"), _BYTES_UP),
    "blend": partial(_permuted, "", lambda i, n, c: (c >> (i % 8) & 1, i)),
    "packs": partial(_pack, {"i16": "i8", "i32": "i16"}),
    "packus": partial(_pack, {"i16": "u8", "i32": "u16"}),
    "cvtsepi32": partial(_narrowed_lanes, "i32"),
    "cvtsepi16": partial(_narrowed_lanes, "i16"),
    "cvtph_ps": partial(_halves_to, "f16"),
    "cvtpbh_ps": partial(_halves_to, "bf16"),
    "cvtps_ph": partial(_to_halves, "f16"),
    "cvtneps_pbh": partial(_to_halves, "bf16"),
    "cvtne2ps_pbh": _to_pairs,
    **{f"set_m128{k}": _joined for k in ("", "i", "d")},
    **{f"setr_m128{k}": lambda shape, low, top: _joined(shape, top, low) for k in ("", "i", "d")},
    "extract": _extract,
    **{f"insert_epi{bits}": _insert for bits in (8, 16, 32, 64)},
    **{f"extract{k}{s}": partial(_part, 128) for k in "fi" for s in ("128", *_QUARTERS)},
    **{f"extract{k}{s}": partial(_part, 256) for k in "fi" for s in _HALVES},
    **{f"insert{k}{s}": partial(_insert_part, 128) for k in "fi" for s in ("128", *_QUARTERS)},
    **{f"insert{k}{s}": partial(_insert_part, 256) for k in "fi" for s in _HALVES},
    **{f"broadcast_{k}{s}": partial(_repeat, 128) for k in "fi" for s in _QUARTERS},
    **{f"broadcast_{k}32x2": partial(_repeat, 64) for k in "fi"},
    **{f"broadcast_{k}{s}": partial(_repeat, 256) for k in "fi" for s in _HALVES},
    **dict.fromkeys(("broadcastsi128", "broadcast_ps", "broadcast_pd"), partial(_repeat, 128)),
    **{f"broadcast{of}": _first_lane for of in ("b", "w", "d", "q", "ss", "sd", "_ss", "_sd")},
    **dict.fromkeys(("permute2f128", "permute2x128"), _permute_halves),
}
"""Operations by their names, those of an element alone before it."""
