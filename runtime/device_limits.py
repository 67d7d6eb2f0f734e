"""What a step and the KV pool of a device may hold, from its free memory."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.ir.errors import CapacityError
from dovetail.ir.model import KV_BLOCK


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Tokens and sequences of a step, longest request in tokens, blocks of the KV pool."""

    step_tokens: int
    sequences: int
    context: int
    blocks: int


def device_limits(
    *,
    free: int,
    weights: int,
    block_bytes: int,
    row_bytes: int,
    output_bytes: int,
    context: int,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    max_model_len: int | None = None,
    gpu_blocks: int | None = None,
) -> DeviceLimits:
    """Return limits; CapacityError where not even one block fits."""
    tokens, sequences = max_num_batched_tokens or 2048, max_num_seqs or 256
    sequences = min(sequences, tokens)
    left = free - weights - tokens * row_bytes - sequences * output_bytes
    blocks = gpu_blocks or left // block_bytes
    if blocks < 1:
        raise CapacityError("no memory for KV on the device")
    most = max_model_len or context
    return DeviceLimits(tokens, sequences, most, min(blocks, -(-most // KV_BLOCK) * sequences))
