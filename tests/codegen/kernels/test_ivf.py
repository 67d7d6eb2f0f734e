from __future__ import annotations

import numpy as np
import pytest

from tests.codegen.kernels.harness import Runner, edges


def check(run: Runner, metric: str, q: int, n: int, d: int, nth: int) -> None:
    """Distances of q queries to n vectors against float64, nothing else being written."""
    rng = np.random.default_rng(q * 1000 + n * 10 + d)
    queries = rng.standard_normal((q, d + 3)).astype(np.float32)
    vectors = rng.standard_normal((n, d)).astype(np.float32)
    out = np.full((q, n + 2), 7, np.float32)
    run(f"ivf_scan_{metric}", q, n, d, queries, d + 3, vectors, out, n + 2, nth=nth)
    a, b = queries[:, None, :d].astype(np.float64), vectors[None].astype(np.float64)
    terms = (a - b) ** 2 if metric == "l2" else a * b
    bound = 4e-7 * np.sqrt(d) * np.abs(terms).sum(-1) + 1e-12
    assert (np.abs(out[:, :n] - terms.sum(-1)) <= bound).all()
    assert (out[:, n:] == 7).all()


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_every_dimension_edge(any_runner: Runner, metric: str) -> None:
    for d in edges(any_runner.lanes):
        check(any_runner, metric, 1, 5, d, 2)


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_any_number_of_queries_vectors_and_threads(native: Runner, metric: str) -> None:
    for q in (1, 2, 3, 4, 5, 9):
        for n in (1, 3, 4, 5, 8, 31):
            for nth in (1, 3, 40):
                check(native, metric, q, n, 24, nth)


def test_an_empty_list_writes_nothing(native: Runner) -> None:
    queries, out = np.ones((2, 16), np.float32), np.full((2, 4), 7, np.float32)
    native("ivf_scan_l2", 2, 0, 16, queries, 16, np.zeros(1, np.float32), out, 4, nth=2)
    assert (out == 7).all()


def test_order_of_neighbours_is_that_of_exact_distances(native: Runner) -> None:
    rng = np.random.default_rng(3)
    vectors = rng.standard_normal((400, 96)).astype(np.float32)
    queries = vectors[:3] + np.float32(0.01) * rng.standard_normal((3, 96)).astype(np.float32)
    out = np.zeros((3, 400), np.float32)
    native("ivf_scan_l2", 3, 400, 96, queries, 96, vectors, out, 400, nth=2)
    wide = ((queries[:, None].astype(np.float64) - vectors[None]) ** 2).sum(-1)
    np.testing.assert_array_equal(out.argsort(1)[:, :10], wide.argsort(1)[:, :10])
