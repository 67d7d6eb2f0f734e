"""The figures of the contention model, each with where it comes from.

In: a HardwareSpec. Out: MachineParameters, chosen by class (instruction set, server or client) and
never by the name of a file or machine. A measured figure replaces a default with `measured`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from dovetail.ir.plans import PlanFigure
from dovetail.topology.values import HardwareSpec

CLIENT_CORES = 16
"""A machine of one memory node and at most so many cores is taken for a client's."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number in SI units and its source."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class MachineParameters:
    """What the simulator knows of a machine beyond its topology; seconds, bytes/s, flop/s."""

    core_flops: Figure
    core_bandwidth: Figure
    package_bandwidth: Figure
    far_node_share: Figure  # of the bandwidth of a package's nearer memory nodes
    package_link: Figure
    node_link: Figure
    l3_bandwidth: Figure
    l3_core_bandwidth: Figure
    latent_cores: Figure  # cores whose misses a latent group serves without queueing
    latent_size: Figure  # cores of a latent group that no tool shows; 0 = none
    latent_queueing: Figure
    node_queueing: Figure
    line_transfer: Figure
    rank_step: Figure
    all_reduce_bandwidth: Figure
    barrier: Figure
    time_slice: Figure
    preemption: Figure
    row_shares: tuple[tuple[int, Figure], ...] = ()  # least rows of a product, share of core_flops

    def share(self, rows: int) -> float:
        """Return the share of `core_flops` that products of so many rows reach; 1 if unknown."""
        shares = [figure.value for least, figure in self.row_shares if least <= rows]
        return shares[-1] if shares else 1.0

    def measured(self, **values: float) -> MachineParameters:
        """Return the parameters with some figures replaced by values measured on the machine."""
        figures: dict[str, Any] = {n: Figure(v, "measured here") for n, v in values.items()}
        return replace(self, **figures)

    def sources(self) -> dict[str, Figure]:
        """Return every figure by name."""
        named = {item.name: getattr(self, item.name) for item in fields(self)}
        shares = named.pop("row_shares")
        return named | {f"core_flops_share_of_{rows}_rows": figure for rows, figure in shares}

    def with_figures(self, given: Mapping[str, PlanFigure]) -> MachineParameters:
        """Return the parameters with the figures of `given`, by the names of `sources`."""
        named = {name: Figure(figure.value, figure.source) for name, figure in given.items()}
        found: dict[str, Any] = {f.name: named[f.name] for f in fields(self) if f.name in named}
        shares = [
            (int(rows[1]), figure)
            for name, figure in named.items()
            if (rows := re.fullmatch(r"core_flops_share_of_(\d+)_rows", name))
        ]
        return replace(self, **found, row_shares=tuple(sorted(shares, key=lambda share: share[0])))


_FIG3 = "fitted to Sandwich Fig. 3"

COMMON = {
    "core_bandwidth": Figure(8e9, "assumed: 12 outstanding lines of 64 bytes at 96 ns"),
    "far_node_share": Figure(0.93, "Sandwich Fig. 3(a): fast and slow NUMA nodes of a package"),
    "package_link": Figure(35e9, "assumed: two inter-socket links of 10.4 GT/s x 16 bit"),
    "node_link": Figure(60e9, "assumed: on-package fabric between memory nodes"),
    "l3_bandwidth": Figure(30e9, "assumed: one 32-byte port per L3 group at about 1 GHz"),
    "l3_core_bandwidth": Figure(8e9, "assumed: L3 slices scale with the cores of a group"),
    "latent_cores": Figure(3.0, "Sandwich §3.3: three of four cores of an L3-tag cluster"),
    "latent_size": Figure(4.0, "Sandwich Fig. 5: an L3-tag cluster has four cores"),
    "latent_queueing": Figure(0.2, _FIG3 + "(a)"),
    "node_queueing": Figure(0.01, _FIG3 + "(a)"),
    "line_transfer": Figure(275e-9, _FIG3 + "(b): a shared line, per further L3 group"),
    "rank_step": Figure(4.8e-6, _FIG3 + "(b): one rank seen by another in an all-reduce step"),
    "all_reduce_bandwidth": Figure(8e9, "assumed: a core passes on what it reads from memory"),
    "barrier": Figure(0.3e-6, "assumed: per doubling of the threads of a team"),
    "time_slice": Figure(4e-3, "Linux: base slice of the fair scheduler on many cores"),
    "preemption": Figure(0.0052, _FIG3 + "(a): chance per thread and barrier, no PU being idle"),
}

CORES = {
    "avx512": Figure(80e9, "class x86-64 with AVX-512: 2.1 GHz x 64 flop x 0.6"),
    "x86-64": Figure(50e9, "class x86-64: AVX2, 2.6 GHz x 32 flop x 0.6"),
    "aarch64": Figure(25e9, "class aarch64: NEON, 2.6 GHz x 16 flop x 0.6"),
    "other": Figure(25e9, "unknown instruction set: two 128-bit FMA units at 2.6 GHz x 0.6"),
}

PACKAGES = {
    "server": Figure(135e9, "class server: 8 channels DDR4-2933 x 0.72"),
    "client": Figure(37e9, "class client: 2 channels DDR4-3200 x 0.72"),
}

# a mesh of single cores: x86 parts either show their clusters or have none
CLASS_FIGURES: Mapping[str, dict[str, Figure]] = {
    "avx512": {"latent_size": Figure(0.0, "class x86-64: L3 groups are visible")},
    "x86-64": {"latent_size": Figure(0.0, "class x86-64: L3 groups are visible")},
}


def default_parameters(spec: HardwareSpec) -> MachineParameters:
    """Return the documented defaults of the class that `spec` belongs to."""
    kind = _class_of(spec)
    size = "client" if spec.cores <= CLIENT_CORES and len(spec.nodes) <= 1 else "server"
    figures: dict[str, Any] = COMMON | CLASS_FIGURES.get(kind, {})
    return MachineParameters(core_flops=CORES[kind], package_bandwidth=PACKAGES[size], **figures)


def _class_of(spec: HardwareSpec) -> str:
    if spec.arch in ("x86_64", "amd64"):
        return "avx512" if "avx512f" in spec.isa_flags else "x86-64"
    return "aarch64" if spec.arch in ("aarch64", "arm64") else "other"
