"""Operators of rows, which a kernel of a user's own may compute: their slots and their meaning.

In: float64 rows. Out: what every right kernel makes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dovetail.compiler.measure.expected import ACTIVATIONS
from dovetail.compiler.tape.operators import OPERATORS, Operand, read_slots
from dovetail.ir.model import ModelSpec

Array = npt.NDArray[np.float64]
_ALONE = read_slots("T:int H:int x:in ldx:int out:out ldo:int")
_GATED = read_slots("T:int H:int x:in ldx:int y:in ldy:int out:out ldo:int")


@dataclass(frozen=True, slots=True)
class RowOp:
    """An operator: slots of its kernel, what it computes from arrays by their slots, and eps.

    ours: the family of our kernel for it, and its dtype parameter; None where ours are part of
    other kernels.
    """

    slots: tuple[Operand, ...]
    meaning: Callable[[Mapping[str, Array], float], Array]
    ours: tuple[str, str | None] | None = None

    @property
    def arrays(self) -> tuple[str, ...]:
        """The slots that are read as arrays, in order."""
        return tuple(s.name for s in self.slots if s.kind in ("in", "weight", "weight?"))


def row_bytes(kind: str, shape: Mapping[str, int]) -> int:
    """Return the bytes of float32 that an operator of rows reads and writes once; 0 of others."""
    if kind not in ROW_OPS or "rows" not in shape:
        return 0
    kinds = [slot.kind for slot in ROW_OPS[kind].slots]
    rows = shape["rows"] * (kinds.count("in") + kinds.count("out"))
    return 4 * shape["width"] * (rows + sum(k.startswith("weight") for k in kinds))


def _rmsnorm(a: Mapping[str, Array], eps: float) -> Array:
    x = a["x"]
    found: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * a["w"]
    return found


def _layernorm(a: Mapping[str, Array], eps: float) -> Array:
    x = a["x"] - a["x"].mean(-1, keepdims=True)
    found: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * a["w"] + a["b"]
    return found


def _softmax(a: Mapping[str, Array], eps: float) -> Array:
    e = np.exp(a["x"] - a["x"].max(-1, keepdims=True))
    found: Array = e / e.sum(-1, keepdims=True)
    return found


ROW_OPS: dict[str, RowOp] = {
    "rmsnorm": RowOp(OPERATORS["rmsnorm"], _rmsnorm, ("rmsnorm", None)),
    "layernorm": RowOp(OPERATORS["layernorm"], _layernorm, ("layernorm", None)),
    "softmax": RowOp(_ALONE, _softmax),
    "silu": RowOp(_ALONE, lambda a, _: ACTIVATIONS["silu"](a["x"])),
    "gelu": RowOp(_ALONE, lambda a, _: ACTIVATIONS["gelu"](a["x"]), ("activate_rows", "gelu")),
    "gelu_tanh": RowOp(
        _ALONE, lambda a, _: ACTIVATIONS["gelu_tanh"](a["x"]), ("activate_rows", "gelu_tanh")
    ),
    "tanh": RowOp(_ALONE, lambda a, _: np.tanh(a["x"]), ("activate_rows", "tanh")),
    "silu_mul": RowOp(_GATED, lambda a, _: ACTIVATIONS["silu"](a["x"]) * a["y"]),
    "gelu_tanh_mul": RowOp(_GATED, lambda a, _: ACTIVATIONS["gelu_tanh"](a["x"]) * a["y"]),
}
"""Every operator that `--kernel OP=FILE` may name."""
GATE_OPS = {"silu": "silu_mul", "gelu_tanh": "gelu_tanh_mul"}
"""A model's activation to its gate, which ours is part of a product; a tape may have it apart."""


def model_ops(spec: ModelSpec) -> tuple[str, ...]:
    """Return the operators that a kernel of a user's own can compute in a model."""
    norms = () if spec.layer_norm else ("rmsnorm",)
    fused = spec.experts or spec.adapters  # rows of no adapter have the same bits beside others
    gate = None if fused else GATE_OPS.get(spec.activation)
    return (*norms, gate) if gate else norms
