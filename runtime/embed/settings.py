"""What a user asks of the embedding queues of an artifact: `load(path, embedding=...)`.

In: an SLO and choices. Out: a frozen value that `open_service` reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from dovetail.ir.errors import SpecError
from dovetail.ir.options import check_fields
from dovetail.runtime.embed.line import Arrival

CLASSES = (32, 128, 512)
"""Query-length classes: most tokens of each; the longest is the model's own limit."""


@dataclass(frozen=True, slots=True)
class EmbeddingSettings:
    """Queues within an SLO (WindVE §IV): accelerators first, then the CPU, else BUSY.

    Args:
        slo: seconds that a query may take.
        arrival: `closed` sizes queues for queries that come together (WindVE), `open` for any.
        classes: most tokens of each query-length class; those beyond the model's limit are cut.
        heterogeneous: whether the CPU takes the overflow of accelerators.
        cpu_instances: processes of the CPU, each with the model; one is best.
        stress: whether to refine the depths by a stress test at load; seconds per class.

    Raises SpecError for a value that cannot be meant.
    """

    slo: float = 1.0
    arrival: Arrival = "open"
    classes: tuple[int, ...] = CLASSES
    heterogeneous: bool = True
    cpu_instances: int = 1
    stress: bool = False

    def __post_init__(self) -> None:
        """Raise SpecError for what cannot be meant."""
        check_fields(self)
        if not 0 < self.slo < math.inf:
            raise SpecError(f"an SLO of {self.slo:g} s cannot be met; give a positive time")
        if self.arrival not in get_args(Arrival):
            known = " or ".join(get_args(Arrival))
            raise SpecError(f"arrival must be {known}, not {self.arrival!r}")
        if any(each < 1 for each in self.classes):
            raise SpecError(f"length classes must be at least 1 token, not {self.classes}")
