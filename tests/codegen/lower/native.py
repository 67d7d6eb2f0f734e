"""Lower kernel text, compile it with gcc and call it on numpy arrays."""

import ctypes
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from dovetail.codegen.catalog import KernelRequest
from dovetail.codegen.lower import lower
from dovetail.codegen.targets import DEVICE_TARGETS, TARGETS, host_features, runs_on
from dovetail.ir.diagnostics import Source
from dovetail.ir.high.parse import parse_high
from dovetail.ir.low.nodes import Unit
from dovetail.ir.low.parse import parse_low
from dovetail.ir.low.print import print_low
from tests.codegen.float_targets import FLOAT_TARGETS
from tests.codegen.warp_host import warp_library

HEAD = """#include <stddef.h>
#include <stdint.h>
#include <math.h>
#include <string.h>
static inline float dt_f32_of_bits(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t dt_bits_of_f32(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
"""
EVERY = [t.name for t in TARGETS.values() if runs_on(t, platform.machine(), host_features())]
"""Targets that this machine runs, best first."""
NATIVE = [name for name in EVERY if name in FLOAT_TARGETS]
"""Those that differ in more than products of bytes."""
RUNNING = [*NATIVE, *DEVICE_TARGETS]
"""And those whose text runs here as plain C++."""


def low_text(text, kernel, target, **binding):
    """The lowered C text; checks that it is what the low IR parses."""
    unit = parse_high(Source("test.dk", text))
    lowered = lower(unit, kernel, binding, TARGETS[target], name=kernel)
    printed = print_low(lowered)
    assert parse_low(Source("lowered", printed)) == lowered
    return printed


@cache
def library(text, target, binding):
    """One shared library of all kernels in `text`, bound alike; the compiler is called once."""
    chosen = TARGETS[target]
    unit = parse_high(Source("test.dk", text))
    kernels = [f.name for f in unit.functions if f.kind == "kernel"]
    lowered = [lower(unit, name, dict(binding), chosen, name=name) for name in kernels]
    items = list({item.name: item for unit in lowered for item in unit.items}.values())
    includes = "".join(f"#include <{h}>\n" for h in chosen.headers)
    folder = Path(tempfile.mkdtemp(prefix="dovetail-test-"))
    (folder / "k.c").write_text(includes + HEAD + print_low(Unit(items=tuple(items))))
    flags = [flag.replace("-O3", "-O1") for flag in chosen.cflags]
    command = ["gcc", *flags, "-Werror", "-shared", "k.c", "-o", "k.so", "-lm"]
    subprocess.run(command, check=True, cwd=folder)
    loaded = ctypes.CDLL(str(folder / "k.so"))
    shutil.rmtree(folder)
    return loaded


@cache
def device_library(text, binding):
    """The same for a device target: a warp is a CPU thread."""
    unit = parse_high(Source("test.dk", text))
    kernels = [f.name for f in unit.functions if f.kind == "kernel"]
    requests = [KernelRequest("test", name, dict(binding), name) for name in kernels]
    return warp_library(requests, {"test": unit})


def run(text, kernel, target, *args, **binding):
    """Call `kernel` with arrays (by address), ints (i64) and floats (f32)."""
    if target in DEVICE_TARGETS:
        device_library(text, tuple(sorted(binding.items()))).call(kernel, args, 0, 1)
        return
    loaded = library(text, target, tuple(sorted(binding.items())))
    getattr(loaded, kernel)(*(_argument(a) for a in args))


def _argument(value):
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p(value.ctypes.data)
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int64(value)
