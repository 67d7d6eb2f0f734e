"""An artifact's engine as the options of `load` ask for it.

In: an opened artifact, options. Out: an `Engine`. Options are values, so that another process can
be told of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from dovetail.ir.artifact import ServicePlan
from dovetail.ir.errors import DeviceError, RequestError, SpecError
from dovetail.runtime.activations import ACTIVATIONS
from dovetail.runtime.artifact import Artifact
from dovetail.runtime.device_limits import Wishes
from dovetail.runtime.devices import AUTO, CPU, choose_device, find_torch, parse_device
from dovetail.runtime.engine import Engine
from dovetail.runtime.plan import OFFLOADS, ON_CPU, Offload, SchedulerSettings
from dovetail.runtime.rank_options import RankOptions
from dovetail.topology.hardware import HardwareSpec

log = logging.getLogger("dovetail")

DTYPES = ("auto", "f32", "bf16", "f16")
"""What activations on a device may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What `load` says about engines; its arguments have these names.

    spare_cpu: whether the CPU alone will do where the device cannot be had; `settle` says so.
    """

    plan: ServicePlan | None = None
    threads: int | None = None
    kv_blocks: int | None = None
    deterministic: bool = False
    activations: str = "integer"
    settings: SchedulerSettings | None = None
    ranks: RankOptions | None = None
    device: str = "cpu"
    offload: Offload = "auto"
    dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    gpu_blocks: int | None = None
    max_waiting: int | None = None
    spare_cpu: bool = False

    def __post_init__(self) -> None:
        """Raises RequestError for what no engine can have."""
        for name in ("threads", "kv_blocks", "gpu_blocks", "max_waiting"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(f"{name} must be at least 1, not {value}")
        if self.activations not in ACTIVATIONS:
            raise RequestError(f"activations are integer or float, not {self.activations!r}")
        if self.offload not in OFFLOADS:
            raise RequestError(f"offload must be auto, off or full, not {self.offload!r}")
        if self.dtype not in DTYPES:
            raise RequestError(f"dtype is one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            share = self.gpu_memory_utilization
            raise RequestError(f"gpu_memory_utilization must be above 0 and at most 1, not {share}")
        if not self.beside_cpu and self.gpu_blocks is not None:
            raise RequestError("gpu_blocks are a device's beside the CPU; name the device, too")
        self.wishes.check()

    def settle(self, hardware: HardwareSpec) -> EngineOptions:
        """Return them with a device that is here, never `auto`; raises as `choose_device`.

        Of what is `deterministic` the CPU alone knows how.
        """
        wanted = CPU if self.deterministic and self.device == AUTO else self.device
        found = choose_device(wanted, hardware.accelerators, torch=find_torch())
        return replace(self, device=found.name, spare_cpu=self.device == AUTO)

    @property
    def beside_cpu(self) -> bool:
        """Whether a device computes, too."""
        return parse_device(self.device).beside_cpu

    @property
    def scheduling(self) -> SchedulerSettings:
        """How requests share the CPU alone, or a device and the CPU."""
        if self.beside_cpu:
            settings = replace(self.settings or SchedulerSettings(), offload=self.offload)
        else:
            settings = self.settings or ON_CPU
        waiting = settings.max_waiting if self.max_waiting is None else self.max_waiting
        return replace(settings, max_waiting=waiting)

    @property
    def wishes(self) -> Wishes:
        """Most that a step and a request may hold."""
        return Wishes(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
        )


def open_engine(artifact: Artifact, hardware: HardwareSpec, options: EngineOptions) -> Engine:
    """Return the engine of the model of `artifact` that generates; raises as `load`.

    A driver may be too old for torch, which is known once torch has been imported.
    """
    try:
        return _open(artifact, hardware, options)
    except DeviceError as error:
        if not options.spare_cpu:
            raise
        log.warning("device %s is not used: %s", options.device, error)
    alone = replace(options, device=CPU, gpu_blocks=None)
    return _open(artifact, hardware, alone)


def _open(artifact: Artifact, hardware: HardwareSpec, options: EngineOptions) -> Engine:
    make, settings = _choose(options)
    return make(
        artifact,
        next(iter(artifact.models.values())),
        hardware,
        plan=options.plan,
        threads=options.threads,
        kv_blocks=options.kv_blocks,
        deterministic=options.deterministic,
        activations=options.activations,
        settings=settings,
    )


def _choose(options: EngineOptions) -> tuple[Callable[..., Engine], SchedulerSettings]:
    """Return what makes the engine, and its scheduler's settings."""
    if options.beside_cpu:
        from dovetail.runtime.accelerator.engine import (  # noqa: PLC0415 - it imports torch
            DeviceEngine,
            DeviceOptions,
        )

        device = DeviceOptions(
            name=options.device,
            gpu_memory_utilization=options.gpu_memory_utilization,
            wishes=options.wishes,
            gpu_blocks=options.gpu_blocks,
            dtype=None if options.dtype == "auto" else options.dtype,
        )
        return partial(DeviceEngine, device, ranks=options.ranks), options.scheduling
    if options.ranks is not None:
        raise SpecError("`ranks` are for processes that each have a device; give `device`, too")
    return partial(Engine, wishes=options.wishes), options.scheduling
