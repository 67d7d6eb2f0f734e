"""Third-party kernels: how many of their functions parse, lift, and compute what gcc's build does.

    python -m benchmarks.lift [--only TEXT] [--functions] [--json FILE]

Reads the unmodified files of DOVETAIL_CORPUS/kernels, each with a text of benchmarks/lift_headers
in front. What lifts is built for two targets and compared with gcc's build of the same text, on
random memory and several sizes, in child processes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from dovetail.cli.kernel import Around, read_pieces
from dovetail.codegen.catalog import resolve_imports
from dovetail.codegen.lift import lift_function
from dovetail.codegen.lower import lower
from dovetail.codegen.targets import TARGETS
from dovetail.errors import DovetailError
from dovetail.ir.diagnostics import Source
from dovetail.ir.errors import SyntaxDiagnostic
from dovetail.ir.expr import NamedType
from dovetail.ir.high import nodes as high
from dovetail.ir.low import nodes as low
from dovetail.ir.low.parse import Pieces
from dovetail.ir.low.print import print_low
from dovetail.ir.low.types import scalar

CORPUS = Path(os.environ.get("DOVETAIL_CORPUS", "../shared")) / "kernels"
HEADERS = Path(__file__).with_name("lift_headers")
X86_FLAGS = ("-mavx2", "-mfma", "-mf16c", "-mssse3")
AVX512 = tuple(f"-mavx512{x}" for x in ("f", "bw", "dq", "vl", "cd", "vnni", "vbmi"))
TARGETS_X86 = ("x86-64-avx512", "x86-64-avx2")
TARGETS_ARM = ("aarch64-neon", "x86-64-avx2")
ARENA = 1 << 18
"""Bytes of memory behind each pointer parameter; pointers stand in its middle quarter."""
TRIALS = 40
WANTED = 6
"""Calls that must agree, of TRIALS that are tried: some sizes make no sense to a kernel."""


@dataclass
class Row:
    """What became of one function."""

    file: str
    function: str
    parsed: bool = False
    lifted: bool = False
    compared: str = ""  # "same", or why not
    way: str = ""  # how it lifted
    reason: str = ""
    targets: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Setting:
    """How a file is compiled: its header, gcc's flags, macros, machine."""

    header: str
    flags: tuple[str, ...]
    defines: tuple[str, ...] = ()
    arm: bool = False

    @property
    def targets(self) -> tuple[str, str]:
        """The targets that a lifted kernel is built for."""
        return TARGETS_ARM if self.arm else TARGETS_X86


def setting_of(path: Path) -> Setting:
    """Return how a file of the corpus is compiled."""
    name = path.name
    arm = "neon" in name or "arch__arm" in name
    wide = re.search(r"avx512|skylakex|avx256skx|avxvnni", name)
    flags = () if arm else (*X86_FLAGS, *(AVX512 if wide else ()))
    if "gfni" in name:
        flags = (*flags, "-mgfni")
    if "amx" in name:
        flags = (*flags, "-mamx-tile", "-mamx-int8")
    if arm:
        flags = ("-mcpu=generic+dotprod+i8mm+fullfp16",)
    if name.startswith("xnnpack"):
        return Setting("xnnpack.h", flags, arm=arm)
    if name.startswith("ggml"):
        return Setting("ggml.h", flags, arm=arm)
    if name.startswith("openblas"):
        real = "double" if re.search(r"x86_64__d", name) else "float"
        return Setting("openblas.h", flags, (f"FLOAT {real}",))
    return Setting("plain.h", flags, ("TESTING 1",))


@cache
def compiler_macros(flags: tuple[str, ...], arm: bool) -> str:
    """Return the macros that the compiler defines for some flags, as far as kernels ask."""
    if arm:
        wanted = "__aarch64__ __GNUC__ __ARM_NEON __ARM_FEATURE_FMA __ARM_FEATURE_DOTPROD"
        names = (*wanted.split(), "__ARM_FEATURE_MATMUL_INT8")
        return "".join(f"#define {name} 1\n" for name in names)
    said = subprocess.run(
        ["gcc", *flags, "-dM", "-E", "-x", "c", "/dev/null"],
        capture_output=True,
        text=True,
        check=True,
    )
    kept = re.findall(
        r"#define (__(?:AVX|SSE|SSSE|FMA|F16C|BMI|GFNI|AMX|GNUC|x86_64)\w* .*)", said.stdout
    )
    return "".join(f"#define {line}\n" for line in kept)


@cache
def include_folder() -> Path:
    """Return a folder with the headers of the corpus that other files of it include."""
    folder = Path(tempfile.mkdtemp(prefix="dovetail-lift-"))
    (folder / "a/b").mkdir(parents=True)
    for path in CORPUS.glob("*.h"):
        (folder / path.name.split("__")[-1]).symlink_to(path)
    for path in CORPUS.iterdir():
        for name in re.findall(r'#include [<"]([^>"]+)[>"]', path.read_text(errors="replace")):
            bare = name if not name.startswith("..") else Path(name).name
            known = bare in ("immintrin.h", "arm_neon.h", "smmintrin.h", "emmintrin.h") or (
                "/" not in bare
                and re.match(r"(std|string|assert|math|float|time|ctype|fcntl|unistd)", bare)
            )
            if known or bare.startswith(("sys/", "omp", "Acc", "riscv", "arm_sve")):
                continue
            made = folder / bare
            made.parent.mkdir(parents=True, exist_ok=True)
            if not made.exists():
                made.write_text("")
    return folder


def read_file(path: Path, setting: Setting) -> Pieces:
    """Return the functions of a file, with its header in front."""
    defines = "".join(f"#define {d}\n" for d in setting.defines)
    macros = Source("<compiler>", compiler_macros(setting.flags, setting.arm) + defines)
    tables = Source("<tables>", exponent_tables())
    header = Source(setting.header, (HEADERS / setting.header).read_text())
    text = Source(path.name, path.read_text())
    return read_pieces(text, Around((macros, tables, header), (include_folder(),)))


def exponent_tables() -> str:
    """Return XNNPACK's tables of 2 ** (-k / n), whose text is generated there, too."""
    out = "#include <stdint.h>\n"
    for n in (16, 64, 2048):
        bits = [
            struct.unpack("<I", struct.pack("<f", 2.0 ** (-k / n)))[0]
            + (k << (23 - int(math.log2(n))))
            for k in range(n)
        ]
        values = ", ".join(f"0x{b & 0xFFFFFFFF:08X}u" for b in bits)
        out += f"static const uint32_t xnn_table_exp2minus_k_over_{n}[{n}] = {{ {values} }};\n"
    rng = np.random.default_rng(0)
    for name, (type_, count) in GRIDS.items():
        bits = int(type_[4:-2])
        values = ", ".join(f"0x{v:x}u" for v in rng.integers(0, 1 << min(bits, 62), count))
        out += f"static const {type_} {name}[{count}] = {{ {values} }};\n"
    return out


GRIDS = {
    "iq2xxs_grid": ("uint64_t", 256),
    "iq2xs_grid": ("uint64_t", 512),
    "iq2s_grid": ("uint64_t", 1024),
    "iq3xxs_grid": ("uint32_t", 256),
    "iq3s_grid": ("uint32_t", 512),
    "iq1s_grid": ("uint64_t", 2048),
    "ksigns_iq2xs": ("uint8_t", 128),
}
"""Tables of ggml, filled with numbers of our own: what is compared does not depend on them."""


# ---- comparing ----


def argument_kinds(function: low.Function) -> list[str]:
    """Return `p` for a pointer, `i` an integer, `f` or `d` a number, for each parameter."""
    kinds = []
    for param in function.params:
        found = scalar(param.type)
        by_value = found is None and isinstance(param.type, NamedType)
        kinds.append(
            "v"
            if by_value
            else "p"
            if found is None
            else {"float": "f", "double": "d"}.get(found.name, "i")
        )
    return kinds


def driver(name: str, kinds: Sequence[str], types: Sequence[str], returns: str) -> str:
    """Return the C text of a program's `main`, which calls a function on memory from stdin."""
    args = ", ".join(
        {
            "p": f"(void *)(memory + {i} * {ARENA} + {ARENA // 4})",
            "v": f"*({type_} *)(memory + {i} * {ARENA} + {ARENA // 4})",
            "i": f"({type_})words[{i}]",
            "f": f"(float)reals[{i}]",
            "d": f"reals[{i}]",
        }[kind]
        for i, (kind, type_) in enumerate(zip(kinds, types, strict=True))
    )
    count = len(kinds) + 1
    last = f"memory + {count - 1} * {ARENA} + {ARENA // 4}"
    invoke = f"{name}({args});"
    if returns == "lifted":
        invoke = f"{name}({args}{', ' if args else ''}(void *)({last}));"
    elif returns != "void":
        invoke = f"{{ {returns} made = {name}({args}); memcpy({last}, &made, sizeof made); }}"
    return f"""
#include <stdio.h>
#include <string.h>
static char memory[{count} * {ARENA}] __attribute__((aligned(64)));
int main(void) {{
  long long words[{count}]; double reals[{count}];
  while (fread(words, 1, sizeof words, stdin) == sizeof words) {{
    if (fread(reals, 1, sizeof reals, stdin) != sizeof reals) return 1;
    if (fread(memory, 1, sizeof memory, stdin) != sizeof memory) return 1;
    {invoke}
    fwrite(memory, 1, sizeof memory, stdout); fflush(stdout);
  }}
  return 0;
}}
"""


def compile_program(text: str, flags: Sequence[str], arm: bool) -> list[str] | str:
    """Return the command of a compiled program, or what the compiler said."""
    folder = Path(tempfile.mkdtemp(dir=include_folder().parent, prefix="dovetail-lift-"))
    (folder / "k.c").write_text(text)
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl", "-static"]
    command = [*(zig if arm else ["gcc"]), "-O1", "-w", "-fno-strict-aliasing", "-fwrapv"]
    command += ["-std=gnu11", "-ffp-contract=off", "-fno-sanitize=all" if arm else "-w", *flags]
    command += ["-ffunction-sections", "-Wl,--gc-sections"]
    command += [] if arm else ["-Wl,--unresolved-symbols=ignore-all"]
    command += [f"-I{include_folder()}", f"-I{include_folder()}/a/b", "k.c", "-o", "k", "-lm"]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if said.returncode:
        lines = [
            line for line in said.stderr.splitlines() if "error" in line or "undefined" in line
        ]
        shutil.rmtree(folder)
        return (lines or ["the compiler failed"])[0][-160:]
    return [*(["qemu-aarch64"] if arm else []), str(folder / "k")]


def trials(function: low.Function, kinds: Sequence[str]) -> Iterator[bytes]:
    """Yield inputs: sizes at and beside edges, memory of numbers that suit each parameter."""
    for trial in range(TRIALS):
        rng = np.random.default_rng(trial)
        limit = {0: 512, 1: 512, 2: 128}.get(kinds.count("i"), 32)
        sizes = [1, 2, 3, 4, 5, 8, 12, 16, 20, 28, 32, 48, 60, 64, 96, 128, 160, 256, 512]
        sizes = [size for size in sizes if size <= limit]
        whole = int(rng.choice([s for s in sizes if s % 4 == 0]))
        words, reals, memory = [], [], []
        for kind, param in zip(kinds, function.params, strict=True):
            words.append(int(rng.choice(sizes)) if trial % 2 else whole)
            reals.append(float(np.float32(rng.uniform(-2, 2))))
            memory.append(random_memory(param, rng, kind))
        memory.append(bytes(ARENA))
        words.append(0)
        reals.append(0.0)
        count = len(words)
        yield struct.pack(f"<{count}q{count}d", *words, *reals) + b"".join(memory)


def random_memory(param: low.Param, rng: np.random.Generator, kind: str) -> bytes:
    """Return memory for a parameter: floats near 1, whole numbers of any value."""
    type_ = param.type
    of = getattr(type_, "of", None)
    found = scalar(of) if of is not None else None
    if found is not None and found.floating:
        dtype = {2: np.float16, 4: np.float32, 8: np.float64}[found.size]
        return rng.uniform(-1, 1, ARENA // found.size).astype(dtype).tobytes()
    if found is not None and found.size >= 4:
        return rng.integers(0, 100, ARENA // 4).astype(np.int32).tobytes()
    # bytes whose every pair is a half of modest size and whose every four a modest float
    data = rng.integers(0, 256, ARENA).astype(np.uint8)
    data[1::2] = rng.choice(
        np.array([0x2C, 0x2E, 0x30, 0x34, 0x38, 0x3A, 0x3C], np.uint8), ARENA // 2
    )
    return data.tobytes()


def agree(first: bytes, second: bytes, function: low.Function) -> bool:
    """Whether two memories hold the same: the same bytes, or floats that are near."""
    if first == second:
        return True
    a, b = np.frombuffer(first, np.uint8), np.frombuffer(second, np.uint8)
    for start in range(0, len(a), ARENA):
        x, y = a[start : start + ARENA], b[start : start + ARENA]
        if np.array_equal(x, y) or near(x, y, np.float32, 2e-4) or near(x, y, np.float64, 1e-9):
            continue
        if near(x, y, np.float16, 4e-3):
            continue
        return False
    return True


def near(x: np.ndarray, y: np.ndarray, dtype: type, tolerance: float) -> bool:
    """Whether the bytes that differ are numbers of a type that are close."""
    u, v = x.view(dtype).astype(np.float64), y.view(dtype).astype(np.float64)
    differ = (x != y).reshape(len(u), -1).any(axis=1)
    u, v = u[differ], v[differ]
    with np.errstate(invalid="ignore"):
        return bool(
            np.all(np.abs(u - v) <= tolerance * np.maximum(1, np.abs(u)) + 0 * u)
            or np.all(
                np.isnan(u) & np.isnan(v) | (np.abs(u - v) <= tolerance * np.maximum(1, np.abs(u)))
            )
        )


def run_once(command: list[str], data: bytes) -> bytes | None:
    """Return the memory after a call; None where the program died."""
    try:
        said = subprocess.run(command, input=data, capture_output=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return None
    return said.stdout if said.returncode == 0 else None


def compare(path: Path, setting: Setting, function: low.Function, unit: high.Unit, row: Row) -> str:
    """Return `same`, or how gcc's build of the text and ours differ."""
    kinds = argument_kinds(function)
    types = [
        print_low(p.type) if k in "iv" else "" for p, k in zip(function.params, kinds, strict=True)
    ]
    returns = print_low(function.returns)
    defines = "".join(f"#define {d}\n" for d in setting.defines)
    intrinsics = "#include <arm_neon.h>\n" if setting.arm else "#include <immintrin.h>\n"
    text = path.read_text()
    text = re.sub(r"\bint main\(", "int other_main(", text)
    original = intrinsics + defines + exponent_tables() + (HEADERS / setting.header).read_text()
    original += text + driver(function.name, kinds, types, returns)
    theirs = compile_program(original, setting.flags, setting.arm)
    if isinstance(theirs, str):
        return f"gcc does not build it: {theirs}"
    ours = []
    for name in setting.targets:
        target = TARGETS[name]
        made = print_low(lower(unit, function.name, {}, target, name="lifted"))
        heads = "".join(f"#include <{h}>\n" for h in target.headers)
        heads += (
            "#include <stddef.h>\n#include <stdint.h>\n#include <math.h>\n#include <string.h>\n"
        )
        whole = (
            heads
            + HELPERS
            + made
            + driver(
                "lifted",
                [k.replace("v", "p") for k in kinds],
                ["long long"] * len(kinds),
                "lifted" if returns != "void" else "void",
            )
        )
        arm = name.startswith("aarch64")
        flags = [f.replace("-O3", "-O1") for f in target.cflags if not f.startswith(("-W", "-std"))]
        built = compile_program(whole, flags, arm)
        if isinstance(built, str):
            return f"{name}: {built}"
        ours.append((name, built))
        row.targets.append(name)
    met = 0
    for data in trials(function, kinds):
        wanted = run_once(theirs, data)
        if wanted is None:
            continue
        for name, command in ours:
            got = run_once(command, data)
            if got is None:
                return f"{name}: it dies where gcc's does not"
            if not agree(wanted, got, function):
                return f"{name}: other numbers"
        met += 1
        if met == WANTED:
            return "same"
    return "same" if met else "no call of it ends well under gcc"


HELPERS = """
static inline float dt_f32_of_bits(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t dt_bits_of_f32(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
"""


# ---- the table ----


def measure(path: Path, builds: bool, only: str = "") -> list[Row]:
    """Return what became of each function of a file."""
    setting = setting_of(path)
    rows: list[Row] = []
    try:
        pieces = read_file(path, setting)
    except SyntaxDiagnostic as error:  # all its code is behind conditions
        print(error.diagnostics[0].message)
        return rows
    for name in pieces.own:
        if only and only not in name and only not in path.name:
            continue
        row = Row(path.name, name)
        rows.append(row)
        try:
            function = pieces.function(name)
            row.parsed = True
            unit = lift_function(pieces, name)
            row.lifted = True
            literal = any(note.startswith("written out") for note in unit.notes)
            row.way = "literal" if literal else "by meaning"
            if builds:
                row.compared = compare(path, setting, function, resolve_imports(unit), row)
                if row.compared != "same":
                    print(f"  {name}: {row.compared}", flush=True)
        except SyntaxDiagnostic as error:
            row.reason = error.diagnostics[0].message
        except DovetailError as error:
            if row.lifted:
                row.compared = f"not lowered: {error}"
            row.reason = str(error).removeprefix("this cannot be lifted: ")
    return rows


def kernel_files() -> list[Path]:
    """Return the files of the corpus, in order."""
    return sorted(p for p in CORPUS.iterdir() if p.suffix in (".c", ".cpp", ".h"))[2:]


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Return the shares of functions."""
    count = max(1, len(rows))
    lifted = [r for r in rows if r.lifted]
    return {
        "functions": len(rows),
        "parse": sum(r.parsed for r in rows) / count,
        "lift": len(lifted) / count,
        "same": sum(r.compared == "same" for r in lifted) / max(1, len(lifted)),
    }


def main() -> None:
    """Print the table and the reasons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="files or functions whose name has this")
    parser.add_argument("--no-build", action="store_true", help="parse and lift only")
    parser.add_argument("--json", type=Path, help="write the rows")
    options = parser.parse_args()
    rows: list[Row] = []
    for path in kernel_files():
        made = measure(path, not options.no_build, options.only)
        rows += made
        if made:
            parsed, lifted = sum(r.parsed for r in made), sum(r.lifted for r in made)
            same = sum(r.compared == "same" for r in made)
            print(f"{path.name[:84]:84} {len(made):4} {parsed:4} {lifted:4} {same:4}", flush=True)
    print({k: round(v, 3) for k, v in summary(rows).items()})
    for title, reasons in (
        ("not parsed", [r.reason for r in rows if not r.parsed]),
        ("not lifted", [r.reason for r in rows if r.parsed and not r.lifted]),
        (
            "not the same",
            [
                f"{r.function}: {r.compared}"
                for r in rows
                if r.lifted and r.compared != "same" and r.compared
            ],
        ),
    ):
        print(f"\n{title}: {len(reasons)}")
        for reason, count in Counter(reasons).most_common(60):
            print(f"  {count:3} {reason}")
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in rows], indent=1))


if __name__ == "__main__":
    main()
