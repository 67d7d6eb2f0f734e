"""Lift C text, lower it again for any target, and run both on the same arguments."""

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from dovetail.codegen.catalog import resolve_imports
from dovetail.codegen.interpret import interpret
from dovetail.codegen.lift import lift
from dovetail.codegen.lower import lower
from dovetail.codegen.targets import TARGETS
from dovetail.ir.diagnostics import Source
from dovetail.ir.high.parse import parse_high
from dovetail.ir.high.print import print_high
from dovetail.ir.high.verify import verify_high
from dovetail.ir.low.parse import parse_low
from dovetail.ir.low.print import print_low
from dovetail.ir.low.verify import verify_low
from tests.codegen.lower.native import NATIVE, _argument, build

KERNELS = Path(__file__).parent / "kernels"
PRELUDE = (KERNELS / "prelude.h").read_text()
WHERE = [*NATIVE, "aarch64-neon"]
"""Targets that run here; NEON runs in the interpreter."""


@cache
def parsed(file):
    source = Source(file, (KERNELS / file).read_text())
    unit = parse_low(source, defines=PRELUDE)
    verify_low(unit, source)
    return unit


@cache
def lifted(file, function):
    """The lifted module; what it prints must parse to the same and pass the verifier."""
    unit = lift(parsed(file), function)
    text = print_high(unit)
    source = Source(f"{function}.dk", text)
    again = parse_high(source)
    assert again == unit, text
    module = resolve_imports(again)
    verify_high(module, source)
    return module


def kernel_of(file, function):
    return lifted(file, function).function(function)


def run_original(file, function, target, args):
    """Run the C text itself: compiled where this machine can, else interpreted."""
    if target not in NATIVE:
        interpret(parsed(file), function, list(args), TARGETS[target])
        return
    getattr(compiled(file, target), function)(*map(_argument, args))


@cache
def compiled(file, target):
    """The C text itself, compiled by gcc with the prelude in front."""
    library = Path(tempfile.mkdtemp()) / "original.so"
    command = ["gcc", *TARGETS[target].cflags, "-w", "-shared"]
    command += ["-include", "math.h", "-include", str(KERNELS / "prelude.h"), str(KERNELS / file)]
    subprocess.run([*command, "-o", str(library), "-lm"], check=True)
    return ctypes.CDLL(str(library))


def run_lifted(file, function, target, args, **binding):
    lowered = lower(lifted(file, function), function, binding, TARGETS[target], name=function)
    if target not in NATIVE:
        interpret(lowered, function, list(args), TARGETS[target])
        return
    library = build(print_low(lowered), target)
    getattr(library, function)(*map(_argument, args))


def both(file, function, original, target, args, **binding):
    """Arrays after the original and after the lifted kernel, from equal arguments."""
    first = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    second = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    run_original(file, function, original, first)
    run_lifted(file, function, target, second, **binding)
    arrays = [i for i, a in enumerate(args) if isinstance(a, np.ndarray)]
    return [(first[i], second[i]) for i in arrays]
