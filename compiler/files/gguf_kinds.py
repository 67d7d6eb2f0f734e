"""The types of GGUF tensors that are read: plain ones, and blocks of quantised values.

A row is a whole number of blocks of so many values, each of so many bytes. The figures and the
arithmetic are those of the package `gguf`.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt

from dovetail.compiler.files.gguf_blocks import FORM_OF_KIND

PLAIN = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of tensor: `values` of a row make a block of `size` bytes."""

    name: str
    values: int
    size: int


KINDS: dict[int, Kind] = {
    int(kind): Kind(kind.name, *gguf.GGML_QUANT_SIZES[kind])
    for kind in (gguf.GGMLQuantizationType[name] for name in (*PLAIN, *FORM_OF_KIND))
}
"""Number in a file -> what it stands for."""


def name_kind(number: int) -> str:
    """Return how a type is called that may be none of ours."""
    known = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    return known.get(number, f"number {number}")


def dequantise(kind: str, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return the values [rows][k] of rows of blocks, uint8 [rows][bytes]; scales may be NaN."""
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(np.ascontiguousarray(blocks), gguf.GGMLQuantizationType[kind])
