from __future__ import annotations

import tracemalloc

import pytest

from dovetail.ir.errors import SpecError
from dovetail.topology.fundamental import build_tree
from dovetail.topology.hardware import check_hardware
from dovetail.topology.hwloc import MAX_ELEMENTS, Reader, read_hwloc

HEAD = '<?xml version="1.0"?><!DOCTYPE topology SYSTEM "hwloc.dtd"><topology>'

# two sockets as version 1 writes them: nodes hold packages, caches are numbered by `depth`
VERSION_1 = f"""{HEAD}
<object type="Machine" cpuset="0x0000000f" allowed_cpuset="0x0000000b" local_memory="0">
 <info name="Architecture" value="x86_64"/>
 <distances nbobjs="2" relative_depth="1" latency_base="10.000000">
  <latency value="1.0"/><latency value="2.1"/><latency value="2.1"/><latency value="1.0"/>
 </distances>
 <object type="NUMANode" os_index="4" cpuset="0x00000003" local_memory="1024">
  <page_type size="4096" count="1"/>
  <object type="Socket" os_index="0" cpuset="0x00000003">
   <info name="CPUModel" value="Acme 1"/>
   <object type="Cache" cpuset="0x00000003" cache_size="8192" depth="3" cache_type="0">
    <object type="Core" os_index="0" cpuset="0x00000003">
     <object type="PU" os_index="0" cpuset="0x00000001"/>
     <object type="PU" os_index="1" cpuset="0x00000002"/>
    </object></object></object></object>
 <object type="NUMANode" os_index="9" cpuset="0x0000000c" local_memory="2048">
  <object type="Socket" os_index="1" cpuset="0x0000000c">
    <object type="Core" os_index="0" cpuset="0x00000004">
     <object type="Cache" cpuset="0x00000004" cache_size="64" depth="1" cache_type="2">
     <object type="PU" os_index="2" cpuset="0x00000004"/></object></object>
    <object type="Core" os_index="1" cpuset="0x00000008">
     <object type="PU" os_index="3" cpuset="0x00000008"/></object>
  </object></object>
</object></topology>"""


def test_version_1() -> None:
    spec = check_hardware(read_hwloc(VERSION_1.encode(), "f"), "f")
    assert (spec.sockets, spec.cores, len(spec.pus), spec.allowed_pus) == (2, 3, 4, (0, 1, 3))
    assert [(n.id, n.pus, n.memory_bytes) for n in spec.nodes] == [
        (4, (0, 1), 1024),
        (9, (2, 3), 2048),
    ]
    assert [n.distances for n in spec.nodes] == [(10, 21), (21, 10)]
    assert [(c.level, c.kind, c.bytes, c.pus) for c in spec.caches] == [
        (1, "instruction", 64, (2,)),
        (3, "unified", 8192, (0, 1)),
    ]
    assert (spec.arch, spec.cpu_model) == ("x86_64", "Acme 1")


def test_version_1_without_numa_has_one_node() -> None:
    text = (
        f'{HEAD}<object type="Machine" local_memory="7"><object type="PU" os_index="3"/></object>'
    )
    spec = check_hardware(read_hwloc(f"{text}</topology>".encode(), "f"), "f")
    assert [(n.pus, n.memory_bytes) for n in spec.nodes] == [((3,), 7)]


def test_nested_nodes_are_home_to_the_pus_of_the_smallest() -> None:
    inside = "".join(pu(i) for i in range(4)) + "".join(
        f'<object type="NUMANode" os_index="{node}" cpuset="{pus}"/>'
        for node, pus in ((0, "0xf"), (1, "0x3"), (2, "0xc"), (3, "0xf"), (4, "0x0"))
    )
    spec = check_hardware(read_hwloc(machine(inside).encode(), "f"), "f")
    assert [p.node for p in spec.pus] == [1, 1, 2, 2]
    assert [n.id for n in spec.memory_only_nodes] == [3, 4]
    tree = build_tree(spec).tree
    assert [(level.kind, level.arity) for level in tree.levels] == [("numa", 2), ("core", 2)]


def machine(inside: str, attributes: str = "") -> str:
    return f'{HEAD}<object type="Machine" {attributes}>{inside}</object></topology>'


def pu(index: object) -> str:
    return f'<object type="PU" os_index="{index}"/>'


BAD = {
    "empty": "",
    "truncated": VERSION_1[:700],
    "other xml": "<svg></svg>",
    "no machine": f"{HEAD}</topology>",
    "no PU": machine(""),
    "a PU twice": machine(pu(1) + pu(1)),
    "PU id is no number": machine(pu("x")),
    "PU id is far too large": machine(pu("9" * 400)),
    "set is no set": machine(pu(0), 'cpuset="0xzz"'),
    "set without end": machine(pu(0), 'cpuset="0xf...f"'),
    "huge set": machine(pu(0), f'cpuset="{"0x1," * 5000}"'),
    "wrong count": machine(pu(0), 'cpuset="0x00000003"'),
    "nodes overlap": machine(
        pu(0)
        + pu(1)
        + pu(2)
        + '<object type="NUMANode" os_index="0" cpuset="0x3"/>'
        + '<object type="NUMANode" os_index="1" cpuset="0x6"/>'
    ),
    "nodes share an id": machine(pu(0) + '<object type="NUMANode" os_index="0"/>' * 2),
    "distances of other nodes": VERSION_1.replace("<distances ", "<distances2 type='NUMANode' ")
    .replace("</distances>", "<indexes>4 8</indexes></distances2>")
    .replace("/><latency", "/><x/><latency"),
    "entity": '<!DOCTYPE a [<!ENTITY b "c">]><topology>&b;</topology>',
    "external entity": '<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><topology>&b;'
    "</topology>",
    "deep": HEAD + '<object type="Group">' * 5000,
    "long text": f"{HEAD}<indexes>{'1 ' * (1 << 20)}</indexes></topology>",
    "encoding": '<?xml version="1.0" encoding="nonsense"?><topology/>',
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_bad_files_are_spec_errors(text: str) -> None:
    with pytest.raises(SpecError, match=r"\w"):
        check_hardware(read_hwloc(text.encode(), "file.xml"), "file.xml")


def test_expanding_entities_cost_nothing() -> None:
    entities = '<!ENTITY a0 "lol">' + "".join(
        f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 12)
    )
    text = f"<!DOCTYPE t [{entities}]><topology>&a11;</topology>"
    with pytest.raises(SpecError, match="entity"):
        read_hwloc(text.encode(), "f")


def test_objects_below_a_wide_set_take_memory_of_their_own_text_only() -> None:
    wide = ",".join(["0xffffffff"] * 256)
    objects = '<object type="Misc"/>' * 20_000
    data = f'{HEAD}<object type="Machine" cpuset="{wide}">{objects}</object></topology>'.encode()
    reader = Reader("f")
    tracemalloc.start()
    reader.feed(data)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(reader.objects) == 20_001 and most < 64 << 20


@pytest.mark.parametrize(
    ("kind", "count", "message"),
    [
        ("Misc", MAX_ELEMENTS, f"more than {MAX_ELEMENTS}"),
        ("Group", 1_000_000, "too many"),
        ("PU", 1_000_000, "too many"),
    ],
)
def test_a_million_objects_end_in_bounded_memory(kind: str, count: int, message: str) -> None:
    data = (HEAD + f'<object type="{kind}" os_index="1"/>' * count + "</topology>").encode()
    reader = Reader("f")
    with pytest.raises(SpecError, match=message):
        reader.feed(data)
    assert len(reader.objects) <= MAX_ELEMENTS
