"""A kernel without an operator in the measuring child: called on memory of random numbers.

In: a library, its thread team and a `CallCase`. Out: seconds of a kernel, and whether it leaves in
memory what the first one leaves that is checked, the kernel as it stands.
"""

from __future__ import annotations

import numpy as np

from dovetail.compiler.measure.kernel_call import PERIOD, KernelCall
from dovetail.compiler.measure.meter import ARRAY_BYTES, CallCase, Candidate
from dovetail.compiler.measure.rows import NEAR
from dovetail.runtime.machine.library import KernelLibrary
from dovetail.runtime.machine.memory import allocate
from dovetail.runtime.native.tape import Team


class CallRun:
    """One case bound to arrays, which calls change and checks fill anew."""

    def __init__(self, library: KernelLibrary, team: Team, case: CallCase) -> None:
        self.library, self.team, self.case = library, team, case
        self.arrays: dict[str, np.ndarray] = {}
        self.wanted: dict[str, np.ndarray] = {}

    def bind(self, candidate: Candidate, calls: int) -> KernelCall:
        """Return so many calls."""
        sizes, operands = dict(self.case.sizes), list[int | float]()
        for param in self.library.kernels[candidate.kernel].params:
            if param.kind != "slot":
                continue
            if param.type.startswith("ptr"):
                numbers = np.float32 if param.type == "ptr[f32]" else np.uint8
                array = self.arrays.setdefault(param.name, allocate(ARRAY_BYTES).view(numbers))
                operands.append(array.ctypes.data)
            else:
                kind = float if param.type in ("f32", "f64") else int
                operands.append(kind(sizes[param.name]))
        return KernelCall(self.library, candidate, None, *[operands] * calls, rows=1)

    def check(self, candidate: Candidate) -> bool:
        """Run once; whether the numbers that are left are those of the first kernel."""
        call, random = self.bind(candidate, 1), np.random.default_rng(6)
        for array in self.arrays.values():
            drawn = random.uniform(-1, 1, PERIOD) if array.itemsize > 1 else np.arange(16)
            array[:] = np.resize(drawn, array.shape)
        call.run(self.team)
        self.wanted = self.wanted or {name: a.copy() for name, a in self.arrays.items()}
        pairs = [(a, self.wanted[name]) for name, a in self.arrays.items()]
        return all(np.allclose(a, b, NEAR, NEAR, equal_nan=True) for a, b in pairs)
