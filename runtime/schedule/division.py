"""How a step's requests are divided into sub-batches: NEO's way and the paper's simpler ones.

In: a step's prompts, and who decodes on either device. Out: one or two batches, side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.runtime.schedule.plan import Batch, Pipelining, PrefillChunk
from dovetail.runtime.schedule.request import Request

Members = tuple[list[Request], list[Request]]
"""CPU decodes of batch 0 and of batch 1."""


def divide_evenly(decodes: Sequence[Request]) -> Members:
    """Return two halves, of every length some in each."""
    return list(decodes[::2]), list(decodes[1::2])


def make_batches(
    pipelining: Pipelining, prompts: Sequence[PrefillChunk], gpu: Sequence[Request], cpu: Members
) -> tuple[Batch, ...]:
    """Return a step's batches; what the GPU does alone is in the first, but for `symmetric`.

    That halves decodes on either device; prompts have steps of their own (NEO §3.1, strawman 2).
    """
    halves = pipelining == "symmetric" and not prompts
    first, second = divide_evenly(gpu) if halves else (gpu, ())
    batches = (
        Batch(tuple(prompts), _numbers(first), _numbers(cpu[0])),
        Batch((), _numbers(second), _numbers(cpu[1])),
    )
    return batches if batches[1].tokens else batches[:1]


def _numbers(requests: Sequence[Request]) -> tuple[int, ...]:
    return tuple([request.id for request in requests])
