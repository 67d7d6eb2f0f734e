"""How a GPU's memory would be divided, as `dovetail inspect --gpu` prints it (equation (2)).

In: an artifact, a device or a machine class that one does not have, what workflows ask. Out: a
`MemoryDivision`, and facts and a table of it. A device's memory and times are its own; those of a
machine class are *assumed*, and its scans timed by an emulated clock.
"""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from dovetail.cli.report import show_bytes
from dovetail.ir.errors import RequestError, SpecError
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.flows.service import FlowSettings
from dovetail.runtime.gpu_memory import (
    Accelerator,
    GpuShare,
    MemoryDivision,
    ask_device,
    describe,
    divide_memory,
    name_index,
)
from dovetail.runtime.open_engine import EngineOptions
from dovetail.runtime.retrieval.budget import ScanCost
from dovetail.runtime.sim.machines import MACHINES
from dovetail.topology.hardware import HardwareSpec, read_hardware


def divide_gpu(path: Path, gpu: str, share: GpuShare) -> MemoryDivision:
    """Return how `load` would divide the memory of `gpu`: a device here, or a machine class.

    Raises SpecError for an unknown name, or where it is not clear which index is meant, and what
    opening artifact, device and index raises.
    """
    hardware = read_hardware()
    artifact = open_artifact(path, hardware, kernels=False)
    share = name_index(share, artifact)
    if gpu in MACHINES:
        spec = next(iter(artifact.models.values())).file.spec
        accelerator = Accelerator.assumed(MACHINES[gpu], spec)
    else:
        accelerator = ask_device(artifact, _options(gpu, hardware))
    threads = FlowSettings().search_threads
    return divide_memory(share, accelerator, threads, kernels=False)


def _options(device: str, hardware: HardwareSpec) -> EngineOptions:
    try:
        options = EngineOptions(device=device).settle(hardware)
    except RequestError:
        options = EngineOptions()
    if not options.beside_cpu:
        known = ", ".join(MACHINES)
        raise SpecError(f"{device!r} is no device beside the CPU here, and none of {known}")
    return options


def describe_division(found: MemoryDivision) -> dict[str, str]:
    """Return what was asked, measured and chosen."""
    share = found.share
    cold = f"no hot clusters: {found.why_cold or 'no cluster fits'}"
    return {
        "asked": f"{share.rate:g} workflows/s, each of {share.generations:g} generations "
        f"({share.prompt} + {share.reply} tokens) and {share.retrievals:g} searches of "
        f"{share.nprobe} clusters",
        "index": f"{share.index}, {show_bytes(found.index_bytes)} of vectors",
        "to divide": f"{show_bytes(found.budget)}, {show_bytes(found.least_kv)} of it KV at least",
        "scans on the CPU": f"{_show_cost(found.host)} on {found.host.threads} threads (measured)",
        "device": found.origin,
        "scans there": _show_cost(found.device) if found.device else cold,
        "generations": "simulated by the device's cost tables",
        "chosen": describe(found.plan),
    }


def division_table(found: MemoryDivision) -> Table:
    """Return what comes of each size of the KV cache: workflows/s that either side can do."""
    table = Table(title="workflows/s by how memory is divided", title_justify="left")
    table.add_column("")
    for column in ("KV", "hot clusters", "generation", "retrieval", "both"):
        table.add_column(column, justify="right")
    for plan in found.tried:
        sides = (plan.generation, plan.retrieval, plan.workflows)
        sizes = show_bytes(plan.kv_bytes), show_bytes(plan.cluster_bytes)
        chosen = "chosen" if plan == found.plan else ""
        table.add_row(chosen, *sizes, *(f"{side:.4g}" for side in sides))
    return table


def _show_cost(cost: ScanCost) -> str:
    return f"{1e6 * cost.fixed:.3g} us and {1e9 * cost.per_vector:.3g} ns a vector"
