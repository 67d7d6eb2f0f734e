"""Searches that end early: what is scanned falls, and the recall keeps its bound."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("faiss")

from dovetail.ir.errors import SpecError
from dovetail.runtime.index.build import build_index
from dovetail.runtime.index.cursor import begin_search, find_patience
from dovetail.runtime.index.early_stop import RECALL, calibrate, choose_patience
from dovetail.runtime.index.ivf import IvfIndex
from tests.runtime.index.parts import part_of

DIM, COUNT, LISTS, NPROBE, TOPK = 16, 3000, 40, 24, 3
RNG = np.random.default_rng(19)
CENTRES = RNG.standard_normal((30, DIM))


def draw(count: int) -> np.ndarray:
    spread = 0.35 * RNG.standard_normal((count, DIM))
    return (CENTRES[RNG.integers(30, size=count)] + spread).astype(np.float32)


@pytest.fixture(scope="module")
def index(one_thread: None) -> IvfIndex:
    return build_index(draw(COUNT), clusters=LISTS)


def search(index: IvfIndex, query: np.ndarray, patience: int, step: int) -> tuple[set[int], int]:
    """Search in steps and stop as the control plane does; return ids and clusters scanned."""
    (probe,) = index.probe(query[None], NPROBE)
    cursor = begin_search(probe.clusters, TOPK)
    while not cursor.done and (cursor.unchanged < patience or len(cursor.best) < TOPK):
        taken = cursor.left[:step]
        scan = part_of(query, taken)
        cursor.advance(len(taken), index.scan([scan], 20)[0])
    return {i for _, i in cursor.best[:TOPK]}, cursor.position


@pytest.mark.parametrize("step", [1, 4])
def test_a6_5_held_out_queries_keep_the_recall_and_scan_less(index: IvfIndex, step: int) -> None:
    chosen = choose_patience(index, draw(400), TOPK, NPROBE, recall=0.9)
    assert 0.9 <= chosen.at_least < chosen.recall <= 1 and chosen.scanned < 0.9
    kept, scanned = [], []
    for query in draw(200):
        found, clusters = search(index, query, chosen.patience, step)
        wanted, _ = search(index, query, NPROBE, NPROBE)
        kept.append(len(found & wanted) / TOPK)
        scanned.append(clusters / NPROBE)
    assert np.mean(kept) >= 0.9 and np.mean(scanned) < 0.95


def test_a_bound_that_few_queries_cannot_show_leaves_the_search_whole(index: IvfIndex) -> None:
    whole = choose_patience(index, draw(5), TOPK, NPROBE, recall=0.9)
    assert (whole.recall, whole.scanned) == (1, 1) and whole.patience >= NPROBE
    assert search(index, draw(1)[0], whole.patience, 1)[1] == NPROBE
    easy = choose_patience(index, draw(50), TOPK, NPROBE, recall=0.0)
    assert easy.patience == 1 and easy.scanned < 1


def test_wrong_questions_are_refused(index: IvfIndex) -> None:
    for queries, recall in ((draw(0), 0.9), (draw(3), 1.5)):
        with pytest.raises(SpecError):
            choose_patience(index, queries, TOPK, NPROBE, recall=recall)


def test_a_calibrated_end_keeps_its_recall_on_queries_it_never_saw(index: IvfIndex) -> None:
    ends = calibrate(index, draw(2000), NPROBE)
    assert {end.topk for end in ends} == {1, 5, 20}
    for end in ends:
        assert end.queries == 1000 and end.recall >= RECALL and end.scanned < 1
    patience = find_patience(ends, TOPK, NPROBE)
    assert patience == max(end.patience for end in ends if end.topk in (1, 5))
    kept = []
    for query in draw(1000):
        found, _ = search(index, query, patience or 0, 1)
        kept.append(len(found & search(index, query, NPROBE, NPROBE)[0]) / TOPK)
    assert np.mean(kept) >= RECALL
    assert find_patience(ends, 21, NPROBE) is None and find_patience(ends, 1, NPROBE + 1) is None
