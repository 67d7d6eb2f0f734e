"""Reads the output of `lscpu -p`, `lscpu -J` and `lscpu -J -e`.

In: text, or decoded JSON. Out: a HardwareSpec. Columns are taken from the header, since they differ
from machine to machine; what no column says (memory, cache sizes) stays unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dovetail.ir.errors import SpecError
from dovetail.topology import builder
from dovetail.topology.textfile import MAX_ID, parse_id_list, parse_number, parse_size
from dovetail.topology.values import CacheSpec, GroupSpec, HardwareSpec, NodeSpec

MAX_COLUMNS = 64
MAX_NODES = 1024

_CACHE = re.compile(r"l([1-8])([di]?)$")
_CACHE_FIELD = re.compile(r"L([1-8])([di]?)(?: cache)?$")
_INSTANCES = re.compile(r"(\d{1,19}(?:\.\d+)?) ?([KMG]?)i?B? ?(?:\((\d{1,9}) instances?\))?$")

Row = Mapping[str, str]


def read_lscpu_table(text: str, where: str) -> HardwareSpec:
    """Return the machine in the output of `lscpu -p`, unchecked; SpecError where it is none."""
    header: list[str] = []
    rows: list[Row] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#"):
            names = [name.strip().lower() for name in line[1:].split(",")]
            header = names if names[0] == "cpu" and len(names) <= MAX_COLUMNS else header
        elif line.strip():
            cells = [cell.strip() for cell in line.split(",")]
            if not header:
                raise SpecError(f"{where} has no header `# CPU,...`: keep all that lscpu -p prints")
            if len(cells) != len(header):
                raise SpecError(
                    f"{where} line {number} has {len(cells)} columns, its header {len(header)}"
                )
            rows.append(dict(zip(header, cells, strict=True)))
            _check_count(len(rows), where)
    return _build(rows, where)


def read_lscpu_json(value: Mapping[str, Any], where: str) -> HardwareSpec:
    """Return the machine in decoded `lscpu -J` (fields) or `lscpu -J -e` (a table), unchecked."""
    if isinstance(value.get("cpus"), list):
        entries = value["cpus"]
        _check_count(len(entries), where)
        return _build([_table_row(entry, where) for entry in entries], where)
    fields: dict[str, str] = {}
    _collect(value.get("lscpu"), fields, where)
    return _summary(fields, where)


def _table_row(entry: object, where: str) -> Row:
    if not isinstance(entry, dict):
        raise SpecError(f"{where}: an entry of `cpus` is no object")
    row: dict[str, str] = {}
    for key, value in entry.items():
        names, cells = str(key).lower().split(":"), _text(value).split(":")
        if len(names) == len(cells) <= MAX_COLUMNS:  # "l1d:l1i:l2:l3" is four columns
            row.update(zip(names, cells, strict=True))
    return row


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "Y" if value else "N"
    return "" if value is None or value == "-" else str(value)


def _check_count(count: int, where: str) -> None:
    if count > builder.MAX_PUS:
        raise SpecError(f"{where} lists more than {builder.MAX_PUS} PUs")


def _build(rows: Sequence[Row], where: str) -> HardwareSpec:
    online = [row.get("online", "Y").upper()[:1] != "N" for row in rows]
    rates = {row.get("cpu", ""): _clock(row.get("maxmhz", "")) for row in rows}
    capacity = builder.scale_capacity(rates)
    found = [
        _pu_row(row, here, capacity.get(row.get("cpu", ""), 1024), where)
        for row, here in zip(rows, online, strict=True)
    ]
    live = [row for row, here in zip(rows, online, strict=True) if here]
    nodes = [
        NodeSpec(id=node, pus=pus, memory_bytes=0)
        for node, pus in _members(live, "node", where).items()
    ]
    columns = set(live[0]) if live else set()
    # firmware without packages: clusters stand in for them, and are groups only beside sockets
    kinds = columns & {"book", "drawer", "cluster" if "socket" in columns else ""}
    groups = [
        GroupSpec(kind=kind, pus=pus)
        for kind in kinds
        for pus in _members(live, kind, where).values()
    ]
    caches = _caches(live, where)
    return builder.build_hardware(where, found, nodes, caches=caches, groups=groups)


def _clock(text: str) -> float:
    match = re.match(r"\d{1,9}(\.\d{1,9})?$", text)
    return float(text) if match else float("inf")  # unknown: taken for one of the fastest


def _pu_row(row: Row, online: bool, capacity: int, where: str) -> builder.PuRow:
    cpu = _id(row.get("cpu", ""), "CPU", where)
    if cpu is None:
        raise SpecError(f"{where}: a PU has no CPU id")
    socket = _id(row.get("socket") or row.get("cluster") or "", "Socket", where)
    node = _id(row.get("node", ""), "Node", where)
    core = _id(row.get("core", ""), "Core", where)
    # core ids repeat across packages with `-y` and across core kinds on big.LITTLE; siblings
    # always share their first-level data cache
    key = (socket, core if core is not None else ("pu", cpu), row.get("l1d", ""))
    return builder.PuRow(cpu, key, socket, node, online, capacity)


def _id(text: str, column: str, where: str) -> int | None:
    if text in ("", "-"):
        return None
    number = parse_number(text)
    if number is None or number > MAX_ID:
        raise SpecError(f"{where}: {column} is {text[:40]!r}, not a number up to {MAX_ID}")
    return number


def _members(rows: Iterable[Row], column: str, where: str) -> dict[int, tuple[int, ...]]:
    members: dict[int, list[int]] = {}
    for row in rows:
        key = _id(row.get(column, ""), column, where)
        if key is not None:
            members.setdefault(key, []).append(int(row["cpu"]))
    return {key: tuple(sorted(pus)) for key, pus in members.items()}


def _caches(rows: Sequence[Row], where: str) -> Iterable[CacheSpec]:
    for column in rows[0] if rows else ():
        match = _CACHE.match(column)
        if match:
            for pus in _members(rows, column, where).values():
                yield builder.make_cache(match, pus)


def _collect(value: object, fields: dict[str, str], where: str, depth: int = 0) -> None:
    if not isinstance(value, list) or depth > 8 or len(value) > MAX_NODES:
        raise SpecError(f"{where} is not output of lscpu -J: no list of fields where one should be")
    for entry in value:
        if not isinstance(entry, dict) or not isinstance(entry.get("field"), str):
            raise SpecError(f"{where} is not output of lscpu -J: an entry without `field`")
        fields[entry["field"].rstrip(":")] = _text(entry.get("data"))
        if entry.get("children"):
            _collect(entry["children"], fields, where, depth + 1)


def _summary(fields: Mapping[str, str], where: str) -> HardwareSpec:
    """Lay a machine out from counts: cores in order of packages, SMT siblings a machine apart."""
    threads = _count(fields, "Thread(s) per core", where, 1)
    listed = fields.get("On-line CPU(s) list")
    pus = parse_id_list(listed, where) if listed else tuple(range(_count(fields, "CPU(s)", where)))
    _check_count(len(pus), where)
    sockets = _count(fields, "Socket(s)", where, 0) or _count(fields, "Cluster(s)", where, 1)
    known = set(pus)
    nodes = [
        NodeSpec(id=node, pus=tuple(p for p in found if p in known), memory_bytes=0)
        for node, found in _node_lists(fields, where)
    ]
    cores = max(1, len(pus) // threads)
    place = {pu: i % cores for i, pu in enumerate(pus)}
    rows = [builder.PuRow(pu, place[pu], place[pu] * sockets // cores) for pu in pus]
    return builder.build_hardware(
        where,
        rows,
        nodes,
        caches=_summary_caches(fields, place, cores, where),
        domains=[frozenset(pus)],
        arch=fields.get("Architecture", builder.UNKNOWN),
        vendor=fields.get("Vendor ID", builder.UNKNOWN),
        model=fields.get("Model name", builder.UNKNOWN),
        flags=tuple(sorted(set(fields.get("Flags", "").split()))),
    )


def _count(fields: Mapping[str, str], name: str, where: str, default: int | None = None) -> int:
    text = fields.get(name, "")
    if default is not None and text in ("", "-"):
        return default
    number = parse_number(text)
    if number is None or not 1 <= number <= builder.MAX_PUS:
        raise SpecError(
            f"{where}: {name} is {text[:40]!r}, not a number from 1 to {builder.MAX_PUS}"
        )
    return number


def _node_lists(fields: Mapping[str, str], where: str) -> Iterable[tuple[int, tuple[int, ...]]]:
    for name, text in fields.items():
        match = re.fullmatch(r"NUMA node(\d{1,6}) CPU\(s\)", name)
        if match:
            yield int(match[1]), parse_id_list(text, where)


def _summary_caches(
    fields: Mapping[str, str], place: Mapping[int, int], cores: int, where: str
) -> Iterable[CacheSpec]:
    for name, text in fields.items():
        match, size = _CACHE_FIELD.match(name), _INSTANCES.match(text)
        if match is None or size is None:
            continue
        default = 1 if int(match[1]) > 2 else cores  # older versions give the size of one cache
        count = min(cores, max(1, int(size[3] or default)))
        total = int(float(size[1]) * parse_size(f"1{size[2]}", where))
        for group in range(count):
            pus = [p for p, core in place.items() if core * count // cores == group]
            bytes_each = total // count if size[3] else total
            yield builder.make_cache(match, pus, bytes_each)
