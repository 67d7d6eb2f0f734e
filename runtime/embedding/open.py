"""The embedding services of an artifact on this machine: detect, start, size, keep, serve.

In: an encoder, with an SLO or without. Out: a running `EmbeddingService`. With an SLO its queues
are sized by the model's profile, or by measuring, which the profile then keeps.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np

from dovetail.ir.encoder import EncoderSpec
from dovetail.ir.errors import ArtifactError
from dovetail.ir.profile import LatencyRow, ProfileFile, ProfileKey
from dovetail.runtime.artifact import Artifact, EncoderPart
from dovetail.runtime.cost_tables import read_profile, write_profile
from dovetail.runtime.embedding.calibrate import (
    MARGIN,
    Calibrator,
    DriftKeeper,
    Sample,
    depths_of,
    fixed_manager,
    profile_rows,
)
from dovetail.runtime.embedding.depths import make_manager
from dovetail.runtime.embedding.detector import CPU, DevicePlan, EmbeddingPlan, detect_devices
from dovetail.runtime.embedding.instance import EmulatedAccelerator, Ids, Instance, LocalInstance
from dovetail.runtime.embedding.line import Line
from dovetail.runtime.embedding.process import ProcessInstance
from dovetail.runtime.embedding.query import QueueSpec
from dovetail.runtime.embedding.queues import BULK_SHARE, QueueManager
from dovetail.runtime.embedding.service import EmbeddingService
from dovetail.runtime.embedding.settings import EmbeddingSettings
from dovetail.runtime.embedding.source import artifact_source, open_encoder
from dovetail.runtime.encoder import Encoder
from dovetail.topology.hardware import HardwareSpec

EMULATED_LENGTH = 75
"""Tokens of the queries that an emulated accelerator's line is for (WindVE §V-A3)."""
SHORTEST = 16
"""Tokens of the first length class where there is no SLO; each next one is twice as long."""
AHEAD = 2
"""Passes of an encoder in this process that are queued, so that each is full."""

log = logging.getLogger("dovetail")


def serve_here(encoder: Encoder) -> EmbeddingService:
    """Serve an encoder in this process, without an SLO: calls share passes, and none is BUSY."""
    tokens, longest = encoder.pass_tokens, encoder.spec.max_tokens
    steps = range((longest - 1).bit_length())
    classes = sorted({longest, *(SHORTEST << n for n in steps if SHORTEST << n < longest)})
    queue = QueueSpec(
        name=CPU,
        accelerator=False,
        depths=tuple(BULK_SHARE * AHEAD * -(-tokens // bound) for bound in classes),
        lines=(Line(0.0, 0.0),) * len(classes),
        token_budget=tokens,
    )
    manager = QueueManager([queue], classes, arrival="closed")
    return EmbeddingService({CPU: [LocalInstance(encoder)]}, manager)


def open_service(
    artifact: Artifact,
    part: EncoderPart,
    hardware: HardwareSpec,
    settings: EmbeddingSettings,
    *,
    threads: int | None = None,
) -> EmbeddingService:
    """Serve an encoder of an artifact within an SLO; close the service when done.

    Lines come from the model's profile, which is written where it lacks one of the devices.

    Args:
        artifact: the open artifact.
        part: its encoder.
        hardware: this machine.
        settings: the SLO, and what is to serve it.
        threads: of a CPU instance, default one for each of its CPUs.

    Raises:
        ArtifactError: the encoder is unfit.
        SpecError: an option makes no sense.
    """
    spec = part.file.spec
    bounds = {min(each, spec.max_tokens) for each in (*settings.classes, spec.max_tokens)}
    classes = tuple(sorted(bounds))
    plan = _detect(hardware, artifact, settings)
    for note in plan.notes:
        log.info("%s", note)
    keeper = DriftKeeper()
    service = EmbeddingService(
        _start(plan, artifact.path, part, threads, settings.emulated),
        fixed_manager(plan, spec.max_tokens, {}),
        slo=settings.slo,
        observe=keeper,
    )
    try:
        key = embedding_key(artifact, hardware, plan, threads)
        rows = _kept_rows(part, key, plan, classes, settings.arrival)
        if rows and not settings.stress:
            depths = depths_of(plan, rows, settings.slo)
            service.use(make_manager(plan, depths, MARGIN))
        else:
            calibrator = Calibrator(service, plan, make_sample(spec))
            depths, lines = calibrator.size_queues(
                classes, settings.slo, settings.arrival, stress=settings.stress
            )
            _keep(part, key, profile_rows(depths, lines))
        for note in depths.notes:
            log.info("%s", note)
        keeper.keep(service, plan, depths)
    except BaseException:
        service.close()
        raise
    return service


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
    cpu = plan.devices[-1]
    return ProfileKey(
        model=artifact.manifest.model_fingerprint,
        device=f"{hardware.cpu_model} {artifact.target}",
        threads=threads or len(cpu.pus[0]) if cpu.pus else 0,
        tensor_parallel=1,
        kernels=hashlib.sha256("\n".join(kernels).encode()).hexdigest(),
    )


def _detect(
    hardware: HardwareSpec, artifact: Artifact, settings: EmbeddingSettings
) -> EmbeddingPlan:
    """Return the devices that have an encoder: kernels of encoders are the CPU's alone so far."""
    for device in hardware.accelerators:
        log.info(
            "%s (%s): there is no encoder for it, so it does not embed", device.name, device.kind
        )
    names = [f"emulated{i}" for i in range(len(settings.emulated))]
    return detect_devices(
        msgspec.structs.replace(hardware, accelerators=()),
        heterogeneous=settings.heterogeneous,
        emulated=[DevicePlan(name, "emulated") for name in names],
        cpu_instances=settings.cpu_instances,
        service=artifact.service if artifact.service.prefill.cpus else None,
    )


def _start(
    plan: EmbeddingPlan,
    path: Path,
    part: EncoderPart,
    threads: int | None,
    emulated: Sequence[Line],
) -> dict[str, list[Instance]]:
    """Start every instance of a plan."""
    started: dict[str, list[Instance]] = {}
    for device in plan.devices:
        if device.accelerator:
            line = emulated[len(started)]
            encoder = open_encoder(str(path), 1, part.name)
            started[device.name] = [EmulatedAccelerator(line, EMULATED_LENGTH, encoder)]
        else:
            started[device.name] = [
                ProcessInstance(artifact_source(path, threads or len(pus) or None, part.name), pus)
                for pus in device.pus
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
