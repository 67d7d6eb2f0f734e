"""Which format each matrix that a compile quantised has, and by how much it is off.

The content of `models/<name>/quantisation.json` in an artifact, where a compile quantised.
"""

from __future__ import annotations

import msgspec


class QuantisedWeight(msgspec.Struct, frozen=True, kw_only=True):
    """One matrix: `error` is ||(W - Q) x|| / ||W x||, measured on some of its rows.

    Over inputs x of the strength that calibration found in each value of K, else of equal strength.
    wanted: the format it would have had if `error` there, `wanted_error`, were below its bound.
    """

    name: str
    format: str
    error: float
    wanted: str
    wanted_error: float


class QuantisationFile(msgspec.Struct, frozen=True, kw_only=True):
    """`models/<name>/quantisation.json`. bounds: format -> the largest error that may stay in it.

    calibration: the text whose activations were measured; calibration_tokens: how many of it.
    """

    schema: int = 1
    bounds: dict[str, float]
    weights: tuple[QuantisedWeight, ...]
    calibration: str | None = None
    calibration_tokens: int = 0

    @property
    def kept(self) -> tuple[QuantisedWeight, ...]:
        """Return the matrices whose error passed the bound of the format asked for."""
        return tuple(weight for weight in self.weights if weight.format != weight.wanted)
