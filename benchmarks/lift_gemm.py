"""XNNPACK's float GEMM micro-kernels, lifted: each width and unrolling beside gcc's build of the C.

    python -m benchmarks.lift_gemm [--only TEXT] [--k N] [--columns N] [--rounds N] [--json FILE]

Reads DOVETAIL_CORPUS/kernels. All ways are called in turns, one thread; where gcc's build of the
file runs on this machine all lifted kernels have to give its bits, else those of the first of them.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Report, origin
from benchmarks.lift import HEADERS, kernel_files, read_file, setting_of
from dovetail.codegen.catalog import KernelRequest, resolve_imports
from dovetail.codegen.library import LibrarySpec, build_library
from dovetail.codegen.lift import lift, lift_function
from dovetail.codegen.lift.unroll import unroll_kernel
from dovetail.codegen.targets import host_target
from dovetail.ir.diagnostics import NO_SPAN, Diagnostic
from dovetail.ir.errors import SyntaxDiagnostic
from dovetail.ir.high import nodes as high

NAME = re.compile(r"ukernel_(\d+)x(\d+)(?:s4)?__")


def written_out(path: Path, function: str) -> high.Unit:
    """Return the kernel written out literally, as what is not understood is lifted."""
    pieces = read_file(path, setting_of(path))
    source = pieces.functions[function][0]
    faults = SyntaxDiagnostic([Diagnostic("low", "asked for", NO_SPAN, source)])
    return resolve_imports(lift(pieces.unit([function]), function, faults=faults))


def lifted(path: Path, function: str) -> high.Unit:
    """Return the kernel lifted by its meaning, with loops that may be unrolled."""
    unit = resolve_imports(lift_function(read_file(path, setting_of(path)), function))
    return high.Unit(functions=(*unit.functions[:-1], unroll_kernel(unit.functions[-1])))


def build_own(path: Path) -> ctypes.CDLL:
    """Build a file with gcc for the instruction set that it was written for."""
    setting = setting_of(path)
    header = "#include <immintrin.h>\n" + (HEADERS / setting.header).read_text()
    text = re.sub(r'#include "src[^\n]*', "", path.read_text())
    command = ["gcc", "-O3", "-ffp-contract=off", *setting.flags, "-DNDEBUG", "-w", "-shared"]
    with tempfile.TemporaryDirectory(prefix="dovetail-gemm-") as folder:
        Path(folder, "k.c").write_text(header + text)
        subprocess.run([*command, "-fPIC", "k.c", "-o", "k.so"], cwd=folder, check=True)
        return ctypes.CDLL(str(Path(folder, "k.so")))


def build_lifted(path: Path, function: str) -> tuple[ctypes.CDLL, dict[str, str]]:
    """Build every variant; return the library and what each of its kernels is."""
    modules = {"written": written_out(path, function), "lifted": lifted(path, function)}
    tunables = {t.name: t.choices for t in modules["lifted"].functions[-1].tunables}
    names, requests = {}, [KernelRequest("written", function, {}, "written")]
    for values in product(*(tunables[name] for name in sorted(tunables))):
        binding = dict(zip(sorted(tunables), values, strict=True))
        name = "lifted" + "".join(f"_{value}" for value in values)
        names[name] = "lifted" + "".join(f", {k} {v}" for k, v in binding.items())
        requests.append(KernelRequest("lifted", function, binding, name))
    spec = LibrarySpec(host_target(), tuple(requests), "gemm", modules, tvm_ffi=False)
    return ctypes.CDLL(str(build_library(spec).path)), {"written": "written out", **names}


def aligned(count: int, rng: np.random.Generator) -> np.ndarray:
    """Return random floats at a line's start."""
    raw = rng.uniform(-1, 1, count + 16).astype(np.float32)
    start = -raw.ctypes.data % 64 // 4
    return raw[start : start + count]


def measure(path: Path, function: str, k: int, columns: int, rounds: int) -> Mapping[str, float]:
    """Return the median CPU seconds of each way."""
    found = NAME.search(function)
    assert found is not None
    mr, nr = map(int, found.groups())
    rng = np.random.default_rng(0)
    blocks = -(-columns // nr)
    a, w = aligned(mr * k, rng), aligned(blocks * nr * (k + 1), rng)
    limits = np.array([-1e3, 1e3], np.float32)
    library, names = build_lifted(path, function)
    ways = {title: getattr(library, name) for name, title in names.items()}
    if not setting_of(path).arm:
        ways = {"gcc's build": getattr(build_own(path), function), **ways}
    times: dict[str, list[float]] = {title: [] for title in ways}
    wanted: dict[int, np.ndarray] = {}

    def call(title: str, width: int) -> np.ndarray:
        out = np.zeros((mr, blocks * nr), np.float32)
        places = [ctypes.c_void_p(x.ctypes.data) for x in (a, w, out, limits)]
        sizes = [ctypes.c_int64(n) for n in (mr, width, 4 * k, 4 * k, out.strides[0], 4 * nr)]
        before = time.thread_time()
        ways[title](*sizes[:3], places[0], sizes[3], *places[1:3], *sizes[4:], places[3])
        if width == columns:
            times[title].append(time.thread_time() - before)
        return out

    for width in {columns, *range(1, 2 * nr)}:  # tails; the first call of each is not timed
        for title in ways:
            out = call(title, width)
            if title == "written out":  # which may fuse what the C rounds twice
                continue
            if not np.array_equal(wanted.setdefault(width, out), out):
                raise SystemExit(f"{function}: {title} gives other bits for {width} columns")
    for each in times.values():
        each.clear()
    for _ in range(rounds):
        for title in ways:
            call(title, columns)
    return {title: statistics.median(each) for title, each in times.items()}


def rows_of(path: Path, function: str, k: int, columns: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each way."""
    found = NAME.search(function)
    assert found is not None
    flop = 2 * k * columns * int(found[1])
    shape = {"function": function, "k": k, "columns": columns, "target": host_target().name}
    return [
        {**shape, "way": way, "us": 1e6 * t, "gflops": 1e-9 * flop / t, **origin()}
        for way, t in measure(path, function, k, columns, rounds).items()
    ]


def main() -> None:
    """Print a row for each kernel and way, and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--only", default="f32-gemm", help="files whose name has this")
    parser.add_argument("--k", type=int, default=512)
    parser.add_argument("--columns", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path, metavar="F", help="write the report to F")
    options = parser.parse_args()
    report = Report("lift_gemm", {"threads": 1, "rounds": options.rounds})
    for path in kernel_files():
        if options.only not in path.name or "scalar" in path.name or "f32-gemm" not in path.name:
            continue
        (function,) = read_file(path, setting_of(path)).own
        report.rows += rows_of(path, function, options.k, options.columns, options.rounds)
    report.print(("function", "way", "us", "gflops"))
    report.write(options.json)


if __name__ == "__main__":
    main()
