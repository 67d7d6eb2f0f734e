"""Times of the machine that the simulations of RAG stand for: an H100 and 64 cores beside it.

In: the name of a model, the size of an index. Out: seconds of engine steps and of scans, each by a
roofline over documented figures; what is assumed says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from dovetail.ir.model import ModelSpec
from dovetail.ir.plans import Figure
from dovetail.runtime.flows.control.costs import StepCost
from dovetail.runtime.retrieval.budget import ScanCost
from dovetail.runtime.sim.machines import MACHINES, Roofline
from dovetail.topology.presets import preset_model

CPU_BANDWIDTH = 350e9
"""EPYC 9534, 12 channels DDR5-4800 = 461 GB/s x 0.76: what all its threads read."""
SCAN_THREADS = 32
"""Threads that use up that bandwidth; one alone reads 11 GB/s (assumed)."""
DEVICE_BANDWIDTH = 2000e9
"""H100: 3350 GB/s x 0.6 for short lists (assumed)."""
LINK = 50e9
"""Bytes/s from host to device (PCIe 5.0 x16, assumed)."""
ENCODE = StepCost(fixed=6e-3, per_sequence=0.2e-3)
"""A batch of the encoder on the device, and each text (assumed)."""
STEP_TOKENS, MOST_SEQUENCES = 2048, 256
"""Of a step of the engine: prompt tokens but for one prompt that is longer, and sequences."""
SCAN_FIXED = 200e-6
"""Handing a batch over, waking threads, merging (assumed, about what faiss takes)."""
DEVICE_FIXED = 100e-6
"""Launch and synchronisation of a scan on the device (assumed)."""


@dataclass(frozen=True, slots=True)
class StepTable:
    """Seconds of a step of continuous batching."""

    roofline: Roofline
    layers: int

    def seconds(self, prefills: Sequence[int], decodes: int, stored: int) -> float:
        """See EngineCost."""
        cost = self.roofline
        layer = cost.linear(sum(prefills) + decodes) + cost.gpu_decode(stored)
        layer += sum(map(cost.prefill, prefills))
        return self.layers * layer + cost.head(len(prefills) + decodes)


def model_spec(name: str) -> ModelSpec:
    """Return the dimensions of a model of HedraRAG §6.1."""
    llama = preset_model("llama-2-7b", kv_dtype="bf16")
    larger = {
        "llama-2-13b": {
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "n_layers": 40,
            "heads": 40,
        },
        # OPT's two products of 4 x hidden have the size of three of 8/3 x hidden
        "opt-30b": {"hidden_size": 7168, "intermediate_size": 19115, "n_layers": 48, "heads": 56},
    }
    if name not in larger:
        return preset_model(name, kv_dtype="bf16")
    sizes = larger[name]
    heads = sizes.pop("heads")
    return msgspec.structs.replace(llama, **sizes, n_heads=heads, n_kv_heads=heads)


def engine_cost(name: str) -> StepTable:
    """Return the cost of a model's steps on one H100."""
    stage = Figure(16e-6, "assumed: eight kernels at 2 us")
    machine = replace(MACHINES["h100"], accelerators=1, stage=stage)
    spec = model_spec(name)
    return StepTable(Roofline(machine, spec), spec.n_layers)


def cpu_scan(d: int) -> ScanCost:
    """Return the cost of scanning vectors of `d` float32 on the CPU."""
    return ScanCost(SCAN_FIXED, SCAN_THREADS * 4 * d / CPU_BANDWIDTH, SCAN_THREADS)


def device_scan(d: int) -> ScanCost:
    """Return the cost of scanning them on the accelerator."""
    return ScanCost(DEVICE_FIXED, 4 * d / DEVICE_BANDWIDTH)
