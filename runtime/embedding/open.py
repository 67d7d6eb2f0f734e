"""The embedding service of an artifact on this machine: detect, start, size, keep, serve.

In: encoders, with an SLO or without. Out: a running `EmbeddingService`, whose devices they share.
With an SLO queues are sized by each model's profile, or by measuring, which the profile then keeps.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime

import numpy as np

from dovetail.ir.artifact import PhasePlan
from dovetail.ir.encoder import EncoderSpec
from dovetail.ir.errors import ArtifactError
from dovetail.ir.profile import LatencyRow, ProfileFile, ProfileKey
from dovetail.runtime.artifact import Artifact, EncoderPart
from dovetail.runtime.cost_tables import read_profile, write_profile
from dovetail.runtime.devices import AUTO, CPU
from dovetail.runtime.embedding.accelerators import only, start_accelerators
from dovetail.runtime.embedding.calibrate import (
    Calibrator,
    DriftKeeper,
    Sample,
    depths_of,
    fixed_manager,
    profile_rows,
)
from dovetail.runtime.embedding.depths import Depths, join_depths, make_manager
from dovetail.runtime.embedding.detector import (
    DevicePlan,
    EmbeddingPlan,
    choose_accelerators,
    detect_devices,
)
from dovetail.runtime.embedding.instance import EmulatedAccelerator, Ids, Instance, LocalInstance
from dovetail.runtime.embedding.line import Line
from dovetail.runtime.embedding.process import ProcessInstance
from dovetail.runtime.embedding.query import QueryClass, QueueSpec, length_classes
from dovetail.runtime.embedding.queues import BULK_SHARE, QueueManager
from dovetail.runtime.embedding.service import EmbeddingService, Models
from dovetail.runtime.embedding.settings import EmbeddingSettings
from dovetail.runtime.embedding.source import artifact_source, open_encoder
from dovetail.runtime.encoder import WIDE_TOKENS, Encoder
from dovetail.runtime.forward import find_tape
from dovetail.topology.hardware import HardwareSpec

EMULATED_LENGTH = 75
"""Tokens of the queries that an emulated accelerator's line is for (WindVE §V-A3)."""
SHORTEST = 16
"""Tokens of the first length class where there is no SLO; each next one is twice as long."""
AHEAD = 2
"""Passes of an encoder without an SLO that are queued, so that each is full."""

log = logging.getLogger("dovetail")


def serve_here(encoders: Mapping[str, Encoder]) -> EmbeddingService:
    """Serve encoders in this process, without an SLO: calls share passes, and none is BUSY."""
    models = {name: LocalInstance(encoder) for name, encoder in encoders.items()}
    longest = {name: encoder.spec.max_tokens for name, encoder in encoders.items()}
    tokens = max(each.pass_tokens for each in encoders.values())
    return _serve_all({CPU: models}, longest, tokens)


def serve_apart(artifact: Artifact, plan: PhasePlan) -> EmbeddingService:
    """As `serve_here`, each in a process of its own with the threads and CPUs of `plan`."""
    parts = artifact.encoders
    models: dict[str, Instance] = {}
    with ExitStack() as opened:
        for name in parts:
            source = artifact_source(artifact.path, plan.threads, name)
            models[name] = instance = ProcessInstance(source, plan.cpus)
            opened.callback(instance.close)
        opened.pop_all()  # all are there: the service closes them
    tokens = max(find_tape(part, "encode").max_tokens for part in parts.values())
    return _serve_all({CPU: models}, _longest(artifact), tokens)


def serve_accelerators(
    artifact: Artifact, hardware: HardwareSpec, device: str, threads: int | None = None
) -> EmbeddingService | None:
    """As `serve_here`, on the accelerators alone that `device` asks for; None where none embeds.

    threads: see `choose_accelerators`.
    """
    hardware = choose_accelerators(hardware, device, threads)
    with ExitStack() as opened:
        found = start_accelerators(artifact, hardware, device, opened)
        opened.pop_all()  # the service closes them
    longest = _longest(artifact)
    return _serve_all(found, longest, max(WIDE_TOKENS, *longest.values())) if found else None


def _longest(artifact: Artifact) -> dict[str, int]:
    """Return the tokens of the longest text of each encoder."""
    return {name: part.file.spec.max_tokens for name, part in artifact.encoders.items()}


def _serve_all(
    devices: Mapping[str, Models], longest: Mapping[str, int], tokens: int
) -> EmbeddingService:
    """Serve models of these longest texts on each device, in turns, in passes of so many tokens."""
    classes: list[QueryClass] = []
    for name, most in longest.items():
        steps = range((most - 1).bit_length())
        classes += length_classes(
            {most, *(SHORTEST << n for n in steps if SHORTEST << n < most)}, name
        )
    queues = [
        QueueSpec(
            name=name,
            accelerator=name != CPU,
            depths=tuple(BULK_SHARE * AHEAD * -(-tokens // each.tokens) for each in classes),
            lines=(Line(0.0, 0.0),) * len(classes),
            token_budget=tokens,
        )
        for name in devices
    ]
    instances = {name: [models] for name, models in devices.items()}
    return EmbeddingService(instances, QueueManager(queues, classes, arrival="closed"))


def open_service(
    artifact: Artifact,
    hardware: HardwareSpec,
    settings: EmbeddingSettings,
    *,
    threads: int | None = None,
    device: str = AUTO,
) -> EmbeddingService:
    """Serve the encoders of an artifact within an SLO; close the service when done.

    They share the devices: what one holds is room that the others do not have. Lines come from
    each model's profile, which is written where it lacks one of the devices.

    Args:
        artifact: the open artifact, with an encoder at least.
        hardware: this machine.
        settings: the SLO, and what is to serve it.
        threads: of a CPU instance, default one for each of its CPUs.
        device: which accelerators are to embed, see `choose_accelerators`.

    Raises:
        ArtifactError: an encoder is unfit.
        DeviceError: the device that is asked for by name cannot have them.
        SpecError: an option makes no sense.
    """
    keeper = DriftKeeper()
    hardware = choose_accelerators(hardware, device, threads)
    with ExitStack() as opened:
        started = start_accelerators(artifact, hardware, device, opened)
        hardware = only(hardware, started)
        plan = _detect(hardware, artifact, settings)
        for note in plan.notes:
            log.info("%s", note)
        instances = _start(plan, artifact, threads, settings.emulated, started, opened)
        manager = fixed_manager(plan, 1, {})
        service = EmbeddingService(instances, manager, slo=settings.slo, observe=keeper)
        opened.pop_all()  # all are there: the service closes them
    try:
        key = embedding_key(artifact, hardware, plan, threads)
        found = [_size(service, plan, part, key, settings) for part in artifact.encoders.values()]
        depths = join_depths(found)
        service.use(make_manager(plan, depths))
        for note in depths.notes:
            log.info("%s", note)
        keeper.keep(service, plan, depths)
    except BaseException:
        service.close()
        raise
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
    bounds = {min(each, spec.max_tokens) for each in (*settings.classes, spec.max_tokens)}
    classes = tuple(sorted(bounds))
    rows = _kept_rows(part, key, plan, classes, settings.arrival)
    if rows and not settings.stress:
        return depths_of(plan, rows, settings.slo, part.name)
    depths, lines = Calibrator(service, plan, make_sample(spec), part.name).size_queues(
        classes, settings.slo, settings.arrival, stress=settings.stress
    )
    _keep(part, key, profile_rows(depths, lines))
    return depths


def make_sample(spec: EncoderSpec, seed: int = 0) -> Sample:
    """Return a source of queries of any length, of random token ids."""
    draw = np.random.default_rng(seed)

    def sample(count: int, length: int) -> Sequence[Ids]:
        return list(draw.integers(0, spec.vocab_size, (count, length)).astype(np.int32))

    return sample


def embedding_key(
    artifact: Artifact, hardware: HardwareSpec, plan: EmbeddingPlan, threads: int | None
) -> ProfileKey:
    """Return what the lines of an encoder hold for."""
    kernels = sorted(f"{kernel.name} {kernel.digest}" for kernel in artifact.kernels.kernels)
    pus = [device.pus[0] for device in plan.devices if device.kind == CPU and device.pus]
    devices = (hardware.cpu_model, artifact.target, *(a.model for a in hardware.accelerators))
    return ProfileKey(
        model=artifact.manifest.model_fingerprint,
        device=" ".join(devices),
        threads=threads or len(pus[0]) if pus else 0,
        tensor_parallel=1,
        kernels=hashlib.sha256("\n".join(kernels).encode()).hexdigest(),
    )


def _detect(
    hardware: HardwareSpec, artifact: Artifact, settings: EmbeddingSettings
) -> EmbeddingPlan:
    """Return the devices that embed, all accelerators of `hardware` among them."""
    names = [f"emulated{i}" for i in range(len(settings.emulated))]
    return detect_devices(
        hardware,
        heterogeneous=settings.heterogeneous,
        emulated=[DevicePlan(name, "emulated") for name in names],
        cpu_instances=settings.cpu_instances,
        service=artifact.service if artifact.service.prefill.cpus else None,
    )


def _start(
    plan: EmbeddingPlan,
    artifact: Artifact,
    threads: int | None,
    emulated: Sequence[Line],
    there: Mapping[str, Models],
    opened: ExitStack,
) -> dict[str, list[Models]]:
    """Start every instance of a plan but those `there`, with all encoders; `opened` closes them."""
    path, lines = artifact.path, iter(emulated)

    def start(name: str, line: Line | None, pus: Sequence[int]) -> Instance:
        instance: Instance
        if line is not None:
            encoder = open_encoder(str(path), 1, name)
            instance = EmulatedAccelerator(line, EMULATED_LENGTH, encoder)
        else:
            source = artifact_source(path, threads or len(pus) or None, name)
            instance = ProcessInstance(source, pus)
        opened.callback(instance.close)
        return instance

    started: dict[str, list[Models]] = {name: [models] for name, models in there.items()}
    for device in plan.devices:
        if device.name in there:
            continue
        line = next(lines) if device.accelerator else None
        started[device.name] = [
            {name: start(name, line, pus) for name in artifact.encoders}
            for pus in device.pus or ((),)
        ]
    return started


def _kept_rows(
    part: EncoderPart,
    key: ProfileKey,
    plan: EmbeddingPlan,
    bounds: Sequence[int],
    arrival: str,
) -> tuple[LatencyRow, ...]:
    """Return the profile's rows if they are for these devices, classes and arrivals; else none."""
    try:
        found = read_profile(part.folder, key)
    except ArtifactError as error:
        log.warning("%s", error)
        return ()
    rows = found.latency if found else ()
    wanted = {(device.name, bound) for device in plan.devices for bound in bounds}
    fits = {(row.device, row.length) for row in rows} == wanted
    return rows if fits and {row.arrival for row in rows} == {arrival} else ()


def _keep(part: EncoderPart, key: ProfileKey, rows: tuple[LatencyRow, ...]) -> None:
    created = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        write_profile(part.folder, ProfileFile(key=key, created=created, tables={}, latency=rows))
    except OSError as error:
        log.warning("the profile could not be kept in %s: %s", part.folder, error.strerror)
