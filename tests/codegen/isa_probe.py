"""Runs every intrinsic of a table twice, as compiled and by its numpy meaning, on the same bytes.

One C program holds all cases of a target; it reads records from stdin and writes results to stdout.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dovetail.codegen.emit import emit_unit
from dovetail.codegen.isa.intrinsics import SCALAR_TYPES, Intrinsic
from dovetail.codegen.isa.target import Target
from tests.codegen.interp.meanings import immediates_of, meaning_of
from tests.codegen.interp.memory import Memory, Pointer
from tests.codegen.interp.vectors import VECTOR_TYPES
from tests.codegen.programs import STREAMS, build_program

SLOT = 128  # bytes of one argument, value or memory
SLOTS = 16
RESULT = 64
RECORD = SLOT * SLOTS
TRIALS = 12
EDGES = np.array(
    """0 -0 1 -1 0.5 1.5 2.5 -2.5 3.5 inf -inf nan 1e-40 -1e-42 3e38 2147483648 -2147483648
    2147483520 4e9 -4e9 65504 65520 6e-8 5.96e-8 2.98023223876953125e-8 1e-3""".split(),
    np.float32,
)
UNDEFINED_FROM = {"_mm256_castps128_ps256": 4, "_mm256_castsi128_si256": 4}
UNDEFINED_FROM |= {"_mm_undefined_ps": 0, "_mm512_castps256_ps512": 8, "_mm512_castps128_ps512": 4}
"""Lanes from here on are undefined, as after a cast to a wider register."""


@dataclass(frozen=True)
class Case:
    """An intrinsic with one value for its immediates."""

    intrinsic: Intrinsic
    immediate: int = 0


def cases_of(rows: Iterable[Intrinsic]) -> list[Case]:
    return [Case(row, value) for row in rows for value in immediates_of(row) or (0,)]


def is_pointer(kind: str) -> bool:
    return kind.endswith("*")


def is_written(kind: str) -> bool:
    return is_pointer(kind) and not kind.startswith("const ")


def case_text(number: int, case: Case) -> str:
    """Return the C function of one case: arguments from `in`, result and memory to `out`."""
    lines, arguments = [], []
    for position, kind in enumerate(case.intrinsic.params):
        at = f"in + {position * SLOT}"
        if kind == "imm":
            arguments.append(str(case.immediate))
        elif is_written(kind):
            lines.append(f"memcpy(out + {RESULT}, {at}, {SLOT});")
            arguments.append(f"({kind})(out + {RESULT})")
        elif is_pointer(kind):
            arguments.append(f"({kind})({at})")
        else:
            lines.append(f"{kind} a{position}; memcpy(&a{position}, {at}, sizeof a{position});")
            arguments.append(f"a{position}")
    call = f"{case.intrinsic.name}({', '.join(arguments)})"
    if case.intrinsic.returns == "void":
        lines.append(f"{call};")
    else:
        lines.append(f"{case.intrinsic.returns} r = {call}; memcpy(out, &r, sizeof r);")
    return f"static void case_{number}(const uint8_t* in, uint8_t* out) {{ {' '.join(lines)} }}\n"


def program_text(target: Target, cases: Sequence[Case]) -> str:
    functions = "".join(case_text(i, case) for i, case in enumerate(cases))
    names = ", ".join(f"case_{i}" for i in range(len(cases)))
    return f"""{emit_unit("probe", target, (), ())}
{STREAMS}
{functions}
static void (*const cases[])(const uint8_t*, uint8_t*) = {{ {names} }};
static _Alignas(64) uint8_t in[{RECORD}], out[{RESULT + SLOT}];
int main(void) {{
  for (int i = 0; i < {len(cases)}; ++i) {{
    for (int trial = 0; trial < {TRIALS}; ++trial) {{
      take(in, sizeof in);
      memset(out, 0, sizeof out);
      cases[i](in, out);
      give(out, sizeof out);
    }}
  }}
  return 0;
}}
"""


def run_program(
    target: Target, cases: Sequence[Case], records: bytes, cache: Path, emulator: Sequence[str]
) -> npt.NDArray[np.uint8]:
    # unoptimised: each case calls its intrinsic once, and -O1 took six times as long
    flags = ("-O0", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
    program = build_program(target, program_text(target, cases), cache, flags)
    done = subprocess.run([*emulator, str(program)], input=records, capture_output=True, check=True)
    return np.frombuffer(done.stdout, np.uint8).reshape(len(cases), TRIALS, RESULT + SLOT)


def argument_bytes(kind: str, trial: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return the bytes of one argument: edge values first, then random ones of every magnitude."""
    element = element_of(kind)
    if element == "float32":
        spread = rng.standard_normal(SLOT // 4) * 2.0 ** rng.integers(-30, 40, SLOT // 4)
        plain = rng.uniform(-8, 8, SLOT // 4)
        edges = rng.choice(EDGES, SLOT // 4)
        value = (edges, edges, edges, plain, spread)[min(trial, 4)].astype(np.float32)
        return value.view(np.uint8)
    if element == "float16":
        return rng.integers(0, 0x7C00, SLOT // 2, np.uint16).view(np.uint8)
    return rng.integers(0, 256, SLOT, np.uint8)


def element_of(kind: str) -> str:
    base = kind.removeprefix("const ").rstrip("*").strip()
    if base in VECTOR_TYPES:
        return VECTOR_TYPES[base].dtype
    return SCALAR_TYPES.get(base, "uint8")


def make_records(cases: Sequence[Case], seed: int) -> npt.NDArray[np.uint8]:
    """Return random arguments; the order of a reduction is the compiler's, so no NaN there."""
    rng = np.random.default_rng(seed)
    records = np.zeros((len(cases), TRIALS, SLOTS, SLOT), np.uint8)
    for i, case in enumerate(cases):
        for trial in range(TRIALS):
            for position, kind in enumerate(case.intrinsic.params):
                step = max(trial, 3) if "reduce_m" in case.intrinsic.name else trial
                records[i, trial, position] = argument_bytes(kind, step, rng)
    return records


def evaluate(case: Case, record: npt.NDArray[np.uint8]) -> tuple[object, npt.NDArray[np.uint8]]:
    """Return the result of the meaning and the memory it wrote (zeros without a pointer)."""
    memory = np.zeros(SLOT, np.uint8)
    arguments: list[object] = []
    for position, kind in enumerate(case.intrinsic.params):
        data = record[position].copy()
        if kind == "imm":
            arguments.append(case.immediate)
        elif is_pointer(kind):
            arguments.append(Pointer(Memory(f"argument {position}", data)))
            memory = data if is_written(kind) else memory
        elif kind in VECTOR_TYPES:
            vector = VECTOR_TYPES[kind]
            arguments.append(data.view(vector.dtype)[: vector.lanes])
        else:
            arguments.append(data.view(SCALAR_TYPES[kind])[0])
    with np.errstate(all="ignore"):
        return meaning_of(case.intrinsic)(*arguments), memory


def mismatch(case: Case, record: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> str:
    """Return what differs between the compiled instruction and its meaning, or an empty string."""
    row = case.intrinsic
    result, memory = evaluate(case, record)
    label = f"{row.name} imm={case.immediate}"
    if not np.array_equal(memory, out[RESULT:]):
        return f"{label}: memory {memory} != {out[RESULT:]}"
    if row.returns == "void":
        return "" if result is None else f"{label}: returns {result}"
    vector = VECTOR_TYPES.get(row.returns)
    dtype = np.dtype(vector.dtype if vector else SCALAR_TYPES[row.returns])
    lanes = vector.lanes if vector else 1
    got = np.atleast_1d(np.asarray(result))
    if vector and (got.dtype != dtype or got.size != lanes):
        return f"{label}: {got.dtype}[{got.size}] instead of {dtype}[{lanes}]"
    defined = UNDEFINED_FROM.get(row.name, lanes)
    got = got.astype(dtype)[:defined]
    want = out[: lanes * dtype.itemsize].view(dtype)[:defined]
    bits = f"uint{8 * dtype.itemsize}"
    same = got.view(bits) == want.view(bits)
    if dtype.kind == "f" and dtype.itemsize > 2:
        same |= np.isnan(got) & np.isnan(want)
    return "" if same.all() else f"{label}: meaning {got} != compiled {want}"


def check_table(
    target: Target, rows: Iterable[Intrinsic], cache: Path, emulator: Sequence[str] = ()
) -> list[str]:
    """Return every mismatch between the meanings of `rows` and the instructions of `target`."""
    cases = cases_of(rows)
    records = make_records(cases, seed=7)
    out = run_program(target, cases, records.tobytes(), cache, emulator)
    found = [
        mismatch(case, records[i, trial], out[i, trial])
        for i, case in enumerate(cases)
        for trial in range(TRIALS)
    ]
    return [text for text in found if text]
