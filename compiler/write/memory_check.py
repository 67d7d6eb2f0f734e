"""Whether a model that is to be compiled fits the memory of its machine, before any work begins.

In: a ModelSpec and a HardwareSpec, whose memory is cut to the limit of its control group. Out:
nothing, or a CapacityError with the arithmetic and what would fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from dovetail.compiler.families.sources import WeightSource
from dovetail.compiler.families.tensors import weight_sources
from dovetail.compiler.formats.weight_dtype import CHOICES
from dovetail.compiler.formats.weight_formats import quantise_formats
from dovetail.compiler.tape.adapted import build_adapted_tape
from dovetail.compiler.tape.encoder import build_encode_tape
from dovetail.compiler.tape.forward import build_forward_tape, build_sample_tape
from dovetail.compiler.tape.gates import build_gated_tape
from dovetail.compiler.write.weights import plan_sources, total_bytes
from dovetail.ir.encoder import EncoderSpec
from dovetail.ir.errors import CapacityError
from dovetail.ir.formats import is_quantised
from dovetail.ir.model import ModelSpec, WeightEntry
from dovetail.runtime.native.forward import kv_block_bytes
from dovetail.runtime.native.step import step_bytes
from dovetail.runtime.schedule.device_limits import MemoryNeed
from dovetail.topology.hardware import HardwareSpec


def check_fits(
    model: str | Path,
    spec: ModelSpec,
    hardware: HardwareSpec,
    step: tuple[int, int],
    beside: Sequence[WeightSource] = (),
    *,
    gated: bool = False,
) -> None:
    """Raise CapacityError where one request of the whole context does not fit into memory.

    step: most tokens and sequences of a step. beside: weights of adapters. gated: there may be a
    tape with a user's own gate. A description of a machine may not tell its memory; then all fits.
    """
    need, memory = memory_need(spec, step, beside, gated=gated), hardware.usable_memory
    if memory and need.total > memory:
        fewer = ("fewer adapters",) if beside else ()
        found = _remedies(spec, step, memory, beside, gated=gated)
        remedy = " or ".join((*found, *fewer)) or "a smaller model"
        raise CapacityError(
            f"{model} does not fit into memory as {spec.weight_dtype}: {need.explain(memory)}; "
            f"use {remedy}"
        )


def check_encoder_fits(
    model: str | Path,
    spec: EncoderSpec,
    weights: tuple[WeightEntry, ...],
    hardware: HardwareSpec,
    step: tuple[int, int],
) -> None:
    """Raise CapacityError where a text encoder does not fit into memory, as `check_fits` does.

    step: most tokens and texts of a pass.
    """
    activations = build_encode_tape(spec, weights, *step).arena_bytes
    need = MemoryNeed(
        weights=total_bytes(weights), block=0, activations=activations, context=spec.max_tokens
    )
    memory = hardware.usable_memory
    if memory and need.total > memory:
        raise CapacityError(
            f"{model} does not fit into memory as {spec.weight_dtype}: {need.explain(memory)}; "
            "use a narrower --weight-dtype or a smaller model"
        )


def memory_need(
    spec: ModelSpec,
    step: tuple[int, int],
    beside: Sequence[WeightSource] = (),
    *,
    gated: bool = False,
) -> MemoryNeed:
    """Return what a model needs as it is to be stored, with weights of adapters `beside` it."""
    entries = plan_sources((*weight_sources(spec), *beside), spec.weight_format)
    adapted = (build_adapted_tape,) if beside else ()
    builders = (build_forward_tape, *adapted, *((build_gated_tape,) if gated else ()))
    arena = max(build(spec, entries, *step).arena_bytes for build in builders)  # one runs at a time
    sampling = build_sample_tape(spec, step[1]).arena_bytes
    return MemoryNeed(
        weights=total_bytes(entries),
        block=kv_block_bytes(spec),
        activations=arena + sampling + step_bytes(spec, *step),
        context=spec.max_context,
    )


def _remedies(
    spec: ModelSpec,
    step: tuple[int, int],
    memory: int,
    beside: Sequence[WeightSource],
    *,
    gated: bool,
) -> Iterator[str]:
    """Yield the widest dtype of weights that fits, and the longest context; else both together."""
    now = memory_need(spec, step, beside, gated=gated)
    stored = {name: _stored_as(spec, form) for name, form in CHOICES.items()}
    needs = {n: memory_need(each, step, beside, gated=gated) for n, each in stored.items()}
    narrower = {name: need for name, need in needs.items() if need.weights < now.weights}
    fitting = next((name for name, need in narrower.items() if need.total <= memory), None)
    if fitting:
        yield f"--weight-dtype {fitting}"
    if longest := now.longest(memory):
        yield _context(longest)
    if not fitting and not longest:
        least = [(need.longest(memory), name) for name, need in narrower.items()]
        yield from (f"--weight-dtype {n} with {_context(most)}" for most, n in least[-1:] if most)


def _stored_as(spec: ModelSpec, form: str) -> ModelSpec:
    if is_quantised(form):
        return quantise_formats(replace(spec, ordered=()), form)
    return replace(spec, weight_dtype=form, formats=(), ordered=())


def _context(tokens: int) -> str:
    return f"--max-context {tokens} (`serve`: --max-model-len)"
