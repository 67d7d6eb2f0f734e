"""What `load` says about an engine: values, so that another process can be told of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict

from dovetail.ir.artifact import ServicePlan
from dovetail.ir.errors import RequestError, SpecError
from dovetail.runtime.machine.devices import AUTO, CPU, choose_device, find_torch, parse_device
from dovetail.runtime.native.deterministic import ACTIVATIONS
from dovetail.runtime.schedule.device_limits import LimitOptions, check_counts
from dovetail.runtime.schedule.plan import OFFLOADS, ON_CPU, Offload, SchedulerSettings
from dovetail.runtime.schedule.speculation import DRAFTED, read_speculation
from dovetail.topology.hardware import HardwareSpec

BACKENDS = ("gloo", "nccl")


@dataclass(frozen=True, slots=True)
class RankOptions:
    """How ranks beyond the first one are started, and how they sum.

    backend: torch.distributed's `gloo` or `nccl`; None is what the device calls for.
    ray: address of a Ray cluster (extra `ray`) that places the ranks on its machines, each of
    which has the artifact under the same path; None: all run on this machine. The first rank is
    the process that loads.
    resources: what a rank asks of the machine Ray puts it on, beside its threads as CPUs.
    seconds: after which a rank that does not answer in a sum is given up.
    """

    backend: Literal["gloo", "nccl"] | None = None
    ray: str | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 60.0

    def __post_init__(self) -> None:
        """Raises SpecError for a backend that there is not."""
        if self.backend is not None and self.backend not in BACKENDS:
            raise SpecError(f"the backend must be gloo or nccl, not {self.backend!r}")


DTYPES = ("auto", "f32", "bf16", "f16")
"""What activations on a device may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(LimitOptions):
    """What `load` says about engines; its arguments have these names.

    spare_cpu: whether the CPU alone will do where the device cannot be had; `settle` says so.
    memory: bytes of the CPU's that others leave this app or engine; None: all that are free.
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
    gpu_blocks: int | None = None
    max_waiting: int | None = None
    kv_file: str | None = None
    kv_file_bytes: int = 1 << 30
    speculative_config: dict[str, Any] | str | None = None
    draft: str | None = None
    spare_cpu: bool = False
    memory: int | None = None

    def __post_init__(self) -> None:
        """Raises RequestError for what no engine can have."""
        LimitOptions.__post_init__(self)
        names = ("threads", "kv_blocks", "memory", "gpu_blocks", "max_waiting", "kv_file_bytes")
        check_counts(**{name: getattr(self, name) for name in names})
        if self.activations not in ACTIVATIONS:
            raise RequestError(f"activations are integer or float, not {self.activations!r}")
        if self.offload not in OFFLOADS:
            raise RequestError(f"offload must be auto, off or full, not {self.offload!r}")
        if self.dtype not in DTYPES:
            raise RequestError(f"dtype is one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.kv_file is not None and self.beside_cpu and self.device != AUTO:
            raise RequestError("kv_file is for KV of the CPU alone; give the device cpu")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            share = self.gpu_memory_utilization
            raise RequestError(f"gpu_memory_utilization must be above 0 and at most 1, not {share}")
        read_speculation(self.speculative_config)
        if not self.beside_cpu and self.gpu_blocks is not None:
            raise RequestError("gpu_blocks needs a device beside the CPU; give the device, too")

    def settle(self, hardware: HardwareSpec) -> EngineOptions:
        """Return them with a device that is here, never `auto`; raises as `choose_device`.

        Of what is `deterministic` the CPU alone knows how.
        """
        wanted = CPU if self.deterministic and self.device == AUTO else self.device
        found = choose_device(wanted, hardware.accelerators, torch=find_torch())
        spare, blocks = self.device == AUTO, self.gpu_blocks
        if spare and not parse_device(found.name).beside_cpu:
            blocks = None  # nobody asked for the CPU, which has no such blocks
        return replace(self, device=found.name, spare_cpu=spare, gpu_blocks=blocks)

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
        drafts = read_speculation(self.speculative_config) or settings.num_speculative_tokens
        if self.draft is not None and self.speculative_config is None:
            drafts = drafts or DRAFTED
        return replace(settings, max_waiting=waiting, num_speculative_tokens=drafts)


class EngineKeywords(TypedDict, total=False):
    """Options of `load` for the engine, with the defaults of `EngineOptions`."""

    plan: ServicePlan | None
    threads: int | None
    kv_blocks: int | None
    memory: int | None
    deterministic: bool
    activations: str
    settings: SchedulerSettings | None
    ranks: RankOptions | None
    device: str
    offload: Offload
    dtype: str
    gpu_memory_utilization: float
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_model_len: int | None
    gpu_blocks: int | None
    max_waiting: int | None
    kv_file: str | None
    kv_file_bytes: int
    speculative_config: dict[str, Any] | str | None
    draft: str | None
