"""Lower kernel text, compile it with gcc and call it on numpy arrays."""

import ctypes
import platform
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from dovetail.codegen.lower import lower
from dovetail.codegen.targets import TARGETS, host_features, runs_on
from dovetail.ir.diagnostics import Source
from dovetail.ir.high.parse import parse_high
from dovetail.ir.low.parse import parse_low
from dovetail.ir.low.print import print_low

HEAD = """#include <stddef.h>
#include <stdint.h>
#include <math.h>
#include <string.h>
static inline float dt_f32_of_bits(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t dt_bits_of_f32(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
"""
NATIVE = [t.name for t in TARGETS.values() if runs_on(t, platform.machine(), host_features())]
"""Targets that this machine runs, best first."""


def low_text(text, kernel, target, **binding):
    """The lowered C text; checks that it is what the low IR parses."""
    unit = parse_high(Source("test.dk", text))
    lowered = lower(unit, kernel, binding, TARGETS[target], name=kernel)
    printed = print_low(lowered)
    assert parse_low(Source("lowered", printed)) == lowered
    return printed


@cache
def build(c_text, target):
    chosen = TARGETS[target]
    includes = "".join(f"#include <{h}>\n" for h in chosen.headers)
    folder = Path(tempfile.mkdtemp())
    (folder / "k.c").write_text(includes + HEAD + c_text)
    command = ["gcc", *chosen.cflags, "-Werror", "-Wno-parentheses", "-shared"]
    command += [str(folder / "k.c"), "-o", str(folder / "k.so"), "-lm"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "k.so"))


def run(text, kernel, target, *args, **binding):
    """Call `kernel` with arrays (by address), ints (i64) and floats (f32)."""
    library = build(low_text(text, kernel, target, **binding), target)
    getattr(library, kernel)(*(_argument(a) for a in args))


def _argument(value):
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p(value.ctypes.data)
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int64(value)
