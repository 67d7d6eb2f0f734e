"""Adapters that one model serves side by side: pairs of small matrices beside its own weights.

In: folders of PEFT by name, and the model. Out: rows of weights to pack behind the model's: of each
part of a product (of q, of k, of gate ...) the first matrices of all adapters [adapters][R][k], the
second ones in panels [adapters][n / 16][R][16], scaled, and the rank of each. R is the largest.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dovetail.compiler.adapter import (
    Floats,
    find_target,
    is_adapter,
    read_config,
    read_factors,
    read_parts,
)
from dovetail.compiler.checkpoint import Checkpoint, TensorInfo
from dovetail.compiler.families import FAMILIES
from dovetail.compiler.model_source import ModelSource
from dovetail.compiler.sources import WeightSource
from dovetail.compiler.tensors import weight_sources
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.errors import SpecError
from dovetail.ir.model import PANEL, ModelSpec

Array = npt.NDArray[Any]
Pair: TypeAlias = tuple[Floats, Floats]
"""What is added to a weight: [n][rank], scaled, times [rank][k]."""
A, B, RANKS = "adapters_a", "adapters_b", "adapters_ranks"
PRODUCTS = ("qkv", "q", "k", "v", "o", "gate_up", "down")
"""Products of layers that adapters may add to."""
_PARTS = {"lora_A", "lora_B"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:-]{0,127}")


def pair_name(weight: str, part: int, side: str) -> str:
    """Return the name of one matrix of all adapters' pairs for a part of a weight."""
    return f"{weight}.{side}{part}"


def adapter_sources(found: Mapping[str, Array]) -> Iterator[WeightSource]:
    """Yield what `read_adapters` found as weights without tensors."""
    dtypes = {np.dtype(DTYPES[name].numpy): name for name in ("f32", "bf16")}
    for name, rows in found.items():
        n, k = rows.shape
        yield WeightSource(name, "rows", n, k, dtype=dtypes[rows.dtype])


def read_adapters(
    given: Mapping[str, str | Path], source: ModelSource, spec: ModelSpec
) -> dict[str, Array]:
    """Return the rows [n][k] of every weight that adapters bring, by name.

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
    found: dict[str, Array] = {}
    for one in products:
        for part, (tensor, first, count) in enumerate(one.parts):
            own = [each.get(tensor) for each in pairs]
            if any(own):
                stacked = _stack(own, first, count, one.k, spec.adapter_dtype)
                found |= {pair_name(one.name, part, side): rows for side, rows in stacked.items()}
    return found


def _read_pairs(
    folder: Path, base: Checkpoint, targets: Collection[str], *, swaps: bool
) -> dict[str, Pair]:
    """Return the pairs of one adapter by tensor.

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
    if not parts:
        raise SpecError(f"{folder}: the adapter changes nothing; was it trained with its modules?")
    found = {}
    for name, stored in parts.items():
        target = base.info(name)
        up, down = read_factors(target, stored, config)
        if not (np.isfinite(up).all() and np.isfinite(down).all()):
            raise SpecError(f"{folder}: the sum for {name} has NaN or infinite values")
        found[name] = up[target.stored_rows(0, target.height)] if swaps else up, down
    return found


def _stack(
    pairs: Sequence[Pair | None], first: int, count: int, k: int, dtype: str
) -> dict[str, Array]:
    """Return the pairs of all adapters for rows [first, first + count) of a tensor, one by one."""
    most = max(len(pair[1]) for pair in pairs if pair)
    panels = -(-count // PANEL)
    a = np.zeros((len(pairs), most, k), np.float32)
    b = np.zeros((len(pairs), panels * PANEL, most), np.float32)
    ranks = np.zeros((len(pairs), 1), np.float32)
    for place, pair in enumerate(pairs):
        if pair:
            up, down = pair
            ranks[place] = rank = len(down)
            a[place, :rank], b[place, :count, :rank] = down, up[first : first + count]
    turned = b.reshape(-1, panels, PANEL, most).transpose(0, 1, 3, 2)
    form = DTYPES[dtype]
    return {
        A: form.narrow(a.reshape(-1, k)),
        B: form.narrow(turned.reshape(-1, PANEL)),
        RANKS: ranks,
    }
