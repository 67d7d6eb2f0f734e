"""Kernels of the target cuda against torch's operators."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from tests.codegen.kernels.harness import Runner
from tests.codegen.kernels.reference import paged


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.float64))


def test_rmsnorm(cuda: Runner) -> None:
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((5, 200)).astype(np.float32), rng.random(200, np.float32)
    out = np.zeros_like(x)
    cuda("rmsnorm", 5, 200, x, 200, w, 1e-5, out, 200, nth=7)
    want = F.rms_norm(tensor(x), (200,), tensor(w), 1e-5)
    np.testing.assert_allclose(out, want, rtol=3e-6, atol=1e-6)


def test_gate_rows(cuda: Runner) -> None:
    rng = np.random.default_rng(2)
    gate, up = (rng.standard_normal((3, 600)).astype(np.float32) for _ in range(2))
    out = np.zeros_like(gate)
    cuda("gate_rows_silu", 3, 600, gate, 600, up, 600, out, 600, nth=4)
    np.testing.assert_allclose(out, F.silu(tensor(gate)) * tensor(up), rtol=2e-6, atol=1e-7)


def test_list_scan(cuda: Runner) -> None:
    rng = np.random.default_rng(3)
    queries, vectors = (rng.standard_normal((n, 72)).astype(np.float32) for n in (6, 50))
    out = np.zeros((6, 50), np.float32)
    cuda("ivf_scan_l2", 6, 50, 72, queries, 72, vectors, out, 50, nth=3)
    want = torch.cdist(tensor(queries), tensor(vectors)) ** 2
    np.testing.assert_allclose(out, want, rtol=2e-6)
    cuda("ivf_scan_ip", 6, 50, 72, queries, 72, vectors, out, 50, nth=3)
    np.testing.assert_allclose(out, tensor(queries) @ tensor(vectors).T, rtol=1e-5, atol=2e-5)


def test_paged_decode_attention(cuda: Runner) -> None:
    rng = np.random.default_rng(4)
    n_q, n_kv, hd, lengths, splits = 8, 2, 80, [40, 3, 129], 2
    pool = paged(rng, lengths, n_kv, hd, "bf16")
    n, ldq = len(lengths), (n_q + 2 * n_kv) * hd
    q = rng.standard_normal((n, ldq)).astype(np.float32)
    out = np.zeros((n, n_q * hd), np.float32)
    partial = np.full((n, n_q, splits, hd + 16), np.nan, np.float32)
    starts = np.zeros(1, np.int32)
    sizes = np.array(lengths, np.int32)
    tables = (starts, sizes, pool.tables, pool.tables.shape[1], pool.k, pool.v)
    args = (0, n, n_q, n_kv, hd, hd**-0.5, 0, splits, q, ldq, *tables, partial, out, n_q * hd)
    for kernel in ("decode_attention_bf16", "decode_attention_merge_bf16"):
        cuda(kernel, *args, nth=6)
    for d in range(n):
        query = tensor(q[d, : n_q * hd]).view(n_q, 1, hd)
        keys, values = (tensor(x[d]).transpose(0, 1) for x in (pool.keys, pool.values))
        want = F.scaled_dot_product_attention(
            query[None], keys[None], values[None], enable_gqa=True
        )
        np.testing.assert_allclose(out[d], want.flatten(), rtol=2e-5, atol=2e-5)
