"""What the CPU adds to an accelerator on this machine: the closed-loop measurement of WindVE §V.

In: an encoder's artifact, a torch device or none. Out: lines, predicted and stress-tested depths,
alone and side by side.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dovetail.ir.errors import SpecError
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.embed.depths import decide_depths, fixed_manager
from dovetail.runtime.embed.devices import (
    DevicePlan,
    EmbeddingPlan,
    choose_accelerators,
    detect_devices,
)
from dovetail.runtime.embed.encoder import artifact_source, find_encoder
from dovetail.runtime.embed.fit_latency import Calibrator, Stress, Trial, stress_depths
from dovetail.runtime.embed.line import FittedLine, Line, fit_line
from dovetail.runtime.embed.open import make_sample, start_accelerators
from dovetail.runtime.embed.process import ProcessInstance
from dovetail.runtime.embed.service import EmbeddingService, Models, Observer
from dovetail.runtime.machine.devices import AUTO, TORCH_CPU
from dovetail.topology.hardware import read_hardware

NPU, CPU = "npu", "cpu"
NO_ACCELERATOR = "none: the CPU alone"
TRIALS = 8
"""Of a stress test in turns: all runs near its end count, so its bounds need not meet."""
NEAR = 0.25
"""Trials at concurrencies this far from the last, relative, say how fast the device is there."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Concurrency within one SLO. Depths by device: `npu` is the accelerator, if there is one.

    accelerator: what it is, in words.
    at_start: by the lines as fitted before the stress test, where it starts. predicted: by lines
    fitted to points from before and after it, as a machine's speed changes in that minute.
    together: stress-tested side by side; alone: each by itself, in turns with the others.
    gain: queries that the CPU adds, of those of the accelerator alone. cpu_share: what it adds, of
    what it holds alone. saving: see `cost_saving`. Without an accelerator these are None.
    depth_error: greatest distance of predicted from tested together, relative; 0 within one query.
    """

    slo: float
    length: int
    accelerator: str
    lines: dict[str, Line]
    at_start: dict[str, int]
    predicted: dict[str, int]
    together: dict[str, int]
    alone: dict[str, int]
    gain: float | None
    cpu_share: float | None
    saving: float | None
    depth_error: float


@contextmanager
def serve_devices(
    artifact: Path,
    length: int,
    slo: float,
    *,
    device: str = AUTO,
    threads: int | None = None,
    observe: Observer | None = None,
) -> Iterator[tuple[Calibrator, str]]:
    """Serve on a torch device and, on CPUs that it leaves, a CPU instance; or on the CPU alone.

    Gives what measures them, and the accelerator in words.

    device: see `choose_accelerators`; of several the first.

    Raises what opening the artifact raises; SpecError where queries are longer than its encoder
    takes, or the device leaves no CPU; DeviceError where the device cannot have the encoder.
    """
    found, hardware = open_artifact(artifact, read_hardware()), read_hardware()
    part = find_encoder(found)
    spec = part.file.spec
    if length > spec.max_tokens:
        raise SpecError(f"{artifact}: its encoder takes {spec.max_tokens} tokens, not {length}")
    asked = choose_accelerators(hardware, device, threads)
    first = msgspec.structs.replace(asked, accelerators=asked.accelerators[:1])
    with ExitStack() as opened:
        devices: dict[str, list[Models]] = {}
        words, pus = NO_ACCELERATOR, tuple[int, ...]()
        if started := start_accelerators(found, first, device, opened):
            (accelerator,) = first.accelerators
            words = f"{accelerator.name}: {accelerator.model}"
            cpu = detect_devices(first).devices[-1]
            if cpu.accelerator:
                raise SpecError(f"{accelerator.name} leaves no CPU to our kernels; give them one")
            pus = cpu.pus[0] if accelerator.kind == TORCH_CPU else ()
            devices[NPU] = [{"": started[accelerator.name][part.name]}]
        source = artifact_source(found, threads or len(pus) or None)
        devices[CPU] = [{"": ProcessInstance(source, pus)}]
        plan = pair_plan(*devices)
        manager = fixed_manager(plan, length, dict.fromkeys(devices, 1))
        service = EmbeddingService(devices, manager, slo=slo, observe=observe)
        opened.enter_context(service)
        yield Calibrator(service, plan, make_sample(spec)), words


def measure_artifact(
    artifact: Path,
    length: int,
    slo: float,
    *,
    device: str = AUTO,
    repeats: int = 3,
    threads: int | None = None,
) -> Capacity:
    """Return the capacity of an artifact's encoder on this machine; see `serve_devices`."""
    served = serve_devices(artifact, length, slo, device=device, threads=threads)
    with served as (calibrator, accelerator):
        return measure_capacity(calibrator, length, slo, accelerator, repeats=repeats)


def measure_capacity(
    calibrator: Calibrator, length: int, slo: float, accelerator: str = "", *, repeats: int = 3
) -> Capacity:
    """Return the concurrency within `slo` of all devices, and of each alone.

    Several minutes at most: a trial takes about `slo` seconds, `repeats` times.
    """
    before = _fits(calibrator, length, slo)
    at_start = _depths(calibrator.plan, before, length, slo)
    together, alone = stress_in_turns(
        at_start,
        {name: fitted.line for name, fitted in before.items()},
        slo,
        lambda counts: calibrator.run(counts, length),
        repeats,
    )
    after = _fits(calibrator, length, slo)
    joined = {
        name: fit_line(
            [p for fit in (before[name], after[name]) for p in fit.points + fit.outliers]
        )
        for name in before
    }
    predicted = _depths(calibrator.plan, joined, length, slo)
    pair = NPU in together
    added = sum(together.values()) - alone.get(NPU, 0)
    return Capacity(
        slo=slo,
        length=length,
        accelerator=accelerator,
        lines={name: fitted.line for name, fitted in joined.items()},
        at_start=at_start,
        predicted=predicted,
        together=together,
        alone=alone,
        gain=added / max(alone[NPU], 1) if pair else None,
        cpu_share=added / max(alone[CPU], 1) if pair else None,
        saving=cost_saving(together[NPU], together[CPU]) if pair else None,
        depth_error=max(_error(predicted[name], together[name]) for name in predicted),
    )


def _fits(calibrator: Calibrator, length: int, slo: float) -> dict[str, FittedLine]:
    return {name: each[length] for name, each in calibrator.profile((length,), slo).items()}


def _depths(
    plan: EmbeddingPlan, fitted: Mapping[str, FittedLine], length: int, slo: float
) -> dict[str, int]:
    lines = {name: {length: each} for name, each in fitted.items()}
    found = decide_depths(plan, lines, slo, "closed")
    return {name: classes[0].depth for name, classes in found.devices.items()}


def stress_in_turns(
    predicted: Mapping[str, int],
    lines: Mapping[str, Line],
    slo: float,
    trial: Trial,
    repeats: int,
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the depths of devices together, and of each alone.

    A trial runs all of them together and then each alone, so that a machine that becomes faster or
    slower meanwhile is so for both.
    """
    single = {f"{name} alone": name for name in predicted}

    def run(counts: Mapping[str, int]) -> dict[str, float]:
        both = {name: counts[name] for name in predicted if name in counts}
        taken = dict(trial(both))
        for key, name in single.items():
            if key in counts:
                taken[key] = trial({name: counts[key]})[name]
        return taken

    found = stress_depths(
        {**predicted, **{key: predicted[name] for key, name in single.items()}},
        {**lines, **{key: lines[name] for key, name in single.items()}},
        slo,
        run,
        repeats=repeats,
        trials=TRIALS,
    )
    together = {name: reach(found, name, lines[name], slo) for name in predicted}
    return together, {name: reach(found, key, lines[name], slo) for key, name in single.items()}


def reach(found: Stress, name: str, line: Line, slo: float) -> int:
    """Return the depth of a device for `slo` seconds by all runs of a stress test near its last.

    `found.depths` hang on the last trials alone. Where devices are compared that were tested in
    turns, this is their median over the same time, however fast the machine was when.
    """
    tried = [(counts[name], runs) for counts, runs in found.trials if name in counts]
    if not tried:
        return found.depths[name]
    last = tried[-1][0]
    near = [(count, runs) for count, runs in tried if abs(count - last) <= NEAR * last]
    paces = [run[name] / line.seconds(count) for count, runs in near for run in runs]
    return line.scaled(statistics.median(paces)).depth(slo, "closed")


def _error(predicted: int, tested: int) -> float:
    off = abs(predicted - tested)
    return off / max(tested, 1) if off > 1 else 0.0


def pair_plan(*names: str) -> EmbeddingPlan:
    """Return an accelerator and a CPU, or the devices of these names."""
    devices = tuple(DevicePlan(name, name) for name in names or (NPU, CPU))
    return EmbeddingPlan(devices, len(devices) > 1)


def cost_saving(accelerators: int, cpu: int) -> float:
    """Return the part of the deployment cost that the CPU saves at peaks (WindVE §III-B)."""
    return cpu / (cpu + accelerators) if cpu else 0.0
