"""What lowering, emission and the interpreter know of an instruction set: a record of tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from typing import Literal

from dovetail.codegen.isa.intrinsics import Intrinsic
from dovetail.ir.diagnostics import Source
from dovetail.ir.expr import Call
from dovetail.ir.low.nodes import Function
from dovetail.ir.low.parse import parse_low


@dataclass(frozen=True)
class Target:
    """One instruction set.

    `lanes` is VL, the float32 lanes of a vector; `registers` the vector registers a micro-kernel
    may fill. `types` spells high-IR types in C. `ops` gives for each high-IR operation (`vfma`,
    `vload.bf16` ...) a C expression over `{0}`, `{1}` ...; what one instruction cannot do calls a
    `dt_*` helper of the prelude. `cpu_features` are /proc/cpuinfo flags. `device` targets are
    accelerators: they have another emitter and toolchain. `bf16_dot`: `vdot_pairs` is one
    instruction, twice the rate of float32. `tiles`: it has tile registers, which multiply bfloat16
    matrices (`tile_dots`). `quads` says which codes `vdot_quads` takes: 0 to 127 where it is
    "narrow" (two products are added in 16 bits, or signed bytes multiplied), 0 to 255 where it is
    "wide". `sums_16`: products of quads are added in 16 bits first (`vmul_quads`), where several of
    them fit, since no instruction adds four of them in 32. `zig_cpu` stands for a `-march` of
    `cflags`, which zig spells its own way. CPUs with one of `slow_flags` run the target, but slower
    than a lesser one.
    """

    name: str
    isa: str
    lanes: int
    registers: int
    types: Mapping[str, str]
    ops: Mapping[str, str]
    headers: tuple[str, ...]
    cflags: tuple[str, ...]
    machine: str
    zig_target: str
    cpu_features: frozenset[str]
    intrinsics: Mapping[str, Intrinsic]
    prelude_files: tuple[str, ...]
    constants: Mapping[str, int] = field(default_factory=dict)
    device: bool = False
    bf16_dot: bool = False
    tiles: bool = False
    quads: Literal["narrow", "wide"] = "narrow"
    sums_16: bool = False
    zig_cpu: str = ""
    slow_flags: frozenset[str] = frozenset()

    @property
    def rounds_rows(self) -> bool:
        """Whether products of many rows and bfloat16 weights round the activations, too."""
        return self.bf16_dot or self.tiles

    @cached_property
    def prelude(self) -> dict[str, Function]:
        """The `dt_*` helpers by name, in the order of the prelude text."""
        folder = files("dovetail.codegen.isa")
        texts = [Source(n, (folder / n).read_text(encoding="utf-8")) for n in self.prelude_files]
        items = [item for text in texts for item in parse_low(text).items]
        return {item.name: item for item in items if isinstance(item, Function)}

    def prelude_functions(self, names: Iterable[str]) -> tuple[Function, ...]:
        """Return the helpers among `names` and all helpers these call, each before its users."""
        needed: set[str] = set()
        waiting = [n for n in names if n in self.prelude]
        while waiting:
            name = waiting.pop()
            if name not in needed:
                needed.add(name)
                waiting += [n for n in called_names(self.prelude[name]) if n in self.prelude]
        return tuple(f for name, f in self.prelude.items() if name in needed)


def called_names(function: Function) -> set[str]:
    """Return the names of all functions and intrinsics a function calls."""
    return {node.name for node in function.walk() if isinstance(node, Call)}
