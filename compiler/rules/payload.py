"""The payload of a compile: every GEMM a model runs and how often each M occurs.

In: ModelSpec and WorkloadSpec. Out: what schedules are searched for and gains are weighed by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dovetail.compiler.rules.schedules import HEADS, GemmOp, count_gemms
from dovetail.compiler.rules.workload import WorkloadSpec
from dovetail.ir.encoder import EncoderSpec
from dovetail.ir.model import ModelSpec


@dataclass(frozen=True, slots=True)
class GemmUse:
    """One matrix product of a step, and how often it runs.

    calls: times in one step. sizes: M -> share of the steps; the shares sum to 1. Of experts calls
    are those of one token, and a step's share is as many times larger as it has more of them.
    """

    gemm: GemmOp
    calls: int
    sizes: dict[int, float]


@dataclass(frozen=True, slots=True)
class Payload:
    """All matrix products of a model under a workload.

    shards: process number -> those of one process, where several share the model.
    """

    uses: tuple[GemmUse, ...]
    shards: Mapping[int, tuple[GemmUse, ...]] = field(default_factory=dict)

    def of(self, processes: int) -> tuple[GemmUse, ...]:
        """Return the matrix products of one of so many processes."""
        return self.uses if processes == 1 else self.shards[processes]

    def largest(self, op: str) -> int:
        """Return the largest M at which `op` runs."""
        return max(max(use.sizes) for use in self.uses if use.gemm.op == op)


def make_payload(
    spec: ModelSpec,
    workload: WorkloadSpec,
    max_step_tokens: int,
    max_step_sequences: int,
    processes: Iterable[int] = (),
) -> Payload:
    """Return the payload of one model under one workload, for one process and as many as given."""
    steps = workload.step_sizes(max_step_tokens)
    sizes = {"head": _head_sizes(steps, min(workload.concurrency, max_step_sequences))}
    if spec.experts:
        most = spec.experts.count / spec.experts.used  # from so many rows on, each expert has some
        shared = _sizes(
            (max(1, round(size / most)), share * min(size, most)) for size, share in steps.items()
        )
        sizes |= {"gate_up": shared, "down": shared}

    def uses(count: int) -> tuple[GemmUse, ...]:
        return tuple(
            GemmUse(gemm=gemm, calls=times, sizes=sizes.get(gemm.op, steps))
            for gemm, times in count_gemms(spec, count).items()
        )

    return Payload(uses(1), {count: uses(count) for count in processes if count > 1})


def make_encoder_payload(spec: EncoderSpec, max_step_tokens: int) -> Payload:
    """Return the payload of an encoder: passes over 8, 16, 32 .. tokens, all as frequent."""
    counts = [1 << i for i in range(3, max_step_tokens.bit_length())]
    sizes = dict.fromkeys(counts, 1 / len(counts))
    texts = dict.fromkeys((1, 4, 16), 1 / 3)
    return Payload(
        tuple(
            GemmUse(gemm=gemm, calls=times, sizes=texts if gemm.op in HEADS else sizes)
            for gemm, times in count_gemms(spec).items()
        )
    )


def _head_sizes(steps: dict[int, float], sequences: int) -> dict[int, float]:
    """Return M of the head: a row per sequence in a decode step, one after a prefill chunk."""
    return _sizes((size if size <= sequences else 1, share) for size, share in steps.items())


def _sizes(found: Iterable[tuple[int, float]]) -> dict[int, float]:
    rows: dict[int, float] = {}
    for size, share in found:
        rows[size] = rows.get(size, 0.0) + share
    return dict(sorted(rows.items()))
