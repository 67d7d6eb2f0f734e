"""The payload of a compile: every GEMM a model runs and how often each M occurs.

In: ModelSpec and WorkloadSpec. Out: what the schedules are made and searched for.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.compiler.workload import WorkloadSpec
from dovetail.ir.model import ModelSpec


@dataclass(frozen=True, slots=True)
class GemmShape:
    """One matrix product C[M, N] = A[M, K] B^T. `family` is the kernel family that computes it.

    `calls`: times it runs in one step. `bias` and `residual` tell the epilogue.
    """

    op: str
    family: str
    n: int
    k: int
    dtype: str
    calls: int
    bias: bool = False
    residual: bool = False


@dataclass(frozen=True, slots=True)
class Payload:
    """All shapes, with the share of steps at each M; `head` has its own: rows of logits."""

    gemms: tuple[GemmShape, ...]
    step_sizes: dict[int, float]
    head_sizes: dict[int, float]

    def sizes(self, gemm: GemmShape) -> dict[int, float]:
        """Return M -> weight for a shape; weights sum to 1."""
        return self.head_sizes if gemm.op == "head" else self.step_sizes


def make_payload(
    spec: ModelSpec, workload: WorkloadSpec, max_step_tokens: int, max_step_sequences: int
) -> Payload:
    """Return the payload of one model under one workload."""
    steps = workload.step_sizes(max_step_tokens)
    rows: dict[int, float] = {}
    for size, share in steps.items():
        # a prefill chunk wants one row of logits, a decode step one per sequence
        out = size if size <= min(workload.concurrency, max_step_sequences) else 1
        rows[out] = rows.get(out, 0.0) + share
    return Payload(_gemms(spec), steps, dict(sorted(rows.items())))


def _gemms(spec: ModelSpec) -> tuple[GemmShape, ...]:
    hidden, inner, layers, dtype = (
        spec.hidden_size,
        spec.intermediate_size,
        spec.n_layers,
        spec.weight_dtype,
    )
    heads = spec.n_heads * spec.head_dim
    linear, silu = "gemm_linear", "gemm_silu"
    return (
        GemmShape("qkv", linear, spec.qkv_size, hidden, dtype, layers, bias=spec.attention_bias),
        GemmShape("o", linear, hidden, heads, dtype, layers, bias=spec.output_bias, residual=True),
        GemmShape("gate_up", silu, inner, hidden, dtype, layers, bias=spec.mlp_bias),
        GemmShape("down", linear, hidden, inner, dtype, layers, bias=spec.mlp_bias, residual=True),
        GemmShape("head", linear, spec.vocab_size, hidden, dtype, 1),
    )
