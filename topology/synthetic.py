"""Reads one-line machines such as `package:2 numa:2 l3:4 core:4 pu:2` (hwloc's notation).

In: the line. Out: a HardwareSpec whose PUs are numbered in order, SMT siblings side by side.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from dovetail.ir.errors import SpecError
from dovetail.topology.builder import MAX_PUS, PuRow, build_hardware, make_cache
from dovetail.topology.textfile import parse_size
from dovetail.topology.values import CacheSpec, GroupSpec, HardwareSpec, NodeSpec

MAX_LINE = 4096
MAX_LEVELS = 32

_LEVEL = re.compile(r"\[?([A-Za-z][A-Za-z0-9]*)(?::(\d{1,6}))?(?:\(([^()]*)\))?\]?$")
_CACHE = re.compile(r"l([1-8])([di]?)(?:cache)?$")
_NAMES = {
    **dict.fromkeys(("package", "socket"), "socket"),
    **dict.fromkeys(("numa", "numanode", "node"), "node"),
    **dict.fromkeys(("group", "die", "cluster", "book", "drawer", "tile"), "group"),
    "core": "core",
    "pu": "pu",
}


@dataclass(frozen=True, slots=True)
class _Level:
    name: str
    role: str  # socket, node, core, pu, group or cache
    arity: int  # children of each object of the level above
    bytes: int


def looks_synthetic(text: str) -> bool:
    """Tell whether `text` is a line of levels, not the name of a file."""
    return re.match(r"\s*[A-Za-z][A-Za-z0-9]*:\d", text) is not None and "/" not in text


def read_synthetic(text: str) -> HardwareSpec:
    """Return the machine that `text` describes, unchecked.

    Raises:
        SpecError: a level is unknown, its count is missing, or the machine is too large.
    """
    if len(text) > MAX_LINE:
        raise SpecError(f"a machine in one line has at most {MAX_LINE} characters")
    levels = [_parse(token) for token in text.replace("[ ", "[").split()]
    if not 1 <= len(levels) <= MAX_LEVELS:
        raise SpecError(f"a machine in one line has 1 to {MAX_LEVELS} levels")
    _check_order(levels)
    total = prod(level.arity for level in levels)
    if not 1 <= total <= MAX_PUS:
        raise SpecError(f"{text.strip()[:60]!r} has {total} PUs, expected 1 to {MAX_PUS}")
    return _build(levels, total, text.strip())


def _parse(token: str) -> _Level:
    match = _LEVEL.match(token)
    bracketed = token.startswith("[")
    if match is None or bracketed != token.endswith("]") or not (match[2] or bracketed):
        raise SpecError(f"{token[:40]!r} is not a level such as l3:4 or core:8(...)")
    name = match[1].lower()
    role = "cache" if _CACHE.match(name) else _NAMES.get(name)
    if role is None or (bracketed and role != "node"):
        known = ", ".join(sorted(_NAMES))
        raise SpecError(f"unknown level {name[:40]!r}; known are {known} and l1 to l8")
    sizes = re.findall(r"(?:size|memory)=(\d+[KMG]?)", match[3] or "")
    return _Level(name, role, int(match[2] or 1), parse_size(sizes[0], token) if sizes else 0)


def _check_order(levels: Sequence[_Level]) -> None:
    roles = [level.role for level in levels]
    for role in ("socket", "node", "core", "pu"):
        if roles.count(role) > 1:
            raise SpecError(f"two levels of kind {role} in one machine")
    if roles[-1] not in ("core", "pu") or ("pu" in roles and roles[-1] != "pu"):
        raise SpecError("the last level of a machine in one line must be core or pu")


def _build(levels: Sequence[_Level], total: int, text: str) -> HardwareSpec:
    spans: list[tuple[_Level, int]] = []
    inside = total
    for level in levels:
        inside //= level.arity
        spans.append((level, inside))
    width = {level.role: span for level, span in spans}
    memory = next((level.bytes for level in levels if level.role == "node"), 0)
    rows = [
        PuRow(pu, pu // width.get("core", 1), pu // width.get("socket", total), None)
        for pu in range(total)
    ]
    node_span = width.get("node", total)
    nodes = [
        NodeSpec(id=i, pus=pus, memory_bytes=memory) for i, pus in enumerate(_cut(total, node_span))
    ]
    return build_hardware(
        text,
        rows,
        nodes,
        caches=_caches(spans, total),
        groups=[
            GroupSpec(kind=level.name, pus=pus)
            for level, span in spans
            if level.role == "group"
            for pus in _cut(total, span)
        ],
    )


def _caches(spans: Sequence[tuple[_Level, int]], total: int) -> Iterator[CacheSpec]:
    for level, span in spans:
        match = _CACHE.match(level.name)
        if match:
            for pus in _cut(total, span):
                yield make_cache(match, pus, level.bytes)


def _cut(total: int, span: int) -> Iterator[tuple[int, ...]]:
    return (tuple(range(first, first + span)) for first in range(0, total, span))
