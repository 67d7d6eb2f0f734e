"""The summary of an artifact: what a person wants to know first, in at most twenty lines.

In: an `Inspection`. Out: facts by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from dovetail.cli.inspect_plans import show_cpus
from dovetail.cli.inspection import (
    EncoderInspection,
    Inspection,
    ModelInspection,
    hardware_facts,
    memory_rows,
    rate_of,
)
from dovetail.cli.report import show_bytes, show_count
from dovetail.ir.artifact import PHASES, PhasePlan


def summarise(found: Inspection) -> dict[str, str]:
    """Return the facts of an artifact that matter most."""
    return dict(_facts(found))


def _facts(found: Inspection) -> Iterator[tuple[str, str]]:
    manifest, plan = found.manifest, found.plan
    size = sum(entry.bytes for entry in manifest.files.values())
    yield "artifact", f"{found.path}: {len(manifest.files)} files, {show_bytes(size)}"
    yield "written by", f"{manifest.producer} at {manifest.created}, effort {manifest.effort}"
    if found.hardware is not None:
        facts = hardware_facts(found.hardware)
        yield "planned for", f"{facts['cpu']}, {facts['shape']}"
    yield "targets", ", ".join(manifest.targets)
    counts = {show_count(plan.processes_of(phase), "process"): None for phase in PHASES}
    phases = f"prefill {_show_phase(plan.prefill)}; decode {_show_phase(plan.decode)}"
    yield "plan", f"{' and '.join(counts)}; {phases}"
    if found.choice and found.choice.pairs:
        yield "chosen", _describe_choice(found)
    for model in found.models[:3]:
        yield model.file.name, _describe_model(model)
    for encoder in found.encoders[:3]:
        yield encoder.file.name, _describe_encoder(encoder)
    rows = [row for part in found.parts for table in part.schedules for row in table.rows]
    sources = Counter(row.source for row in rows)
    shown = ", ".join(f"{count} {source}" for source, count in sorted(sources.items()))
    yield "schedules", f"{len(rows)} rows: {shown}"
    if fastest := max(_rates(found), default=None):
        yield "fastest product", f"{fastest[0]:.0f} GFLOP/s: {fastest[1]}"
    if errors := [w for p in found.parts if p.quantisation for w in p.quantisation.weights]:
        worst = max(errors, key=lambda weight: weight.error)
        finer = sum(weight.format != weight.wanted for weight in errors)
        shown = f"worst {worst.error:.2%} ({worst.name}), {finer} in a finer format"
        yield "quantised here", f"{len(errors)} matrices, {shown}"
    needed = sum(size for _, size, _ in memory_rows(found))
    yield "memory", show_bytes(needed) + (" with KV of one context" if found.models else "")
    shared = sum(bool(kernel.shared) for index in found.kernels for kernel in index.kernels)
    kernels = sum(len(index.kernels) for index in found.kernels)
    yield "kernels", f"{kernels}, {shared} of them shared by all models"
    if found.workflows:
        yield "workflows", ", ".join(file.name for file in found.workflows)
    if found.indexes:
        sizes = (f"{name} ({index.documents} documents)" for name, index in found.indexes.items())
        yield "indexes", ", ".join(sizes)


def _show_phase(phase: PhasePlan) -> str:
    return f"{show_count(phase.threads, 'thread')} on PUs {show_cpus(phase.cpus)}"


def _describe_choice(found: Inspection) -> str:
    choice = found.choice
    assert choice is not None
    best, others = choice.pairs[0], len(choice.pairs) - 1
    seconds = best.simulated if best.measured is None else best.measured
    shown = "" if seconds is None else f", {seconds:.4f} s per request of trace {choice.trace}"
    return f"{choice.source}{shown}; {show_count(others, 'other pair')}"


def _describe_model(model: ModelInspection) -> str:
    spec = model.file.spec
    weights = show_bytes(sum(weight.bytes for weight in model.file.weights))
    beside = f", adapters {', '.join(spec.adapters)}" if spec.adapters else ""
    mixed = f" with {spec.experts.count} experts each" if spec.experts else ""
    return (
        f"{spec.family}, {show_count(spec.n_layers, 'layer')} of {spec.hidden_size}{mixed}, "
        f"{weights} of {spec.weight_dtype} weights, {spec.kv_dtype} KV, "
        f"context {spec.max_context}{beside}"
    )


def _describe_encoder(encoder: EncoderInspection) -> str:
    spec = encoder.file.spec
    weights = show_bytes(sum(weight.bytes for weight in encoder.file.weights))
    return (
        f"{spec.family} encoder, {show_count(spec.n_layers, 'layer')} of {spec.hidden_size}, "
        f"{weights} of {spec.weight_dtype} weights, texts of {spec.max_tokens} tokens"
    )


def _rates(found: Inspection) -> Iterator[tuple[float, str]]:
    for part in found.parts:
        for table in part.schedules:
            for row in table.rows:
                if (rate := rate_of(table, row)) is not None:
                    threads = show_count(table.threads, "thread")
                    yield rate, f"{table.op} of {part.file.name} at M = {row.m_lo}, {threads}"
