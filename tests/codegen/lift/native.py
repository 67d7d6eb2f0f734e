"""Lift C text, lower it again for any target, and run both on the same arguments."""

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from dovetail.codegen.catalog import resolve_imports
from dovetail.codegen.isa.signatures import known_constants, known_functions
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
from tests.codegen.interpret import interpret
from tests.codegen.lower.native import HEAD, NATIVE, _argument

KERNELS = Path(__file__).parent / "kernels"
PRELUDE = (KERNELS / "prelude.h").read_text()
WHERE = [*NATIVE, "aarch64-neon"]
"""Targets that run here; NEON runs in the interpreter."""
EACH = [(target,) for target in WHERE]


@cache
def parsed(file):
    source = Source(file, (KERNELS / file).read_text())
    unit = parse_low(source, defines=PRELUDE)
    targets = TARGETS.values()
    functions, constants = known_functions(targets), known_constants(targets)
    verify_low(unit, source, functions=functions, constants=constants)
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
    return compile_c(PRELUDE + (KERNELS / file).read_text(), TARGETS[target], ("-w",))


def run_lifted(file, function, target, args, **binding):
    lowered = lower(lifted(file, function), function, binding, TARGETS[target], name=function)
    assert parse_low(Source("lowered", print_low(lowered))) == lowered
    if target not in NATIVE:
        interpret(lowered, function, list(args), TARGETS[target])
        return
    loaded = build(print_low(lowered), target)
    getattr(loaded, function)(*map(_argument, args))


@cache
def build(text, target):
    chosen = TARGETS[target]
    includes = "".join(f"#include <{h}>\n" for h in chosen.headers)
    return compile_c(includes + HEAD + text, chosen, ("-Werror",))


def compile_c(text, target, flags):
    folder = Path(tempfile.mkdtemp(prefix="dovetail-test-"))
    (folder / "k.c").write_text(text)
    fast = [flag.replace("-O3", "-O1") for flag in target.cflags]
    command = ["gcc", *fast, *flags, "-shared", "k.c", "-o", "k.so", "-lm"]
    subprocess.run(command, check=True, cwd=folder)
    loaded = ctypes.CDLL(str(folder / "k.so"))
    shutil.rmtree(folder)
    return loaded


def both(file, function, original, target, args, **binding):
    """Arrays after the original and after the lifted kernel, from equal arguments."""
    first = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    second = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    run_original(file, function, original, first)
    run_lifted(file, function, target, second, **binding)
    arrays = [i for i, a in enumerate(args) if isinstance(a, np.ndarray)]
    return [(first[i], second[i]) for i in arrays]
