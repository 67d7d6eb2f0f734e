"""Forward tapes whose gated products are two steps: gates and ups come apart, then meet.

In: as of the tape `forward`. Out: the tape `GATED`, in which a kernel of a user's own joins them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from dovetail.compiler.tape.builder import NO_RESIDUAL, Value
from dovetail.compiler.tape.forward import ForwardTape
from dovetail.ir.model import APART, OWN_GATE, PANEL, ModelSpec, WeightEntry
from dovetail.ir.tape import GATED, ArgRef, BufferRef, Tape


def build_gated_tape(
    spec: ModelSpec, weights: Sequence[WeightEntry], tokens: int, sequences: int
) -> Tape:
    """Return the tape of a step of at most so many rows and sequences, with a user's own gate."""
    tape = _Gated(spec, weights, tokens, sequences)
    return tape.build(GATED, tape.own)


class ApartTape(ForwardTape):
    """A forward tape that can take gated products apart; joint: the operator of the second step."""

    joint: ClassVar[str]

    def __init__(
        self, spec: ModelSpec, weights: Sequence[WeightEntry], tokens: int, sequences: int
    ) -> None:
        super().__init__(spec, weights, tokens, sequences)
        inner = max(map(spec.layer_inner, range(spec.n_layers)))
        self.pairs = self.padded("pairs", tokens, -(-inner // PANEL) * PANEL * 2)

    def apart(self, segment: str, m: ArgRef, weight: str, a: BufferRef) -> tuple[BufferRef, int]:
        """Append the product that gives gates and ups of m rows, in panels by turns."""
        _, n, *others = self.gemm(weight, self.in_order(segment, m, weight, a), m)
        assert isinstance(n, int)
        pairs, whole = self.rows(self.pairs), (m, -(-n // PANEL) * PANEL * 2, *others)
        self.add(APART, segment, *whole, *NO_RESIDUAL, *pairs, *self.split)
        return pairs

    def meet(
        self, segment: str, m: ArgRef, weight: str, pairs: BufferRef, stride: int, *out: Value
    ) -> None:
        """Append what joins gates and ups of m rows."""
        self.add(self.joint, segment, m, self.weights[weight].n // 2, pairs, stride, *out)


class _Gated(ApartTape):
    joint = OWN_GATE

    def product(
        self, op: str, segment: str, m: ArgRef, weight: str, a: BufferRef, *rest: Value
    ) -> None:
        """Append a product of m rows, a gated one apart."""
        if op == "gate_up":
            self.meet(segment, m, weight, *self.apart(segment, m, weight, a), *rest)
        else:
            super().product(op, segment, m, weight, a, *rest)
