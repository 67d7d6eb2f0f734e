from __future__ import annotations

import numpy as np
import pytest

from tests.codegen.kernels.harness import Runner


def routed(
    run: Runner,
    logits: np.ndarray,
    k: int,
    share: int,
    nth: int,
    choice: np.ndarray | None = None,
    sigmoid: int = 0,
    scale: float = 1.0,
    factors: np.ndarray | None = None,
    groups: tuple[int, int] = (1, 1),
) -> tuple[np.ndarray, ...]:
    t, e = logits.shape
    padded = np.full((t, e + 3), 1e9, np.float32)
    padded[:, :e] = logits
    chosen, weights = np.full((t, k), -1, np.int32), np.zeros((t, k), np.float32)
    how = *groups, choice, sigmoid, share, scale, factors
    run("route", t, e, k, *how, padded, e + 3, chosen, weights, nth=nth)
    return chosen, weights


def check_route(run: Runner, t: int, e: int, k: int, nth: int) -> None:
    rng = np.random.default_rng(e * 10 + k)
    logits = rng.standard_normal((t, e)).astype(np.float32)
    exact = np.exp(logits.astype(np.float64))
    exact /= exact.sum(1, keepdims=True)
    wanted = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    picked = np.take_along_axis(exact, wanted, 1)
    for share in (0, 1):
        chosen, weights = routed(run, logits, k, share, nth)
        assert (chosen == wanted).all()
        whole = picked.sum(1, keepdims=True) if share else 1.0
        np.testing.assert_allclose(weights, picked / whole, rtol=3e-6)
        scale = rng.standard_normal(e).astype(np.float32)
        _, scaled = routed(run, logits, k, share, nth, factors=scale)
        np.testing.assert_array_equal(scaled, weights * scale[chosen])


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_each_row_goes_to_its_largest_logits(native: Runner, nth: int) -> None:
    for t, e, k in ((1, 8, 2), (5, 128, 8), (4, 17, 17), (2, 1, 1), (3, 1024, 3)):
        check_route(native, t, e, k, nth)


@pytest.mark.parametrize("sigmoid", [0, 1])
def test_some_choose_by_more_than_they_weigh_by(any_runner: Runner, sigmoid: int) -> None:
    rng = np.random.default_rng(3)
    for t, e, k in ((1, 5, 2), (3, 33, 4)):
        logits, choice = (rng.standard_normal(s).astype(np.float32) for s in ((t, e), e))
        exact = np.exp(logits.astype(np.float64))
        exact = exact / (1 + exact) if sigmoid else exact / exact.sum(1, keepdims=True)
        for added in (None, choice):
            by = exact if added is None else exact + added
            wanted = np.argsort(-by, axis=1, kind="stable")[:, :k]
            picked = np.take_along_axis(exact, wanted, 1)
            for share in (0, 1):
                chosen, weights = routed(any_runner, logits, k, share, 2, added, sigmoid, 2.5)
                assert (chosen == wanted).all()
                whole = picked.sum(1, keepdims=True) if share else 1.0
                np.testing.assert_allclose(weights, picked / whole * 2.5, rtol=3e-6)


@pytest.mark.parametrize("sigmoid", [0, 1])
def test_experts_are_of_the_best_groups(any_runner: Runner, sigmoid: int) -> None:
    """Groups are ranked by their best logit, or by the two best sigmoids with what is added."""
    rng = np.random.default_rng(5)
    for t, e, k, groups, used in ((1, 6, 2, 3, 1), (4, 40, 6, 8, 3), (3, 33, 9, 11, 11)):
        logits = rng.standard_normal((t, e)).astype(np.float32)
        choice = rng.standard_normal(e).astype(np.float32) if sigmoid else None
        by = 1 / (1 + np.exp(-logits.astype(np.float64))) + choice if sigmoid else logits
        parts = np.sort(by.reshape(t, groups, -1), -1)[..., -2 if sigmoid else -1 :].sum(-1)
        best = np.argsort(-parts, -1, kind="stable")[:, :used]
        inside = (np.arange(e) // (e // groups) == best[..., None]).any(1)
        wanted = np.argsort(-np.where(inside, by, -np.inf), -1, kind="stable")[:, :k]
        given = {"sigmoid": sigmoid, "groups": (groups, used)}
        chosen, _ = routed(any_runner, logits, k, 1, 2, choice, **given)
        assert (chosen == wanted).all()


def test_scores_of_zero_give_numbers(native: Runner) -> None:
    _, weights = routed(native, np.full((1, 4), -np.inf, np.float32), 2, 1, 1, sigmoid=1)
    assert weights.tolist() == [[0, 0]]


@pytest.mark.parametrize("nth", [1, 3])
def test_rows_are_gated(any_runner: Runner, nth: int) -> None:
    rng = np.random.default_rng(nth)
    for t, h in ((1, 16), (3, 530)):
        gates, x = (rng.standard_normal((t, n)).astype(np.float32) for n in (4, h + 2))
        out = x.copy()
        any_runner("row_gate", t, h, gates, 4, out, h + 2, nth=nth)
        wanted = x[:, :h] / (1 + np.exp(-gates[:, :1].astype(np.float64)))
        np.testing.assert_allclose(out[:, :h], wanted, rtol=3e-6)
        assert (out[:, h:] == x[:, h:]).all()


def test_any_target_routes_alike(any_runner: Runner) -> None:
    for e in (1, 7, 16, 33):
        check_route(any_runner, 2, e, min(e, 3), 2)


def test_of_equal_logits_the_lowest_expert_comes_first(native: Runner) -> None:
    logits = np.array([[1, 2, 2, 1, 2]], np.float32)
    chosen, weights = routed(native, logits, 4, 1, 1)
    assert chosen.tolist() == [[1, 2, 4, 0]]
    assert weights[0, 0] == weights[0, 1] == weights[0, 2] > weights[0, 3]


def test_logits_far_apart_give_numbers(native: Runner) -> None:
    logits = np.array([[3e38, -3e38, 0, -np.inf]], np.float32)
    chosen, weights = routed(native, logits, 3, 1, 1)
    assert chosen.tolist() == [[0, 2, 1]] and weights.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("nth", [1, 3])
def test_rows_go_to_their_experts_and_back(native: Runner, nth: int) -> None:
    for t, e, k, h in ((1, 4, 2, 16), (7, 5, 3, 100), (40, 64, 8, 530)):
        rng = np.random.default_rng(t)
        chosen = np.stack([rng.permutation(e)[:k] for _ in range(t)]).astype(np.int32)
        starts = np.full(e + 1, -1, np.int32)
        places, tokens = np.full((t, k), -1, np.int32), np.full(t * k, -1, np.int32)
        native("sort_experts", t, e, k, chosen, starts, places, tokens, nth=nth)
        counts = np.bincount(chosen.reshape(-1), minlength=e)
        assert starts.tolist() == [0, *np.cumsum(counts)]
        order = np.argsort(chosen.reshape(-1), kind="stable")
        assert (tokens == order // k).all()
        assert (places.reshape(-1)[order] == np.arange(t * k)).all()

        x, rest = (rng.standard_normal((t, h + 2)).astype(np.float32) for _ in range(2))
        rows = np.full((t * k, h + 5), 7, np.float32)
        native("expert_rows", t, k, h, tokens, x, h + 2, rows, h + 5, nth=nth)
        assert (rows[:, :h] == x[tokens, :h]).all() and (rows[:, h:] == 7).all()

        weights = rng.random((t, k)).astype(np.float32)
        given = (rows[places, :h].astype(np.float64) * weights[..., None]).sum(1) * 0.25
        for residual in (None, rest):
            out = rest.copy()
            at = None if residual is None else out  # it may be what is written
            where = places, weights, rows, h + 5, at, h + 2
            native("combine_experts", t, k, h, *where, 0.25, out, h + 2, nth=nth)
            wanted = given if residual is None else given + rest[:, :h]
            np.testing.assert_allclose(out[:, :h], wanted, rtol=3e-6, atol=2e-6)
            assert (out[:, h:] == rest[:, h:]).all()
