"""HardwareSpec v1: what a machine is, as one frozen value with a JSON form.

In: this machine (`auto`), a file of another one (hwloc XML, lscpu, our JSON) or a line such as
`package:2 numa:2 l3:4 core:4 pu:2`.
Out: sockets, NUMA nodes, cores, PUs, caches, instruction flags, memory and the limits put on us.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from dovetail.ir.errors import SpecError
from dovetail.topology.builder import MAX_GROUPS, MAX_PUS
from dovetail.topology.hwloc import read_hwloc
from dovetail.topology.lscpu import read_lscpu_json, read_lscpu_table
from dovetail.topology.synthetic import looks_synthetic, read_synthetic
from dovetail.topology.sysfs import read_sysfs
from dovetail.topology.values import HardwareSpec

MAX_FILE_BYTES = 16 << 20

__all__ = ["HardwareSpec", "check_hardware", "dump_hardware", "load_hardware", "read_hardware"]


def read_hardware(source: str | Path = "auto", *, root: Path = Path("/")) -> HardwareSpec:
    """Return the machine that `source` describes.

    Args:
        source: `auto` for this machine; a line of levels such as `package:2 core:4`; else the path
            of an hwloc XML file, of saved output of `lscpu -p` or `lscpu -J`, or of
            `dump_hardware`. The kind of a file is told from its contents.
        root: where `/sys` and `/proc` are found under; only used by `auto`.

    Raises:
        SpecError: the file is missing, too large, none of these, or an impossible machine.
    """
    if source == "auto":
        return check_hardware(read_sysfs(root), "this machine")
    if isinstance(source, str) and looks_synthetic(source) and not _is_file(source):
        return check_hardware(read_synthetic(source), repr(source))
    return load_hardware(Path(source))


def load_hardware(path: Path) -> HardwareSpec:
    """Return the machine described in `path`; raises SpecError where it holds anything else."""
    data = _read_file(path)
    if data.lstrip()[:1] == b"<":
        spec = read_hwloc(data, path.name)
    elif data.lstrip()[:1] == b"{":
        spec = _read_json(data, path)
    else:
        spec = _read_table(data, path)
    return check_hardware(spec, str(path))


def _is_file(name: str) -> bool:
    try:
        return Path(name).exists()
    except OSError:  # longer than any file name
        return False


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SpecError(f"cannot read hardware file {path}: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise SpecError(f"hardware file {path} is larger than {MAX_FILE_BYTES >> 20} MiB")
    return data


def _read_json(data: bytes, path: Path) -> HardwareSpec:
    try:
        value = msgspec.json.decode(data)
        if isinstance(value, dict) and value.keys() & {"lscpu", "cpus"}:
            return read_lscpu_json(value, path.name)
        return msgspec.convert(value, HardwareSpec)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SpecError(
            f"{path} is neither output of lscpu -J nor a HardwareSpec v1 JSON file: {error}"
        ) from None


def _read_table(data: bytes, path: Path) -> HardwareSpec:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = ""
    if not text.lstrip().startswith(("#", *"0123456789")):
        raise SpecError(
            f"{path} is not a hardware file: give hwloc XML (lstopo --of xml), the output of "
            "lscpu -p or lscpu -J, or a hardware.json"
        )
    return read_lscpu_table(text, path.name)


def dump_hardware(spec: HardwareSpec) -> bytes:
    """Return `spec` as indented JSON that `load_hardware` reads back to an equal value."""
    return msgspec.json.format(msgspec.json.encode(spec), indent=1) + b"\n"


def check_hardware(spec: HardwareSpec, where: str) -> HardwareSpec:
    """Return `spec` unchanged, or raise SpecError naming `where` and what cannot be true."""
    for fault in _faults(spec):
        raise SpecError(f"hardware description of {where} is wrong: {fault}")
    return spec


def _faults(spec: HardwareSpec) -> Iterable[str]:
    ids = [pu.id for pu in spec.pus]
    known = set(ids)
    if spec.schema != 1:
        yield f"schema {spec.schema} is not 1; write it again with this version"
    if not spec.pus or len(ids) > MAX_PUS:
        yield f"{len(ids)} PUs, expected 1 to {MAX_PUS}"
    if len(known) != len(ids):
        yield "two PUs have the same id"
    if any(min(pu.id, pu.core, pu.socket, pu.node) < 0 or pu.capacity <= 0 for pu in spec.pus):
        yield "a PU has a negative id, core, socket or node, or no capacity"
    yield from _allowed_faults(spec)
    yield from _cache_faults(spec, known)
    yield from _node_faults(spec, known)
    yield from _group_faults(spec, known)
    if spec.memory_bytes < 0 or (spec.memory_limit is not None and spec.memory_limit <= 0):
        yield "memory must be a positive number of bytes, or 0 where it is unknown"
    if spec.cpu_quota is not None and not 0 < spec.cpu_quota < 1e6:
        yield f"a CPU quota of {spec.cpu_quota} cores"


def _allowed_faults(spec: HardwareSpec) -> Iterable[str]:
    allowed = set(spec.allowed_pus)
    online = {pu.id for pu in spec.pus if pu.online}
    if not allowed:
        yield "no PU is allowed"
    if len(allowed) != len(spec.allowed_pus) or list(spec.allowed_pus) != sorted(allowed):
        yield "allowed_pus must be sorted and hold no PU twice"
    if not allowed <= online:
        yield f"allowed PUs {sorted(allowed - online)} do not exist or are offline"


def _cache_faults(spec: HardwareSpec, known: set[int]) -> Iterable[str]:
    for cache in spec.caches:
        if not (1 <= cache.level <= 8 and 0 <= cache.bytes < 1 << 40 and cache.line_bytes > 0):
            yield f"a level {cache.level} cache of {cache.bytes} bytes"
        if not cache.pus or not set(cache.pus) <= known:
            yield f"a level {cache.level} cache is shared by PUs that do not exist"


def _group_faults(spec: HardwareSpec, known: set[int]) -> Iterable[str]:
    if len(spec.groups) > MAX_GROUPS:
        yield f"{len(spec.groups)} groups, expected at most {MAX_GROUPS}"
    if any(not group.pus or not set(group.pus) <= known for group in spec.groups):
        yield "a group holds PUs that do not exist, or none"
    if any(not set(device.near) <= known for device in spec.accelerators):
        yield "an accelerator is near PUs that do not exist"
    if not 0 <= spec.empty_sockets <= MAX_PUS:
        yield f"{spec.empty_sockets} packages without PUs"


def _node_faults(spec: HardwareSpec, known: set[int]) -> Iterable[str]:
    nodes = {node.id for node in spec.nodes}
    if len(nodes) != len(spec.nodes):
        yield "two NUMA nodes have the same id"
    if nodes and any(pu.node not in nodes for pu in spec.pus if pu.online):
        yield "a PU is on a NUMA node that does not exist"
    for node in spec.nodes:
        if not {*node.pus, *node.near} <= known or node.memory_bytes < 0:
            yield f"NUMA node {node.id} has unknown PUs or negative memory"
        if node.distances and len(node.distances) != len(spec.nodes):
            yield f"NUMA node {node.id} does not give {len(nodes)} distances"
