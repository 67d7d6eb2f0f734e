"""Lowered kernels to one CUDA C++ text: a warp per thread of the language, arrays shared per warp.

In: the frozen `UnitSpec` that every emitter takes. Out: text for nvcc, NVRTC, or a C++ compiler
that is given another header in place of templates/warp.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dovetail.codegen.emit import KernelSpec, UnitSpec, read_template, shared_helpers, templates
from dovetail.ir.errors import ScheduleError
from dovetail.ir.expr import ArrayType, Call, Int, Name, NamedType
from dovetail.ir.low.nodes import Declare, ExprStmt, Function, Param
from dovetail.ir.low.print import print_low
from dovetail.ir.low.types import size_of
from dovetail.ir.rewrite import rewrite_node

SHARED_BYTES = 48 << 10
"""Shared memory a block may declare, on every GPU."""
BLOCK_WARPS = 8
ALIGNMENT = 64
WARP_VALUES = {"tid": "dt_warp()", "nth": "dt_warps()"}


@dataclass(frozen=True, slots=True)
class CudaKernelText:
    """Everything the template lays out for one kernel.

    `warps` are in a block. A kernel that does not share its work runs on the first warp, `alone`.
    """

    name: str
    family: str
    binding: tuple[tuple[str, int | str], ...]
    body: str
    warps: int
    alone: bool
    params: tuple[str, ...]
    arguments: tuple[str, ...]


def emit_cuda(spec: UnitSpec) -> str:
    """Return the CUDA C++ text of all kernels of `spec`; it needs no other file of ours.

    The index entries of the kernels say how many warps a block has.
    """
    return (
        templates()
        .get_template("unit.cu.j2")
        .render(
            spec=spec,
            warp=read_template("warp.cuh"),
            helpers=[
                print_low(replace(helper, static=False, inline=False))
                for helper in shared_helpers(spec.kernels, spec.target)
            ],
            kernels=[cuda_kernel_text(kernel) for kernel in spec.kernels],
        )
    )


def cuda_kernel_text(kernel: KernelSpec) -> CudaKernelText:
    """Return the pieces of one kernel."""
    entry = kernel.entry
    function = kernel.unit.function(entry.name)
    given = [
        param
        for param, about in zip(function.params, entry.params, strict=True)
        if about.kind != "thread"
    ]
    return CudaKernelText(
        name=entry.name,
        family=entry.family,
        binding=tuple(entry.binding.items()),
        body=print_low(share_arrays(function, entry.warps)),
        warps=entry.warps,
        alone=len(given) == len(function.params),
        params=tuple(_spell_param(param) for param in given),
        arguments=tuple(WARP_VALUES.get(param.name, param.name) for param in function.params),
    )


def block_warps(function: Function) -> int:
    """Return how many warps of a block have room for their arrays in shared memory.

    Raises ScheduleError where not even one has.
    """
    needed = sum(_array_bytes(node) for node in function.walk() if isinstance(node, Declare))
    if needed > SHARED_BYTES:
        raise ScheduleError(
            f"`{function.name}` needs {needed} bytes of shared memory for each warp, a block has "
            f"{SHARED_BYTES}; bind smaller tiles"
        )
    return min(BLOCK_WARPS, SHARED_BYTES // max(needed, 1))


def _array_bytes(node: Declare) -> int:
    if not isinstance(node.type, ArrayType):
        return 0
    size = size_of(node.type, {})
    assert size is not None, "lowering leaves arrays of known size"
    return -(-size // ALIGNMENT) * ALIGNMENT


def share_arrays(function: Function, warps: int) -> Function:
    """Return `function` with every array as a piece of shared memory, one for each warp."""

    def share(node: Declare) -> ExprStmt | None:
        if not isinstance(node.type, ArrayType):
            return None
        assert isinstance(node.type.of, NamedType)
        assert node.type.size is not None
        args = (Name(id=node.type.of.name), Name(id=node.name), node.type.size, Int(value=warps))
        return ExprStmt(expr=Call(name="DT_LOCAL", args=args))

    changed = rewrite_node(function, [(Declare, share)])
    assert isinstance(changed, Function)
    return changed


def _spell_param(param: Param) -> str:
    """Return a parameter as C declares it."""
    return print_low(Declare(type=param.type, name=param.name)).rstrip(";\n")
