"""The two files of documents: damage is told at load, and what comes later ends nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dovetail.ir.errors import ArtifactError, RequestError
from dovetail.ir.index_file import DOCUMENTS, OFFSETS, Passage
from dovetail.runtime.index.documents import DocumentStore, encode_passages, open_documents

COUNT = 2000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines, offsets = encode_passages(
        Passage(key=f"p{i}", text=f"text {i}", metadata={"even": i % 2 == 0}) for i in range(COUNT)
    )
    (tmp_path / DOCUMENTS).write_bytes(lines)
    np.save(tmp_path / OFFSETS, offsets)
    return tmp_path


@pytest.mark.parametrize("left", [0, 10, 128, 5000, 8 * COUNT])
def test_offsets_that_were_cut_off_are_told_at_load(folder: Path, left: int) -> None:
    os.truncate(folder / OFFSETS, left)
    with pytest.raises(ArtifactError, match="run `dovetail index build` again"):
        open_documents(folder / DOCUMENTS, folder / OFFSETS)


def test_a_damaged_line_is_told_as_often_as_all_lines_are_read(folder: Path) -> None:
    """What was read before it is not taken for all there is."""
    store = open_documents(folder / DOCUMENTS, folder / OFFSETS)
    with (folder / DOCUMENTS).open("r+b") as file:
        file.seek(-10, os.SEEK_END)
        file.write(b"x" * 10)
    for _ in range(2):
        with pytest.raises(ArtifactError, match=f"line {COUNT} "):
            store.match({"even": True})
        with pytest.raises(ArtifactError, match=f"line {COUNT} "):
            store.find("p1")


def test_true_is_not_one() -> None:
    values = [1, True, 1.0, 0, False, [True, 2], "True"]
    passages = (Passage(key=f"p{i}", text="", metadata={"n": n}) for i, n in enumerate(values))
    store = DocumentStore()
    store.add(passages)
    for wanted, found in ((1, [0, 2]), (True, [1, 5]), (False, [4]), (0, [3]), ("True", [6])):
        assert store.match({"n": wanted}).tolist() == found
    store.forget([1])
    assert store.match({"n": [True, 1]}).tolist() == [0, 2, 5]


def test_a_field_without_a_name_is_unknown_as_any_other() -> None:
    store = DocumentStore()
    store.add([Passage(key="p", text="", metadata={"n": 1})])
    with pytest.raises(RequestError, match="no document has the metadata field ''; there are: n"):
        store.match({"n": 1, "": 1})


OUTLIVES = f"""
import os, sys
from pathlib import Path
from dovetail.runtime.index.documents import open_documents

lines, offsets = map(Path, sys.argv[1:])
store = open_documents(lines, offsets)
os.truncate(offsets, 0)
print(store[0].key, store[{COUNT - 1}].key)
"""


def test_offsets_that_are_cut_off_later_do_not_end_the_process(folder: Path) -> None:
    """In a process of its own: to read mapped bytes of a file that was cut off would end it."""
    command = [sys.executable, "-c", OUTLIVES, str(folder / DOCUMENTS), str(folder / OFFSETS)]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert found.stdout.split() == ["p0", f"p{COUNT - 1}"]
