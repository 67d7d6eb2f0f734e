"""Third-party kernels: how many of their functions parse, lift, and compute what gcc's build does.

    python -m benchmarks.lift [--only TEXT] [--json FILE] [--seconds N] [--vectors]

Reads the unmodified files of DOVETAIL_CORPUS/kernels, each with a text of benchmarks/lift_headers
in front. What lifts is built for two targets and compared with gcc's build of the same text, on
random memory and several sizes, in child processes; NEON by qemu-aarch64. With --json it keeps what
is done, and goes on from there. With --vectors it also counts vector instructions: of gcc's build
at -O1, which has those that the text asks for, and of ours as it is shipped.
"""

from __future__ import annotations

import argparse
import atexit
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path

import numpy as np

from benchmarks.common import origin
from dovetail.codegen.catalog import resolve_imports
from dovetail.codegen.isa.target import Target
from dovetail.codegen.lift import lift_function
from dovetail.codegen.lower import lower
from dovetail.codegen.targets import TARGETS
from dovetail.codegen.user_file import Around, read_pieces
from dovetail.errors import DovetailError
from dovetail.ir.diagnostics import Source
from dovetail.ir.errors import SyntaxDiagnostic
from dovetail.ir.expr import NamedType, PointerType
from dovetail.ir.files import write_whole
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
PORTION = 12
"""Functions of a file that are built as one program."""
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
    vectors: tuple[int, int] | None = None  # instructions: of gcc's build of x86, and of ours
    machine: str = ""
    commit: str = ""


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
    wide = re.search(r"avx512|skylakex|cooperlake|_spr|avx256skx|avxvnni", name)
    flags = () if arm else (*X86_FLAGS, *(AVX512 if wide else ()))
    if "gfni" in name:
        flags = (*flags, "-mgfni")
    if re.search(r"cooperlake|_spr", name):
        flags = (*flags, "-mavx512bf16")
    if re.search(r"amx|_spr", name):
        flags = (*flags, "-mamx-tile", "-mamx-int8", "-mamx-bf16")
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
def work_folder() -> Path:
    """Return a folder that ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="dovetail-lift-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def include_folder() -> Path:
    """Return a folder with the headers of the corpus that other files of it include."""
    folder = work_folder() / "include"
    (folder / "a/b").mkdir(parents=True)
    for path in CORPUS.glob("*.h"):
        (folder / path.name.split("__")[-1]).symlink_to(path.resolve())
    for path in CORPUS.glob("*"):
        for name in re.findall(r'#include [<"]([^>"]+)[>"]', path.read_text(errors="replace")):
            bare = name if not name.startswith("..") else Path(name).name
            of_compiler = re.match(r"\w*intrin\.h$|arm_|riscv|sys/|omp|Acc", bare) or (
                "/" not in bare
                and re.match(r"(std|int|string|assert|math|float|time|ctype|fcntl|unistd)", bare)
            )
            if of_compiler:
                continue
            made = folder / bare
            made.parent.mkdir(parents=True, exist_ok=True)
            if not made.exists():
                vectors = re.fullmatch(r"src/xnnpack/simd/f32-(\w+)\.h", bare)
                text = HEADERS.joinpath("xnnpack_simd.h").read_text()
                made.write_text(f"#define SIMD_{vectors[1]} 1\n{text}" if vectors else "")
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
    """Return for each parameter what it is.

    `p`: a pointer; `q`: one to pointers; `v`: a struct; `i`: an integer; `f`, `d`: a number.
    """
    kinds = []
    for param in function.params:
        found = scalar(param.type)
        by_value = found is None and isinstance(param.type, NamedType)
        kinds.append(
            "v"
            if by_value
            else "q"
            if isinstance(getattr(param.type, "of", None), PointerType)
            else "p"
            if found is None
            else {"float": "f", "double": "d"}.get(found.name, "i")
        )
    return kinds


def driver(entries: Sequence[Entry]) -> str:
    """Return the C text of a program's `main`: calls one of the functions on memory from stdin."""
    count = max(len(entry.kinds) for entry in entries) + 1
    cases = "".join(
        f"    case {i}: {entry.call(len(entry.kinds))} break;\n" for i, entry in enumerate(entries)
    )
    return f"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static char memory[{count} * {ARENA}] __attribute__((aligned(64)));
enum {{ ROWS = {ARENA // 64} }};
static void point(char *at, char *to) {{
  for (int i = 0; i < ROWS; ++i) ((char **)at)[i] = to + 64 * (i * 37 % 101);
}}
int main(int argc, char **argv) {{
  long long words[{count}]; double reals[{count}];
  int which = atoi(argv[1]), used = atoi(argv[2]);
  if (fread(words, 8, used, stdin) != used || fread(reals, 8, used, stdin) != used) return 1;
  if (fread(memory, {ARENA}, used, stdin) != used) return 1;
  switch (which) {{
{cases}  }}
  fwrite(memory, {ARENA}, used, stdout);
  return 0;
}}
"""


@dataclass(frozen=True)
class Entry:
    """How a program calls a function: kinds and types of its parameters, what it returns."""

    name: str
    kinds: tuple[str, ...]
    types: tuple[str, ...]
    returns: str

    def call(self, last: int) -> str:
        """Return the statement; what comes back goes to the memory after the parameters'."""
        args = [
            {
                "p": f"(void *)({place(i)})",
                "q": f"(void *)({place(i)})",
                "v": f"*({type_} *)({place(i)})",
                "i": f"({type_})words[{i}]",
                "f": f"(float)reals[{i}]",
                "d": f"reals[{i}]",
            }[kind]
            for i, (kind, type_) in enumerate(zip(self.kinds, self.types, strict=True))
        ]
        if self.returns == "lifted":
            args.append(f"(void *)({place(last)})")
        invoke = f"{self.name}({', '.join(args)});"
        for i in (i for i, kind in enumerate(self.kinds) if kind == "q"):
            invoke = f"point({place(i)}, {place(last)}); {invoke} memset({place(i)}, 0, 8 * ROWS);"
        if self.returns in ("void", "lifted"):
            return invoke
        made = f"{self.returns} made = {invoke} memcpy({place(last)}, &made, sizeof made);"
        return f"{{ {made} }}"


def spelled_type(text: str, function: low.Function, index: int) -> str:
    """Return a parameter's type; of a struct without a tag, as the file's text spells it."""
    param = function.params[index]
    type_ = print_low(param.type)
    found = re.search(rf"\b{function.name}\s*\(([^()]*)\)\s*{{", text)
    if "anonymous" not in type_ or not found:
        return type_
    return re.sub(rf"\b{param.name}\s*$", "", found[1].split(",")[index].strip())


def place(index: int) -> str:
    """Return the address of the memory of a parameter."""
    return f"memory + {index} * {ARENA} + {ARENA // 4}"


def compile_program(text: str, flags: Sequence[str], arm: bool) -> list[str] | str:
    """Return the command of a compiled program, or what the compiler said."""
    folder = Path(tempfile.mkdtemp(dir=work_folder()))
    (folder / "k.c").write_text(text)
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl", "-static"]
    command = [*(zig if arm else ["gcc"]), "-O1", "-w", "-fno-strict-aliasing", "-fwrapv"]
    command += ["-std=gnu11", "-ffp-contract=off", *flags]
    command += ["-fno-sanitize=all", "-Wno-implicit-function-declaration"] if arm else []
    command += ["-ffunction-sections", "-Wl,--gc-sections"]
    command += [] if arm else ["-static", "-Wl,--unresolved-symbols=ignore-all"]
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
            some = meant_sizes(function.name, param.name)
            words.append(int(rng.choice(some or sizes)) if trial % 2 or some else whole)
            reals.append(float(np.float32(rng.uniform(-2, 2))))
            memory.append(random_memory(param, rng, kind))
        memory.append(bytes(ARENA))
        words.append(0)
        reals.append(0.0)
        count = len(words)
        yield struct.pack(f"<{count}q{count}d", *words, *reals) + b"".join(memory)


def meant_sizes(function: str, param: str) -> tuple[int, ...]:
    """Return the numbers that a parameter may have, as far as names tell it."""
    if re.search("get_scale|sign_bytes", function):
        return (0, 1)  # the place in a table
    if param == "nrc":
        return (1,)  # rows at a time; ggml asserts it
    if re.search("_f(16|32)_gemm_", function):
        return GEMM_SIZES.get(param, ())
    if param in ("n", "k") and re.search("vec_dot|quantize_row", function):
        return (256, 512)  # whole blocks of every format
    return ()


GEMM_SIZES = {
    "kc": (4, 8, 12, 20, 32),
    "a_stride": (32, 64),
    "cm_stride": (256, 512),
    "cn_stride": (64,),
}
"""In bytes: whole elements, and rows that do not overlap."""


def random_memory(param: low.Param, rng: np.random.Generator, kind: str) -> bytes:
    """Return memory for a parameter: floats near 1, integers that may be distances in bytes."""
    type_ = param.type
    of = getattr(type_, "of", None)
    found = scalar(of) if of is not None else None
    if found is not None and found.floating:
        dtype = {2: np.float16, 4: np.float32, 8: np.float64}[found.size]
        return rng.uniform(-1, 1, ARENA // found.size).astype(dtype).tobytes()
    if found is not None and found.size >= 4:
        return (4 * rng.integers(0, 25, ARENA // 4)).astype(np.int32).tobytes()
    # bytes whose every pair is a half of modest size and whose every four a modest float
    data = rng.integers(0, 256, ARENA).astype(np.uint8)
    data[1::2] = rng.choice(
        np.array([0x2C, 0x2E, 0x30, 0x34, 0x38, 0x3A, 0x3C], np.uint8), ARENA // 2
    )
    return data.tobytes()


def agree(first: bytes, second: bytes) -> bool:
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


def build_programs(
    make: Callable[[Sequence[Candidate]], str],
    candidates: Sequence[Candidate],
    flags: Sequence[str],
    arm: bool,
) -> dict[str, list[str] | str]:
    """Return for each function the command that calls it, or why there is none.

    All are built as one program; where that fails, halves are, down to a function alone.
    """
    built = compile_program(make(candidates), flags, arm)
    if isinstance(built, str) and len(candidates) > 1:
        half = len(candidates) // 2
        parts = (candidates[:half], candidates[half:])
        return {k: v for p in parts for k, v in build_programs(make, p, flags, arm).items()}
    if isinstance(built, str):
        return {candidates[0].row.function: built}
    return {
        c.row.function: [*built, str(i), str(len(c.entry.kinds) + 1)]
        for i, c in enumerate(candidates)
    }


@dataclass(frozen=True)
class Candidate:
    """A function that was lifted, to be compared: as C, and as a module of the high IR."""

    row: Row
    function: low.Function
    unit: high.Unit
    text: str

    @property
    def entry(self) -> Entry:
        """How the function of the file is called."""
        kinds = tuple(argument_kinds(self.function))
        types = tuple(
            spelled_type(self.text, self.function, i) if k in "iv" else ""
            for i, k in enumerate(kinds)
        )
        return Entry(self.function.name, kinds, types, print_low(self.function.returns))

    @property
    def lifted_entry(self) -> Entry:
        """How the kernel is called; it gives back what the function returns through a pointer."""
        kinds = tuple(k.replace("v", "p") for k in self.entry.kinds)
        returns = "lifted" if self.entry.returns != "void" else "void"
        return Entry(f"lifted_{self.row.function}", kinds, ("long long",) * len(kinds), returns)


def original_text(path: Path, setting: Setting, candidates: Sequence[Candidate]) -> str:
    """Return the program of the functions as they stand in the file."""
    defines = "".join(f"#define {d}\n" for d in setting.defines)
    intrinsics = "#include <arm_neon.h>\n" if setting.arm else "#include <immintrin.h>\n"
    text = re.sub(r"\bint main\(", "int other_main(", path.read_text())
    header = (HEADERS / setting.header).read_text()
    calls = driver([c.entry for c in candidates])
    intrinsics += "#include <assert.h>\n"  # which some have as <cassert>
    return intrinsics + defines + exponent_tables() + header + text + calls


def lifted_text(target: Target, candidates: Sequence[Candidate]) -> str:
    """Return the program of the kernels as they are lowered for a target."""
    items = {
        item.name: item
        for c in candidates
        for item in lower(c.unit, c.row.function, {}, target, name=c.lifted_entry.name).items
    }
    heads = (*target.headers, "stddef.h", "stdint.h", "math.h", "string.h")
    includes = "".join(f"#include <{head}>\n" for head in heads)
    body = print_low(low.Unit(items=tuple(items.values())))
    return includes + HELPERS + body + driver([c.lifted_entry for c in candidates])


PACKED = re.compile(
    r"\t[^#\n]*%[yz]mm|\t(?!v?(?:mov|and|x?or|pand|px?or))(?:\w+p[sd]|v?p\w+)[ \t][^\n]*%xmm"
)
"""An instruction of x86 on several lanes; moves and bits of 16 bytes are of scalar code as well."""


def count_vectors(text: str, flags: Sequence[str]) -> Callable[[str], int]:
    """Return what tells the vector instructions of a function of a text, and of those it calls."""
    folder = Path(tempfile.mkdtemp(dir=work_folder()))
    (folder / "k.c").write_text(text)
    once = ("-fno-inline-functions-called-once", "-fno-strict-aliasing", "-fwrapv")
    includes = (f"-I{include_folder()}", f"-I{include_folder()}/a/b")
    command = ["gcc", "-w", "-std=gnu11", *once, *flags, *includes, "-c", "k.c", "-o", "k.o"]
    subprocess.run(command, cwd=folder, capture_output=True, check=True)
    show = ["objdump", "-dr", "--no-show-raw-insn", "k.o"]
    said = subprocess.run(show, cwd=folder, capture_output=True, text=True, check=True).stdout
    shutil.rmtree(folder)
    bodies = dict(re.findall(r"^[0-9a-f]+ <(\w+)>:\n((?:.+\n)*)", said, re.MULTILINE))

    def count(name: str, above: tuple[str, ...] = ()) -> int:
        body = bodies.get(name, "")
        called = {*re.findall(r"R_X86_64_\w+\t(\w+)|call\s.*<(\w+)>", body)}
        names = {a or b for a, b in called} & bodies.keys() - {name, *above}
        return len(PACKED.findall(body)) + sum(count(each, (*above, name)) for each in names)

    return count


def note_vectors(path: Path, setting: Setting, candidates: Sequence[Candidate]) -> None:
    """Note in each row how many vector instructions gcc's build of the text and ours have."""
    target = next(TARGETS[name] for name in setting.targets if name.startswith("x86"))
    ours = count_vectors(lifted_text(target, candidates), [f for f in target.cflags if f[1] != "W"])
    if setting.arm:
        theirs: Callable[[str], int] = lambda _: -1  # noqa: E731 - not counted
    else:
        text = original_text(path, setting, candidates)
        theirs = count_vectors(text, ("-O1", *setting.flags))
    for c in candidates:
        c.row.vectors = (theirs(c.row.function), ours(c.lifted_entry.name))


def compare(
    path: Path, setting: Setting, candidates: Sequence[Candidate], vectors: bool = False
) -> None:
    """Note in each row `same`, or how gcc's build of the text and ours differ."""
    ready = []
    for candidate in candidates:
        try:
            for name in setting.targets:
                lower(candidate.unit, candidate.row.function, {}, TARGETS[name], name="lifted")
        except DovetailError as error:
            candidate.row.compared = f"not lowered: {error}"
            continue
        ready.append(candidate)
    if not ready:
        return

    def original(some: Sequence[Candidate]) -> str:
        return original_text(path, setting, some)

    theirs = build_programs(original, ready, setting.flags, setting.arm)
    ready = [c for c in ready if not isinstance(theirs[c.row.function], str)]
    for candidate in candidates:
        said = theirs.get(candidate.row.function)
        if isinstance(said, str):
            candidate.row.compared = f"the file's own text does not build: {said}"
    ours = {}
    for name in setting.targets if ready else ():
        target = TARGETS[name]
        flags = [f.replace("-O3", "-O1") for f in target.cflags if not f.startswith(("-W", "-std"))]
        make = partial(lifted_text, target)
        ours[name] = build_programs(make, ready, flags, name.startswith("aarch64"))
    if vectors and ready:
        note_vectors(path, setting, ready)
    for c in ready:
        mine = {name: built[c.row.function] for name, built in ours.items()}
        wrong = next((f"{n}: {m}" for n, m in mine.items() if isinstance(m, str)), "")
        c.row.targets = [name for name, m in mine.items() if not isinstance(m, str)]
        c.row.compared = wrong or compare_runs(c, theirs[c.row.function], mine)


def compare_runs(c: Candidate, theirs: list[str], ours: Mapping[str, list[str]]) -> str:
    """Return `same`, or how calls of the built functions differ."""
    met = 0
    for data in trials(c.function, c.entry.kinds):
        wanted = run_once(theirs, data)
        if wanted is None:
            continue
        for name, command in ours.items():
            got = run_once(command, data)
            if got is None:
                return f"{name}: it dies where gcc's does not"
            if not agree(wanted, got):
                return f"{name}: other numbers"
        met += 1
        if met == WANTED:
            break
    return "same" if met else "no call of it ends well under gcc"


HELPERS = """
static inline float dt_f32_of_bits(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t dt_bits_of_f32(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
"""


# ---- the table ----


def measure(
    path: Path, builds: bool, done: Container[tuple[str, str]] = (), vectors: bool = False
) -> Iterator[list[Row]]:
    """Yield, in portions, what became of the functions of a file that are not done."""
    setting = setting_of(path)
    try:
        pieces = read_file(path, setting)
    except SyntaxDiagnostic as error:  # all its code is behind conditions
        print(error.diagnostics[0].message)
        return
    names = [name for name in pieces.own if (path.name, name) not in done]
    for at in range(0, len(names), PORTION):
        rows = [Row(path.name, name, **origin()) for name in names[at : at + PORTION]]
        lifted = [c for row in rows if (c := lift_row(pieces, row)) is not None]
        if builds and lifted:
            compare(path, setting, lifted, vectors)
        yield rows


def lift_row(pieces: Pieces, row: Row) -> Candidate | None:
    """Parse and lift a function; None where that does not work, and the row tells why."""
    try:
        function = pieces.function(row.function)
        row.parsed = True
        unit = lift_function(pieces, row.function)
    except SyntaxDiagnostic as error:
        row.reason = error.diagnostics[0].message
        return None
    except DovetailError as error:
        row.reason = str(error).removeprefix("this cannot be lifted: ")
        return None
    row.lifted = True
    literal = any(note.startswith("written out") for note in unit.notes)
    row.way = "literal" if literal else "by meaning"
    source = pieces.functions[row.function][0]
    return Candidate(row, function, resolve_imports(unit), source.text)


def kernel_files() -> list[Path]:
    """Return the files of the corpus, in order. Raises SystemExit where it is not here."""
    if not CORPUS.is_dir():
        raise SystemExit(f"{CORPUS} is not here: set DOVETAIL_CORPUS to the folder above it")
    licences = set(CORPUS.glob("LICENSE.*"))
    return sorted(
        p for p in CORPUS.iterdir() if p.suffix in (".c", ".cpp", ".h") if p not in licences
    )


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


def read_rows(file: Path | None) -> list[Row]:
    """Return the rows of an earlier run that was not finished."""
    if file is None or not file.exists():
        return []
    return [Row(**row) for row in json.loads(file.read_text())]


def main() -> None:
    """Print the table and the reasons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="files whose name has this")
    parser.add_argument("--no-build", action="store_true", help="parse and lift only")
    parser.add_argument("--vectors", action="store_true", help="count vector instructions")
    parser.add_argument("--json", type=Path, help="keep rows here; a stopped run goes on from it")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    rows = read_rows(options.json)
    for path in kernel_files():
        if options.only not in path.name:
            continue
        known = {(row.file, row.function) for row in rows}
        for made in measure(path, not options.no_build, known, options.vectors):
            rows += made
            for row in made:
                if row.lifted and row.compared not in ("", "same"):
                    print(f"  {row.function}: {row.compared}", flush=True)
            if options.json:
                write_whole(options.json, json.dumps([asdict(r) for r in rows], indent=1).encode())
            if time.monotonic() > end:
                print(f"stopped after {len(rows)} functions; the same command goes on")
                return
    show(rows)


def show(rows: Sequence[Row]) -> None:
    """Print a line for each file, the shares, and the reasons."""
    for file in dict.fromkeys(row.file for row in rows):
        made = [row for row in rows if row.file == file]
        parsed, lifted = sum(r.parsed for r in made), sum(r.lifted for r in made)
        same = sum(r.compared == "same" for r in made)
        print(f"{file[:84]:84} {len(made):4} {parsed:4} {lifted:4} {same:4}")
    print({k: round(v, 3) for k, v in summary(rows).items()})
    asked = [row for row in rows if row.vectors and row.vectors[0] > 0]
    if asked:
        ours = sum(bool(row.vectors and row.vectors[1]) for row in asked)
        print(f"vectors where the text has some: {ours} of {len(asked)}")
    for title, reasons in (
        ("not parsed", [r.reason for r in rows if not r.parsed]),
        ("not lifted", [r.reason for r in rows if r.parsed and not r.lifted]),
        (
            "not the same",
            [f"{r.function}: {r.compared}" for r in rows if r.compared not in ("", "same")],
        ),
    ):
        print(f"\n{title}: {len(reasons)}")
        for reason, count in Counter(reasons).most_common(60):
            print(f"  {count:3} {reason}")


if __name__ == "__main__":
    main()
