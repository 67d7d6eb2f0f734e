"""A share of many alike cases runs by default; the rest is long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import pytest


def pick(cases: Sequence[Any], every: int) -> list[Any]:
    """Return one of `every` so many cases, and one of each first part: the same everywhere."""
    seen, found = set(), []
    for case in cases:
        if case[0] not in seen or crc32(repr(case).encode()) % every == 0:
            found.append(case)
        seen.add(case[0])
    return found


def in_turns(firsts: Sequence[Any], cases: Sequence[Any]) -> list[Any]:
    """Return each of `firsts` with each case, the first of one with the next case than the last's.

    So of a share each case has some.
    """
    turned = [(*cases[at % len(cases) :], *cases[: at % len(cases)]) for at in range(len(firsts))]
    return [(one, *case) for one, order in zip(firsts, turned, strict=True) for case in order]


def share(cases: Sequence[Any], every: int) -> list[Any]:
    """Return all cases; those run by default that `pick` returns."""
    runs = pick(cases, every)
    return [c if c in runs else pytest.param(*c, marks=pytest.mark.long) for c in cases]
