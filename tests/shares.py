"""A share of many alike cases runs by default; the rest is long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import pytest


def share(cases: Sequence[Any], every: int) -> list[Any]:
    """Return all cases: of `every` so many one runs by default, and one of each first part.

    Which ones is the same on all machines.
    """
    seen, found = set(), []
    for case in cases:
        runs = case[0] not in seen or crc32(repr(case).encode()) % every == 0
        seen.add(case[0])
        found.append(case if runs else pytest.param(*case, marks=pytest.mark.long))
    return found
