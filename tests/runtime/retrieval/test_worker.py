"""What a worker answers, asked in this process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("faiss")

from dovetail.compiler.write.index_build import IndexRequest, build_index_folder
from dovetail.ir.index_file import EmbedderEntry, Passage
from dovetail.runtime.child.framing import ErrorText
from dovetail.runtime.index.manifest import read_manifest
from dovetail.runtime.index.scans import Part
from dovetail.runtime.retrieval.wire import (
    OpenIndex,
    Room,
    ScannedParts,
    ScanParts,
)
from dovetail.runtime.retrieval.worker import Shelf
from tests.runtime.index.parts import part_of
from tests.runtime.retrieval.test_process import DIM, VECTORS, Given


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    passages = [Passage(key=f"p{i}", text=str(i)) for i in range(100)]
    entry = EmbedderEntry(name="given", fingerprint="")
    request = IndexRequest(output=tmp_path / "idx", clusters=4)
    build_index_folder(passages, Given(), entry, request, lambda *_: None)
    shelf = Shelf()
    room = Room("torch:cpu", 1 << 20)
    idx = tmp_path / "idx"
    shelf.open(OpenIndex("a", str(idx), read_manifest(idx), kernels=False, room=room))
    return shelf


def part(clusters: tuple[int, ...], dim: int = DIM, version: int = 0) -> Part:
    return part_of(VECTORS[0][:dim], clusters, depth=5, version=version)


def test_clusters_that_a_failed_request_missed_are_not_told_of_by_the_next(shelf: Shelf) -> None:
    """The device has nothing: all that a request wants is missed."""
    wrong = part((3,), DIM - 1, version=1)  # scanned after those of version 0
    assert isinstance(shelf.answer(ScanParts("a", (part((0, 1, 2)), wrong), hot=True)), ErrorText)
    told = shelf.answer(ScanParts("a", (part((1,)),), hot=True))
    assert isinstance(told, ScannedParts) and (told.missed, told.absent) == (1, (1,))
    assert len(told.parts[0].hits) == 5 and np.isfinite(told.parts[0].hits[0][0])
