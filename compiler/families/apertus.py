"""Apertus: MLPs without gates, whose activation (xIELU) has numbers of its own in each layer.

In: a layer, or a GGUF file, which has these numbers in its metadata. Out: where they are packed
from, as tensors of the names that checkpoints give them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dovetail.compiler.families.sources import WeightSource
from dovetail.compiler.files.checkpoint import Rearranged, TensorInfo
from dovetail.compiler.files.gguf_file import GgufFile
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.errors import SpecError

NUMBERS = ("alpha_p", "alpha_n", "beta")
"""What is learnt of the part above 0, of the part below, and what both have; in this order."""
UNUSED_NUMBER = "eps"
"""What x is at most where e**x - 1 is computed: near 0, where it makes no difference."""


def xielu_source(layer: int) -> WeightSource:
    """Return the numbers of a layer as a vector."""
    tensors = tuple(f"model.layers.{layer}.mlp.act_fn.{name}" for name in NUMBERS)
    name, count = f"layers.{layer}.xielu", len(NUMBERS)
    return WeightSource(name, "vector", count, 1, tensors, (1,) * count)


@dataclass(frozen=True, slots=True)
class _Told(Rearranged):
    """A tensor of one value, which metadata have."""

    value: float

    def values(self, first: int, last: int) -> npt.NDArray[np.float32]:
        """Return rows [first, last)."""
        return np.array([self.value], np.float32)[first:last]


def told_numbers(file: GgufFile) -> Iterator[TensorInfo]:
    """Yield the numbers of all layers that a file tells, as tensors; other files have none."""
    if file.values.get("general.architecture") != "apertus":
        return
    layers = file.values.get("apertus.block_count")
    for name in NUMBERS:
        found = file.values.get(key := f"xielu.{name}")
        if not isinstance(found, np.ndarray) or found.shape != (layers,):
            raise SpecError(f"{file.path}: {key} must have a number of each of {layers} layers")
        for layer, value in enumerate(found.astype(float).tolist()):
            tensor = xielu_source(layer).tensors[NUMBERS.index(name)]
            yield TensorInfo(
                *(tensor, file.path, DTYPES["f32"], (1,), 0, 0, "F32"), packed=_Told(value)
            )
