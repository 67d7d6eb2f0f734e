"""Which attention a model gets on a device: the first backend that is there and computes right.

In: a device, types, heads. Out: a class of `PagedAttention`. Each backend but plain torch attends
once over made-up keys first; where one fails or differs the log says so, and the next is tried.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from dovetail.ir.model import KV_BLOCK, ModelSpec
from dovetail.runtime.accel.attention import PlainAttention
from dovetail.runtime.accel.attention_flashinfer import FlashInferAttention
from dovetail.runtime.accel.attention_flex import FlexAttention
from dovetail.runtime.accel.device import TYPES, TorchDevice, first_line
from dovetail.runtime.accel.step import Attended, PagedAttention, Step

BACKENDS = (FlashInferAttention, FlexAttention)
"""The best one first; behind them plain torch, which runs everywhere."""
CHECKED = ((5, 1), (1, 1), (40, 1), (33, 17), (16, 16))
"""Keys and queries of the sequences that a backend is tried with: decodes, chunks of prompts."""
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference from plain torch, where values are of the size of 1."""

log = logging.getLogger("dovetail")


def choose_attention(
    device: TorchDevice, spec: ModelSpec, dtype: torch.dtype
) -> type[PagedAttention]:
    """Return the attention of a model, a rank's part, with activations of `dtype`."""
    if spec.sinks or spec.attention_cap or len(spec.head_shapes) > 1:  # what backends know not
        return PlainAttention
    kv, target = TYPES[spec.kv_dtype], device.device
    for backend in BACKENDS:
        if not backend.fits(target, dtype, kv, spec.head_dim):
            continue
        try:
            found = try_attention(backend(target), device, spec, dtype)
        except Exception as error:  # whatever a library raises that cannot work here
            log.warning("%s attention is disabled: %s", backend.name, first_line(error))
            continue
        if found <= TOLERANCE[dtype]:
            return backend
        log.warning("%s attention is disabled: results differ by %.2g", backend.name, found)
    return PlainAttention


def try_attention(
    tried: PagedAttention, device: TorchDevice, spec: ModelSpec, dtype: torch.dtype
) -> float:
    """Return the largest difference from plain torch; raises whatever the backend raises."""
    heads = spec.n_heads, spec.n_kv_heads, spec.head_dim
    found, windows = [], {spec.layer_window(i) for i in range(spec.n_layers)}
    with device.working():
        step, pools, q = _make_step(device, heads, dtype, TYPES[spec.kv_dtype])
        plain = PlainAttention(device.device)
        for attention, recorded in ((plain, False), (tried, False), (tried, True)):
            rows, step.recorded = [], recorded and tried.records
            for window in sorted(windows):
                attention.add(Attended(*heads[:2], heads[2] ** -0.5, window, *pools))
            step.shared.clear()
            attention.begin(step)
            for over in attention.kinds.values():
                out = torch.zeros_like(q)
                attention.prompts(step, q, out, over)
                attention.decodes(step, q, out, over)
                rows.append(out)
            found.append(torch.stack(rows).float())
        differences = torch.stack([(one - found[0]).abs().max() for one in found[1:]])
        return float(differences.max().nan_to_num(nan=torch.inf))


def _make_step(
    device: TorchDevice, heads: tuple[int, int, int], dtype: torch.dtype, kv: torch.dtype
) -> tuple[Step, Sequence[torch.Tensor], torch.Tensor]:
    """Return a step of made-up sequences, K and V of a layer, and all queries."""
    prompts = [each for each in CHECKED if each[1] > 1]
    decodes = [each for each in CHECKED if each[1] == 1]
    lengths = np.array([keys for keys, _ in prompts + decodes], np.int32)
    starts = np.cumsum([0, *(queries for _, queries in prompts + decodes)]).astype(np.int32)
    counts, draw = -(-lengths // KV_BLOCK), np.random.default_rng(0)
    n_q, n_kv, size = heads
    blocks = draw.permutation(int(counts.sum())).astype(np.int32)
    tables = np.zeros((len(lengths), int(counts.max())), np.int32)
    for row, (last, count) in enumerate(zip(np.cumsum(counts), counts, strict=True)):
        tables[row, :count] = blocks[last - count : last]
    host = {"block_tables": tables, "seq_lengths": lengths, "seq_starts": starts}
    there = {name: torch.from_numpy(array).to(device.device) for name, array in host.items()}
    numbers = {"n_prefill": len(prompts), "n_decode": len(decodes)}
    numbers |= {"decode_row": int(starts[len(prompts)])}

    def drawn(*shape: int) -> torch.Tensor:
        values = draw.standard_normal(shape, np.float32)
        return torch.from_numpy(values).to(device.device)

    pools = [drawn(len(blocks) + 1, n_kv, KV_BLOCK, size).to(kv) for _ in "kv"]
    for pool in pools:
        pool[-1] = 0  # see DevicePools
    return Step(host, there, numbers), pools, drawn(int(starts[-1]), n_q * size).to(dtype)
