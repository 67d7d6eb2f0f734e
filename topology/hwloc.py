"""Reads hwloc XML, versions 1 and 2, as `lstopo --of xml` writes it.

In: the bytes of a file. Out: a HardwareSpec. The text is parsed as a stream: entity declarations,
too many objects and nesting without end are refused before they cost memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from dovetail.ir.errors import SpecError
from dovetail.topology import builder
from dovetail.topology.textfile import parse_number
from dovetail.topology.values import AcceleratorSpec, CacheSpec, GroupSpec, HardwareSpec, NodeSpec

MAX_ELEMENTS = 200_000
MAX_DEPTH = 128
MAX_WORDS = builder.MAX_PUS // 32
MAX_NODES = 1024
MAX_ACCELERATORS = 256

_CACHE = re.compile(r"L([1-8])([di]?)Cache$")
_CACHE_KINDS = {"0": "unified", "1": "data", "2": "instruction"}
_SOCKETS = ("Package", "Socket")
_NODES = ("NUMANode", "Node")
_GROUPS = ("Group", "Die", "Cluster", "Book", "Drawer", "Tile", "Module")
_GPU_DEVICE = re.compile(r"(cuda|nvml)\d+$")


@dataclass(slots=True)
class _Object:
    kind: str
    element: Element
    number: int
    pus: set[int] = field(default_factory=set)
    core: int | None = None
    socket: int | None = None
    near: str = ""
    """The set of PUs of the nearest object above that has one, as text."""

    def get(self, name: str, default: str = "") -> str:
        """Return an attribute."""
        return self.element.get(name, default)


def read_hwloc(data: bytes, where: str) -> HardwareSpec:
    """Return the machine in `data`, unchecked; SpecError naming `where` for anything else."""
    reader = Reader(where)
    reader.feed(data)
    return reader.hardware()


class Reader:
    """Collects the objects of one file while expat walks it; at most MAX_ELEMENTS of them."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.elements = 0
        self.objects: list[_Object] = []
        self.left = {"PU": builder.MAX_PUS, "Group": builder.MAX_GROUPS, "NUMANode": MAX_NODES}
        self.open: list[_Object | None] = []
        self.tree = TreeBuilder()

    def feed(self, data: bytes) -> None:
        """Walk a whole file; SpecError at the first element that no export would hold."""
        parser = expat.ParserCreate()
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self.tree.data
        parser.EntityDeclHandler = self._entity
        try:
            parser.Parse(data, True)
            self.root = self.tree.close()
        except expat.ExpatError as error:
            raise SpecError(f"{self.where} is not well-formed XML: {error}") from None
        except (ValueError, LookupError) as error:  # an encoding that is none
            raise SpecError(f"{self.where} cannot be decoded: {error}") from None

    def fail(self, message: str) -> SpecError:
        """Return the error for this file."""
        return SpecError(f"hwloc file {self.where}: {message}")

    def _entity(self, name: str, *_: object) -> None:
        raise self.fail(f"declares the entity {name!r}; topology files need none")

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        self.elements += 1
        if self.elements > MAX_ELEMENTS:
            raise self.fail(f"more than {MAX_ELEMENTS} elements")
        if len(self.open) >= MAX_DEPTH:
            raise self.fail(f"objects nested deeper than {MAX_DEPTH}")
        if self.elements == 1 and tag != "topology":
            raise self.fail(f"its first element is <{tag[:40]}>, not <topology>")
        element = self.tree.start(tag, attributes)
        self.open.append(self._object(element) if tag == "object" else None)

    def _end(self, tag: str) -> None:
        self.tree.end(tag)
        self.open.pop()

    def _object(self, element: Element) -> _Object:
        parents = [item for item in self.open if item is not None]
        kind = element.get("type", "")
        if kind == "Cache":  # version 1 numbers caches by an attribute
            side = "i" if element.get("cache_type") == "2" else ""
            kind = f"L{element.get('depth', '')}{side}Cache"
        found = _Object(kind, element, len(self.objects))
        limited = "Group" if kind in _GROUPS else "NUMANode" if kind in _NODES else kind
        if limited in self.left:
            self.left[limited] -= 1
            if self.left[limited] < 0:
                raise self.fail(f"too many objects of type {limited}")
        for parent in reversed(parents):
            found.core = parent.number if parent.kind == "Core" else found.core
            found.socket = parent.number if parent.kind in _SOCKETS else found.socket
            found.near = found.near or parent.get("cpuset")
        if kind == "PU":
            pu = self._number(found, "os_index")
            for parent in parents:
                parent.pus.add(pu)
            found.pus.add(pu)
        self.objects.append(found)
        return found

    def _number(self, item: _Object, name: str, default: int | None = None) -> int:
        text = item.get(name)
        if not text and default is not None:
            return default
        number = parse_number(text)
        if number is None:
            raise self.fail(f"{name}={text[:40]!r} of an object is not a number")
        return number

    def _set(self, text: str) -> set[int]:
        words = text.split(",")
        if len(words) > MAX_WORDS:
            raise self.fail(f"a set of more than {builder.MAX_PUS} PUs")
        found: set[int] = set()
        for place, word in enumerate(reversed(words)):
            try:
                bits = int(word, 16) if word else 0
            except ValueError:
                raise self.fail(f"the set {text[:60]!r} is no list of 32-bit words") from None
            if not 0 <= bits < 1 << 32:
                raise self.fail(f"the set {text[:60]!r} has no lower end or too wide a word")
            found.update(place * 32 + i for i in range(bits.bit_length()) if bits >> i & 1)
        return found

    def of(self, *kinds: str) -> list[_Object]:
        """Return the objects of some types, in the order of the file."""
        return [item for item in self.objects if item.kind in kinds]

    def hardware(self) -> HardwareSpec:
        """Return what the file says, unchecked, once it was walked."""
        top = self.of("Machine", "System")
        if not top:
            raise self.fail("no Machine object: is it an export of `lstopo --of xml`?")
        self._check_sets()
        known = top[0].pus
        allowed = top[0].get("allowed_cpuset")
        infos: dict[str, str] = {}
        for item in self.of("Machine", "System", *_SOCKETS):
            infos = _infos(item.element) | infos
        return builder.build_hardware(
            self.where,
            self._rows(),
            self._with_distances(self._nodes(known, top[0])),
            caches=self._caches(),
            groups=self._groups(),
            accelerators=self._accelerators(known),
            allowed=self._set(allowed) if allowed else None,
            domains=[frozenset(i.pus) for i in self.of("Machine", *_SOCKETS, *_GROUPS) if i.pus],
            arch=infos.get("Architecture", builder.UNKNOWN),
            vendor=infos.get("CPUVendor", builder.UNKNOWN).strip(),
            model=infos.get("CPUModel", builder.UNKNOWN).strip(),
            empty_sockets=sum(not item.pus for item in self.of(*_SOCKETS)),
        )

    def _check_sets(self) -> None:
        for item in self.objects:
            claimed = item.get("cpuset")
            checked = item.kind in ("Machine", "Core", *_SOCKETS) or _CACHE.match(item.kind)
            if checked and claimed and self._set(claimed) != item.pus:
                name = f"{item.kind} {item.get('os_index')}".strip()
                raise self.fail(f"{name} has the set {claimed[:60]} but other PUs below it")

    def _rows(self) -> list[builder.PuRow]:
        capacity = self._capacities()
        rows = []
        for item in self.of("PU"):
            pu = self._number(item, "os_index")
            core = ("core", item.core) if item.core is not None else ("pu", pu)
            rows.append(builder.PuRow(pu, core, item.socket, capacity=capacity.get(pu, 1024)))
        return rows

    def _capacities(self) -> dict[int, int]:
        rates: dict[int, float] = {}
        for kind in self.root.iter("cpukind"):
            infos = _infos(kind)
            number = parse_number(infos.get("LinuxCapacity", infos.get("FrequencyMaxMHz", "")))
            if number is not None:
                for pu in self._set(kind.get("cpuset", "")):
                    rates[pu] = float(number)
        return builder.scale_capacity(rates)

    def _nodes(self, known: set[int], top: _Object) -> list[NodeSpec]:
        taken: set[frozenset[int]] = set()
        nodes: list[NodeSpec] = []
        # ordinary memory first: device memory and HBM have the PUs of the node they stand beside
        for item in sorted(self.of(*_NODES), key=lambda i: "subtype" in i.element.attrib):
            text = item.element.get("cpuset")
            pus = frozenset((self._set(text) if text is not None else item.pus) & known)
            if any(pus & other and not (pus <= other or other <= pus) for other in taken):
                raise self.fail("two NUMA nodes share some of their PUs but not all of either")
            own = frozenset() if pus in taken else pus
            taken.add(pus)
            nodes.append(
                NodeSpec(
                    id=self._number(item, "os_index"),
                    pus=tuple(sorted(own)),
                    memory_bytes=self._number(item, "local_memory", 0),
                    kind=item.get("subtype"),
                    near=() if own else tuple(sorted(pus)),
                )
            )
        if not nodes:  # version 1 leaves out the one node of a machine without NUMA
            memory = self._number(top, "local_memory", 0)
            nodes.append(NodeSpec(id=0, pus=tuple(sorted(known)), memory_bytes=memory))
        if len({node.id for node in nodes}) < len(nodes):
            raise self.fail("two NUMA nodes have the same os_index")
        return nodes

    def _with_distances(self, nodes: list[NodeSpec]) -> tuple[NodeSpec, ...]:
        count = len(nodes)
        for order, values in self._matrices(nodes):
            if len(values) != count * count or sorted(order) != sorted(n.id for n in nodes):
                raise self.fail(f"{len(values)} NUMA distances for {count} nodes")
            rows = [values[i * count : (i + 1) * count] for i in range(count)]
            return builder.add_distances(nodes, order, rows)
        return tuple(nodes)

    def _matrices(self, nodes: Iterable[NodeSpec]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield (node ids, values row by row) of every table of NUMA latencies."""
        for block in self.root.iter("distances2"):
            latency = block.get("name", "NUMALatency") == "NUMALatency"
            if block.get("type") == "NUMANode" and latency:
                yield self._numbers(block, "indexes"), self._numbers(block, "u64values")
        ids = [node.id for node in nodes]
        for block in self.root.iter("distances"):
            values = [item.get("value", "") for item in block.iterfind("latency")]
            if len(values) == len(ids) ** 2:  # other tables are between packages or cores
                base = self._float(block.get("latency_base", "1"))
                yield ids, [round(self._float(v) * base) for v in values]

    def _numbers(self, block: Element, name: str) -> list[int]:
        words = (word for part in block.iterfind(name) for word in (part.text or "").split())
        return [round(self._float(word)) for word in words]

    def _float(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < 1 << 53:
            raise self.fail(f"{text[:40]!r} is not a distance between NUMA nodes")
        return value

    def _caches(self) -> Iterator[CacheSpec]:
        for item in self.objects:
            match = _CACHE.match(item.kind)
            if match is None or not item.pus:
                continue
            side = builder.CACHE_KINDS[match[2]]
            kind = _CACHE_KINDS.get(item.get("cache_type"), side)
            yield CacheSpec(
                level=int(match[1]),
                kind=kind,
                bytes=self._number(item, "cache_size", 0),
                line_bytes=self._number(item, "cache_linesize", 64) or 64,
                pus=tuple(sorted(item.pus)),
            )

    def _groups(self) -> Iterator[GroupSpec]:
        for item in self.of(*_GROUPS):
            if item.pus:
                kind = item.get("subtype", item.kind).lower()
                yield GroupSpec(kind=kind, pus=tuple(sorted(item.pus)))

    def _accelerators(self, known: set[int]) -> tuple[AcceleratorSpec, ...]:
        devices = [item for item in self.of("OSDev") if _GPU_DEVICE.match(item.get("name"))]
        # CUDA and NVML list the same devices; CUDA's names are the ones programs use
        cuda = [item for item in devices if item.get("name").startswith("cuda")]
        if len(devices) > MAX_ACCELERATORS:
            raise self.fail(f"more than {MAX_ACCELERATORS} accelerators")
        return tuple(
            AcceleratorSpec(
                kind="cuda",
                name=item.get("name"),
                model=infos.get("GPUModel", ""),
                memory_bytes=(parse_number(infos.get("CUDAGlobalMemorySize", "")) or 0) << 10,
                near=tuple(sorted(self._set(item.near) & known)),
            )
            for item in cuda or devices
            for infos in (_infos(item.element),)
        )


def _infos(element: Element) -> dict[str, str]:
    """Return what an element says besides, by name."""
    return {info.get("name", ""): info.get("value", "") for info in element.iterfind("info")}
