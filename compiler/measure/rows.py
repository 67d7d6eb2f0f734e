"""Operators of rows in the measuring child: one case bound to arrays, called and checked.

In: a library, its thread team and a `RowsCase`. Out: seconds of a kernel, and whether its numbers
agree with float64.
"""

from __future__ import annotations

import numpy as np

from dovetail.compiler.measure.kernel_call import KernelCall, zeros
from dovetail.compiler.measure.meter import Candidate, RowsCase
from dovetail.compiler.measure.row_ops import ROW_OPS
from dovetail.runtime.machine.library import KernelLibrary
from dovetail.runtime.native.tape import Team

PADDING = 16
SIZES = (1.0, 1e-3, 20.0, 0.1)
"""Sizes of the values of neighbouring rows: where they are small, another eps shows."""
NEAR = 2e-5
"""How far a right kernel may be from float64, as a share of 1 or of the value."""


class RowsRun:
    """One case bound to operands, which stay in the cache, as those of a step are."""

    def __init__(self, library: KernelLibrary, team: Team, case: RowsCase) -> None:
        self.library, self.team, self.case = library, team, case
        self.op = ROW_OPS[case.kind]
        random = np.random.default_rng(5)
        # an odd number of rows is checked: teams of two and more do not share it out evenly
        self.held, self.stride = max(case.rows, len(SIZES)) | 1, case.width + PADDING
        sizes = np.resize(np.array(SIZES, np.float32), self.held)[:, None]
        self.arrays = {}
        for slot in self.op.slots:
            if slot.kind in ("in", "out"):
                self.arrays[slot.name] = array = zeros(self.held, self.stride)
                values = random.standard_normal((self.held, case.width), np.float32)
                array[:, : case.width] = values * sizes
            elif slot.kind.startswith("weight"):
                self.arrays[slot.name] = array = zeros(1, self.stride)
                array[:] = random.uniform(0.5, 1.5, array.shape)

    def operands(self, rows: int) -> list[int | float]:
        """Return the operand values, in the order of the kernel's slots."""
        known: dict[str, int | float] = {"T": rows, "H": self.case.width, "eps": self.case.eps}
        known |= {name: array.ctypes.data for name, array in self.arrays.items()}
        return [known.get(slot.name, self.stride) for slot in self.op.slots]

    def bind(self, candidate: Candidate, calls: int) -> KernelCall:
        """Return so many calls on the same rows."""
        operands = [self.operands(self.case.rows)] * calls
        return KernelCall(self.library, candidate, None, *operands, rows=1)

    def check(self, candidate: Candidate) -> bool:
        """Run once, on rows of several sizes: all as in float64, and nothing written beside."""
        width, out = self.case.width, self.arrays["out"]
        out[:] = np.nan
        KernelCall(self.library, candidate, None, self.operands(self.held), rows=1).run(self.team)
        wide = {n: self.arrays[n][:, :width].astype(np.float64) for n in self.op.arrays}
        expected = self.op.meaning(wide, self.case.eps)
        near = np.abs(out[:, :width] - expected) <= NEAR * np.maximum(1, np.abs(expected))
        return bool(near.all() and np.isnan(out[:, width:]).all())
