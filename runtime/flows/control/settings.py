"""What a user may set of how workflows share engine and index; the paper's figures by default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dovetail.ir.errors import SpecError
from dovetail.ir.options import check_fields

MEASURED: Literal["measured"] = "measured"
"""A patience that each index has of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WavefrontSettings:
    """How workflows are scheduled. Any `transformations` but two give the same answers.

    `stop` leaves out what a search hardly ever finds, see patience; `arrange` shows documents in
    another order where a workflow lets it.

    transformations: names of those that may be applied where they are predicted to pay; None: all
        that are registered.
    generation_load, retrieval_load: a generation (search) is begun on a guess while fewer than so
        many are under way (HedraRAG §4.3, where 16 is best for generations). None: while the
        engine is predicted to do less than half of what it can.
    refresh: sub-stages between two looks at which clusters are hot (§4.4).
    patience: clusters, in the order of centroids, without change of the nearest documents after
        which a search ends; MEASURED: as was measured when the index was built, which keeps 0.99 of
        what is found; None: it never ends early, and is exact.
    fixed_clusters: clusters of each search in a sub-stage, instead of as many as fit its time.
    """

    transformations: frozenset[str] | None = None
    generation_load: int | None = None
    retrieval_load: int = 32
    refresh: int = 50
    patience: int | Literal["measured"] | None = MEASURED
    fixed_clusters: int | None = None

    def __post_init__(self) -> None:
        """Raises SpecError for a value of a wrong type, or a number below 1."""
        check_fields(self)
        for name in ("refresh", "patience", "fixed_clusters"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise SpecError(f"{name} must be at least 1, not {value}")
