"""An artifact's encoder for the embedding service, also in a process of its own.

In: an artifact's path, threads or a torch device. Out: an `Encoder`, or the `EncoderSource` that a
child opens.
"""

from __future__ import annotations

from pathlib import Path

from dovetail.ir.artifact import PhasePlan
from dovetail.ir.errors import ArtifactError
from dovetail.runtime.artifact import Artifact, EncoderPart, open_artifact
from dovetail.runtime.embedding.instance import EncoderSource
from dovetail.runtime.encoder import Encoder
from dovetail.runtime.library import fit_plans
from dovetail.topology.hardware import read_hardware


def artifact_source(
    path: Path, threads: int | None = None, model: str | None = None
) -> EncoderSource:
    """Return how another process opens the encoder of an artifact; see `open_encoder`."""
    options = {"path": str(path.resolve()), "threads": threads, "model": model}
    return EncoderSource(module=__name__, function="open_encoder", options=options)


def device_source(path: Path, device: str, model: str | None = None) -> EncoderSource:
    """Return how another process opens the encoder of an artifact on a torch device."""
    options = {"path": str(path.resolve()), "device": device, "model": model}
    module = "dovetail.runtime.accelerator.encoder"
    return EncoderSource(module=module, function="open_torch_encoder", options=options)


def open_encoder(path: str, threads: int | None = None, model: str | None = None) -> Encoder:
    """Open an encoder of the artifact at `path`, on the CPUs that this process may use.

    Args:
        path: the artifact directory.
        threads: default as many as its service configuration plans for prompts.
        model: the encoder's name, default the first one that embeds.

    Raises:
        ArtifactError: the artifact is unfit, or has no such encoder.
    """
    hardware = read_hardware()
    artifact = open_artifact(path, hardware)
    part = find_encoder(artifact, model)
    service = artifact.service
    phase = PhasePlan(threads=service.prefill.threads * service.processes, cpus=())
    (plan,) = fit_plans(phase, 1, threads, hardware.allowed_pus)
    return Encoder(artifact, part, plan, spin=service.spin_iterations)


def find_encoder(artifact: Artifact, model: str | None = None) -> EncoderPart:
    """Return the encoder of that name, default the first that embeds; ArtifactError if none."""
    for name, part in artifact.encoders.items():
        if name == model or (model is None and not part.file.spec.labels):
            return part
    wanted = f"called {model!r}" if model else "that embeds"
    raise ArtifactError(
        f"{artifact.path}: has no encoder {wanted}; compile one with `dovetail compile MODEL`"
    )
