"""What an early end of searches saves, and what the search before adds to it (HedraRAG §4.3).

In: HotpotQA's questions, its passages and 2WikiMultiHopQA's in an index built as `dovetail index
build` does, which chooses the patience on words of passages. Out: for each way of a search what it
finds of a whole one and what it compares, behind a related search (IRG: the question and the first
passage that was found) and in chains of sub-questions, where history may mislead. Counts, no times.

    python benchmarks/rag_history.py --json benchmarks/results/rag_history.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from common import Report, add_report_options, open_report
from dovetail.runtime.index.cursor import (
    HISTORY,
    SearchHistory,
    begin_search,
    choose_probes,
    find_patience,
    merge_hits,
    reorder_probes,
)
from dovetail.runtime.index.ivf import IvfIndex
from dovetail.runtime.index.manifest import read_manifest
from dovetail.runtime.index.scans import Part, Vectors
from dovetail.runtime.retrieval.folder import open_index
from hotpot import embed_texts, open_encoder, read_passages
from rag_parts import build_index, make_questions

TOPK = 5
Order: TypeAlias = Callable[[tuple[int, ...], SearchHistory], tuple[int, ...]]


def nearest_first(clusters: tuple[int, ...], history: SearchHistory) -> tuple[int, ...]:
    """Return the clusters as they are served."""
    return reorder_probes(clusters, history, TOPK)


def probed_second(clusters: tuple[int, ...], history: SearchHistory) -> tuple[int, ...]:
    """Return the clusters as HedraRAG §4.3 has them: those hit, those probed, the rest."""
    hit, probed = set(history.homes.values()), set(history.clusters)
    return tuple(sorted(clusters, key=lambda c: 0 if c in hit else 1 if c in probed else 2))


@dataclass(frozen=True, slots=True)
class Way:
    """What a search does.

    ends: early, else it scans all clusters. order: which clusters come first. seeds: documents of
    the history count as found before their clusters are scanned.
    """

    name: str
    ends: bool = True
    order: Order | None = None
    seeds: bool = False


WAYS = (
    Way("whole", ends=False),
    Way("early end"),
    Way("with order", order=nearest_first),
    Way("with seeds", seeds=True),
    Way("with order and seeds", order=nearest_first, seeds=True),
    Way("with the paper's order and seeds", order=probed_second, seeds=True),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one search.

    recall: of the nearest TOPK of a whole search. compared: part of the vectors in its clusters.
    settled: part of its clusters that were scanned when the nearest changed last.
    """

    recall: float
    compared: float
    settled: float


@dataclass(frozen=True, slots=True)
class Search:
    """A query, its clusters with all that they hold of the nearest, and the search before it."""

    query: Vectors
    clusters: tuple[int, ...]
    found: dict[int, list[tuple[float, int]]]
    history: SearchHistory | None

    def run(self, index: IvfIndex, way: Way, patience: int) -> Outcome:
        """Scan cluster by cluster until all are, or nothing nearer was found for `patience`."""
        history = self.history
        seeds = index.distances(self.query, history.homes) if history and way.seeds else {}
        cursor = begin_search(self.clusters, TOPK, history, seeds)
        if way.order and history:
            cursor.follow(way.order(self.clusters, history))
        settled = 0
        while not cursor.done and not (
            way.ends and len(cursor.partial) == TOPK and cursor.unchanged >= patience
        ):
            known = cursor.partial
            cursor.advance(1, self.found[cursor.left[0]])
            settled = settled if cursor.partial == known else cursor.position
        whole = {id_ for _, id_ in merge_hits(self.found.values(), TOPK)}
        scanned, every = (
            sum(index.sizes[cluster] for cluster in clusters)
            for clusters in (cursor.clusters[: cursor.position], self.clusters)
        )
        return Outcome(
            recall=len(whole & {id_ for _, id_ in cursor.partial}) / len(whole),
            compared=scanned / every,
            settled=settled / len(self.clusters),
        )

    def after(self, index: IvfIndex) -> SearchHistory:
        """Return the history that the whole search leaves."""
        cursor = begin_search(self.clusters, TOPK)
        for cluster in self.clusters:
            cursor.advance(1, self.found[cluster])
        homes = {id_: index.home(id_) for _, id_ in cursor.best}
        return cursor.history({id_: home for id_, home in homes.items() if home is not None})


def open_searches(
    index: IvfIndex, queries: Vectors, nprobe: int, before: Sequence[Search] | None = None
) -> list[Search]:
    """Return the searches of queries [n, d], each with the history of the one at its place."""
    histories = [search.after(index) for search in before] if before else [None] * len(queries)
    searches = []
    for query, part, history in zip(queries, index.probe(queries, nprobe), histories, strict=True):
        each = [
            Part(part.vector, (cluster,), (far,))
            for cluster, far in zip(part.clusters, part.centroids, strict=True)
        ]
        found = dict(zip(part.clusters, index.scan(each, HISTORY), strict=True))
        searches.append(Search(query, part.clusters, found, history))
    return searches


def compare(index: IvfIndex, searches: Sequence[Search], patience: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each way: means over all searches."""
    for way in WAYS:
        outcomes = [search.run(index, way, patience) for search in searches]
        means = {
            name: statistics.fmean(getattr(outcome, name) for outcome in outcomes)
            for name in Outcome.__slots__
        }
        yield {"way": way.name, "searches": len(outcomes), **means}


def main(arguments: Sequence[str] | None = None) -> Report:
    """Run the benchmark with command line `arguments`, print and write its report."""
    options = _parse(arguments)
    report = open_report("rag_history", options, {"topk": TOPK}, ())
    passages = read_passages(options.traces)
    with tempfile.TemporaryDirectory() as work, open_encoder(Path(work)) as app:
        cut = app.embeddings.choose(labels=False).divide
        build_index(Path(work) / "idx", passages.texts, app, cut=cut)
        opened = open_index(Path(work) / "idx")
        index = opened.index
        early = read_manifest(Path(work) / "idx").early
        nprobe = options.nprobe or choose_probes(index.clusters)
        patience = find_patience(early, TOPK, nprobe)
        if patience is None:
            raise SystemExit(f"no early end was found for {nprobe} clusters; choose fewer")

        def search(texts: Sequence[str], before: Sequence[Search] | None = None) -> list[Search]:
            return open_searches(index, embed_texts(app, texts), nprobe, before)

        first = search(passages.questions)
        nearest = [merge_hits(one.found.values(), 1) for one in first]
        drafts = [opened.store.documents(hits, index.metric)[0].text for hits in nearest]
        pairs = zip(passages.questions, drafts, strict=True)
        again = [f"{question} {draft}" for question, draft in pairs]
        chains = passages.sub_questions()
        sets = {
            "titles": search(list(make_questions(passages.texts))),
            "related": search(again, first),
            "chains": search(chains[1], search(chains[0])),
        }
    report.rows = [
        {"questions": name, **row}
        for name, searches in sets.items()
        for row in compare(index, searches, patience)
    ]
    report.summary = {"clusters": index.clusters, "nprobe": nprobe, "patience": patience}
    report.write(options.json)
    report.print()
    return report


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    corpus = os.environ.get("DOVETAIL_CORPUS", "../shared")
    parser.add_argument("--traces", type=Path, default=Path(corpus) / "traces")
    parser.add_argument("--nprobe", type=int, help="clusters that a whole search scans")
    add_report_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
