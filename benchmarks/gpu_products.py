"""Generated products beside torch's on one NVIDIA GPU, of the shapes of an 8B model's layers.

In: a device, a folder for what is built. Out: a row for each shape and format, ratios by rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dovetail.codegen.catalog import device_kernels
from dovetail.codegen.library import LibrarySpec, build_library
from dovetail.codegen.targets import DEVICE_TARGETS
from dovetail.ir.formats import FORMATS
from dovetail.runtime.accel.generated import (
    ROWS,
    GeneratedProducts,
    Operand,
    compare_in_graphs,
    row_major,
)
from dovetail.runtime.accel.skinny import GpuModule

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
TINY = {"o": (256, 256)}
BLOCKS = ("q8_32", "q4_32", "q4_32m", "q4_32km")


def compare_products(name: str, work: Path, *, tiny: bool) -> list[dict[str, Any]]:
    """Return times as a share of `torch.mm` with bfloat16 weights, whatever the format."""
    device = torch.device(name)
    every = device_kernels(FORMATS)  # those of the tests, which have built them
    built = build_library(LibrarySpec(DEVICE_TARGETS["cuda"], every))
    module = GpuModule(built.path, built.index, device)
    rows = []
    for shape, (n, k) in (TINY if tiny else SHAPES).items():
        for form in ("bf16", *BLOCKS):
            folder = work / f"{shape}-{form}"
            folder.mkdir()
            plain = torch.randn(n, k, device=device).to(torch.bfloat16)
            operand = row_major(plain) if form == "bf16" else in_blocks(n, k, form, device)
            operands = {f"{shape}{i}": operand for i in range(2)}
            products = GeneratedProducts(
                module, module.rates, operands, folder, device, torch.bfloat16
            )
            found: list[float] = []
            own = partial(multiply, plain)
            products.choose(own, ROWS, partial(note, found))
            ratios = {f"{m} rows": round(r, 3) for m, r in zip(ROWS, found, strict=False)}
            rows.append({"shape": f"{shape} {n} x {k}", "format": form, **ratios})
    return rows


def multiply(weight: torch.Tensor, _name: str, x: torch.Tensor) -> torch.Tensor:
    """Return torch's own product."""
    return torch.mm(x, weight.T)


def note(found: list[float], ours: Callable[[], object], theirs: Callable[[], object]) -> float:
    """Compare, and keep the ratio."""
    found.append(compare_in_graphs(ours, theirs))
    return found[-1]


def in_blocks(n: int, k: int, form: str, device: torch.device) -> Operand:
    """Return a weight of random bytes in a format."""
    stride = FORMATS[form].panel_elements(k)
    panels = torch.randint(0, 255, (n // 16 * stride,), dtype=torch.uint8, device=device)
    return Operand(n, k, form, stride, 1, lambda: panels)
