"""What would be planned, and take how long, if the machine or the requests were others.

In: an inspection. Out: the plans of the compiler's contention model for each change, the same
figures behind all of them. Nothing is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from dovetail.cli.inspection import Inspection
from dovetail.compiler.plan.service import choose_plans, sample_trace, within_quota
from dovetail.compiler.rules.workload import DEFAULT_WORKLOAD, WorkloadSpec, read_workload
from dovetail.ir.errors import SpecError
from dovetail.ir.model import ModelSpec
from dovetail.ir.plans import Figure
from dovetail.topology.parameters import MachineParameters
from dovetail.topology.replay import Trace
from dovetail.topology.values import HardwareSpec

BANDWIDTHS = ("core_bandwidth", "package_bandwidth", "l3_bandwidth", "l3_core_bandwidth")
"""Figures that memory of another speed changes."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What plans are made for."""

    hardware: HardwareSpec
    figures: MachineParameters
    trace: Trace


@dataclass(frozen=True, slots=True)
class Variant:
    """The best pair by the model where something is different; seconds per request.

    shapes: processes x threads of prefill and decode.
    """

    name: str
    shapes: tuple[str, ...]
    seconds: float


def read_trace(found: Inspection, sequences: int) -> Trace:
    """Return the requests that were planned for; the assumed ones where the trace is not here."""
    return sample_trace(_find_workload(found), sequences)


def _find_workload(found: Inspection) -> WorkloadSpec:
    words = (word.partition("=") for word in found.manifest.command)
    for path in (value for name, _, value in words if name == "--workload"):
        try:
            workload = read_workload(Path(path))
        except SpecError:
            continue
        if workload.fingerprint == found.manifest.workload_fingerprint:
            return workload
    return DEFAULT_WORKLOAD


def scale_bandwidth(now: Situation, factor: float) -> Situation:
    """Return the situation with all memory `factor` times as fast."""
    scaled: dict[str, Any] = {
        name: Figure(getattr(now.figures, name).value * factor, f"{factor:g} times as much")
        for name in BANDWIDTHS
    }
    return replace(now, figures=replace(now.figures, **scaled))


def halve_cores(now: Situation) -> Situation:
    """Return the situation where only half of the cores may be used."""
    quota = max(1.0, now.hardware.usable_threads / 2)
    return replace(now, hardware=structs.replace(now.hardware, cpu_quota=quota))


def lengthen(now: Situation, factor: int) -> Situation:
    """Return the situation where prompts have `factor` times as many tokens."""
    longer = tuple((factor * prompt, output) for prompt, output in now.trace.requests)
    return replace(now, trace=replace(now.trace, requests=longer))


CHANGES: dict[str, Callable[[Situation], Situation]] = {
    "as it is": lambda now: now,
    "half of the memory bandwidth": lambda now: scale_bandwidth(now, 0.5),
    "twice the memory bandwidth": lambda now: scale_bandwidth(now, 2),
    "half of the cores": halve_cores,
    "prompts 4 times as long": lambda now: lengthen(now, 4),
    "prompts 16 times as long": lambda now: lengthen(now, 16),
}


def plan_variants(
    spec: ModelSpec, now: Situation, progress: Callable[[str, int, int], None]
) -> Iterator[Variant]:
    """Yield the best plans for each of CHANGES; progress is told how many are done, of all."""
    for number, (name, change) in enumerate(CHANGES.items()):
        there = change(now)
        hardware, _ = within_quota(there.hardware)
        choice = choose_plans(hardware, spec, there.trace, parameters=there.figures)
        best = min(choice.pairs, key=lambda p: p.simulated if p.simulated is not None else 1e9)
        pair = choice.prefill[best.prefill], choice.decode[best.decode]
        shapes = tuple(f"{plan.processes} x {plan.threads}" for plan in pair)
        yield Variant(name, shapes, best.simulated or 0.0)
        progress("what if", number + 1, len(CHANGES))
