"""The encoders of an artifact on this machine: detect, start, size the queues, keep, serve.

In: an open artifact, with an SLO or without. Out: `Embeddings` over a running service whose devices
all encoders share. With an SLO queues are sized by each model's profile, or by measuring, which the
profile then keeps. Torch is asked for its devices where it is imported: in their processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import msgspec
import numpy as np

from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.encoder import EncoderSpec
from dovetail.ir.errors import ArtifactError, DeviceError, DovetailError, install
from dovetail.ir.profile import LatencyRow, ProfileKey
from dovetail.runtime.artifact import Artifact, EncoderPart
from dovetail.runtime.embed.depths import (
    Depths,
    depths_of,
    fixed_manager,
    join_depths,
    make_manager,
    profile_rows,
)
from dovetail.runtime.embed.device_queue import QueryClass, QueueSpec, length_classes
from dovetail.runtime.embed.devices import (
    EmbeddingPlan,
    choose_accelerators,
    detect_devices,
    torch_names,
)
from dovetail.runtime.embed.drift import DriftKeeper
from dovetail.runtime.embed.encoder import (
    EmbeddingModel,
    EncoderSource,
    artifact_source,
    device_source,
)
from dovetail.runtime.embed.fit_latency import Calibrator, Sample
from dovetail.runtime.embed.line import Line
from dovetail.runtime.embed.process import ProcessInstance
from dovetail.runtime.embed.queue import BULK_SHARE, QueueManager
from dovetail.runtime.embed.service import EmbeddingService, Models
from dovetail.runtime.embed.settings import EmbeddingSettings
from dovetail.runtime.embed.texts import Embeddings, TextEncoder
from dovetail.runtime.machine.devices import AUTO, CPU, find_torch
from dovetail.runtime.machine.seat import Board, Seat
from dovetail.runtime.native.adapt import fit_plans
from dovetail.runtime.native.encoder import WIDE_TOKENS, Encoder
from dovetail.runtime.native.forward import find_tape
from dovetail.runtime.schedule.cost_tables import (
    digest_kernels,
    keep_profile,
    make_profile,
    read_profile,
)
from dovetail.topology.hardware import HardwareSpec

SHORTEST = 16
"""Tokens of the first length class where there is no SLO; each next one is twice as long."""
AHEAD = 2
"""Passes of an encoder without an SLO that are queued, so that each is full."""

log = logging.getLogger("dovetail")


def open_encoders(
    artifact: Artifact,
    hardware: HardwareSpec,
    *,
    plan: ServicePlan | None = None,
    threads: int | None = None,
    settings: EmbeddingSettings | None = None,
    apart: bool = False,
    device: str = AUTO,
    board: Board | None = None,
) -> Embeddings:
    """Serve every encoder of an artifact, each on all threads of the plan for prompts, in turns.

    settings: an SLO for all devices together; without, calls share passes and wait for the
    accelerators that embed, or else for encoders in this process or `apart`, in others.
    device: which accelerators, by torch's name, `auto` for all that are here, `cpu` for none.
    board: of the workers that share the CPUs.

    Raises ArtifactError or CapacityError as `Encoder` does, SpecError and DeviceError as
    `open_service`.
    """
    if not artifact.encoders:
        return Embeddings(artifact.path, {})

    def start(name: str) -> EmbeddingModel:
        service = plan or artifact.plan(name)
        whole = service.prefill.threads * service.processes_of("prefill")
        phase = PhasePlan(threads=whole, cpus=service.prefill.cpus)
        (fitted,) = fit_plans(phase, 1, threads, hardware.allowed_pus)
        if apart:
            source = artifact_source(artifact, fitted.threads, name, fitted.cpus)
            return ProcessInstance(source, fitted.cpus, board)
        encoder = Encoder(artifact, artifact.encoders[name], fitted, spin=service.spin_iterations)
        encoder.seat = Seat(board, next(board.slots)) if board else None
        return encoder

    if settings is not None:
        queues = open_service(
            artifact, hardware, settings, threads=threads, device=device, board=board
        )
    else:
        chosen = choose_accelerators(hardware, device, threads)
        queues = _open_unbounded(artifact, chosen, device, start)
    found = {
        name: TextEncoder(name, part.file.spec, part.tokenizer, queues)
        for name, part in artifact.encoders.items()
    }
    return Embeddings(artifact.path, found)


def instances_here(hardware: HardwareSpec, device: str, settings: EmbeddingSettings | None) -> int:
    """Return how many instances of each encoder `open_encoders` has on the CPU."""
    alone = not choose_accelerators(hardware, device).accelerators
    if settings is None:
        return int(alone)
    return settings.cpu_instances if alone or settings.heterogeneous else 0


# ---- instances ----


def start_accelerators(
    artifact: Artifact, hardware: HardwareSpec, device: str, opened: ExitStack
) -> dict[str, Models]:
    """Return every encoder on each accelerator that can have them, in processes of their own.

    One that cannot is left out and the log says why, unless it was asked for by name; then
    DovetailError. hardware: with the accelerators that `device` asks for (`choose_accelerators`).
    opened: closes the processes.
    """
    found: dict[str, Models] = {}
    for accelerator, torch_name in zip(hardware.accelerators, torch_names(hardware), strict=True):
        try:
            if find_torch() is None:
                raise DeviceError(f"torch is not installed: {install('gpu')}, or give device cpu")
            source = partial(device_source, artifact, torch_name)
            found[accelerator.name] = _in_processes(artifact, source, accelerator.near, opened)
        except DovetailError as error:
            if device != AUTO:
                raise
            log.warning("%s is not used for embeddings: %s", accelerator.name, error)
    return found


def _in_processes(
    artifact: Artifact,
    source: Callable[[str], EncoderSource],
    pus: Sequence[int],
    opened: ExitStack,
    board: Board | None = None,
) -> Models:
    """Start every encoder in a process of its own on these CPUs; `source` is told its name."""
    return _start_models(artifact, lambda name: ProcessInstance(source(name), pus, board), opened)


def _start_models(
    artifact: Artifact, start: Callable[[str], EmbeddingModel], opened: ExitStack
) -> Models:
    """Start every encoder by its name; `opened` closes them, and an error those that are there."""
    models: dict[str, EmbeddingModel] = {}
    with ExitStack() as started:
        for name in artifact.encoders:
            models[name] = start(name)
            started.callback(models[name].close)
        opened.enter_context(started.pop_all())
    return models


# ---- without an SLO ----


def _open_unbounded(
    artifact: Artifact, hardware: HardwareSpec, device: str, start: Callable[[str], EmbeddingModel]
) -> EmbeddingService:
    """Serve on the accelerators of `hardware` alone, or where none embeds what `start` starts."""
    parts = artifact.encoders.values()
    longest = {part.name: part.file.spec.max_tokens for part in parts}
    with ExitStack() as opened:
        devices = start_accelerators(artifact, hardware, device, opened)
        tokens = max(WIDE_TOKENS, *longest.values())
        if not devices:
            devices = {CPU: _start_models(artifact, start, opened)}
            tokens = max(find_tape(part, "encode").max_tokens for part in parts)
        manager = _full_passes(devices, longest, tokens)
        service = EmbeddingService({name: [each] for name, each in devices.items()}, manager)
        opened.pop_all()  # all are there: the service closes them
    return service


def _full_passes(devices: Iterable[str], longest: Mapping[str, int], tokens: int) -> QueueManager:
    """Return queues that fill passes of so many tokens; longest: text of each model, in tokens."""
    classes: list[QueryClass] = []
    for name, most in longest.items():
        shorter = (SHORTEST << n for n in range(most.bit_length()))
        classes += length_classes({most, *(each for each in shorter if each < most)}, name)
    depths = tuple(BULK_SHARE * AHEAD * -(-tokens // each.tokens) for each in classes)
    lines = (Line(0.0, 0.0),) * len(classes)
    queues = [QueueSpec(n, n != CPU, depths, lines, token_budget=tokens) for n in devices]
    return QueueManager(queues, classes, arrival="closed")


# ---- within an SLO ----


def open_service(
    artifact: Artifact,
    hardware: HardwareSpec,
    settings: EmbeddingSettings,
    *,
    threads: int | None = None,
    device: str = AUTO,
    board: Board | None = None,
) -> EmbeddingService:
    """Serve the encoders of an artifact within an SLO; close the service when done.

    They share the devices: what one holds is room that the others do not have. Lines come from
    each model's profile, which is written where it lacks one of the devices.

    threads: of a CPU instance, default one for each of its CPUs. device: which accelerators are to
    embed, see `choose_accelerators`.

    Raises:
        ArtifactError: an encoder is unfit.
        DeviceError: the device that is asked for by name cannot have them.
        SpecError: an option makes no sense.
    """
    keeper = DriftKeeper()
    hardware = choose_accelerators(hardware, device, threads)
    with ExitStack() as opened:
        there = start_accelerators(artifact, hardware, device, opened)
        able = tuple(each for each in hardware.accelerators if each.name in there)
        hardware = msgspec.structs.replace(hardware, accelerators=able)
        shared = artifact.plan(next(iter(artifact.encoders)))  # all share one queue
        plan = detect_devices(
            hardware,
            heterogeneous=settings.heterogeneous,
            cpu_instances=settings.cpu_instances,
            service=shared if shared.prefill.cpus else None,
        )
        instances = {name: [models] for name, models in there.items()}
        for pus in () if plan.devices[-1].accelerator else plan.devices[-1].pus:
            source = partial(artifact_source, artifact, threads or len(pus) or None)
            found = _in_processes(artifact, source, pus, opened, board)
            instances.setdefault(CPU, []).append(found)
        manager = fixed_manager(plan, 1, {})
        service = EmbeddingService(instances, manager, slo=settings.slo, observe=keeper)
        opened.pop_all()  # all are there: the service closes them
        opened.enter_context(service)
        key = embedding_key(artifact, hardware, plan, threads)
        sized = [_size(service, plan, part, key, settings) for part in artifact.encoders.values()]
        depths = join_depths(sized)
        service.use(make_manager(plan, depths))
        for note in depths.notes:
            log.info("%s", note)
        keeper.keep(service, plan, depths)
        opened.pop_all()
    return service


def _size(
    service: EmbeddingService,
    plan: EmbeddingPlan,
    part: EncoderPart,
    key: ProfileKey,
    settings: EmbeddingSettings,
) -> Depths:
    """Return an encoder's depths where it has the devices to itself: as kept, or as measured."""
    spec = part.file.spec
    classes = sorted({min(each, spec.max_tokens) for each in (*settings.classes, spec.max_tokens)})
    rows = _kept_rows(part, key, plan, classes, settings.arrival)
    if rows and not settings.stress:
        return depths_of(plan, rows, settings.slo, part.name)
    depths = Calibrator(service, plan, make_sample(spec), part.name).size_queues(
        classes, settings.slo, settings.arrival, stress=settings.stress
    )
    keep_profile(part.folder, make_profile(key, {}, profile_rows(depths)))
    return depths


def make_sample(spec: EncoderSpec) -> Sample:
    """Return a source of queries of any length, of random token ids."""
    draw = np.random.default_rng(0)
    return lambda *shape: list(draw.integers(0, spec.vocab_size, shape, dtype=np.int32))


def embedding_key(
    artifact: Artifact, hardware: HardwareSpec, plan: EmbeddingPlan, threads: int | None
) -> ProfileKey:
    """Return what the lines of an encoder hold for."""
    pus = [device.pus[0] for device in plan.devices if device.kind == CPU and device.pus]
    devices = (hardware.cpu_model, artifact.target, *(a.model for a in hardware.accelerators))
    return ProfileKey(
        model=artifact.manifest.model_fingerprint,
        device=" ".join(devices),
        threads=threads or len(pus[0]) if pus else 0,
        tensor_parallel=1,
        kernels=digest_kernels(artifact.kernels.kernels),
    )


def _kept_rows(
    part: EncoderPart, key: ProfileKey, plan: EmbeddingPlan, bounds: Sequence[int], arrival: str
) -> tuple[LatencyRow, ...]:
    """Return the profile's rows if they are for these devices, classes and arrivals; else none."""
    try:
        found = read_profile(part.folder, key)
    except ArtifactError as error:
        log.warning("%s", error)
        return ()
    rows = found.latency if found else ()
    wanted = {(device.name, bound, arrival) for device in plan.devices for bound in bounds}
    return rows if {(row.device, row.length, row.arrival) for row in rows} == wanted else ()
