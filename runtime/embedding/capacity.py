"""What the CPU adds to an accelerator on this machine: the closed-loop measurement of WindVE §V.

In: a CPU instance and queries. Out: lines, predicted and stress-tested depths, alone and side by
side, beside a GPU, or an *emulated* accelerator whose line is the CPU's by the paper's ratios.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from dovetail.ir.encoder import EncoderSpec
from dovetail.ir.errors import SpecError
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.devices import AUTO, TORCH_CPU
from dovetail.runtime.embedding.accelerators import start_accelerators
from dovetail.runtime.embedding.calibrate import Calibrator, Sample, fixed_manager
from dovetail.runtime.embedding.depths import cost_saving, decide_depths
from dovetail.runtime.embedding.detector import (
    EmbeddingPlan,
    choose_accelerators,
    detect_devices,
)
from dovetail.runtime.embedding.instance import EmulatedAccelerator, Ids, Instance
from dovetail.runtime.embedding.line import FittedLine, Line, fit_line
from dovetail.runtime.embedding.process import ProcessInstance
from dovetail.runtime.embedding.profiling import Trial, profile_line, stress_depths
from dovetail.runtime.embedding.service import EmbeddingService, Models, Observer
from dovetail.runtime.embedding.source import artifact_source, find_encoder, open_encoder
from dovetail.runtime.sim.pairs import pair_plan
from dovetail.topology.hardware import read_hardware

ALPHA_RATIO, BETA_RATIO = 0.21, 0.27 / 0.32
"""The accelerator's line by the CPU's: Tesla V100 and Xeon E5-2690 (WindVE §V-B)."""
EMULATED = "emulated: the CPU's line by the published ratios, alpha x 0.21, beta x 0.84"
NPU, CPU = "npu", "cpu"
DISTINCT = 16
"""Different queries of each length: the emulated accelerator knows their vectors."""
TRIALS = 8
"""Of a stress test in turns: all runs near its end count, so its bounds need not meet."""


class Queries:
    """Queries of chosen lengths: the same few of each, whatever they say."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self._vocabulary, self._seed = vocabulary, seed
        self._made: dict[int, list[Ids]] = {}

    def of(self, length: int) -> list[Ids]:
        """Return the different queries of a length."""
        if length not in self._made:
            draw = np.random.default_rng(self._seed + length)
            ids = draw.integers(0, self._vocabulary, (DISTINCT, length)).astype(np.int32)
            self._made[length] = list(ids)
        return self._made[length]

    def sample(self, count: int, length: int) -> Sequence[Ids]:
        """Return `count` queries of a length."""
        queries = self.of(length)
        return [queries[i % len(queries)] for i in range(count)]


@dataclass(frozen=True, slots=True)
class Capacity:
    """Concurrency within one SLO. Depths by device: `npu` is the accelerator, `cpu` real.

    accelerator: what it is, in words. late: batches that an emulated one had not ready in time.
    at_start: by the lines as fitted before the stress test, where it starts. predicted: by lines
    fitted to points from before and after it, as a machine's speed changes in that minute.
    together: stress-tested side by side; alone: each by itself, in turns with the others.
    gain: queries that the CPU adds, of those of the accelerator alone. cpu_share: what it adds, of
    what it holds alone. depth_error: greatest distance of predicted from tested together, relative;
    0 within one query.
    """

    slo: float
    length: int
    lines: dict[str, Line]
    at_start: dict[str, int]
    predicted: dict[str, int]
    together: dict[str, int]
    alone: dict[str, int]
    gain: float
    cpu_share: float
    depth_error: float
    saving: float
    late: int
    accelerator: str = EMULATED


def time_instance(instance: Instance, sample: Sample, length: int, slo: float) -> FittedLine:
    """Return the line of an instance that nobody else uses."""

    def measure(concurrency: int) -> float:
        queries = sample(concurrency, length)
        start = time.perf_counter()
        instance.embed_tokens(queries)
        return time.perf_counter() - start

    return profile_line(measure, slo)


def emulated_line(cpu: Line) -> Line:
    """Return the line of an accelerator that is to the CPU as the paper's is to its own."""
    return Line(cpu.alpha * ALPHA_RATIO, cpu.beta * BETA_RATIO)


@contextmanager
def emulated_pair(
    cpu: Instance,
    line: Line,
    queries: Sequence[Ids],
    length: int,
    *,
    slo: float,
    observe: Observer | None = None,
) -> Iterator[tuple[EmbeddingService, EmbeddingPlan, EmulatedAccelerator]]:
    """Serve on a CPU instance and an emulated accelerator of the same model; ends the instance.

    queries: all that will be asked; the accelerator knows their vectors from the start, so that
    it takes no time of the CPU.
    """
    npu = EmulatedAccelerator(line, length, cpu)
    npu.learn(queries)
    with serve_pair(cpu, npu, length, slo=slo, observe=observe) as (service, plan):
        yield service, plan, npu


@contextmanager
def serve_pair(
    cpu: Instance, npu: Instance, length: int, *, slo: float, observe: Observer | None = None
) -> Iterator[tuple[EmbeddingService, EmbeddingPlan]]:
    """Serve on a CPU instance and an accelerator of the same model; ends both."""
    plan = pair_plan()
    manager = fixed_manager(plan, length, {NPU: 1, CPU: 1})
    devices: dict[str, list[Models]] = {NPU: [{"": npu}], CPU: [{"": cpu}]}
    with EmbeddingService(devices, manager, slo=slo, observe=observe) as service:
        yield service, plan


def measure_capacity(
    calibrator: Calibrator,
    plan: EmbeddingPlan,
    npu: Instance,
    length: int,
    slo: float,
    *,
    repeats: int = 3,
) -> Capacity:
    """Return the concurrency within `slo` of both devices, and of each alone.

    Several minutes at most: a trial takes about `slo` seconds, `repeats` times.
    """
    before = _fits(calibrator, length, slo)
    at_start = _depths(plan, before, length, slo)
    together, alone = stress_in_turns(
        at_start,
        {name: fitted.line for name, fitted in before.items()},
        slo,
        lambda counts: calibrator.run(counts, length),
        repeats,
    )
    after = _fits(calibrator, length, slo)
    joined = {name: fit_line(before[name].all_points + after[name].all_points) for name in before}
    predicted = _depths(plan, joined, length, slo)
    added = sum(together.values()) - alone[NPU]
    return Capacity(
        slo=slo,
        length=length,
        lines={name: fitted.line for name, fitted in joined.items()},
        at_start=at_start,
        predicted=predicted,
        together=together,
        alone=alone,
        gain=added / max(alone[NPU], 1),
        cpu_share=added / max(alone[CPU], 1),
        depth_error=max(_error(predicted[name], together[name]) for name in predicted),
        saving=cost_saving(together[NPU], together[CPU]),
        late=npu.late if isinstance(npu, EmulatedAccelerator) else 0,
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
    single = {_alone(name): name for name in predicted}

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
    together = {name: found.reach(name, lines[name], slo) for name in predicted}
    return together, {name: found.reach(key, lines[name], slo) for key, name in single.items()}


def _alone(name: str) -> str:
    return f"{name} alone"


def measure_artifact(
    artifact: Path, length: int, slo: float, *, repeats: int = 3, threads: int | None = None
) -> Capacity:
    """Return the capacity of an artifact's encoder on this CPU, beside an emulated accelerator.

    Raises what opening the artifact raises; SpecError where queries are longer than its encoder
    takes.
    """
    with closing(open_encoder(str(artifact), 1)) as encoder:
        spec = encoder.spec
    _check_length(artifact, spec, length)
    queries = Queries(spec.vocab_size)
    cpu = ProcessInstance(artifact_source(artifact, threads))
    try:
        line = emulated_line(time_instance(cpu, queries.sample, length, slo).line)
    except BaseException:
        cpu.close()
        raise
    with emulated_pair(cpu, line, queries.of(length), length, slo=slo) as (service, plan, npu):
        calibrator = Calibrator(service, plan, queries.sample)
        return measure_capacity(calibrator, plan, npu, length, slo, repeats=repeats)


@dataclass(frozen=True, slots=True)
class DevicePair:
    """An accelerator and a CPU at work. accelerator: what `npu` is, in words."""

    service: EmbeddingService
    plan: EmbeddingPlan
    npu: Instance
    queries: Queries
    accelerator: str


@contextmanager
def device_pair(
    artifact: Path,
    length: int,
    slo: float,
    *,
    device: str = AUTO,
    threads: int | None = None,
    observe: Observer | None = None,
) -> Iterator[DevicePair | None]:
    """Serve on a torch device and, on CPUs that it leaves, a CPU instance; None where none embeds.

    device: see `choose_accelerators`; of several the first.

    Raises as `measure_artifact`, and DeviceError where the device cannot have the encoder.
    """
    found, hardware = open_artifact(artifact, read_hardware()), read_hardware()
    part = find_encoder(found)
    _check_length(artifact, part.file.spec, length)
    asked = choose_accelerators(hardware, device, threads)
    first = msgspec.structs.replace(asked, accelerators=asked.accelerators[:1])
    with ExitStack() as opened:
        started = start_accelerators(found, first, device, opened)
        if not started:
            yield None
            return
        (accelerator,) = first.accelerators
        cpu = detect_devices(first).devices[-1]
        pus = cpu.pus[0] if accelerator.kind == TORCH_CPU else ()
        if cpu.accelerator:
            raise SpecError(f"{accelerator.name} leaves no CPU to our kernels; give them one")
        instance = ProcessInstance(artifact_source(artifact, threads or len(pus) or None), pus)
        npu, queries = started[accelerator.name][part.name], Queries(part.file.spec.vocab_size)
        served = serve_pair(instance, npu, length, slo=slo, observe=observe)
        service, plan = opened.enter_context(served)
        words = f"{accelerator.name}: {accelerator.model}"
        yield DevicePair(service, plan, npu, queries, words)


def measure_device(
    artifact: Path,
    length: int,
    slo: float,
    *,
    device: str = AUTO,
    repeats: int = 3,
    threads: int | None = None,
) -> Capacity | None:
    """As `measure_artifact`, beside a torch device; None where none embeds. See `device_pair`."""
    with device_pair(artifact, length, slo, device=device, threads=threads) as pair:
        if pair is None:
            return None
        calibrator = Calibrator(pair.service, pair.plan, pair.queries.sample)
        capacity = measure_capacity(calibrator, pair.plan, pair.npu, length, slo, repeats=repeats)
    return replace(capacity, accelerator=pair.accelerator)


def _check_length(artifact: Path, spec: EncoderSpec, length: int) -> None:
    if length > spec.max_tokens:
        raise SpecError(f"{artifact}: its encoder takes {spec.max_tokens} tokens, not {length}")


def _error(predicted: int, tested: int) -> float:
    off = abs(predicted - tested)
    return off / max(tested, 1) if off > 1 else 0.0
