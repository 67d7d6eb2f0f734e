"""The embedding service of an artifact on this machine: detect, start, size, keep, serve.

In: an artifact's path, an SLO. Out: a running `EmbeddingService` whose queues are sized by the
model's profile, or by measuring, which the profile then keeps.
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
from dovetail.runtime.artifact import Artifact, EncoderPart, open_artifact
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
from dovetail.runtime.embedding.detector import DevicePlan, EmbeddingPlan, detect_devices
from dovetail.runtime.embedding.instance import EmulatedAccelerator, Ids, Instance
from dovetail.runtime.embedding.line import Arrival, Line
from dovetail.runtime.embedding.process import ProcessInstance
from dovetail.runtime.embedding.service import EmbeddingService
from dovetail.runtime.embedding.source import artifact_source, find_encoder, open_encoder
from dovetail.runtime.embedding.tokenizing import TokenPool
from dovetail.runtime.encoder_texts import TextReader
from dovetail.topology.hardware import HardwareSpec, read_hardware

CLASSES = (32, 128, 512)
"""Query-length classes: most tokens of each; the longest is the model's own limit."""
EMULATED_LENGTH = 75
"""Tokens of the queries that an emulated accelerator's line is for (WindVE §V-A3)."""

log = logging.getLogger("dovetail")


def open_service(
    path: str | Path,
    *,
    slo: float = 1.0,
    arrival: Arrival = "open",
    classes: Sequence[int] = CLASSES,
    model: str | None = None,
    threads: int | None = None,
    heterogeneous: bool = True,
    cpu_instances: int = 1,
    emulated: Sequence[Line] = (),
    stress: bool = False,
) -> EmbeddingService:
    """Serve an encoder of the artifact at `path` within an SLO; close the service when done.

    Lines come from the model's profile, which is written where it lacks one of the devices.

    Args:
        path: the artifact directory.
        slo: seconds that a query may take.
        arrival: `closed` sizes queues for queries that come together (WindVE), `open` for any.
        classes: most tokens of each query-length class; those beyond the model's limit are cut.
        model: the encoder's name, default the first one that embeds.
        threads: of a CPU instance, default one for each of its CPUs.
        heterogeneous: whether the CPU takes the overflow of accelerators.
        cpu_instances: processes of the CPU, each with the model; one is best.
        emulated: the lines of accelerators that are not there, for queries of 75 tokens.
        stress: whether to refine the depths by a stress test now; seconds per class.

    Raises:
        ArtifactError: the artifact is unfit, or has no such encoder.
        SpecError: an option makes no sense.
    """
    hardware = read_hardware()
    artifact = open_artifact(path, hardware)
    part = find_encoder(artifact, model)
    spec = part.file.spec
    bounds = tuple(sorted({min(each, spec.max_tokens) for each in (*classes, spec.max_tokens)}))
    plan = _detect(hardware, artifact, heterogeneous, cpu_instances, len(emulated))
    for note in plan.notes:
        log.info("%s", note)
    keeper, reader = DriftKeeper(), TextReader(part.tokenizer, spec)
    service = EmbeddingService(
        _start(plan, Path(path), part, threads, emulated),
        fixed_manager(plan, spec.max_tokens, {}),
        slo=slo,
        tokens=TokenPool(reader.read),
        observe=keeper,
    )
    try:
        key = embedding_key(artifact, hardware, plan, threads)
        rows = _kept_rows(part, key, plan, bounds, arrival)
        if rows and not stress:
            depths = depths_of(plan, rows, slo)
            service.use(make_manager(plan, depths, MARGIN))
        else:
            calibrator = Calibrator(service, plan, make_sample(spec))
            depths, lines = calibrator.size_queues(bounds, slo, arrival, stress=stress)
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
    hardware: HardwareSpec,
    artifact: Artifact,
    heterogeneous: bool,
    cpu_instances: int,
    emulated: int,
) -> EmbeddingPlan:
    """Return the devices that have an encoder: kernels of encoders are the CPU's alone so far."""
    for device in hardware.accelerators:
        log.info(
            "%s (%s): there is no encoder for it, so it does not embed", device.name, device.kind
        )
    return detect_devices(
        msgspec.structs.replace(hardware, accelerators=()),
        heterogeneous=heterogeneous,
        emulated=[DevicePlan(f"emulated{i}", "emulated") for i in range(emulated)],
        cpu_instances=cpu_instances,
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
    arrival: Arrival,
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
