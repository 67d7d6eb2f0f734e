"""Float64 references of the kernels: plain numpy, written for reading."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dovetail.ir.dtypes import DTYPES, narrow_bf16, widen_bf16
from dovetail.ir.model import KV_BLOCK

Array = npt.NDArray[np.float64]


def stored(values: npt.ArrayLike, dtype: str) -> npt.NDArray:
    """Return values as an array of the dtype's storage (bf16 as bit patterns)."""
    array = np.asarray(values, np.float32)
    return narrow_bf16(array) if dtype == "bf16" else array.astype(DTYPES[dtype].numpy)


def widened(array: npt.NDArray, dtype: str) -> npt.NDArray[np.float32]:
    """Return the float32 values of stored ones."""
    return widen_bf16(array) if dtype == "bf16" else array.astype(np.float32)


def rmsnorm(x: npt.NDArray, w: npt.NDArray, eps: float) -> Array:
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w


def rotate(x: npt.NDArray, cos: npt.NDArray, sin: npt.NDArray) -> Array:
    """Rotate pairs (c, c + half) of the last axis, half = columns of the tables."""
    half = cos.shape[-1]
    out = x.astype(np.float64)
    a, b = x[..., :half].astype(np.float64), x[..., half : 2 * half].astype(np.float64)
    out[..., :half] = a * cos - b * sin
    out[..., half : 2 * half] = b * cos + a * sin
    return out


def attention(
    q: npt.NDArray,
    k: npt.NDArray,
    v: npt.NDArray,
    scale: float,
    window: int,
    sinks: npt.NDArray | None = None,
    cap: float = 0.0,
) -> Array:
    """q [T][n_q][hd] are the last T positions of k, v [L][n_kv][hd] -> [T][n_q][hd]."""
    group = q.shape[1] // k.shape[1]
    k64, v64 = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("tnd,lnd->ntl", q.astype(np.float64), k64) * scale
    scores = cap * np.tanh(scores / cap) if cap else scores
    position = np.arange(len(k) - len(q), len(k))[:, None]
    key = np.arange(len(k))[None, :]
    hidden = key > position
    if window:
        hidden |= key <= position - window
    scores = np.where(hidden, -np.inf, scores)
    if sinks is not None:  # a last key that has no value
        last = np.broadcast_to(sinks.astype(np.float64)[:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, last], axis=-1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("ntl,lnd->tnd", weights[..., : len(k)], v64)


def drawn_sinks(rng: np.random.Generator, n_q: int) -> npt.NDArray[np.float32]:
    """Return sinks of all sizes: some far above the scores, some far below."""
    return (rng.standard_normal(n_q) * 6).astype(np.float32)


@dataclass(frozen=True)
class Paged:
    """Keys and values of several sequences in one pool, blocks shuffled, unused places NaN."""

    k: npt.NDArray
    v: npt.NDArray
    keys: list[npt.NDArray[np.float32]]
    values: list[npt.NDArray[np.float32]]
    tables: npt.NDArray[np.int32]


def paged(rng: np.random.Generator, lengths: list[int], n_kv: int, hd: int, dtype: str) -> Paged:
    """Draw keys and values of sequences with the given lengths and lay them out in blocks."""
    per = [-(-n // KV_BLOCK) for n in lengths]
    blocks = rng.permutation(sum(per) + 2).astype(np.int32)
    tables = np.full((len(lengths), max(per) + 1), -1, np.int32)
    shape = (len(blocks), n_kv, KV_BLOCK, hd)
    k, v = (stored(np.full(shape, np.nan), dtype) for _ in range(2))
    keys, values = [], []
    at = 0
    for s, length in enumerate(lengths):
        tables[s, : per[s]] = blocks[at : at + per[s]]
        at += per[s]
        for pool, kept in ((k, keys), (v, values)):
            drawn = stored(rng.standard_normal((length, n_kv, hd)), dtype)
            for p in range(length):
                pool[tables[s, p // KV_BLOCK], :, p % KV_BLOCK] = drawn[p]
            kept.append(widened(drawn, dtype))
    return Paged(k, v, keys, values, tables)


def kept_tokens(logits: npt.NDArray, temperature: float, top_k: int, top_p: float, min_p: float):
    """Return probabilities (0 where filtered) after temperature, top-k, top-p, min-p, in order."""
    y = logits.astype(np.float64) / temperature
    p = np.exp(y - y.max())
    p /= p.sum()
    if 0 < top_k < len(p):
        p = np.where(p >= np.sort(p)[-top_k], p, 0)
        p /= p.sum()
    if top_p < 1:
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        smallest = p[order][before < max(top_p, 1e-9)].min()
        p = np.where(p >= smallest, p, 0)
    p = np.where(p >= min_p * p.max(), p, 0)
    return p / p.sum()
