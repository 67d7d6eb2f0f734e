"""Attention of llm.c, as it stands in its repository: lifted, built, tuned, timed beside ours.

    python -m benchmarks.lift_attention [--tokens N,N] [--json FILE]

One thread, float32, causal, ways in turns. Times are of the CPU, to which other processes do not
add. Ours reads keys from pages, llm.c from the rows of its QKV; results are compared with float64.
Also beside them: gcc's build of llm.c's own text.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Report, origin, parse_numbers
from benchmarks.lift import CORPUS, Row, kernel_files, lift_row, read_file, setting_of
from dovetail.codegen.catalog import HeadShape, KernelRequest, kernel_request
from dovetail.codegen.library import LibrarySpec, build_library
from dovetail.codegen.lift.unroll import CHOICES, UNROLL, unroll_kernel
from dovetail.codegen.targets import host_target
from dovetail.compiler.measure.attention import AttentionRun
from dovetail.compiler.measure.meter import PREFILL, AttentionCase, Candidate
from dovetail.compiler.rules.schedules import make_schedule
from dovetail.ir.high import nodes as high
from dovetail.runtime.machine.library import KernelLibrary
from dovetail.runtime.native.tape import Team

FILE, FUNCTION = "llm_c__train_gpt2.c", "attention_forward"
HEADS, HEAD_DIM = 12, 64
ROUNDS = 15


def lifted_unit() -> high.Unit:
    """Return llm.c's attention in the high IR, how many vectors a loop takes left open."""
    (path,) = (each for each in kernel_files() if each.name == FILE)
    found = lift_row(read_file(path, setting_of(path)), Row(FILE, FUNCTION))
    assert found is not None, "llm.c's attention does not lift"
    kernel = found.unit.functions[-1]
    made = unroll_kernel(kernel)
    return high.Unit(functions=(*found.unit.functions[:-1], made))


def own_text() -> str:
    """Return the function as llm.c has it."""
    text = (CORPUS / FILE).read_text()
    start = text.index(f"void {FUNCTION}(")
    end = text.index("\nvoid ", start + 1)
    return "#include <math.h>\n#include <stddef.h>\n" + text[start:end]


def build_own(flags: tuple[str, ...]) -> ctypes.CDLL:
    """Build llm.c's text with gcc and its own flags.

    They are left out of the link: with -Ofast it would have this whole process take numbers below
    1e-38 for zeros.
    """
    with tempfile.TemporaryDirectory(prefix="dovetail-attention-") as folder:
        Path(folder, "k.c").write_text(own_text())
        for command in (
            ["gcc", *flags, "-w", "-fPIC", "-c", "k.c"],
            ["gcc", "-shared", "k.o", "-o", "k.so", "-lm"],
        ):
            subprocess.run(command, cwd=folder, check=True)
        return ctypes.CDLL(str(Path(folder, "k.so")))


def reference(inp: np.ndarray) -> np.ndarray:
    """Return causal attention of rows of q, k, v in float64."""
    q, k, v = np.split(inp.astype(np.float64).reshape(len(inp), -1, HEAD_DIM), 3, axis=1)
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(HEAD_DIM)
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out: np.ndarray = np.einsum("hts,shd->thd", weights, v).reshape(len(inp), -1)
    return out


def measure(tokens: int, heads: int = HEADS, rounds: int = ROUNDS) -> dict[str, float]:
    """Return CPU seconds of each way; all of them give what float64 does."""
    target, unit = host_target(), lifted_unit()
    names = {f"{FUNCTION}_{u}": u for u in CHOICES}
    requests = tuple(KernelRequest("llm_c", FUNCTION, {UNROLL: u}, n) for n, u in names.items())
    built = build_library(
        LibrarySpec(target, requests, name="llm_c", modules={"llm_c": unit}, tvm_ffi=False)
    )
    library, width = ctypes.CDLL(str(built.path)), heads * HEAD_DIM
    rng = np.random.default_rng(0)
    inp = rng.standard_normal((tokens, 3 * width)).astype(np.float32)
    expected = reference(inp)
    scratch = [np.zeros((heads, tokens, tokens), np.float32) for _ in range(2)]
    out = np.zeros((tokens, width), np.float32)
    places = [ctypes.c_void_p(a.ctypes.data) for a in (out, *scratch, inp)]
    kinds = (ctypes.c_int64, ctypes.c_int)
    sizes = [[kind(n) for n in (1, tokens, width, heads)] for kind in kinds]
    calls: dict[str, Callable[[], object]] = {
        f"lifted, {u} vectors at a time": lambda n=n: getattr(library, n)(*places, *sizes[0])
        for n, u in names.items()
    }
    for title, flags in (
        ("gcc -O3 -march=native", ("-O3", "-march=native")),
        ("gcc, llm.c's flags", ("-Ofast", "-fno-finite-math-only", "-march=native")),
    ):
        own = build_own(flags)
        calls[title] = lambda own=own: own.attention_forward(*places, *sizes[1])
    calls["ours"] = bind_ours(tokens, heads)
    times: dict[str, list[float]] = {title: [] for title in calls}
    for turn in range(rounds):
        for title, call in calls.items():
            out[:] = np.nan
            start = time.thread_time()
            call()
            times[title].append(time.thread_time() - start)
            if turn == 0 and title != "ours":
                assert np.abs(out - expected).max() < 1e-4, title
    return {title: statistics.median(each) for title, each in times.items()}


def bind_ours(tokens: int, heads: int) -> Callable[[], object]:
    """Return a call of our attention of a prompt, checked; its keys and values are float32, too."""
    target = host_target()
    request = kernel_request(PREFILL, target, "f32", HeadShape(HEAD_DIM, 1))
    built = build_library(LibrarySpec(target, (request,), name="attention", tvm_ffi=False))
    library = KernelLibrary(built.path, built.index)
    case = AttentionCase(
        kind=PREFILL,
        n_q=heads,
        n_kv=heads,
        head_dim=HEAD_DIM,
        rows=tokens,
        context=tokens,
        dtype="f32",
        threads=1,
    )
    team = Team(library, 1, spin=0)
    candidate, run = Candidate(request.name, make_schedule()), AttentionRun(library, team, case, 0)
    assert run.check(candidate), "our attention is wrong"
    return lambda: run.bind(candidate, 1).run(team)


def rows_of(tokens: int, heads: int, found: dict[str, float]) -> list[dict[str, Any]]:
    """Return a row for each way; `times_ours` is its time over that of ours."""
    shape = {"tokens": tokens, "heads": heads, "head_dim": HEAD_DIM, "target": host_target().name}
    return [
        {**shape, "way": way, "ms": 1e3 * t, "times_ours": t / found["ours"], **origin()}
        for way, t in found.items()
    ]


def main() -> None:
    """Print the times of each way, and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--tokens", type=parse_numbers, default=(256, 1024), help="of a prompt")
    parser.add_argument("--json", type=Path, metavar="F", help="write the report to F")
    options = parser.parse_args()
    report = Report("lift_attention", {"threads": 1, "rounds": ROUNDS})
    for tokens in options.tokens:
        report.rows += rows_of(tokens, HEADS, measure(tokens))
    report.print(("tokens", "heads", "head_dim", "way", "ms", "times_ours"))
    report.write(options.json)


if __name__ == "__main__":
    main()
