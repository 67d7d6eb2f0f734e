"""What runs batches, an encoder with a model of its own, and where it comes from.

In: an artifact's path, threads or a torch device; then token ids. Out: one vector each, or an error
that only this batch has. Another process is told an `EncoderSource`, and opens it.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from dovetail.ir.artifact import PhasePlan
from dovetail.ir.errors import ArtifactError
from dovetail.runtime.artifact import Artifact, EncoderPart, open_same
from dovetail.runtime.native.adapt import fit_plans
from dovetail.runtime.native.encoder import Encoder, Ids, Rows
from dovetail.topology.hardware import read_hardware


class EmbeddingModel(Protocol):
    """An encoder, ready to run; one caller at a time."""

    @property
    def dim(self) -> int:
        """Values of a vector."""

    def embed_tokens(self, ids: Sequence[Ids], types: Sequence[Ids] | None = None) -> Rows:
        """Return the vectors (n, dim) of `n` queries; DeviceError where they cannot be run.

        types: the segment of each token, by default 0.
        """

    def close(self) -> None:
        """Free what it holds."""


class EncoderSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where an encoder comes from, told to another process: a function of a module, its options."""

    module: str
    function: str
    options: dict[str, Any] = {}

    def open(self) -> EmbeddingModel:
        """Return the encoder."""
        make = getattr(importlib.import_module(self.module), self.function)
        model: EmbeddingModel = make(**self.options)
        return model


def artifact_source(
    artifact: Artifact,
    threads: int | None = None,
    model: str | None = None,
    cpus: Sequence[int] = (),
) -> EncoderSource:
    """Return how another process opens an encoder of an artifact; see `open_encoder`."""
    options = {"threads": threads, "model": model, "cpus": cpus, **_name(artifact)}
    return EncoderSource(module=__name__, function="open_encoder", options=options)


def _name(artifact: Artifact) -> dict[str, str]:
    mark = artifact.manifest.model_fingerprint
    return {"path": str(artifact.path.resolve()), "fingerprint": mark}


def device_source(artifact: Artifact, device: str, model: str | None = None) -> EncoderSource:
    """Return how another process opens an encoder of an artifact on a torch device."""
    options = {"device": device, "model": model, **_name(artifact)}
    module = "dovetail.runtime.accel.encoder"
    return EncoderSource(module=module, function="open_torch_encoder", options=options)


def open_encoder(
    path: str,
    threads: int | None = None,
    model: str | None = None,
    cpus: Sequence[int] = (),
    fingerprint: str = "",
) -> Encoder:
    """Open an encoder of the artifact at `path`, on the CPUs that this process may use.

    cpus: those of its threads, one on each; () = any.
    threads: default as many as its service configuration plans for prompts. model: the encoder's
    name. Raises ArtifactError where the artifact is unfit, or has no such encoder, and as
    `open_same`.
    """
    hardware = read_hardware()
    artifact = open_same(path, hardware, fingerprint)
    part = find_encoder(artifact, model)
    service = artifact.plan(part.name)
    whole = len(cpus) or service.prefill.threads * service.processes_of("prefill")
    phase = PhasePlan(threads=whole, cpus=tuple(cpus))
    (plan,) = fit_plans(phase, 1, threads, hardware.allowed_pus)
    return Encoder(artifact, part, plan, spin=service.spin_iterations)


def find_encoder(artifact: Artifact, model: str | None = None) -> EncoderPart:
    """Return the encoder of that name, default the first that embeds; ArtifactError if none."""
    for name, part in artifact.encoders.items():
        if name == model or (model is None and not part.file.spec.labels):
            return part
    wanted = f"called {model!r}" if model else "that embeds"
    raise ArtifactError(
        f"{artifact.path} has no encoder {wanted}; compile one with `dovetail compile ENCODER`"
    )
