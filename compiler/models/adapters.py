"""Adapters that one model serves side by side: pairs of small matrices beside its own weights.

In: folders of PEFT by name, and the model. Out: weights to pack behind the model's: of each
part of a product (of q, of k, of gate ...) the first matrices of all adapters [adapters][R][k], the
second ones in panels [adapters][n / 16][R][16], scaled, and the rank of each. R is the largest.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.compiler.families.decoders import FAMILIES
from dovetail.compiler.families.sources import WeightSource
from dovetail.compiler.families.tensors import weight_sources
from dovetail.compiler.files.checkpoint import Checkpoint, TensorInfo
from dovetail.compiler.models.merged_adapter import (
    Factors,
    Floats,
    find_target,
    is_adapter,
    read_config,
    read_parts,
)
from dovetail.compiler.models.source import ModelSource
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.errors import SpecError
from dovetail.ir.model import PANEL, ModelSpec, WeightEntry

Array = npt.NDArray[Any]
A, B, RANKS = "adapters_a", "adapters_b", "adapters_ranks"
PRODUCTS = ("qkv", "q", "k", "v", "o", "gate_up", "up", "down")
"""Products of layers that adapters may add to."""
_PARTS = {"lora_A", "lora_B"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:-]{0,127}")


def pair_name(weight: str, part: int, side: str) -> str:
    """Return the name of one matrix of all adapters' pairs for a part of a weight."""
    return f"{weight}.{side}{part}"


@dataclass(frozen=True, slots=True)
class Pair:
    """What an adapter adds to rows [first, first + count) of a tensor.

    order: of all rows, where the model's stand in another than the adapter's; None = the same.
    """

    factors: Factors
    first: int
    count: int
    order: npt.NDArray[np.int64] | None

    def side(self, side: str, most: int) -> Floats:
        """Return a matrix as it is stored, with room for so many ranks."""
        rank = self.factors.rank
        if side == RANKS:
            return np.full((1, 1), rank, np.float32)
        if side == A:
            return np.pad(self.factors.down(), ((0, most - rank), (0, 0)))
        up, last = self.factors.up(), self.first + self.count
        up = up[self.first : last] if self.order is None else up[self.order[self.first : last]]
        up = np.pad(up, ((0, -self.count % PANEL), (0, most - rank)))
        return up.reshape(-1, PANEL, most).transpose(0, 2, 1).reshape(-1, PANEL)


@dataclass(frozen=True, slots=True)
class Stacked:
    """A matrix of the pairs of all adapters, [n][k], of which only asked-for rows are read."""

    name: str
    n: int
    k: int
    dtype: str
    side: str
    pairs: tuple[Pair | None, ...]

    def __getitem__(self, rows: slice) -> Array:
        """Return rows [start, stop)."""
        height = self.n // len(self.pairs)
        most = max(pair.factors.rank for pair in self.pairs if pair)
        out = np.zeros((rows.stop - rows.start, self.k), np.float32)
        for number, pair in enumerate(self.pairs):
            base = number * height
            low, high = max(rows.start, base), min(rows.stop, base + height)
            if pair and low < high:
                own = pair.side(self.side, most)[low - base : high - base]
                out[low - rows.start : high - rows.start] = own
        return DTYPES[self.dtype].narrow(out)


def adapter_sources(found: Iterable[Stacked | WeightEntry]) -> Iterator[WeightSource]:
    """Yield the matrices of adapters among weights, as weights without tensors."""
    for one in found:
        if one.name.rpartition(".")[2].startswith((A, B, RANKS)):
            yield WeightSource(one.name, "rows", one.n, one.k, dtype=one.dtype)


def read_adapters(
    given: Mapping[str, str | Path], source: ModelSource, spec: ModelSpec
) -> dict[str, Stacked]:
    """Return every weight that adapters bring, by name; only headers are kept of it.

    Raises SpecError for an adapter that does not fit the model, or changes what products are not.
    """
    for name, folder in given.items():
        if not _NAME.fullmatch(name):
            raise SpecError(f"an adapter cannot be called {name!r}; use letters, digits and _./:-")
        if not is_adapter(Path(folder)):
            raise SpecError(f"{folder} is no folder of an adapter, with adapter_config.json")
    if spec.experts or spec.recurrent or spec.latent or spec.output_gate:
        raise SpecError(
            f"adapters beside one another need a dense model with attention in all layers, which "
            f"{spec.family} is not; compile one adapter alone, without --adapter"
        )
    products = [s for s in weight_sources(spec) if s.name.rpartition(".")[2] in PRODUCTS]
    base, targets = source.checkpoint(), {name for one in products for name in one.tensors}
    names = source.config().texts("architectures")
    swaps = any(FAMILIES[name].neighbours for name in names if name in FAMILIES)
    pairs = [_read_pairs(Path(folder), base, targets, swaps=swaps) for folder in given.values()]
    found: list[Stacked] = []
    for one in products:
        for part, (tensor, first, count) in enumerate(one.parts):
            known = [each.get(tensor) for each in pairs]
            own = (pair and Pair(pair[0], first, count, pair[1]) for pair in known)
            if any(known):
                found += _stack(one.name, part, tuple(own), one.k, spec.adapter_dtype)
    return {stacked.name: stacked for stacked in found}


def _read_pairs(
    folder: Path, base: Checkpoint, targets: Collection[str], *, swaps: bool
) -> dict[str, tuple[Factors, npt.NDArray[np.int64] | None]]:
    """Return factors and the order of rows of one adapter's pairs by tensor.

    swaps: rows of `base` may come in another order than where it was trained (`pairs.py`).
    """
    config = read_config(folder)
    parts: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for info, changed, part in read_parts(folder):
        find_target(base, changed, info)
        if changed not in targets or part not in _PARTS:
            raise SpecError(
                f"{info.path}: tensor {info.name} is no low-rank sum for a product of attention or "
                "of an MLP, the only kind served beside other adapters; compile this adapter "
                f"alone: dovetail compile {folder}"
            )
        parts[changed][part] = info
    found = {}
    for name, stored in parts.items():
        target = base.info(name)
        factors = Factors.of(target, stored, config)
        if not factors.finite:
            raise SpecError(f"{folder}: the sum for {name} has NaN or infinite values")
        found[name] = factors, target.stored_rows(0, target.height) if swaps else None
    return found


def _stack(
    name: str, part: int, pairs: tuple[Pair | None, ...], k: int, dtype: str
) -> Iterator[Stacked]:
    """Yield the matrices of all adapters' pairs for a part of a weight."""
    known = [pair for pair in pairs if pair]
    most, panels = max(pair.factors.rank for pair in known), -(-known[0].count // PANEL)
    shapes = {A: (most, k, dtype), B: (panels * most, PANEL, dtype), RANKS: (1, 1, "f32")}
    for side, (height, width, form) in shapes.items():
        rows = height * len(pairs)
        yield Stacked(pair_name(name, part, side), rows, width, form, side, pairs)
