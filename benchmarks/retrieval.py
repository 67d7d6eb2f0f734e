"""Search in steps of clusters beside a search in one, and generated scans beside faiss's.

Run `python benchmarks/retrieval.py --json F` (two minutes, one thread). Vectors are synthetic, in
clusters of skewed sizes around random centres. Sides take turns on the same queries over lists that
are larger together than the last-level cache; ratios are of CPU time, medians over rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from common import Report, parse_numbers, sample
from dovetail.codegen.catalog import retrieval_kernels
from dovetail.codegen.library import LibrarySpec, build_library
from dovetail.codegen.targets import host_target
from dovetail.runtime.index.build import fill_index
from dovetail.runtime.index.cursor import begin_search
from dovetail.runtime.index.ivf import IvfIndex, Scanner
from dovetail.runtime.index.scanner import KernelScanner
from dovetail.runtime.index.scans import Part, Vectors
from dovetail.runtime.machine.library import KernelLibrary

ROUNDS = 9
TOPK = 5


def make_index(count: int, d: int, clusters: int, metric: str, seed: int = 0) -> IvfIndex:
    """Return an index whose centroids are the centres that vectors were drawn around.

    Sizes of clusters are skewed as those of real corpora are (lognormal, sigma 0.8).
    """
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((clusters, d)).astype(np.float32)
    weights = rng.lognormal(sigma=0.8, size=clusters)
    homes = rng.choice(clusters, count, p=weights / weights.sum())
    vectors = centres[homes] + 0.6 * rng.standard_normal((count, d)).astype(np.float32)
    kind = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
    quantizer = faiss.IndexFlat(d, kind)
    quantizer.add(centres)
    index = faiss.IndexIVFFlat(quantizer, d, clusters, kind)
    index.own_fields = True
    quantizer.this.disown()
    index.is_trained = True
    return fill_index(index, vectors)


def draw_queries(index: IvfIndex, count: int, seed: int) -> Vectors:
    """Return queries near documents, as questions are."""
    rng = np.random.default_rng(seed)
    rows = [index.lists(int(c))[1] for c in rng.integers(index.clusters, size=4 * count)]
    near = [row[0].view(np.float32) for row in rows if len(row)][:count]
    return np.stack(near) + 0.4 * rng.standard_normal((count, index.dim)).astype(np.float32)


def search(
    index: IvfIndex, queries: Vectors, nprobe: int, step: int, scanner: Scanner | None
) -> Any:
    """Search all queries together, `step` clusters of each at a time; return the documents."""
    probes = index.probe(queries, nprobe)
    cursors = [begin_search(probe.clusters, TOPK) for probe in probes]
    for first in range(0, nprobe, step):
        scans = [
            Part(
                probe.vector,
                cursor.left[:step],
                probe.centroids[first : first + step],
                bound=cursor.bound,
            )
            for cursor, probe in zip(cursors, probes, strict=True)
        ]
        for cursor, scan, hits in zip(
            cursors, scans, index.scan(scans, cursors[0].depth, scanner), strict=True
        ):
            cursor.advance(len(scan.clusters), hits)
    return [cursor.best[:TOPK] for cursor in cursors]


def compare(sides: dict[str, Callable[[int], Any]]) -> dict[str, list[float]]:
    """Return the CPU seconds of each side, by rounds in which all search for the same."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(ROUNDS + 1):
        order = list(sides.items())
        results = {}
        for name, run in order if turn % 2 else order[::-1]:
            start = time.process_time()
            results[name] = run(turn)
            found[name].append(time.process_time() - start)
        found_ids = [[[i for _, i in row] for row in result] for result in results.values()]
        assert all(ids == found_ids[0] for ids in found_ids), "sides must find the same documents"
    return {name: seconds[1:] for name, seconds in found.items()}


def median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the ratios round by round."""
    return sample([a / b for a, b in zip(times, others, strict=True)]).median


def measure_steps(
    index: IvfIndex, nprobe: int, steps: Sequence[int], queries: int
) -> list[dict[str, Any]]:
    """Return one row for each number of clusters a step."""
    drawn = [draw_queries(index, queries, seed) for seed in range(ROUNDS + 1)]
    sides = {
        str(step): (lambda turn, step=step: search(index, drawn[turn], nprobe, step, None))
        for step in (nprobe, *steps)
    }
    times = compare(sides)
    whole = times[str(nprobe)]
    return [
        {
            "part": "stepwise",
            "d": index.dim,
            "queries": queries,
            "nprobe": nprobe,
            "clusters a step": step,
            "ms": round(1e3 * sample(times[str(step)]).median, 2),
            "ratio": round(median_ratio(times[str(step)], whole), 3),
        }
        for step in (nprobe, *steps)
    ]


def measure_scanners(index: IvfIndex, scanner: Scanner, shared: int) -> dict[str, Any]:
    """Return the time of kernels over faiss's where `shared` queries want the same clusters."""
    rng = np.random.default_rng(shared)
    queries = draw_queries(index, shared, shared)
    turns = range(ROUNDS + 1)
    chosen = [tuple(rng.choice(index.clusters, 8, replace=False).tolist()) for _ in turns]

    def run(turn: int, by: Scanner | None) -> Any:
        parts = [Part(query.tobytes(), chosen[turn], (0.0,) * 8) for query in queries]
        return index.scan(parts, 20, by)

    times = compare(
        {"faiss": lambda turn: run(turn, None), "kernel": lambda turn: run(turn, scanner)}
    )
    return {
        "part": "scanner",
        "d": index.dim,
        "list": round(len(index) / index.clusters),
        "queries": shared,
        "ms": round(1e3 * sample(times["kernel"]).median, 2),
        "ratio": round(median_ratio(times["faiss"], times["kernel"]), 3),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, metavar="F", help="write the report to F")
    parser.add_argument("--list", type=int, default=1000, help="vectors of a cluster, on average")
    parser.add_argument("--dims", type=parse_numbers, default=(128, 384, 1024))
    parser.add_argument("--clusters", type=int, default=160)
    parser.add_argument("--steps", type=parse_numbers, default=(32, 16, 8, 4, 1))
    parser.add_argument("--shared", type=parse_numbers, default=(1, 2, 4, 8, 16))
    options = parser.parse_args()
    faiss.omp_set_num_threads(1)
    target = host_target()
    built = build_library(LibrarySpec(target=target, kernels=retrieval_kernels(target)))
    library = KernelLibrary(built.path, built.index)
    rows: list[dict[str, Any]] = []
    for d, metric in product(options.dims, ("l2", "ip")):
        index = make_index(options.list * options.clusters, d, options.clusters, metric)
        if metric == "l2":
            for queries in (1, 8):
                rows += measure_steps(index, 64, options.steps, queries)
        scanner = KernelScanner(library, index)
        for shared in options.shared:
            rows.append({**measure_scanners(index, scanner, shared), "metric": metric})
    eights = [row["ratio"] for row in rows if row.get("clusters a step") == 8]
    summary = {
        "stepwise_8_cost_max": max(eights),
        "scanner_gain_max": max(row["ratio"] for row in rows if row["part"] == "scanner"),
    }
    report = Report("retrieval", {"target": target.name, "rounds": ROUNDS}, rows, summary)
    report.print()
    report.write(options.json)


if __name__ == "__main__":
    main()
