"""An artifact's engine as the options of `load` ask for it.

In: an opened artifact, options. Out: an `Engine`. Options are values, so that another process can
be told of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from dovetail.ir.artifact import ServicePlan
from dovetail.ir.errors import RequestError, SpecError
from dovetail.runtime.activations import ACTIVATIONS
from dovetail.runtime.artifact import Artifact
from dovetail.runtime.cuda_engine import CudaEngine, CudaOptions
from dovetail.runtime.emulated import Emulation
from dovetail.runtime.engine import Engine
from dovetail.runtime.meeting import RankOptions
from dovetail.runtime.pipelined import PipelinedEngine
from dovetail.runtime.plan import SchedulerSettings
from dovetail.runtime.timed import TimedEngine
from dovetail.topology.hardware import HardwareSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What `load` says about engines; its arguments have these names."""

    plan: ServicePlan | None = None
    threads: int | None = None
    kv_blocks: int | None = None
    deterministic: bool = False
    activations: str = "integer"
    emulation: Emulation | None = None
    settings: SchedulerSettings | None = None
    ranks: RankOptions | None = None
    cuda: CudaOptions | None = None

    def __post_init__(self) -> None:
        """Raises RequestError for what no engine can have."""
        for name in ("threads", "kv_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(f"{name} must be at least 1, not {value}")
        if self.activations not in ACTIVATIONS:
            raise RequestError(f"activations are integer or float, not {self.activations!r}")
        if self.emulation is not None and self.cuda is not None:
            raise RequestError("give either a GPU or one to emulate")


def open_engine(artifact: Artifact, hardware: HardwareSpec, options: EngineOptions) -> Engine:
    """Return the engine of the model of `artifact` that generates; raises as `load`."""
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


def _choose(options: EngineOptions) -> tuple[Callable[..., Engine], SchedulerSettings | None]:
    """Return what makes the engine, and its scheduler's settings."""
    settings = options.settings
    if options.cuda is not None:
        settings = settings or options.cuda.settings
        cuda = replace(options.cuda, settings=settings)
        return partial(CudaEngine, cuda, ranks=options.ranks), settings
    if options.emulation is not None:
        settings = settings or options.emulation.settings
        emulation = replace(options.emulation, settings=settings)
        kind = TimedEngine if emulation.timed else PipelinedEngine
        return partial(kind, emulation, ranks=options.ranks), settings
    if options.ranks is not None:
        raise SpecError(
            "`ranks` are for processes with accelerators; give `cuda` or an `emulation`, too"
        )
    return Engine, settings
