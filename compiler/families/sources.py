"""A packed weight and the tensors of a checkpoint that it is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightSource:
    """One packed weight: its layout, logical n x k, and the tensors stacked along n to make it.

    `rows` are the rows taken of each tensor, from `starts` on or the first; layout `packed_pair`
    has gate then up, of experts all gates, then all ups; `pair_vector` is a bias in the order of a
    pair's panels. A `vector` has (values + plus) * times. Weights without tensors (rope tables)
    are computed from the spec. `taps` is a convolution of k columns, each apart: n rows of float32,
    of a tensor [k][1][n] or [k][n].
    """

    name: str
    layout: str
    n: int
    k: int
    tensors: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    plus: float = 0.0
    times: float = 1.0
    dtype: str = "f32"  # of one without tensors

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix of a checkpoint."""
        return bool(self.tensors) and self.layout not in ("vector", "pair_vector", "taps")

    def shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that a tensor of so many rows may have."""
        if self.layout == "taps":
            return (rows, 1, self.n), (rows, self.n)
        if self.layout.endswith("vector"):
            return ((rows,), ()) if rows == 1 else ((rows,),)
        return ((rows, self.k),)

    @property
    def parts(self) -> tuple[tuple[str, int, int], ...]:
        """Return (tensor, first row, rows) of each part."""
        return tuple(
            zip(self.tensors, self.starts or (0,) * len(self.rows), self.rows, strict=True)
        )

    @property
    def heights(self) -> dict[str, int]:
        """Return the rows of each tensor, all of which are taken, some twice."""
        ends: dict[str, int] = {}
        for name, first, count in self.parts:
            ends[name] = max(ends.get(name, 0), first + count)
        return ends
