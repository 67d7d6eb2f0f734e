"""A text encoder on a torch device: `TorchEncoder`, which gives the rows of the CPU's `Encoder`.

In: an artifact's encoder and a device. Out: rows of texts. What a pass reads is one upload of
pinned memory, what comes out one download.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from dovetail.ir.errors import CapacityError, DeviceError
from dovetail.runtime.accel.device import TYPES, TorchDevice
from dovetail.runtime.accel.encoder_operators import encoder_operators
from dovetail.runtime.accel.step import Step
from dovetail.runtime.accel.tape import PlacedModel, TorchTape
from dovetail.runtime.accel.weights import load_weights
from dovetail.runtime.artifact import EncoderPart, open_same
from dovetail.runtime.child.child import ChildLost
from dovetail.runtime.embed.encoder import find_encoder
from dovetail.runtime.native.encoder import (
    PASS_TOKENS,
    WIDE_TOKENS,
    Ids,
    PackedEncoder,
    Rows,
    widen_tape,
)
from dovetail.runtime.native.weights import Weights
from dovetail.topology.hardware import read_hardware


class TorchEncoder(PackedEncoder):
    """An encoder whose weights and activations lie on one torch device."""

    def __init__(self, part: EncoderPart, device: TorchDevice, dtype: str | None = None) -> None:
        """Put weights on the device, bind the tape and run a first pass.

        dtype: of activations, f32, bf16 or f16; by default the device's, and on `torch:cpu` that
        of the weights.

        Raises:
            ArtifactError: spec and tape do not fit each other.
            CapacityError: weights or activations do not fit on the device.
        """
        super().__init__(part)
        self.most_tokens = WIDE_TOKENS if device.apart else PASS_TOKENS
        self.tape = tape = widen_tape(self.tape, self.most_tokens)
        self._device, self._entries = device, range(len(tape.entries))
        kind = TYPES[dtype or device.activations(self.spec.weight_dtype)]
        with device.working():
            weights = load_weights(device, Weights(part), kind)
            sizes = tape.max_tokens, tape.max_sequences
            placed = PlacedModel(tape=tape, device=device, weights=weights, dtype=kind, sizes=sizes)
            operators = encoder_operators(self.spec)
            self._bound: TorchTape | None = TorchTape(placed, operators)
            self._rows = device.zeros((tape.max_sequences, self.dim), torch.float32)
            given = 3 * tape.max_tokens + 2 * tape.max_sequences + 1  # what `pass_arrays` has
            self._given = torch.from_numpy(device.host(4 * given)).view(torch.int32)
            self._there = torch.zeros_like(self._given, device=device.device)
        self.embed_tokens([[0]])  # libraries take memory in their first run

    def close(self) -> None:
        """Give the device's memory back; safe to call twice."""
        with self._lock:
            self._bound, self._rows, self._there = None, torch.empty(0), torch.empty(0)

    def _run(self, arrays: Mapping[str, Ids], out: Rows) -> None:
        """Run a pass.

        Raises:
            DeviceError: the device has no memory for it; the next one may run.
            ChildLost: the device failed: nothing runs in this process any more.
        """
        assert self._bound is not None, "a closed encoder runs nothing"
        name, tokens = self._device.name, len(arrays["token_ids"])
        try:
            with self._device.working():
                rows, counts = self._rows[: len(out)], {"n_tokens": tokens, "n_sequences": len(out)}
                given = {**self._upload(arrays), "out": rows}
                step = Step(arrays, given, counts)
                self._bound.begin(step)
                self._bound.run(self._entries, step)
                out[:] = rows.cpu().numpy()
        except CapacityError as error:
            raise DeviceError(
                f"{name}: out of memory in a pass of {tokens} tokens ({error})"
            ) from None
        except DeviceError as error:
            raise ChildLost(str(error)) from None

    def _upload(self, arrays: Mapping[str, Ids]) -> dict[str, torch.Tensor]:
        """Return arrays on the device; the memory they come from is pinned, and used again."""
        sizes = [len(array) for array in arrays.values()]
        given = self._given[: sum(sizes)]
        for part, array in zip(given.split(sizes), arrays.values(), strict=True):
            part.copy_(torch.from_numpy(array))
        there = self._there[: sum(sizes)]
        there.copy_(given, non_blocking=True)
        return dict(zip(arrays, there.split(sizes), strict=True))


def open_torch_encoder(
    path: str, device: str, model: str | None = None, fingerprint: str = ""
) -> TorchEncoder:
    """Open an encoder of the artifact at `path` on a device; for a process that has no other use.

    Args:
        path: the artifact directory.
        device: as torch calls it, `cuda:1`; NVIDIA's are counted by bus address, as
            `HardwareSpec.accelerators` has them. On `torch:cpu` torch has a thread for each CPU
            that this process may use.
        model: the encoder's name, default the first one that embeds.
        fingerprint: of the artifact's models, "" for any.

    Raises what `TorchEncoder` and `open_same` do, and DeviceError where there is no such device.
    """
    part = find_encoder(open_same(path, read_hardware(), fingerprint), model)
    return TorchEncoder(part, TorchDevice(device, len(os.sched_getaffinity(0))))
