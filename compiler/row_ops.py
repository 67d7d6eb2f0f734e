"""Operators of rows, which a kernel of a user's own may compute: their slots and their meaning.

In: float64 rows. Out: what every right kernel makes of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dovetail.compiler.operators import OPERATORS, Operand

Array = npt.NDArray[np.float64]
_ROWS = "T:int H:int x:in ldx:int "
_OUT = "out:out ldo:int"
_ALONE = tuple(Operand(*slot.split(":")) for slot in (_ROWS + _OUT).split())
_GATED = tuple(Operand(*slot.split(":")) for slot in (_ROWS + "y:in ldy:int " + _OUT).split())


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


def _silu(a: Mapping[str, Array], eps: float) -> Array:
    found: Array = a["x"] / (1 + np.exp(-a["x"]))
    return found


def _gelu(a: Mapping[str, Array], eps: float) -> Array:
    x = a["x"]
    erf = np.vectorize(math.erf, otypes=[np.float64])
    found: Array = x / 2 * (1 + erf(x / math.sqrt(2)))
    return found


def _gelu_tanh(a: Mapping[str, Array], eps: float) -> Array:
    x = a["x"]
    found: Array = x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return found


ROW_OPS: dict[str, RowOp] = {
    "rmsnorm": RowOp(OPERATORS["rmsnorm"], _rmsnorm, ("rmsnorm", None)),
    "layernorm": RowOp(OPERATORS["layernorm"], _layernorm, ("layernorm", None)),
    "softmax": RowOp(_ALONE, _softmax),
    "silu": RowOp(_ALONE, _silu),
    "gelu": RowOp(_ALONE, _gelu, ("activate_rows", "gelu")),
    "gelu_tanh": RowOp(_ALONE, _gelu_tanh, ("activate_rows", "gelu_tanh")),
    "tanh": RowOp(_ALONE, lambda a, eps: np.tanh(a["x"]), ("activate_rows", "tanh")),
    "silu_mul": RowOp(_GATED, lambda a, eps: _silu(a, eps) * a["y"]),
}
"""Every operator that `--kernel OP=FILE` may name."""
IN_MODELS = ("rmsnorm",)
"""Those that models have apart; of the others ours are part of products and of attention."""
