"""Any sequence of changes, searches and lost workers, against plain lists of what there was.

Vectors are small whole numbers, so that distances are exact and many documents are equally near.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

faiss = pytest.importorskip("faiss")

from dovetail.ir.index_file import Passage  # noqa: E402
from dovetail.runtime.index import ivf  # noqa: E402
from dovetail.runtime.index.build import METRICS, build_index  # noqa: E402
from dovetail.runtime.index.documents import DocumentStore  # noqa: E402
from dovetail.runtime.index.ivf import IvfIndex  # noqa: E402
from dovetail.runtime.retrieval import change_log, collection  # noqa: E402
from dovetail.runtime.retrieval.change_log import ChangeLog  # noqa: E402
from dovetail.runtime.retrieval.collection import Collection  # noqa: E402
from dovetail.runtime.retrieval.wire import ChangeIndex, RestoreIndex  # noqa: E402

DIM, COUNT, LISTS, KEPT = 4, 60, 5, 4
RNG = np.random.default_rng(23)
VECTORS = RNG.integers(-3, 4, (COUNT, DIM)).astype(np.float32)
INDEXES: dict[str, IvfIndex] = {}

Documents = dict[int, tuple[str, np.ndarray]]
"""By id: key and vector."""


def index_of(metric: str) -> IvfIndex:
    if metric not in INDEXES:
        INDEXES[metric] = build_index(VECTORS, clusters=LISTS, metric=metric)
    return INDEXES[metric]


def passage(key: str) -> Passage:
    return Passage(key=key, text=f"about {key}", metadata={"odd": int(key) % 2})


def opened(metric: str) -> Collection:
    store = DocumentStore()
    store.add(passage(str(i)) for i in range(COUNT))
    return Collection(index_of(metric), store)


def nearest(
    documents: Documents, metric: str, query: np.ndarray, k: int
) -> list[tuple[float, int]]:
    far: Callable[[np.ndarray], float] = (
        (lambda v: float(((v - query) ** 2).sum()))
        if metric == "l2"
        else (lambda v: -float(v @ query))
    )
    return sorted((far(vector), id_) for id_, (_, vector) in documents.items())[:k]


class ComeAndGo(RuleBasedStateMachine):
    """A served index whose worker may be lost at any time, and what should be in it."""

    @initialize(metric=st.sampled_from(sorted(METRICS)), least=st.integers(1, 60))
    def open(self, metric: str, least: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(ivf, "CHANGED_LEAST", least)
        self.patch.setattr(ivf, "CHANGED_SHARE", 0.1)
        self.patch.setattr(collection, "KEPT_VERSIONS", KEPT)
        self.patch.setattr(change_log, "KEPT_VERSIONS", KEPT)
        self.patch.setattr(change_log, "MESSAGE", 200)
        self.metric, self.log, self.served = metric, ChangeLog("i"), opened(metric)
        self.now: Documents = {i: (str(i), vector) for i, vector in enumerate(VECTORS)}
        self.states = [self.now]

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()

    @rule(
        added=st.lists(st.integers(0, 90), max_size=12, unique=True),
        left=st.lists(st.integers(0, 200), max_size=12),
        seed=st.integers(0, 99),
    )
    def change(self, added: list[int], left: list[int], seed: int) -> None:
        """Some go by key and some by id; some come in the place of others."""
        rows = np.random.default_rng(seed).integers(-3, 4, (len(added), DIM)).astype(np.float32)
        passages = tuple(passage(str(key)) for key in added)
        remove: tuple[str | int, ...] = tuple(i if i % 3 else str(i) for i in left)
        first = len(self.served)
        made = self.served.change(passages, rows, remove=remove)
        self.log.add(ChangeIndex("i", first, passages, rows.tobytes(), remove), made.removed)
        gone = {*remove, *map(str, added)}
        kept = {i: (k, v) for i, (k, v) in self.now.items() if i not in gone and k not in gone}
        new = {first + n: (str(key), rows[n]) for n, key in enumerate(added)}
        assert set(made.removed) == set(self.now) - set(kept)
        self.now = kept | new
        self.states.append(self.now)
        assert self.served.now[0] == len(self.states) - 1

    @rule(query=st.lists(st.integers(-4, 4), min_size=DIM, max_size=DIM), k=st.integers(1, 30))
    def search(self, query: list[int], k: int) -> None:
        """Each version that is kept has what it had."""
        vector = np.array(query, np.float32)
        for version in self.served._past:
            seen = self.served.at(version)
            assert len(seen) == len(self.states[version])
            (found,) = seen.find(vector[None], k, LISTS)
            assert found == nearest(self.states[version], self.metric, vector, k)
            told = [
                document.metadata["key"]
                for document in self.served.store.documents(found, self.metric)
            ]
            assert told == [self.states[version][i][0] for _, i in found]

    @rule(query=st.lists(st.integers(-4, 4), min_size=DIM, max_size=DIM), odd=st.integers(0, 1))
    def search_some(self, query: list[int], odd: int) -> None:
        vector = np.array(query, np.float32)
        wanted = {i: (k, v) for i, (k, v) in self.now.items() if int(k) % 2 == odd}
        found = self.served.find(vector, 7, LISTS, {"odd": odd})
        assert [d.id for d in found] == [i for _, i in nearest(wanted, self.metric, vector, 7)]

    @rule()
    def lose(self) -> None:
        """The next worker makes all changes again, without a look at all documents for a key."""
        before, again = set(self.served._past), opened(self.metric)
        again.store.find = lambda key: pytest.fail(f"{key} is looked up")  # type: ignore[method-assign]
        count = len(self.served)
        for body in self.log.replay():
            if isinstance(body, RestoreIndex):
                again.restore(body)
            else:
                rows = np.frombuffer(body.vectors, np.float32).reshape(-1, DIM)
                assert body.first == len(again)
                again.change(body.passages, rows, remove=body.remove, known=body.known)
        del again.store.find
        assert len(again) == count and before <= {*again._past, *range(len(self.states) - KEPT)}
        self.served = again

    @invariant()
    def nothing_is_held_that_no_version_has(self) -> None:
        if hasattr(self, "served"):
            kept = {i for version in self.served._past for i in self.states[version]}
            assert len(dict(self.served.store._items())) == len(kept)
            assert len(self.log._last) <= KEPT
            assert set(self.log._added) <= {i for s in self.states[-KEPT - 1 :] for i in s}
            assert self.log._removed <= set(range(COUNT))


class Longer(ComeAndGo):
    """The same, many more times."""


def test_a_part_is_copied_a_few_times_and_there_are_few_parts() -> None:
    """Documents come one by one; versions share the parts that they see."""
    index, made = index_of("l2"), set[int]()
    alive: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ivf, "CHANGED_LEAST", 1 << 30)
        copied = 0
        for i in range(300):
            index = index.change(VECTORS[i % COUNT][None], [COUNT + i])
            for part in index.fresh:
                if id(part.index) not in made:
                    made.add(id(part.index))
                    alive.append(part.index)
                    copied += len(part)
            assert len(index.fresh) <= 5
    assert len(index) == COUNT + 300 and copied < 25 * 300


TestComeAndGo = ComeAndGo.TestCase
TestComeAndGo.settings = settings(max_examples=10, stateful_step_count=15, deadline=None)
TestLonger = pytest.mark.long(pytest.mark.timeout(280)(Longer.TestCase))
TestLonger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
