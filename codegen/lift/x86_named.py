"""x86 intrinsics whose names follow no pattern: casts of registers, their first lanes, halves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dovetail.codegen.lift.emit import call, cast, num, op
from dovetail.codegen.lift.lanes import BINARY, SIZES, Lanes, Made, Rule, less
from dovetail.codegen.lift.x86_shape import INT, PLAIN, VOID, Shape, vec
from dovetail.codegen.lift.x86_whole import joined, to_halves
from dovetail.ir.expr import Expr, Float, NamedType


def _halves_of(bits: int) -> Rule:
    return lambda lanes, args: to_halves(lanes, Shape(bits, "f32", "ps"), args)


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
    "_mm_cvtss_f32": _scalar_rule("float", lambda w, a: a[0].read_as("f32").item()),
    "_mm256_cvtss_f32": _scalar_rule("float", lambda w, a: a[0].read_as("f32").item()),
    "_mm512_cvtss_f32": _scalar_rule("float", lambda w, a: a[0].read_as("f32").item()),
    "_mm_cvtsd_f64": _scalar_rule("double", lambda w, a: a[0].read_as("f64").item()),
    **{
        f"_mm{w}_cvtsi{s}_si32": _scalar_rule("int", lambda w, a: a[0].read_as("i32").item())
        for w, s in (("", 128), ("256", 256), ("512", 512))
    },
    "_mm_cvtsi128_si64": _scalar_rule("long long", lambda w, a: a[0].read_as("i64").item()),
    "_mm_cvtsi128_si64x": _scalar_rule("long long", lambda w, a: a[0].read_as("i64").item()),
    "_mm_cvtsi32_si128": _low("i32", 4, lambda w, a: a[0]),
    "_mm_cvtsi64_si128": _low("i64", 2, lambda w, a: a[0]),
    "_mm_set_ss": _low("f32", 4, lambda w, a: a[0]),
    "_mm_load1_ps": lambda w, a: (vec(128, "f32"), w.spread(a[0].read_as("f32").item(), "f32", 4)),
    "_mm_load_ps1": lambda w, a: (vec(128, "f32"), w.spread(a[0].read_as("f32").item(), "f32", 4)),
    **{f"_mm_{n}_ss": _scalar_op(n, "f32") for n in PLAIN},
    **{f"_mm_{n}_sd": _scalar_op(n, "f64") for n in PLAIN},
    **{
        f"_mm256_cast{a}128_{b}256": _cast_width(256, e)
        for a, b, e in (("ps", "ps", "f32"), ("si", "si", "u8"), ("pd", "pd", "f64"))
    },
    **{
        f"_mm512_cast{a}256_{b}512": _cast_width(512, e)
        for a, b, e in (("ps", "ps", "f32"), ("si", "si", "u8"), ("pd", "pd", "f64"))
    },
    **{
        f"_mm256_cast{a}256_{b}128": _narrowed_type(128, e)
        for a, b, e in (("ps", "ps", "f32"), ("si", "si", "u8"), ("pd", "pd", "f64"))
    },
    **{
        f"_mm512_cast{a}512_{b}{w}": _narrowed_type(w, e)
        for w in (128, 256)
        for a, b, e in (("ps", "ps", "f32"), ("si", "si", "u8"), ("pd", "pd", "f64"))
    },
    **{
        f"_mm{w}cast{s}_{t}": _narrowed_type(int(w or 128), e)
        for w in ("", "256", "512")
        for s in ("ps", "pd", f"si{w or 128}")
        for t, e in (("ps", "f32"), ("pd", "f64"), (f"si{w or 128}", "u8"))
        if s != t
    },
    **{f"_mm{w}_cvtps_ph": _halves_of(int(w or 128)) for w in ("", "256", "512")},
    **{
        f"_mm256_set_m128{k}": (lambda w, a: joined(w, Shape(256, "u8", ""), a))
        for k in ("", "i", "d")
    },
    "_mm256_setr_m128i": lambda w, a: joined(w, Shape(256, "u8", ""), a[::-1]),
    "_mm256_zeroupper": _nothing,
    **{
        f"_cvtu32_mask{b}": _scalar_rule(f"__mmask{b}", lambda w, a: cast("i64", a[0]))
        for b in (8, 16, 32)
    },
    "_cvtu64_mask64": _scalar_rule("__mmask64", lambda w, a: cast("i64", a[0])),
    **{
        f"_cvtmask{b}_u32": _scalar_rule("unsigned", lambda w, a: cast("u32", a[0]))
        for b in (8, 16, 32)
    },
    "_mm256_testz_si256": lambda w, a: (INT, _test_zero(w, a)),
    "_mm512_kortestz": lambda w, a: (
        INT,
        cast("i32", less(op("|", cast("i64", a[0]), cast("i64", a[1])), 0, "==")),
    ),
}


def _test_zero(lanes: Lanes, args: list[Any]) -> Expr:
    a, b = (v.read_as("u32") for v in args)
    both = lanes.each("u32", 8, lambda i: op("&", a.item(i), b.item(i)))
    return cast("i32", less(lanes.total("u32", 8, both, BINARY["or"]), 0, "=="))
