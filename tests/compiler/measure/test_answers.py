"""What a compile remembers: found again only where all that it depended on is the same."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dovetail.compiler.measure import answers as module
from dovetail.compiler.measure.answers import Memory
from dovetail.topology.hardware import read_hardware

HARDWARE = read_hardware("package:1 core:4")


class Answer(msgspec.Struct, frozen=True):
    value: int


class Other(msgspec.Struct, frozen=True):
    value: int


def test_an_answer_is_found_by_an_equal_question_alone(tmp_path: Path) -> None:
    memory = Memory.of(HARDWARE, tmp_path)
    memory.remember(({"a": 1, "b": {2: (3,)}}, "x"), Answer(7))
    assert Memory.of(HARDWARE, tmp_path).recall(({"b": {2: [3]}, "a": 1}, "x"), Answer) == Answer(7)
    assert memory.recall(({"a": 2, "b": {2: (3,)}}, "x"), Answer) is None
    assert memory.recall(({"a": 1, "b": {2: (3,)}}, "x"), Other) is None
    assert Memory.of(HARDWARE, tmp_path / "new").recall("x", Answer) is None


def test_an_answer_holds_for_its_machine_and_source_files(tmp_path: Path, monkeypatch) -> None:
    Memory.of(HARDWARE, tmp_path).remember("x", Answer(7))
    for change in ({"cpu_model": "another"}, {"allowed_pus": (0, 1)}, {"cpu_quota": 1.5}):
        changed = msgspec.structs.replace(HARDWARE, **change)
        assert Memory.of(changed, tmp_path).recall("x", Answer) is None
    monkeypatch.setattr(module, "digest_sources", lambda *packages: "another version")
    assert Memory.of(HARDWARE, tmp_path).recall("x", Answer) is None


def test_a_damaged_or_unwritable_cache_is_an_empty_one(tmp_path: Path) -> None:
    memory = Memory.of(HARDWARE, tmp_path)
    memory.remember("x", Answer(7))
    (file,) = memory.folder.iterdir()
    for damage in (b"", b'{"value": 7', b"\xff\xfe", b'{"value": "7"}'):
        file.write_bytes(damage)
        assert memory.recall("x", Answer) is None
    memory.remember("x", Answer(8))
    assert memory.recall("x", Answer) == Answer(8)
    (tmp_path / "file").touch()
    nowhere = Memory.of(HARDWARE, tmp_path / "file")
    nowhere.remember("x", Answer(7))
    assert nowhere.recall("x", Answer) is None
