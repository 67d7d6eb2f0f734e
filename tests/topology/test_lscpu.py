from __future__ import annotations

import json
from pathlib import Path

import pytest

from dovetail.ir.errors import SpecError
from dovetail.topology.hardware import HardwareSpec, read_hardware


def load(tmp_path: Path, text: str) -> HardwareSpec:
    file = tmp_path / "lscpu.txt"
    file.write_text(text)
    return read_hardware(file)


def test_columns_come_from_the_header(tmp_path: Path) -> None:
    spec = load(
        tmp_path,
        "# comment\n# Node,Core,Cpu,whatever\n# CPU,Cluster,Core,Node,,L1d,L2i,L3,MaxMHz,Online\n"
        "0,0,0,0,,0,0,0,4000,Y\n4,0,0,0,,0,0,0,4000,Y\n"
        "1,1,1,2,,1,1,,3000,Y\n2,1,2,2,,2,1,,3990,Y\n5,-,-,-,,-,-,,-,N\n",
    )
    assert (spec.sockets, spec.cores, len(spec.pus)) == (2, 3, 5)
    assert [(n.id, n.pus) for n in spec.nodes] == [(0, (0, 4)), (2, (1, 2))]
    assert [(c.level, c.kind, c.pus) for c in spec.caches if c.level > 1] == [
        (2, "instruction", (0, 4)),
        (2, "instruction", (1, 2)),
        (3, "unified", (0, 4)),
    ]
    assert [(p.id, p.capacity, p.online) for p in spec.pus] == [
        (0, 1024, True),
        (1, 768, True),
        (2, 1024, True),
        (4, 1024, True),
        (5, 1024, False),
    ]
    assert spec.allowed_pus == (0, 1, 2, 4)
    assert (spec.memory_bytes, spec.cache_bytes(3)) == (0, 0)


def test_core_ids_that_repeat_per_package_are_told_apart(tmp_path: Path) -> None:
    spec = load(tmp_path, "# CPU,Core,Socket,Node\n0,0,0,\n1,1,0,\n2,0,1,\n3,1,1,\n")
    assert (spec.sockets, spec.cores, spec.nodes) == (2, 4, ())


def test_json_table(tmp_path: Path) -> None:
    rows = [
        {"cpu": i, "node": 0, "socket": 0, "core": i // 2, "l1d:l3": f"{i // 2}:0", "online": True}
        for i in range(4)
    ]
    spec = load(tmp_path, json.dumps({"cpus": rows}))
    assert (spec.cores, len(spec.pus), len(spec.caches), spec.nodes[0].pus) == (
        2,
        4,
        3,
        (0, 1, 2, 3),
    )


def field(name: str, data: str, *children: object) -> dict[str, object]:
    return {"field": f"{name}:", "data": data, "children": list(children)}


SUMMARY = [
    field("Architecture", "x86_64"),
    field("CPU(s)", "8", field("On-line CPU(s) list", "0-7")),
    field(
        "Vendor ID",
        "Acme",
        field(
            "Model name",
            "Acme 9",
            field("Thread(s) per core", "2"),
            field("Core(s) per socket", "2"),
            field("Socket(s)", "2"),
            field("Flags", "fpu avx2"),
        ),
    ),
    field("L1d", "128 KiB (4 instances)"),
    field("L3", "32 MiB (2 instances)"),
    field("NUMA node0 CPU(s)", "0,1,4,5"),
    field("NUMA node1 CPU(s)", "2,3,6,7"),
]


def test_json_summary(tmp_path: Path) -> None:
    spec = load(tmp_path, json.dumps({"lscpu": SUMMARY}))
    assert (spec.sockets, spec.cores, len(spec.pus), spec.arch) == (2, 4, 8, "x86_64")
    assert [n.pus for n in spec.nodes] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert [c.pus for c in spec.caches_of(3)] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert (spec.cache_bytes(1), spec.cache_bytes(3)) == (32 << 10, 16 << 20)
    assert spec.isa_flags == ("avx2", "fpu")
    assert {p.core for p in spec.pus if p.id in (1, 5)} == {1}


HEADER = "# CPU,Core,Socket,Node,,L1d\n"
BAD = {
    "no header": "0,0,0,0\n1,0,0,0\n",
    "ragged": f"{HEADER}0,0,0\n",
    "no rows": HEADER,
    "words": f"{HEADER}a,b,c,d,,e\n",
    "no id": f"{HEADER},0,0,0,,0\n",
    "a PU twice": f"{HEADER}0,0,0,0,,0\n0,1,0,0,,1\n",
    "huge id": f"{HEADER}0,{'9' * 5000},0,0,,0\n",
    "too many": HEADER + "".join(f"{i},{i},0,0,,{i}\n" for i in range(8193)),
    "all offline": "# CPU,Core,Online\n0,0,N\n",
    "prose": "this is no topology",
    "binary": "\x00\x01\x02",
    "empty json": '{"lscpu": []}',
    "no fields": '{"lscpu": [{"data": "x"}]}',
    "no list": '{"lscpu": 3}',
    "cpus of words": '{"cpus": ["x"]}',
    "counts of nonsense": json.dumps({"lscpu": [field("CPU(s)", "1e99")]}),
    "huge range": json.dumps({"lscpu": [field("On-line CPU(s) list", "0-999999999")]}),
    "zeros before a huge count": json.dumps(
        {"lscpu": [field("CPU(s)", "0" * 11 + "199999999999")]}
    ),
    "an id of zeros": f"{HEADER}{'0' * 5000},0,0,0,,0\n",
    "another script's digit": json.dumps(
        {"lscpu": [field("On-line CPU(s) list", "\N{SUPERSCRIPT TWO}")]}
    ),
    "deep": '{"lscpu": ' + "[" * 100000,
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_bad_text_is_a_spec_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(SpecError, match=r"\w"):
        load(tmp_path, text)


def test_a_cache_of_impossible_many_instances_stays_unknown(tmp_path: Path) -> None:
    cache = field("L3 cache", f"1 MiB ({'9' * 5000} instances)")
    assert not load(tmp_path, json.dumps({"lscpu": [field("CPU(s)", "2"), cache]})).caches


def test_sizes_have_a_point(tmp_path: Path) -> None:
    caches = [field("L1d", "64K"), field("L2", "2.5 MiB (2 instances)")]
    spec = load(tmp_path, json.dumps({"lscpu": [field("CPU(s)", "2"), *caches]}))
    assert (spec.cache_bytes(1), spec.cache_bytes(2)) == (64 << 10, 1280 << 10)
