"""Which kernels the rules may name for any model, and a model's library beside those.

In: a target. Out: the requests of everything that schedules by rules call; all models share them.
`python -m dovetail.compiler.rules.shared_kernels` builds all of them beforehand.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from dovetail.codegen.catalog import (
    CAPPED,
    DTYPE_PARAMETER,
    ENCODER_FAMILIES,
    KERNELS,
    PROMPTS,
    HeadShape,
    KernelRequest,
    kernel_request,
    pairs_prompts,
)
from dovetail.codegen.isa.target import Target
from dovetail.codegen.library import ABI, BuiltLibrary, LibrarySpec, build_library
from dovetail.codegen.shared import share_kernels
from dovetail.codegen.targets import TARGETS, get_target, host_target
from dovetail.codegen.toolchain import Advance, unheard
from dovetail.compiler.models.spec import KV_DTYPES
from dovetail.compiler.rules.schedules import (
    GATES,
    LINEAR,
    PANEL_COUNTS,
    GemmOp,
    gemm_requests,
    rule_tiles,
)
from dovetail.ir.artifact import KernelIndex
from dovetail.ir.errors import DovetailError, MissingKernelsError
from dovetail.ir.formats import FORMATS, is_quantised
from dovetail.ir.high.nodes import Unit
from dovetail.ir.shared_kernels import BUNDLED, cached_store, pack_libraries

FAMILIES = (*KERNELS, *ENCODER_FAMILIES, "decode_attention_rows")
"""Everything but products that a step on a CPU calls."""
DTYPES = {"W": tuple(FORMATS), "KV": KV_DTYPES, "ACT": ("tanh",)}
"""What a family's dtype parameter may be."""
FEWER = {
    "embed": ("f32", "bf16", "f16"),
    "embed_sum": ("f32", "bf16"),
    "gate_rows": ("gelu_tanh",),
    "gate_pairs": ("silu", "gelu_tanh", "clamped"),
    **dict.fromkeys(("adapter_in", "adapter_out"), ("f32", "bf16")),
}
"""Families that take others, or fewer: an encoder's words and adapters are floats."""
COMMON_HEADS = {64: (1, 2, 3, 4, 7, 8), 80: (1,), 96: (1, 3), 128: range(1, 9), 256: (1, 2, 4)}
COMMON_KV = ("f32", "bf16")
"""head_dim to the query heads per KV head that decode attention is unrolled for beforehand, and the
KV dtypes.

Those of published models of the supported families; an artifact carries others itself.
"""
COMMON_CAPS = {50: ((128, 2), (256, 2))}
"""Cap of scores to head_dim and group of the models that have it (Gemma 2)."""
ROUNDED = HeadShape(64, 1, rounded=True)
"""Heads for which attention of prompts rounds; its kernels take any such ones."""


@dataclass(frozen=True, slots=True)
class TargetKernels:
    """The kernels of an artifact for a target: their index, and the library of those it carries."""

    index: KernelIndex
    own: BuiltLibrary | None


def rule_kernels(target: Target) -> tuple[KernelRequest, ...]:
    """Return every kernel that rules name for a model of any format, KV dtype and common heads."""
    return (*_products(target), *_others(target))


def _products(target: Target) -> Iterator[KernelRequest]:
    for dtype in FORMATS:
        for kind in (LINEAR, *GATES.values()) if is_quantised(dtype) else PANEL_COUNTS:
            op = GemmOp("", kind, 1, 1, dtype)
            named = {op.kernel(target, tile) for tile in rule_tiles(op, target)}
            yield from (r for r in gemm_requests((dtype,), target, (kind,)) if r.name in named)


def _others(target: Target) -> Iterator[KernelRequest]:
    for family in dict.fromkeys(FAMILIES):
        known = DTYPES.get(DTYPE_PARAMETER.get(family, ""), (None,))
        for dtype in FEWER.get(family, known):
            yield kernel_request(family, target, dtype)
    for dtype in COMMON_KV:
        if pairs_prompts(target, ROUNDED):
            yield from (kernel_request(family, target, dtype, ROUNDED) for family in PROMPTS)
        for size, groups in COMMON_HEADS.items():
            for group in groups:
                request = kernel_request("decode_attention", target, dtype, HeadShape(size, group))
                if request.name != f"decode_attention_{dtype}":  # else it is not unrolled here
                    yield request
        for cap, shapes in COMMON_CAPS.items():
            some = HeadShape(0, 0, cap=cap), HeadShape(32, 1, rounded=True, cap=cap)
            made = (*some, *(HeadShape(*shape, cap=cap) for shape in shapes))
            pairs = ((family, heads) for family in CAPPED for heads in made)
            found = (kernel_request(family, target, dtype, heads) for family, heads in pairs)
            yield from {request.name: request for request in found}.values()


def target_kernels(
    target: Target,
    requests: Sequence[KernelRequest],
    cache: Path | None,
    *,
    here: bool,
    modules: Mapping[str, Unit] | None = None,
    advance: Advance = unheard,
) -> TargetKernels:
    """Return kernels for an artifact: those of the rules shared, the others in a library.

    here: whether this machine is to run them; what another one is to run is all in the library.
    modules: parsed files of the user, which requests may name.
    """
    rules = set(map(_identity, rule_kernels(target))) if here else set()
    shared = [request for request in requests if _identity(request) in rules]
    own = tuple(request for request in requests if _identity(request) not in rules)
    entries = share_kernels(target, shared, cache, advance=advance) if shared else ()
    if own:
        spec = LibrarySpec(target=target, kernels=own, modules=modules or {})
        built = build_library(spec, cache, advance)
        index = replace(built.index, kernels=(*built.index.kernels, *entries))
        return TargetKernels(index, built)
    index = KernelIndex(
        target=target.name, abi=ABI, library="", source="", compiler="", flags=(), kernels=entries
    )
    return TargetKernels(index, None)


def restore_kernels(missing: MissingKernelsError) -> None:
    """Build what an artifact lacks here; it stays unfit where this version has other kernels.

    Raises what `share_kernels` raises.
    """
    target, names = get_target(missing.target), {kernel.name for kernel in missing.kernels}
    share_kernels(target, [r for r in rule_kernels(target) if r.name in names])


def _identity(request: KernelRequest) -> tuple[object, ...]:
    return (request.module, request.kernel, request.name, *sorted(request.binding.items()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the kernels of the rules for this machine, or those that a wheel carries."""
    parser = argparse.ArgumentParser(
        prog="python -m dovetail.compiler.rules.shared_kernels",
        description="Builds the kernels that all models share, for this machine or others.",
    )
    parser.add_argument("targets", nargs="*", help=f"some of {', '.join(TARGETS)}")
    parser.add_argument(
        "--package", action="store_true", help="into the package, anew, for a wheel to carry"
    )
    asked = parser.parse_args(arguments)
    targets = [get_target(name) for name in asked.targets] or [host_target()]
    if asked.package:
        shutil.rmtree(BUNDLED, ignore_errors=True)
    store = BUNDLED if asked.package else cached_store()
    for target in targets:
        kernels = rule_kernels(target)
        print(f"{target.name}: {len(kernels)} kernels into {store}", flush=True)
        share_kernels(target, kernels, store=store)
    if asked.package:
        pack_libraries(BUNDLED)


if __name__ == "__main__":
    try:
        main()
    except DovetailError as error:
        sys.exit(f"dovetail: {error}")
