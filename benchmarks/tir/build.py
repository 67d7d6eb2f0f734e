"""TensorIR to machine code: a flat kernel in, a callable out, through TVM's LLVM.

The passes are few: kernels come with their loops, vectors and registers chosen already.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx as tir
from tvm.target import Target as TvmTarget
from tvm.target import codegen

from dovetail.codegen.catalog import KernelRequest
from dovetail.codegen.isa.target import Target
from dovetail.codegen.lower import flatten
from dovetail.codegen.targets import best_target, host_features
from dovetail.ir.errors import SpecError
from dovetail.ir.high.nodes import Unit
from tir.statements import make_prim_func
from tir.values import Tir

PIPELINE = "dovetail"
CPUS: Mapping[str, str] = {"avx512": "x86-64-v4", "avx2": "x86-64-v3", "generic": "generic"}
"""LLVM's name of the least CPU with an instruction set."""
OPTIONS = ("-disable-machine-licm:bool=true",)
"""LLVM would keep the constants of what follows a product in registers during its loop, and spill
accumulators for them: a gated product ran at 0.3-0.5 of its speed."""


@dataclass(frozen=True, slots=True)
class TirKernel:
    """A kernel built by TVM. `text` is its TensorIR as TVMScript."""

    name: str
    text: str
    function: Any

    def __call__(self, *args: float) -> None:
        """Run it: the kernel's parameters in order, pointers as addresses, null as 0.

        The interpreter lock is released meanwhile, so that Python threads may share the work.
        """
        self.function(*args)


def build_request(request: KernelRequest, target: Target, unit: Unit) -> TirKernel:
    """Return the kernel of `request` built for `target`."""
    if target.isa not in CPUS:
        raise SpecError(f"the TIR backend has no CPU for {target.name}; use {', '.join(CPUS)}")
    function, _ = flatten(unit, request.kernel, request.binding, target, name=request.name)
    module = tvm.IRModule({request.name: make_prim_func(function, target.lanes, request.name)})
    tir.register_tir_pipeline(PIPELINE, _pipeline)
    built = tvm.compile(module, tvm_target(target), tir_pipeline=PIPELINE)
    return TirKernel(request.name, module.script(), built[request.name])


def tvm_target(target: Target) -> Tir:
    """Return TVM's target: this very CPU if `target` is the machine's best."""
    best = best_target(platform.machine(), host_features())
    same = target.name == best.name and target.isa != "generic"
    cpu = codegen.llvm_get_system_cpu() if same else CPUS[target.isa]
    return TvmTarget({"kind": "llvm", "mcpu": cpu, "cl-opt": list(OPTIONS)})


def _pipeline() -> tuple[Any, Any, Any]:
    passes = tir.transform
    first = tvm.ir.transform.Sequential(
        [
            passes.FlattenBuffer(),
            passes.AnnotateEntryFunc(),
            passes.SplitHostDevice(),
            passes.MakePackedAPI(),
        ]
    )

    def last() -> Any:
        return tvm.ir.transform.Sequential([passes.LowerTVMBuiltin(), passes.LowerIntrin()])

    return first, last, last
