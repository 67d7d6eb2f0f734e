"""`models/<name>/profile.json`: cost tables of a model on a machine, and what they hold for."""

from __future__ import annotations

from typing import Literal

import msgspec

Origin = Literal["measured", "simulated", "assumed"]


class CostRow(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds at one point of a table.

    at: the table's coordinates, () for a constant. spread: distance of the quartiles (or the error
    that is assumed), relative to `seconds`.
    """

    at: tuple[int, ...]
    seconds: float
    origin: Origin
    spread: float = 0.0


class ProfileKey(msgspec.Struct, frozen=True, kw_only=True):
    """What the rows hold for. `kernels` is a sha256 over the kernels, "" where none were built."""

    model: str
    device: str
    threads: int
    tensor_parallel: int
    kernels: str


class LatencyRow(msgspec.Struct, frozen=True, kw_only=True):
    """Embedding: the latency line of a device for queries of up to `length` tokens (WindVE Eq. 12).

    points: (concurrency, seconds) behind alpha and beta, where they were measured. error: median
    relative distance of the points. tested: the depth that a stress test found for `slo` seconds.
    """

    device: str
    length: int
    alpha: float
    beta: float
    origin: Origin
    error: float = 0.0
    points: tuple[tuple[int, float], ...] = ()
    slo: float
    arrival: Literal["open", "closed"]
    predicted: int
    tested: int | None = None


class ProfileFile(msgspec.Struct, frozen=True, kw_only=True):
    """Tables by name: those of `runtime.cost_tables.AXES`; a layer's seconds, or a copy's."""

    schema: int = 1
    key: ProfileKey
    created: str
    sources: tuple[str, ...] = ()  # where figures that were assumed come from
    tables: dict[str, tuple[CostRow, ...]]
    latency: tuple[LatencyRow, ...] = ()  # of an embedding model, and its accelerators
