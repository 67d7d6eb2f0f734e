"""The second backend: high-IR kernels become TensorIR, built by TVM's LLVM, no C compiler needed.

In: a `KernelRequest`. Out: a function over integers, numbers and addresses, in the order of the
kernel's parameters. Needs the extra `tvm`; nothing here imports it before a kernel is built.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from dovetail.codegen.catalog import KernelRequest, load_kernel_module
from dovetail.codegen.targets import get_target, host_target
from dovetail.ir.errors import ToolchainError
from dovetail.ir.high.nodes import Unit

if TYPE_CHECKING:
    from tir.build import TirKernel


def has_tvm() -> bool:
    """Return whether the extra `tvm` is installed."""
    return find_spec("tvm") is not None


def build_tir_kernel(
    request: KernelRequest, target: str | None = None, *, unit: Unit | None = None
) -> TirKernel:
    """Return the kernel built for `target` (default: this machine's best), ready to be called.

    `unit` is the request's module if it is not one of ours.

    Raises:
        ToolchainError: TVM is not installed.
        ScheduleError: unknown kernel, a value outside its choices, or a local array over 1 KiB.
        SpecError: there is no such target.
    """
    if not has_tvm():
        raise ToolchainError("the TIR backend needs TVM: pip install 'dovetail[tvm]'")
    from tir.build import build_request

    chosen = get_target(target) if target else host_target()
    return build_request(request, chosen, unit or load_kernel_module(request.module))
