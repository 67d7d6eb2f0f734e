"""Cycles of the NEON register tiles by a static model of cores that are not at hand.

    python benchmarks/neon_cycles.py [--target aarch64-neon] [--dtype f32] [--cpu cortex-a57]

Builds the kernels of a matrix product for the target, takes the innermost loop of each kernel's
whole tile from the machine code, and prints what llvm-mca estimates: cycles of a turn, and
multiply-adds of vectors per cycle. All loads hit the first cache in that model, so that it tells
nothing of what a tile takes from the second. Tiles that the rules choose have a star. Needs
llvm-objdump and llvm-mca (Debian's package llvm).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from dovetail.codegen.library import LibrarySpec, build_library
from dovetail.codegen.targets import get_target
from dovetail.compiler.rules.schedules import LINEAR, GemmOp, MicroKernel, gemm_requests, rule_tiles
from dovetail.ir.model import PANEL

TURNS = 200
MULTIPLIES = ("fmla", "bfdot", "bfmmla", "sdot", "smmla", "usdot", "usmmla")
_FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
_LINE = re.compile(r"^\s*([0-9a-f]+):\s+(?:[0-9a-f]{2} ){4}\s*(\S+)\s*(.*?)\s*(?:<.*>)?$")
_TILE = re.compile(r"gemm_linear_\w+?_(\d+)x(\d+)")


class Loop(NamedTuple):
    """An innermost loop: the function it is in, its instructions without the branch back."""

    function: str
    body: tuple[str, ...]

    @property
    def multiplies(self) -> int:
        """Multiply-adds of vectors in a turn."""
        return sum(line.split()[0] in MULTIPLIES for line in self.body)


def find_loops(text: str) -> Iterator[Loop]:
    """Yield the innermost loops that multiply, from a disassembly of llvm-objdump."""
    function, code = "", list[tuple[int, str, str]]()
    for line in text.splitlines():
        if begins := _FUNCTION.match(line):
            function, code = begins[1], []
        elif found := _LINE.match(line):
            address, name, operands = int(found[1], 16), found[2], found[3]
            target = (
                re.search(r"0x([0-9a-f]+)$", operands) if name.startswith(("b.", "cb")) else None
            )
            start = int(target[1], 16) if target else address + 1
            body = [(n, o) for at, n, o in code if at >= start]
            straight = not any(n == "b" or n.startswith(("b.", "cb", "tb")) for n, _ in body)
            loop = Loop(function, tuple(f"{n} {o}" for n, o in body))
            if straight and loop.multiplies:
                yield loop
            code.append((address, name, operands))


def whole_tiles(loops: Iterable[Loop]) -> dict[str, list[Loop]]:
    """Return the loops of each kernel that multiply most: lower tiles are in it, too."""
    found: dict[str, list[Loop]] = {}
    for loop in loops:
        if tile := _TILE.search(loop.function):
            name = f"{tile[1]}x{tile[2]}"
            known = found.setdefault(name, [loop])
            if loop.multiplies > known[0].multiplies:
                found[name] = [loop]
            elif loop.multiplies == known[0].multiplies and loop not in known:
                known.append(loop)
    return found


def estimate(loop: Loop, cpu: str) -> float:
    """Return the cycles of a turn on `cpu`, a name that llvm-mca knows."""
    command = ["llvm-mca", "-mtriple=aarch64", f"-mcpu={cpu}", "-mattr=+bf16,+i8mm,+dotprod"]
    done = subprocess.run(
        [*command, f"-iterations={TURNS}"],
        input="\n".join(loop.body),
        capture_output=True,
        text=True,
        check=True,
    )
    total = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    assert total is not None, done.stdout
    return int(total[1]) / TURNS


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", default="aarch64-neon")
    parser.add_argument("--dtype", default="f32", choices=("f32", "bf16"))
    parser.add_argument("--cpu", nargs="+", default=["cortex-a57", "thunderx2t99", "tsv110"])
    asked = parser.parse_args(arguments)
    if not (shutil.which("llvm-mca") and shutil.which("llvm-objdump")):
        sys.exit("llvm-mca and llvm-objdump are not installed: apt-get install llvm")
    target = get_target(asked.target)
    kernels = gemm_requests((asked.dtype,), target, (LINEAR,))
    library = build_library(LibrarySpec(target, kernels, name="cycles", tvm_ffi=False))
    command = ["llvm-objdump", "-d", "--mattr=+bf16,+i8mm,+dotprod", str(library.path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rules = rule_tiles(GemmOp("x", LINEAR, PANEL, PANEL, asked.dtype), target)
    print(
        "| tile | multiply-adds | " + " | ".join(f"{cpu}: cycles, per cycle" for cpu in asked.cpu)
    )
    for name, loops in whole_tiles(find_loops(text)).items():
        rows, panels = map(int, name.split("x"))
        star = "*" * (MicroKernel(rows, panels) in rules)
        cycles = [min(estimate(loop, cpu) for loop in loops) for cpu in asked.cpu]
        most = loops[0].multiplies
        shown = " | ".join(f"{least:.1f}, {most / least:.2f}" for least in cycles)
        print(f"| {name}{star} | {most} | {shown} |")


if __name__ == "__main__":
    main()
