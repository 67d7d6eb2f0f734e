"""How the ranks of a group with devices are started and sum: a value that `load` takes.

In: choices. Out: `RankOptions`. It imports no torch, so that any process may have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dovetail.ir.errors import SpecError

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
