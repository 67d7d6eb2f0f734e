"""Made-up questions with meanings: what requests ask, what the model replies, what texts mean.

In: a seed. Out: a `Script`: documents and the vectors of texts in a space of topics, replies of
scripted length, and the end of each chain of steps. Real weights would say nothing of sense at the
speed of an emulated accelerator; here queries of a request drift as HedraRAG §3.2 describes.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import faiss
import numpy as np
from numpy.typing import NDArray

from dovetail.ir.workflow import Name
from dovetail.runtime.flows.control.messages import Generate
from dovetail.runtime.index.cursor import Hit
from dovetail.runtime.index.documents import Document

Vectors = NDArray[np.float32]

TOKENS = {
    "answer": 64,
    "imagine": 100,  # a passage, HyDE
    "compress": 60,  # sentences that matter, RECOMP
    "next": 24,  # a sub-question
    "read": 48,
}
"""Mean length of a reply in tokens, by the first word of its node's name."""
QUESTION_TOKENS, DOCUMENT_TOKENS = 20, 130
MOST_TOKENS = 128
STEPS = 6
"""Queries that a request can make at most."""
ROUNDS = (2, 3, 4)
"""Sub-questions of a multistep request, equally likely."""
CHUNK = 65536
_KEY = re.compile(r"q(\d+):(\d+)")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents around centres of clusters. topics: of each cluster; popular: its share of asks."""

    centres: Vectors
    documents: Vectors
    homes: NDArray[np.int64]
    popular: NDArray[np.float64]

    def nearest(self) -> NDArray[np.int64]:
        """Return of each document the cluster whose centre is nearest."""
        quantizer = faiss.IndexFlatL2(self.centres.shape[1])
        quantizer.add(self.centres)
        homes: NDArray[np.int64] = quantizer.search(self.documents, 1)[1][:, 0]
        return homes


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How documents and queries lie. Lengths are in units of the distance between topics.

    topics: groups of clusters. skew: of Zipf's law by which topics are asked for. spread: of
    clusters in a topic; blur: of documents around a centre; miss: of a query around the document it
    is about; drift: share of the way to another document of the topic that the next query goes;
    jump: of the queries that are about another topic than the one before; partial: distance of
    the meaning of a reply's first words from the whole one's.
    """

    topics: int = 64
    skew: float = 1.6
    spread: float = 0.6
    blur: float = 0.8
    miss: float = 0.75
    drift: float = 0.4
    jump: float = 0.2
    partial: float = 0.3


def make_corpus(
    clusters: int, count: int, d: int, geometry: Geometry = Geometry(), seed: int = 0
) -> Corpus:
    """Return `count` documents in [d]; clusters differ in size as those of k-means do."""
    random = np.random.default_rng(seed)
    topics = random.normal(size=(geometry.topics, d)) / np.sqrt(d)
    topic = np.arange(clusters) % geometry.topics
    centres = topics[topic] + geometry.spread * random.normal(size=(clusters, d)) / np.sqrt(d)
    sizes = random.lognormal(0, 0.5, clusters)
    homes = np.sort(random.choice(clusters, count, p=sizes / sizes.sum()))
    documents = np.empty((count, d), np.float32)
    for at in range(0, count, CHUNK):  # in float64 all of them would be large
        part = homes[at : at + CHUNK]
        aside = geometry.blur * random.normal(size=(len(part), d)) / np.sqrt(d)
        documents[at : at + CHUNK] = centres[part] + aside
    ranks = 1 + random.permutation(geometry.topics)
    popular = (ranks**-geometry.skew)[topic] * random.permutation(1 + np.arange(clusters)) ** -0.3
    return Corpus(
        centres.astype(np.float32),
        documents,
        homes.astype(np.int64),
        popular / popular.sum(),
    )


class Script:
    """What happens to each request; the same for every scheduler that serves it.

    Texts begin with a key, `q<request>:<step>`, by which their meaning is found, so that a text and
    the beginning of it have meanings near each other.
    """

    def __init__(self, corpus: Corpus, geometry: Geometry = Geometry(), seed: int = 0) -> None:
        self.corpus, self.geometry, self.seed = corpus, geometry, seed
        topics = np.arange(len(corpus.centres)) % geometry.topics
        self._topic_of = topics[corpus.homes]
        weights = np.cumsum(corpus.popular[corpus.homes])
        self._weights = weights / weights[-1]
        self._members = [np.flatnonzero(self._topic_of == t) for t in range(geometry.topics)]
        self._meanings: dict[int, Vectors] = {}

    def question(self, request: int) -> str:
        """Return the text of a request."""
        return f"q{request}:0" + " word" * (QUESTION_TOKENS - 1)

    def reply(self, node: Name, round_: int, prompt: str) -> str:
        """Return what the model says; its second word tells of the prompt."""
        request, step = self._key(prompt)
        kind = str(node).partition(" ")[0]
        if kind == "next" and round_ >= self._random(request, 7).choice(ROUNDS):
            return "none"
        random = self._random(request, 11 + zlib.crc32(f"{node} {round_}".encode()) % 9973)
        count = int(np.clip(random.lognormal(np.log(TOKENS[kind]) - 0.08, 0.4), 4, MOST_TOKENS))
        later = {"next": round_ + 1, "imagine": 1}.get(kind, step + 1)
        told = zlib.crc32(prompt.encode())
        return f"q{request}:{min(later, STEPS - 1)} x{told:08x}" + " word" * (count - 2)

    def tokens(self, order: Generate) -> list[str]:
        """Return the tokens of the reply to an order, as texts to be joined."""
        text = self.reply(order.source.node, order.source.round, order.prompt)
        return re.findall(r" ?[^ ]+", text)

    def meaning(self, text: str) -> Vectors:
        """Return the vector [d] of a text: of the last key in it, and what follows that."""
        found = list(_KEY.finditer(text))
        request, step = int(found[-1][1]), int(found[-1][2])
        if request not in self._meanings:
            self._meanings[request] = self._make_meanings(request)
        whole = self._meanings[request][step]
        words = text.count(" ", found[-1].start())
        if step == 0:
            return whole
        part = min(1.0, words / TOKENS["read"])
        aside = self._random(request, 1000 + step).normal(size=whole.shape)
        far = self.geometry.partial * (1 - part) / np.sqrt(len(whole))
        return (whole + far * aside).astype(np.float32)

    def documents(self, hits: Sequence[Hit]) -> list[Document]:
        """Return passages of the usual length."""
        return [
            Document(id=i, text=f"d{i}" + " word" * (DOCUMENT_TOKENS - 1), score=distance)
            for distance, i in hits
        ]

    def _make_meanings(self, request: int) -> Vectors:
        """Return the queries of a request [STEPS, d], each a way on from the one before."""
        geometry, documents = self.geometry, self.corpus.documents
        random = self._random(request, 3)
        about = self._choose(random)
        others = self._members[self._topic_of[about]]
        scale = geometry.miss / np.sqrt(documents.shape[1])
        at = documents[about] + scale * random.normal(size=documents.shape[1])
        made = [at]
        for _ in range(STEPS - 1):
            jumps = random.random() < geometry.jump
            chosen = self._choose(random) if jumps else int(random.choice(others))
            aim = documents[chosen]
            way = 1.0 if jumps else min(1.0, geometry.drift * random.uniform(0, 2))
            at = at + way * (aim - at) + 0.3 * scale * random.normal(size=at.shape)
            made.append(at)
        return np.stack(made).astype(np.float32)

    def _choose(self, random: np.random.Generator) -> int:
        """Return a document, popular ones more often."""
        return int(np.searchsorted(self._weights, random.random()))

    def _key(self, prompt: str) -> tuple[int, int]:
        found = _KEY.findall(prompt)
        request = int(found[-1][0])
        return request, max(int(step) for _, step in found)

    def _random(self, request: int, what: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, request, what))


def count_tokens(text: str) -> int:
    """Return the tokens of a text: its words."""
    return text.count(" ") + text.count("\n") + 1
