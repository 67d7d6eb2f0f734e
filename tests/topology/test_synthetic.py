from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.ir.errors import SpecError
from dovetail.topology.hardware import read_hardware


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("package:2 numa:2 l3:4 core:4 pu:2", (2, 4, 16, 64, 128)),
        ("package:4 numa:2 core:24", (4, 8, 0, 192, 192)),
        ("package:2 numa:1 l3:16 core:4 pu:2", (2, 2, 32, 128, 256)),
        ("pu:3", (1, 1, 0, 3, 3)),
        ("Package:2 [NUMANode(memory=1G)] L3Cache:1(size=32M) Core:3 PU:1", (2, 2, 2, 6, 6)),
    ],
)
def test_counts(line: str, counts: tuple[int, ...]) -> None:
    spec = read_hardware(line)
    l3 = [cache for cache in spec.caches if cache.level == 3]
    assert (spec.sockets, len(spec.nodes), len(l3), spec.cores, len(spec.pus)) == counts


def test_siblings_lie_side_by_side_and_sizes_are_read() -> None:
    spec = read_hardware("package:1 numa:2(memory=4G) die:2 l2:1(size=512K) core:2 pu:2")
    assert [pu.core for pu in spec.pus] == [i // 2 for i in range(16)]
    assert [node.pus for node in spec.nodes] == [tuple(range(8)), tuple(range(8, 16))]
    assert (spec.memory_bytes, spec.cache_bytes(2)) == (8 << 30, 512 << 10)
    assert [(g.kind, g.pus[0]) for g in spec.groups] == [("die", i) for i in (0, 4, 8, 12)]


@pytest.mark.parametrize(
    "line",
    [
        "package:2",
        "core:2 package:2",
        "package:0 core:4",
        "package:2 package:2 core:1",
        "core:9999",
        "core:2 pu:2 l3:2",
        "tree:2 core:4",
        "package:2 core",
        "package:2 core:4(",
        "package:99999999 core:2",
        "l3:2 " * 40 + "core:1",
        "core:1 " * 2000,
    ],
)
def test_bad_lines(line: str) -> None:
    with pytest.raises(SpecError, match=r"\w"):
        read_hardware(line)


def test_a_file_of_that_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "core:2").write_text("# CPU,Core\n0,0\n")
    monkeypatch.chdir(tmp_path)
    assert read_hardware("core:2").cores == 1
