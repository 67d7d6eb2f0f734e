"""What a matrix product must come out as, in float64: a sample of rows, and whole panels.

In: the activations and a way to read the packed weight. Out: expected values with the error that
float32 sums may have. What was computed once serves all candidates and all M of a shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from dovetail.compiler.rules.schedules import CLAMPED, GATED
from dovetail.ir.model import PANEL, RELU2

Wide = npt.NDArray[np.float64]
Pair = tuple[Wide, Wide]
"""Expected values, and how far from them a right kernel may be."""


def _gelu(x: Wide) -> Wide:
    erf: Wide = np.vectorize(math.erf, otypes=[np.float64])(x / np.sqrt(2))
    return x / 2 * (1 + erf)


def _gelu_tanh(x: Wide) -> Wide:
    found: Wide = x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return found


ACTIVATIONS: dict[str, Callable[[Wide], Wide]] = {
    "linear": lambda x: x,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": _gelu,
    "geglu": _gelu,
    **dict.fromkeys(("gelu_tanh", "geglu_tanh"), _gelu_tanh),
    RELU2: lambda x: np.maximum(x, 0) ** 2,
}
"""Kind of a product -> what is done to its sums, or the gate's. No slope but of squares is above
1.13."""
SAMPLED_ROWS = 6
RELATIVE, ABSOLUTE = 1e-5, 1e-6


def _activate_pair(kind: str, gate: Wide, up: Wide) -> Wide:
    """Return what a gated product makes of its two sums."""
    if kind == CLAMPED:
        low = np.minimum(gate, 7)
        found: Wide = low / (1 + np.exp(-1.702 * low)) * (np.clip(up, -7, 7) + 1)
        return found
    return ACTIVATIONS[kind](gate) * up


def rows_to_check(m: int, m_tile: int) -> list[int]:
    """Return the first and last row, some between, and those where the last tile begins."""
    spread = np.linspace(0, m - 1, SAMPLED_ROWS).astype(int).tolist()
    edge = m // m_tile * m_tile if m_tile > 0 else 0
    return sorted({*spread, *(row for row in (edge - 1, edge) if 0 <= row < m)})


def panels_to_check(n: int) -> list[int]:
    """Return the first panel of the product, the middle one and the last, which may be narrow."""
    panels = -(-n // PANEL)
    return sorted({0, panels // 2, panels - 1})


class ExpectedProduct:
    """The product of rows that are the same for every M with one copy of a weight."""

    def __init__(self, kind: str, n: int, columns: Callable[[int], Wide]) -> None:
        """`columns` returns a panel [k][16] of the packed weight; a gated one has two per panel."""
        self._kind, self._n, self._columns = kind, n, columns
        self._rows: dict[int, Pair] = {}
        self._panels: dict[int, Pair] = {}

    def rows(self, a: npt.NDArray[np.float32], rows: Sequence[int]) -> Pair:
        """Return [rows][n] of the product of `a` [m][k], all columns."""
        missing = [row for row in rows if row not in self._rows]
        if missing:
            wide = a[missing].astype(np.float64)
            parts = [self._product(wide, panel) for panel in range(-(-self._n // PANEL))]
            wanted = np.concatenate([part[0] for part in parts], axis=1)
            bound = np.concatenate([part[1] for part in parts], axis=1)
            self._rows |= {row: (wanted[i], bound[i]) for i, row in enumerate(missing)}
        found = [self._rows[row] for row in rows]
        return np.stack([pair[0] for pair in found]), np.stack([pair[1] for pair in found])

    def panel(self, a: npt.NDArray[np.float32], panel: int) -> Pair:
        """Return [m][16] of the product of `a` [m][k], all rows; the last panel may be narrow."""
        known = self._panels.get(panel)
        if known is None or len(known[0]) < len(a):
            known = self._panels[panel] = self._product(a.astype(np.float64), panel)
        return known[0][: len(a)], known[1][: len(a)]

    def _product(self, a: Wide, panel: int) -> Pair:
        width = min(PANEL, self._n - panel * PANEL)
        if self._kind not in GATED:
            b = self._columns(panel)[:, :width]
            sums, bound = a @ b, np.abs(a) @ np.abs(b)
            slope = 2 * np.abs(sums) if self._kind == RELU2 else 1.0
            return ACTIVATIONS[self._kind](sums), slope * bound
        gate = a @ self._columns(2 * panel)[:, :width]
        up = a @ self._columns(2 * panel + 1)[:, :width]
        wanted = _activate_pair(self._kind, gate, up)
        return wanted, np.sqrt(a.shape[1]) * (1 + np.abs(wanted))


def agrees(got: npt.NDArray[np.float32], expected: Pair) -> bool:
    """Tell whether values lie within the bounds; not a number never does."""
    wanted, bound = expected
    return bool((np.abs(got - wanted) <= RELATIVE * bound + ABSOLUTE).all())
