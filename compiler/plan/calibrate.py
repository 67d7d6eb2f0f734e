"""A short calibration of this machine for the contention model.

In: a machine that is this one, and the dtype of a model's weights. Out: MachineParameters whose
figures are measured where that can be done in a few seconds: what one core computes with the
default schedule, what one core and all cores read, what the all-reduce of two processes costs. Kept
in the build cache under the keys of the machine and of our kernels. On a busy machine nothing is
measured; what is not measured stays a documented default.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from dovetail.codegen.isa.target import Target
from dovetail.codegen.library import ABI, BuiltLibrary, LibrarySpec, build_library
from dovetail.codegen.text_cache import generator_digest
from dovetail.compiler.measure.meter import Meter
from dovetail.compiler.measure.recorder import hardware_key
from dovetail.compiler.measure.roofline import free_stream, measure_read_bandwidth
from dovetail.compiler.plan.calibrate_child import RANKS, SumJob, SumTimes
from dovetail.compiler.plan.efficiency import FULL_ROWS, with_shares
from dovetail.compiler.rules.schedules import LINEAR, GemmOp, gemm_requests
from dovetail.compiler.search.policy import SearchTask
from dovetail.ir.artifact import PhasePlan
from dovetail.ir.cache import cache_directory
from dovetail.ir.errors import DovetailError, ToolchainError
from dovetail.ir.files import write_whole
from dovetail.ir.model import ModelSpec
from dovetail.ir.tuning import OK
from dovetail.runtime.child.child import Child, ChildLost
from dovetail.runtime.machine import abi
from dovetail.runtime.machine.cpu_time import QUIET_CORES, busy_cores
from dovetail.runtime.machine.memory import SharedMemory
from dovetail.runtime.native.collective import comm_bytes
from dovetail.topology.binding import choose_pus
from dovetail.topology.hardware import HardwareSpec
from dovetail.topology.parameters import MachineParameters, default_parameters
from dovetail.topology.replay import Trace

SUM = "dovetail.compiler.plan.calibrate_child"
SIDE = 1024
"""N and K of the product that tells what a core computes."""
ROUNDS, SECONDS = 7, 2.0
PASSES = 5
SMALL, LARGE = 1 << 10, 4 << 20
"""Bytes of the all-reduces that tell latency and bandwidth."""
PATIENCE = 20.0
"""Seconds after which two processes that sum are given up."""


def calibrate(
    hardware: HardwareSpec,
    dtype: str,
    target: Target,
    cache: Path | None = None,
    *,
    measure: bool = True,
) -> MachineParameters:
    """Return the figures of this machine; from the cache where it was calibrated before.

    The defaults without measuring, and, for now, while others are at work on the machine.

    Raises:
        ToolchainError: there is no C compiler.
    """
    file = calibration_file(hardware, dtype, target, cache)
    found = read_calibration(file)
    if measure and not found and busy_cores(hardware.allowed_pus) <= QUIET_CORES:
        found = measure_figures(hardware, dtype, target, cache)
        with suppress(OSError):  # a cache that cannot be written is as good as an empty one
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, msgspec.json.format(msgspec.json.encode(found)))
    return default_parameters(hardware).measured(**found)


def figures_of(
    source: str | Path,
    hardware: HardwareSpec,
    spec: ModelSpec,
    target: Target,
    trace: Trace,
    *,
    measured: bool,
    cache: Path | None = None,
) -> MachineParameters:
    """Return the figures to plan with: of this machine where `source` is `auto`.

    They are measured only if asked for, and where there is something to choose. What products of
    few rows compute is predicted in any case.
    """
    if source == "auto":
        measure = measured and hardware.usable_threads > 1
        figures = calibrate(hardware, spec.weight_dtype, target, cache, measure=measure)
    else:
        figures = default_parameters(hardware)
    return with_shares(figures, hardware, spec, target, trace)


def calibration_file(
    hardware: HardwareSpec, dtype: str, target: Target, cache: Path | None = None
) -> Path:
    """Return where the figures of these kernels on a machine with so many allowed PUs are kept."""
    key = hardware_key(hardware, hardware.usable_threads, ABI)
    name = f"{key.label}-{key.cores}-{target.name}-{dtype}-{generator_digest()[:12]}.json"
    return (cache or cache_directory()) / "calibration" / name


def read_calibration(file: Path) -> dict[str, float]:
    """Return the figures in a file; none where it is absent or damaged."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=dict[str, float])
    except (OSError, msgspec.MsgspecError):
        return {}
    known = set(MachineParameters.__dataclass_fields__)
    return found if set(found) <= known and all(v > 0 for v in found.values()) else {}


def measure_figures(
    hardware: HardwareSpec, dtype: str, target: Target, cache: Path | None = None
) -> dict[str, float]:
    """Return the figures that are measured, by name; what fails is left out."""
    kernels = gemm_requests((dtype,), target)
    library = build_library(LibrarySpec(target, kernels, name="tuning", tvm_ffi=False), cache)
    found = measure_bandwidths(hardware, measure_read_bandwidth)
    free_stream()
    if rate := measure_core(hardware, dtype, target, library):
        found["core_flops"] = rate
    if hardware.usable_threads > 1 and (times := measure_sums(hardware, library.path)):
        found |= sum_figures(*times)
    return found


def measure_bandwidths(
    hardware: HardwareSpec, read: Callable[[int, int], float]
) -> dict[str, float]:
    """Return what a core and a package read; `read` gets threads and passes.

    An L3 group passes at least its share of what all cores read from memory.
    """
    core, every = read(1, PASSES), read(hardware.usable_threads, PASSES)
    allowed = [pu for pu in hardware.pus if pu.id in set(hardware.allowed_pus)]
    packages = len({pu.socket for pu in allowed})
    groups = sum(
        cache.level == 3 and not set(cache.pus).isdisjoint(hardware.allowed_pus)
        for cache in hardware.caches
    )
    defaults = default_parameters(hardware)
    found = {"core_bandwidth": core, "package_bandwidth": max(core, every / packages)}
    if groups and every / groups > defaults.l3_bandwidth.value:
        found["l3_bandwidth"] = every / groups
    if core > defaults.l3_core_bandwidth.value:
        found["l3_core_bandwidth"] = core
    return found


def measure_core(
    hardware: HardwareSpec, dtype: str, target: Target, library: BuiltLibrary
) -> float | None:
    """Return flop/s of one core in a large product by the default schedule; None on failure."""
    op = GemmOp("calibration", LINEAR, SIDE, SIDE, dtype)
    phase = PhasePlan(threads=1, cpus=choose_pus(hardware, 1))
    task = SearchTask(op, target, phase, hardware, (FULL_ROWS,))
    problem = task.problem(FULL_ROWS)
    pool = 4 * SIDE * SIDE * 4  # cold weights are not asked for here
    candidate = problem.candidate(task.default(FULL_ROWS))
    try:
        with Meter(library.path, library.index, pool_bytes=pool) as meter:
            (found,) = meter.measure(problem.case, [candidate], rounds=ROUNDS, seconds=SECONDS)
    except ToolchainError:
        return None
    return 2 * FULL_ROWS * SIDE * SIDE / found.low if found.status == OK else None


def measure_sums(hardware: HardwareSpec, library: Path) -> tuple[float, float] | None:
    """Return seconds of a small and a large all-reduce of two pinned processes; None on failure."""
    shared = SharedMemory.create(comm_bytes(abi.declare(ctypes.CDLL(str(library))), RANKS, 1))
    size, sizes = len(shared.bytes), (SMALL, LARGE)
    children: list[Child] = []
    try:
        for rank, pu in enumerate(choose_pus(hardware, RANKS)):
            job = SumJob(library=str(library), nbytes=size, rank=rank, pu=pu, sizes=sizes)
            children.append(Child.start(SUM, "the summing process {}", fds=[shared.fd], quiet=True))
            children[-1].tell(job)
        deadline = time.monotonic() + PATIENCE
        for child in reversed(children):  # what the first one says counts
            times = child.ask(None, SumTimes, max(0.1, deadline - time.monotonic())).seconds
    except (ChildLost, DovetailError):
        return None
    finally:
        for child in children:
            child.kill()
        shared.close()
    small, large = map(min, times)
    return small, large


def sum_figures(small: float, large: float) -> dict[str, float]:
    """Return the figures behind two processes' all-reduces of SMALL and LARGE bytes.

    The model's all-reduce of two takes 4 rank steps and moves half of the bytes twice.
    """
    found = {"rank_step": small / 4}
    if large > small:
        found["all_reduce_bandwidth"] = LARGE / (large - small)
    return found
