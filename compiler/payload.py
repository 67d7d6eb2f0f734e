"""The payload of a compile: every GEMM a model runs and how often each M occurs.

In: ModelSpec and WorkloadSpec. Out: what schedules are searched for and gains are weighed by.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.compiler.schedules import GemmOp, gemm_ops
from dovetail.compiler.workload import WorkloadSpec
from dovetail.ir.model import ModelSpec


@dataclass(frozen=True, slots=True)
class GemmUse:
    """One matrix product of a step, its epilogue, and how often it runs.

    calls: times in one step. sizes: M -> share of the steps; the shares sum to 1.
    """

    gemm: GemmOp
    calls: int
    bias: bool
    residual: bool
    sizes: dict[int, float]


@dataclass(frozen=True, slots=True)
class Payload:
    """All matrix products of a model under a workload."""

    uses: tuple[GemmUse, ...]

    def largest(self, op: str) -> int:
        """Return the largest M at which `op` runs."""
        return max(max(use.sizes) for use in self.uses if use.gemm.op == op)


def make_payload(
    spec: ModelSpec, workload: WorkloadSpec, max_step_tokens: int, max_step_sequences: int
) -> Payload:
    """Return the payload of one model under one workload."""
    steps = workload.step_sizes(max_step_tokens)
    rows = _head_sizes(steps, min(workload.concurrency, max_step_sequences))
    biases = {"qkv": spec.attention_bias, "o": spec.output_bias}
    biases |= dict.fromkeys(("gate_up", "down"), spec.mlp_bias)
    return Payload(
        tuple(
            GemmUse(
                gemm=gemm,
                calls=1 if gemm.op == "head" else spec.n_layers,
                bias=biases.get(gemm.op, False),
                residual=gemm.op in ("o", "down"),
                sizes=rows if gemm.op == "head" else steps,
            )
            for gemm in gemm_ops(spec)
        )
    )


def _head_sizes(steps: dict[int, float], sequences: int) -> dict[int, float]:
    """Return M of the head: a row per sequence in a decode step, one after a prefill chunk."""
    rows: dict[int, float] = {}
    for size, share in steps.items():
        out = size if size <= sequences else 1
        rows[out] = rows.get(out, 0.0) + share
    return dict(sorted(rows.items()))
