"""Decides in which format each matrix is quantised, by the error that it would have there.

In: a model whose spec asks for a quantised format, its checkpoint, and what calibration found of
the inputs of its products. Out: a `Quantised`: the spec with the format of each matrix, and the
table of errors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import inf, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.compiler.families.sources import WeightSource
from dovetail.compiler.files.checkpoint import Checkpoint
from dovetail.compiler.formats.quantise import squared_error
from dovetail.compiler.formats.weight_formats import FINER, WIDEST, is_copied, wanted_format
from dovetail.ir.block_format import BlockFormat
from dovetail.ir.encoder import Spec
from dovetail.ir.formats import FORMATS
from dovetail.ir.model import PANEL, ModelSpec
from dovetail.ir.quantisation import QuantisationFile, QuantisedWeight

Array = npt.NDArray[Any]
Advance = Callable[[int, int], None]

ERROR_BOUNDS = {"q4_32": 0.125, "q6_16k": 0.04, "q8_32": 0.02}
"""Format -> the relative error beyond which a matrix has the next finer one. Normal values have
0.080, 0.017 and 0.005; what passes has outliers in most of its blocks."""
SAMPLE_ROWS = 512
"""Rows of a matrix on which its error is measured, whole panels evenly over it."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a text's activations were. powers: weight -> float32 [k], mean square of each input."""

    text: Path
    tokens: int
    powers: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Quantised:
    """What a compile quantises, and how. formats: of the matrices that it asked about."""

    formats: Mapping[str, str]
    file: QuantisationFile
    powers: Mapping[str, Array] = field(default_factory=dict)

    @property
    def notes(self) -> tuple[str, ...]:
        """Say which matrices are finer than was asked for."""
        kept = self.file.kept
        if not kept:
            return ()
        names = ", ".join(weight.name for weight in kept[:4]) + ", .." * (len(kept) > 4)
        return (f"{len(kept)} matrices would lose too much and have finer formats: {names}",)


def choose_formats(
    sources: Iterable[WeightSource],
    checkpoint: Checkpoint,
    spec: Spec,
    calibration: Calibration | None,
    advance: Advance,
) -> Quantised:
    """Return the formats of the matrices `sources`, with what was measured of each.

    Rows of a matrix are read, never all of it. NaN and infinite values are left to the packer.
    """
    asked = tuple(sources)
    powers = {} if calibration is None else calibration.powers
    measure = partial(_measure, checkpoint=checkpoint, spec=spec, powers=powers)
    found: list[QuantisedWeight] = []
    pool = ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), 8))
    try:
        for weight in pool.map(measure, asked):
            found.append(weight)
            advance(len(found), len(asked))
    finally:
        pool.shutdown(cancel_futures=True)
    file = QuantisationFile(
        bounds=ERROR_BOUNDS,
        weights=tuple(found),
        calibration=None if calibration is None else str(calibration.text),
        calibration_tokens=0 if calibration is None else calibration.tokens,
    )
    return Quantised({weight.name: weight.format for weight in found}, file, powers)


def _measure(
    source: WeightSource, *, checkpoint: Checkpoint, spec: Spec, powers: Mapping[str, Array]
) -> QuantisedWeight:
    wanted = wanted_format(source, spec)
    ordered = isinstance(spec, ModelSpec) and source.name in spec.ordered
    if all(is_copied(checkpoint.info(name), wanted, ordered) for name in source.tensors):
        return QuantisedWeight(
            name=source.name, format=wanted, error=0.0, wanted=wanted, wanted_error=0.0
        )
    rows, power = sample_rows(source, checkpoint), powers.get(source.name)
    errors: dict[str, float] = {}
    for name in (wanted, *FINER.get(wanted, ()), WIDEST):
        form = FORMATS[name]
        errors[name] = _relative_error(rows, form, power) if isinstance(form, BlockFormat) else 0.0
        if errors[name] <= ERROR_BOUNDS.get(name, 0.0):
            break
    return QuantisedWeight(
        name=source.name,
        format=name,
        error=errors[name],
        wanted=wanted,
        wanted_error=errors[wanted],
    )


def _relative_error(rows: Array, form: BlockFormat, power: Array | None) -> float:
    if not np.isfinite(rows).all():
        return inf
    lost, whole = squared_error(rows, form, power)
    return sqrt(lost / whole) if whole else 0.0


def sample_rows(source: WeightSource, checkpoint: Checkpoint) -> Array:
    """Return float32 rows of a matrix: SAMPLE_ROWS at most, panels evenly over its tensors."""
    pieces = []
    share = SAMPLE_ROWS / sum(source.rows)
    for name, start, count in source.parts:
        dtype = checkpoint.info(name).dtype
        panels = -(-count // PANEL)
        taken = min(panels, max(1, round(share * count / PANEL)))
        for panel in np.linspace(0, panels - 1, taken).astype(int).tolist():
            top, end = panel * PANEL, min((panel + 1) * PANEL, count)
            pieces.append(dtype.widen(checkpoint.rows(name, start + top, start + end)))
    return np.concatenate(pieces).astype(np.float32, copy=False)
