from __future__ import annotations

import numpy as np
import pytest

from tests.codegen.kernels.harness import Runner
from tests.codegen.kernels.reference import rmsnorm, rotate, stored, widened

TOLERANCE = {"f32": 3e-6, "f16": 2e-3, "bf16": 1e-2}


def check(
    run: Runner,
    kv: str,
    norm: bool,
    heads: tuple[int, int],
    hd: int,
    rot: int,
    nth: int,
    apart: int | None = None,
    v_norm: bool = False,
):
    n_q, n_kv = heads
    apart = rot // 2 if apart is None else apart
    rng = np.random.default_rng(hd + rot + n_q)
    t, columns = 3, (n_q + 2 * n_kv) * hd
    qkv = rng.standard_normal((t, columns + 16)).astype(np.float32)
    angles = rng.uniform(0, 6, (40, rot // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    weights = rng.standard_normal((2, hd)).astype(np.float32)
    positions = np.array([0, 39, 17], np.int32)
    slots = np.array([16 * 2 + 15, 16 * 0 + 0, 16 * 1 + 7], np.int64)
    pools = [stored(np.full((3, n_kv, 16, hd), 7), kv) for _ in range(2)]
    given = qkv.copy()
    norms = tuple(weights) if norm else (None, None)
    args = (t, qkv, columns + 16, n_q, n_kv, hd, rot, 2 * apart, positions, cos, sin, *norms, 1e-6)
    run(f"rope_store_{kv}", *args, int(v_norm), slots, *pools, nth=nth)

    x = given[:, :columns].reshape(t, n_q + 2 * n_kv, hd)
    q, k, v = x[:, :n_q], x[:, n_q : n_q + n_kv], x[:, n_q + n_kv :]
    if norm:
        q, k = rmsnorm(q, weights[0], 1e-6), rmsnorm(k, weights[1], 1e-6)
    if v_norm:
        v = rmsnorm(v, np.ones(hd, np.float32), 1e-6)
    c, s = cos[positions][:, None], sin[positions][:, None]
    pairs = [*range(rot // 2), *range(apart, apart + rot // 2)]
    want_q, want_k = q.copy(), k.copy()
    for turned in (want_q, want_k):
        turned[..., pairs] = rotate(turned[..., pairs], c, s)
    np.testing.assert_allclose(qkv[:, : n_q * hd].reshape(q.shape), want_q, rtol=1e-5, atol=5e-6)
    np.testing.assert_array_equal(qkv[:, columns:], given[:, columns:])
    for pool, want in zip(pools, (want_k, v), strict=True):
        got = widened(pool, kv)
        for i, slot in enumerate(slots):
            at = got[slot // 16, :, slot % 16]
            np.testing.assert_allclose(at, want[i], rtol=TOLERANCE[kv], atol=TOLERANCE[kv])
        untouched = np.ones(got.shape, bool)
        untouched[slots // 16, :, slots % 16] = False
        assert (got[untouched] == 7).all()


@pytest.mark.parametrize("kv", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("norm", [False, True])
def test_heads_are_rotated_and_stored(native: Runner, kv: str, norm: bool) -> None:
    for nth in (1, 2, 3):
        for hd in (16, 64, 80, 128):
            check(native, kv, norm, (5, 1), hd, hd, nth)


def test_partial_rotation_leaves_the_rest(any_runner: Runner) -> None:
    for rot in (2, 14, 32, 34):
        check(any_runner, "f32", True, (2, 1), 48, rot, 2)


@pytest.mark.parametrize("n_kv", [0, 1, 2])
def test_pairs_may_lie_apart_and_values_be_normed(any_runner: Runner, n_kv: int) -> None:
    check(any_runner, "f32", True, (2, n_kv), 48, 10, 2, apart=24, v_norm=True)


@pytest.mark.parametrize("norm", [False, True])
def test_heads_of_encoders_are_rotated_in_place(any_runner: Runner, norm: bool) -> None:
    rng, t, heads, hd = np.random.default_rng(5), 3, 6, 48
    qkv = rng.standard_normal((t, heads * hd + 16)).astype(np.float32)
    weights = [rng.standard_normal(hd).astype(np.float32) if norm else None for _ in "qk"]
    angles = rng.uniform(0, 6, (40, hd // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    positions, wanted = np.array([0, 39, 17], np.int32), qkv.copy()
    turned = wanted[:, : 4 * hd].reshape(t, 4, hd)
    if norm:
        turned /= np.sqrt((turned**2).mean(-1, keepdims=True) + 0.1)
        turned[:, :3] *= weights[0]
        turned[:, 3:] *= weights[1]
    turned[:] = rotate(turned.copy(), cos[positions][:, None], sin[positions][:, None])
    args = (t, qkv, heads * hd + 16, 3, 1, hd, positions, cos, sin, *weights, 0.1)
    any_runner("rope_rows", *args, nth=2)
    np.testing.assert_allclose(qkv, wanted, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("kv", ["bf16", "f16"])
def test_narrow_pools_in_every_target(interpreted: Runner, kv: str) -> None:
    check(interpreted, kv, False, (1, 1), 16, 16, 1)
