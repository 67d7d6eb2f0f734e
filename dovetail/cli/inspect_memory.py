"""How a GPU's memory would be divided, as `dovetail inspect --gpu` prints it (equation (2)).

In: an artifact, a machine class, what workflows ask. Out: a `MemoryDivision`: scans are measured on
this machine, the GPU's by an emulated clock; and facts and a table of it.
"""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from dovetail.cli.report import show_bytes
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.emulated import Emulation
from dovetail.runtime.flows.service import FlowSettings
from dovetail.runtime.gpu_memory import GpuShare, MemoryDivision, describe, divide_for
from dovetail.runtime.retrieval.budget import ScanCost
from dovetail.runtime.sim.machines import find_machine
from dovetail.topology.hardware import read_hardware


def divide_gpu(path: Path, gpu: str, share: GpuShare) -> MemoryDivision:
    """Return how `load` would divide the memory of an accelerator of class `gpu`.

    Raises SpecError for an unknown class, or where it is not clear which index is meant, and what
    opening artifact and index raises.
    """
    emulation = Emulation(find_machine(gpu))
    artifact = open_artifact(path, read_hardware(), kernels=False)
    threads = FlowSettings().search_threads
    division, _ = divide_for(share, emulation, artifact, threads, kernels=False)
    return division


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
        "scans on the GPU": f"{_show_cost(found.device)} (emulated)" if found.device else cold,
        "generations": "simulated by the cost tables of the machine class",
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
