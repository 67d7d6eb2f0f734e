"""Parts of searches from arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from dovetail.runtime.index.scans import Part


def part_of(
    query: np.ndarray,
    clusters: Iterable[int],
    centroids: Iterable[float] | None = None,
    **asked: Any,
) -> Part:
    """Return a part; the distances of centroids, which few scanners read, are 0 by default."""
    wanted = tuple(clusters)
    far = (0.0,) * len(wanted) if centroids is None else tuple(centroids)
    return Part(np.asarray(query, np.float32).tobytes(), wanted, far, **asked)
