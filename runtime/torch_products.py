"""Matrix products on a GPU by torch: projections of activations, nothing else.

In: addresses of the device. Out: work on a stream. This module and `torch_sums.py` import torch
(extra `cuda`); they are loaded when a model is put on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.ir.errors import CapacityError
from dovetail.runtime.device_weights import DeviceWeight
from dovetail.runtime.launches import Matrix, Product

TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
SPELLING = {"f32": "<f4", "bf16": "<i2", "f16": "<f2"}
"""What arrays of another library say of their type; bfloat16 has no spelling of its own."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """A product's operands over the device's memory."""

    a: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    out: torch.Tensor


class TorchProducts:
    """Products of float32 activations; weights of 16 bits are multiplied in their own type."""

    def __init__(self, weights: Mapping[str, DeviceWeight], ordinal: int = 0) -> None:
        """`weights` by name, on GPU `ordinal`."""
        self._weights, self._ordinal = weights, ordinal

    def bind(self, product: Product, rows: int) -> Tensors:
        """Return tensors over the operands' memory."""
        bias = self._weights.get(product.bias or "")
        return Tensors(
            a=self.activations(product.a, rows),
            weight=self._stored(self._weights[product.weight]),
            bias=None if bias is None else self._stored(bias).view(-1)[: product.out.columns],
            residual=product.residual and self.activations(product.residual, rows),
            out=self.activations(product.out, rows),
        )

    def run(self, bound: Tensors, rows: int, stream: int) -> None:
        """Give the product of the first `rows` rows to a stream; CapacityError without memory."""
        try:
            with self.on(stream):
                multiply(bound, rows)
        except torch.OutOfMemoryError as error:
            raise CapacityError(f"the GPU has no memory for a product: {error}") from None

    def on(self, stream: int) -> AbstractContextManager[Any]:
        """Let torch give its work to a stream of the driver meanwhile."""
        given = torch.cuda.ExternalStream(stream, f"cuda:{self._ordinal}")
        found: AbstractContextManager[Any] = torch.cuda.stream(given)
        return found

    def activations(self, matrix: Matrix, rows: int) -> torch.Tensor:
        """Return a tensor over the first `rows` rows of a matrix on the device."""
        shape, stride = (rows, matrix.columns), matrix.stride
        return self.view(matrix.address, "f32", shape, stride)

    def _stored(self, weight: DeviceWeight) -> torch.Tensor:
        return self.view(weight.address, weight.dtype, (weight.n, weight.k), weight.k)

    def view(self, address: int, dtype: str, shape: tuple[int, int], stride: int) -> torch.Tensor:
        """Return a tensor over memory of the device; rows lie `stride` elements apart."""
        spelling = SPELLING[dtype]
        size = int(spelling[-1])
        memory = _Memory(
            {
                "shape": shape,
                "typestr": spelling,
                "data": (address, False),
                "strides": (stride * size, size),
                "version": 3,
            }
        )
        return torch.as_tensor(memory, device=f"cuda:{self._ordinal}").view(TYPES[dtype])


@dataclass(frozen=True, slots=True)
class _Memory:
    """What another library's array tells of itself."""

    __cuda_array_interface__: dict[str, Any]


def multiply(bound: Tensors, rows: int) -> None:
    """Compute out = a W^T + bias + residual for the first `rows` rows."""
    a, out, weight = bound.a[:rows], bound.out[:rows], bound.weight.t()
    if bound.weight.dtype is not torch.float32:
        product = torch.mm(a.to(bound.weight.dtype), weight)
        if bound.residual is None:
            out.copy_(product)
        else:
            torch.add(bound.residual[:rows], product, out=out)
    elif bound.residual is None:
        torch.mm(a, weight, out=out)
    else:
        torch.addmm(bound.residual[:rows], a, weight, out=out)
    if bound.bias is not None:
        out.add_(bound.bias)
