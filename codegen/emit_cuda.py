"""Lowered kernels to one CUDA C++ text: a warp per thread of the language, arrays shared per warp.

In: frozen `KernelSpec`s. Out: text for nvcc, NVRTC, or a C++ compiler that is given another header
in place of templates/warp.cuh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dovetail.codegen.emit import KernelSpec, read_template, shared_helpers, templates
from dovetail.codegen.isa.target import Target
from dovetail.ir.errors import ScheduleError
from dovetail.ir.expr import ArrayType, Call, Int, Name, NamedType
from dovetail.ir.low.nodes import Declare, ExprStmt, Function
from dovetail.ir.low.print import print_low
from dovetail.ir.low.types import size_of
from dovetail.ir.node import rewrite_node

SHARED_BYTES = 48 << 10
"""Shared memory a block may declare, on every GPU."""
BLOCK_WARPS = 8
ALIGNMENT = 64
WARP_VALUES = {"tid": "dt_warp()", "nth": "dt_warps()"}


def emit_cuda(title: str, target: Target, kernels: Sequence[KernelSpec]) -> str:
    """Return the CUDA C++ text of all kernels; it needs no other file of ours.

    The index entries of the kernels say how many warps a block has.
    """
    return (
        templates()
        .get_template("unit.cu.j2")
        .render(
            title=title,
            target=target,
            warp=read_template("warp.cuh"),
            helpers=[
                print_low(replace(helper, static=False, inline=False))
                for helper in shared_helpers(kernels)
            ],
            kernels=[_kernel_text(kernel) for kernel in kernels],
        )
    )


def _kernel_text(kernel: KernelSpec) -> dict[str, object]:
    """Return everything the template lays out for one kernel.

    `warps` are in a block. A kernel that does not share its work runs on the first warp, `alone`.
    """
    entry = kernel.entry
    function = kernel.unit.function(entry.name)
    pairs = zip(function.params, entry.params, strict=True)
    given = [param for param, about in pairs if about.kind != "thread"]
    return {
        "name": entry.name,
        "family": entry.family,
        "binding": tuple(entry.binding.items()),
        "body": print_low(share_arrays(function, entry.warps)),
        "warps": entry.warps,
        "alone": len(given) == len(function.params),
        "params": [print_low(Declare(type=p.type, name=p.name)).rstrip(";\n") for p in given],
        "arguments": [WARP_VALUES.get(param.name, param.name) for param in function.params],
    }


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
