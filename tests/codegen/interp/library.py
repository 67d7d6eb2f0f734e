"""Functions of <math.h> and <string.h> by name, on numpy scalars and pointers.

float32 functions compute in float64 and round once: within half an ulp, closer than most libms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.codegen.interp.meaning import fma
from tests.codegen.interp.memory import Pointer


def _elementwise(function: Callable[[float], float]) -> Callable[[Any], Any]:
    return lambda x: np.float64(function(float(x)))


def _round_away(x: Any) -> Any:
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


DOUBLE: dict[str, Callable[..., Any]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "cbrt": np.cbrt,
    "fabs": np.abs,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": _round_away,
    "rint": np.rint,
    "nearbyint": np.rint,
    "trunc": np.trunc,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "acosh": np.arccosh,
    "asinh": np.arcsinh,
    "atanh": np.arctanh,
    "erf": _elementwise(math.erf),
    "erfc": _elementwise(math.erfc),
    "pow": np.power,
    "fmod": np.fmod,
    "fmin": np.fmin,
    "fmax": np.fmax,
    "atan2": np.arctan2,
    "hypot": np.hypot,
    "copysign": np.copysign,
    "fdim": lambda a, b: np.maximum(a - b, np.float64(0)),
}


def _single(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: np.float32(function(*(np.float64(a) for a in args)))


def _copy(to: Pointer, source: Pointer, count: int) -> Pointer:
    to.store(source.load(np.uint8, int(count)))
    return to


def _fill(to: Pointer, value: int, count: int) -> Pointer:
    to.store(np.full(int(count), int(value) & 0xFF, np.uint8))
    return to


LIBRARY: dict[str, Callable[..., Any]] = {
    **DOUBLE,
    **{f"{name}f": _single(function) for name, function in DOUBLE.items()},
    "fmaf": lambda a, b, c: np.float32(fma(a, b, c)),
    "ldexpf": lambda x, n: np.float32(np.ldexp(x, n)),
    "abs": abs,
    "isnan": lambda x: int(np.isnan(x)),
    "isinf": lambda x: int(np.isinf(x)),
    "memcpy": _copy,
    "memset": _fill,
}

_F32, _F64 = np.finfo(np.float32), np.finfo(np.float64)
CONSTANTS: dict[str, Any] = {
    "INFINITY": np.float32(np.inf),
    "HUGE_VALF": np.float32(np.inf),
    "NAN": np.float32(np.nan),
    "FLT_MAX": _F32.max,
    "FLT_MIN": _F32.tiny,
    "FLT_EPSILON": _F32.eps,
    "DBL_MAX": _F64.max,
    "DBL_MIN": _F64.tiny,
    "DBL_EPSILON": _F64.eps,
    "M_PI": np.float64(math.pi),
    "M_LN2": np.float64(math.log(2)),
    "M_LOG2E": np.float64(math.log2(math.e)),
    "INT32_MAX": 2**31 - 1,
    "INT32_MIN": -(2**31),
    "INT_MAX": 2**31 - 1,
    "INT_MIN": -(2**31),
    "INT64_MAX": 2**63 - 1,
    "INT64_MIN": -(2**63),
    "SIZE_MAX": 2**64 - 1,
    "UINT32_MAX": 2**32 - 1,
    "UINT64_MAX": 2**64 - 1,
}
"""Values of the names that the standard headers define, NULL apart."""
