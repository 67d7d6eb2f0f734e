"""What a user may ask of the queues, and what is refused."""

from __future__ import annotations

import math

import pytest

from dovetail.ir.errors import SpecError
from dovetail.runtime.embed.settings import EmbeddingSettings


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"slo": 0.0}, "SLO of 0 s"),
        ({"slo": math.nan}, "SLO of nan s"),
        ({"slo": math.inf}, "SLO of inf s"),
        ({"arrival": "poisson"}, "open or closed, not 'poisson'"),
        ({"classes": (32, 0)}, "at least 1 token"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        EmbeddingSettings(**options)  # type: ignore[arg-type]
    assert EmbeddingSettings().slo == 1.0
