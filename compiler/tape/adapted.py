"""The forward tape of steps that have rows of adapters: after each product their low-rank sums.

In: a model whose weights have pairs of matrices of adapters beside them. Out: the tape `ADAPTED`.
Rows of no adapter pass as in the tape `forward`, which serves steps that have no others. A gated
product has no place where sums could be added: its gates and ups come apart, and meet after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from dovetail.compiler.families.sources import WeightSource
from dovetail.compiler.families.tensors import weight_sources
from dovetail.compiler.models.adapters import RANKS, A, B, pair_name
from dovetail.compiler.tape.builder import Value
from dovetail.compiler.tape.gates import ApartTape
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.model import PANEL, ModelSpec, WeightEntry
from dovetail.ir.tape import ADAPTED, ADAPTER_ARGS, ArgRef, BufferRef, Tape, WeightRef

_WHICH = {"n_tokens": "adapters", "n_out": "out_adapters"}
"""The argument that counts rows to the one that tells whose they are."""


class _Change(NamedTuple):
    """A pair of matrices, and where its sums go: columns of C from `first` on.

    step: columns from a panel of them to the next.
    """

    weight: str
    part: int
    first: int
    columns: int
    step: int = PANEL


def build_adapted_tape(
    spec: ModelSpec, weights: Sequence[WeightEntry], tokens: int, sequences: int
) -> Tape:
    """Return the tape of a step of at most so many rows and sequences, some of adapters."""
    return _Adapted(spec, weights, tokens, sequences).build(ADAPTED, spec.n_layers - spec.shared_kv)


class _Adapted(ApartTape):
    joint = "gate_pairs"

    def __init__(
        self, spec: ModelSpec, weights: Sequence[WeightEntry], tokens: int, sequences: int
    ) -> None:
        super().__init__(spec, weights, tokens, sequences)
        self.made_of = {source.name: source for source in weight_sources(spec)}
        widest = max(map(self.rank, filter(_is_first, self.weights)), default=1)
        self.low = [self.padded(f"low{i}", tokens, widest) for i in range(3)]

    def finish(self, name: str, args: tuple[str, ...], tokens: int, sequences: int) -> Tape:
        """Plan the buffers and return the tape."""
        return super().finish(name, args + ADAPTER_ARGS, tokens, sequences)

    def product(
        self, op: str, segment: str, m: ArgRef, weight: str, a: BufferRef, *rest: Value
    ) -> None:
        """Append a product of m rows, and what adapters add to it."""
        sums = [*self.sums(weight)]
        if not sums:
            super().product(op, segment, m, weight, a, *rest)
        elif op == "gate_up":
            pairs = self.apart(segment, m, weight, a)
            self.adapt(segment, m, a, sums, *pairs)
            self.meet(segment, m, weight, *pairs, *rest)
        else:
            super().product(op, segment, m, weight, a, *rest)
            c, stride = rest[2:4]
            assert isinstance(c, BufferRef) and isinstance(stride, int)
            self.adapt(segment, m, a, sums, c, stride)

    def project(self, layer: int, m: ArgRef, source: BufferRef) -> None:
        """Append q, k and v, and what adapters add to them."""
        super().project(layer, m, source)
        parts, sums, column = self.spec.qkv_parts(layer), list[_Change](), 0
        if len(parts) > 1:  # one has passed `product`
            for name in parts:
                sums += [one._replace(first=column) for one in self.sums(name)]
                column += self.weights[name].n
            self.adapt(f"pre_attn({layer})", m, source, sums, *self.rows(self.qkv))

    def adapt(
        self,
        segment: str,
        m: ArgRef,
        a: BufferRef,
        sums: Sequence[_Change],
        c: BufferRef,
        stride: int,
    ) -> None:
        """Append C += (a A^T) B of m rows, each with the matrices of its adapter."""
        which, size = ArgRef(name=_WHICH[m.name]), DTYPES["f32"].size
        assert len(sums) <= len(self.low)
        places = [*zip(self.low, sums, strict=False)]
        for low, one in places:
            first, _, ranks = self.pair(one)
            values = (m, self.rank(pair_name(one.weight, one.part, A)), self.weights[one.weight].k)
            rows = (which, ranks, *self.rows(a), first, *self.rows(low))
            self.add("adapter_in", segment, *values, *rows)
        for low, one in places:
            _, second, ranks = self.pair(one)
            values = (m, self.rank(pair_name(one.weight, one.part, A)), one.columns)
            there = replace(c, offset=c.offset + one.first * size)
            rows = (which, ranks, *self.rows(low), second, there, stride)
            self.add("adapter_out", segment, *values, *rows, one.step)

    def pair(self, one: _Change) -> Sequence[WeightRef]:
        """Return both matrices of all adapters' pairs, and their ranks."""
        return [self.weight(pair_name(one.weight, one.part, side)) for side in (A, B, RANKS)]

    def rank(self, first: str) -> int:
        """Return the ranks that there is room for in a pair, by the name of its first matrix."""
        return self.weights[first].n // len(self.spec.adapters)

    def sums(self, weight: str) -> Iterator[_Change]:
        """Yield what adapters add to a product."""
        source, before = self.made_of[weight], 0
        for part, (_, _, rows) in enumerate(source.parts):
            if pair_name(weight, part, A) in self.weights:
                yield _Change(weight, part, *_place(source, part, before, rows))
            before += rows


def _place(source: WeightSource, part: int, before: int, rows: int) -> tuple[int, int, int]:
    """Return where the columns of a part of a weight begin in C, their number and their step."""
    if source.layout == "packed_pair":
        return part * PANEL, rows, 2 * PANEL
    return before, rows, PANEL


def _is_first(name: str) -> bool:
    return name.rpartition(".")[2].startswith(A)
