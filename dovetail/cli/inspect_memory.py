"""How a GPU's memory would be divided, as `dovetail inspect --gpu` prints it (equation (2)).

In: an artifact, a device, what workflows ask. Out: a `MemoryDivision`, and facts and a table of it.
"""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from dovetail.cli.report import facts_table, make_table, show_bytes
from dovetail.ir.errors import RequestError, SpecError
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.flows.gpu_memory import (
    GpuShare,
    MemoryDivision,
    ask_device,
    describe,
    divide_memory,
    name_index,
)
from dovetail.runtime.flows.service import FlowSettings
from dovetail.runtime.retrieval.budget import ScanCost
from dovetail.topology.hardware import HardwareSpec, read_hardware


def divide_gpu(path: Path, gpu: str, share: GpuShare) -> MemoryDivision:
    """Return how `load` would divide the memory of the device `gpu`.

    Raises SpecError for an unknown name, or where it is not clear which index is meant, and what
    opening artifact, device and index raises.
    """
    hardware = read_hardware()
    artifact = open_artifact(path, hardware, kernels=False)
    share = name_index(share, artifact)
    threads = FlowSettings().plan_searches(artifact).threads
    accelerator = ask_device(artifact, _options(gpu, hardware))
    return divide_memory(share, accelerator, threads, kernels=False)


def _options(device: str, hardware: HardwareSpec) -> EngineOptions:
    try:
        options = EngineOptions(device=device).settle(hardware)
    except RequestError:
        options = EngineOptions()
    if not options.beside_cpu:
        raise SpecError(
            f"{device!r} is not a device of this machine beside the CPU; name one, such as cuda:0"
        )
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


def division_tables(found: MemoryDivision) -> tuple[Table, Table]:
    """Return what was asked and chosen, and what comes of each size of the KV cache.

    That is the workflows/s that either side, generation and retrieval, can do.
    """
    facts = facts_table("memory of the GPU", describe_division(found))
    columns = ("", ">KV", ">hot clusters", ">generation", ">retrieval", ">both")
    rows = [
        (
            "chosen" if plan == found.plan else "",
            show_bytes(plan.kv_bytes),
            show_bytes(plan.cluster_bytes),
            *(f"{side:.4g}" for side in (plan.generation, plan.retrieval, plan.workflows)),
        )
        for plan in found.tried
    ]
    return facts, make_table("workflows/s by how memory is divided", columns, rows)


def _show_cost(cost: ScanCost) -> str:
    return f"{1e6 * cost.fixed:.3g} us and {1e9 * cost.per_vector:.3g} ns a vector"
