"""A text encoder on an NVIDIA GPU: copied weights, generated kernels, torch's products, one stream.

In: an artifact with kernels for the GPU. Out: `CudaEncoder`, which gives the rows of the CPU's
`Encoder`. What a pass reads is one upload of pinned memory, what comes out one download.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import numpy as np

from dovetail.ir.artifact import KernelEntry, KernelIndex
from dovetail.ir.encoder import EncoderFile, EncoderSpec
from dovetail.ir.errors import CapacityError, DeviceError, DovetailError
from dovetail.ir.tape import ArgRef, BufferRef, Slot, Tape, WeightRef
from dovetail.runtime.artifact import Artifact, EncoderPart, device_module, open_artifact
from dovetail.runtime.cuda import WARP, CudaDevice, CudaError
from dovetail.runtime.cuda_pair import (
    WARPS_PER_PROCESSOR,
    GpuParts,
    MakeProducts,
    find_products,
)
from dovetail.runtime.device_weights import DeviceWeights
from dovetail.runtime.embedding.instance import InstanceLost
from dovetail.runtime.embedding.source import find_encoder
from dovetail.runtime.encoder import WIDE_TOKENS, PackedEncoder, Pass, Rows
from dovetail.runtime.launches import LaunchTape
from dovetail.runtime.streams import GpuStreams
from dovetail.runtime.weights import Weights
from dovetail.topology.hardware import read_hardware


class CudaEncoder(PackedEncoder):
    """An encoder whose weights and activations are copies on one GPU."""

    most_tokens = WIDE_TOKENS

    def __init__(
        self,
        artifact: Artifact,
        part: EncoderPart,
        ordinal: int = 0,
        *,
        parts: GpuParts | None = None,
    ) -> None:
        """Copy weights to GPU `ordinal`, bind the tape and run a first pass.

        Raises:
            SpecError: there is no such GPU, or torch is missing.
            ArtifactError: the artifact has no kernels for the GPU.
            CapacityError: weights or activations do not fit on it.
        """
        super().__init__(part)
        self.tape = widen_tape(self.tape)
        parts = GpuParts() if parts is None else parts
        module = parts.module or device_module(artifact)
        make_products = parts.products or find_products()
        self._held = ExitStack()
        try:
            self._open(part, parts.device or CudaDevice(ordinal), module, make_products)
            self.embed_tokens([[0]])  # libraries take memory in their first run
        except BaseException:
            self._held.close()
            raise

    def _open(
        self,
        part: EncoderPart,
        gpu: CudaDevice,
        module: tuple[Path, KernelIndex],
        make_products: MakeProducts,
    ) -> None:
        """Put everything on the GPU; what is there when it fails is given back."""
        held, spec, tape = self._held, self.spec, self.tape
        self._gpu = gpu
        held.callback(gpu.close)
        self._module = gpu.load(*module)
        held.callback(self._module.close)
        weights = DeviceWeights(gpu, Weights(part))
        held.callback(weights.close)

        def alloc(nbytes: int) -> int:
            address = gpu.alloc(nbytes)
            held.callback(gpu.free, address)
            return address

        places = place_args(spec, tape)
        arena, self._memory = alloc(tape.arena_bytes), alloc(places[""])
        gated = alloc(gated_bytes(spec, tape))
        self._streams = GpuStreams(gpu)  # ends before what its work is on is given back
        held.callback(self._streams.close)
        slab = self._streams.pinned(places[""])
        self._arrays = {
            name: slab[place : places[after]].view(np.int32)
            for name, after in zip(GIVEN, (*GIVEN[1:], "out"), strict=True)
            for place in (places[name],)
        }
        self._given = slab[: places["out"]]
        self._rows = slab[places["out"] :].view(np.float32).reshape(-1, self.dim)
        self._out = self._memory + places["out"]
        offsets = {buffer.name: arena + buffer.offset for buffer in tape.buffers}

        def address(slot: Slot) -> int:
            if isinstance(slot, WeightRef):
                return weights.held[slot.name].address if slot.name else 0
            if isinstance(slot, BufferRef):
                return offsets[slot.name] + slot.offset
            assert isinstance(slot, ArgRef)
            return self._memory + places[slot.name] + slot.offset

        self._tape = LaunchTape(
            tape,
            fitting_kernels(spec, self._module.kernels),
            address,
            make_products(weights.held, gpu.ordinal),
            gated,
            ends=product_ends(spec),
        )
        self._warps = WARPS_PER_PROCESSOR * gpu.multiprocessors
        held.callback(gpu.activate)  # comes first, on the thread that closes

    def close(self) -> None:
        """Give the GPU's memory back; safe to call twice."""
        with self._lock:
            self._held.close()

    def _run(self, step: Pass, out: Rows) -> None:
        """Run a pass.

        Raises:
            DeviceError: the GPU has no memory for it; the next one may run.
            InstanceLost: the GPU failed: nothing runs in this process any more.
        """
        self._gpu.activate()
        for name, array in step.arrays().items():
            self._arrays[name][: len(array)] = array
        streams, entries = self._streams, range(len(self.tape.entries))
        rows = self._rows[: len(out)]
        try:
            streams.upload(self._memory, self._given, streams.compute)
            self._tape.run(entries, step.counts(), self._module, self._warps, streams.compute)
            streams.download(rows, self._out, streams.compute)
            streams.finish()
        except CapacityError as error:
            with suppress(DovetailError):  # what was given before it ends first
                streams.finish()
            tokens = len(step.token_ids)
            raise DeviceError(
                f"{self._gpu.name}: out of memory in a pass of {tokens} tokens ({error})"
            ) from None
        except CudaError as error:
            raise InstanceLost(f"{self._gpu.name}: {error}") from None
        out[:] = rows


def open_gpu_encoder(path: str, ordinal: int, model: str | None = None) -> CudaEncoder:
    """Open an encoder of the artifact at `path` on a GPU; for a process that has no other use.

    Args:
        path: the artifact directory.
        ordinal: which GPU, by bus address, as `HardwareSpec.accelerators` has them.
        model: the encoder's name, default the first one that embeds.

    Raises what `CudaEncoder` does.
    """
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    artifact = open_artifact(path, read_hardware())
    return CudaEncoder(artifact, find_encoder(artifact, model), ordinal)


# ---- what lies where ----

GIVEN = ("token_ids", "positions", "type_ids", "seq_starts", "picked_rows")
"""Arguments of a pass, int32."""


def widen_tape(tape: Tape) -> Tape:
    """Return the tape for `WIDE_TOKENS` rows or its own, whatever is more, and texts as well."""
    times = max(1, WIDE_TOKENS // tape.max_tokens)
    replace = msgspec.structs.replace
    buffers = tuple(
        replace(b, offset=b.offset * times, rows=b.rows * times, bytes=b.bytes * times)
        for b in tape.buffers
    )
    return replace(
        tape,
        buffers=buffers,
        arena_bytes=tape.arena_bytes * times,
        max_tokens=tape.max_tokens * times,
        max_sequences=tape.max_sequences * times,
    )


def place_args(spec: EncoderSpec, tape: Tape) -> Mapping[str, int]:
    """Return where the arguments of a pass begin, one behind another; "" is where all end."""
    tokens, texts = 4 * tape.max_tokens, 4 * tape.max_sequences
    sizes = dict(zip(GIVEN, (tokens, tokens, tokens, texts + 4, texts), strict=True))
    places, at = {}, 0
    for name, size in (sizes | {"out": texts * spec.dim}).items():
        places[name], at = at, at + size
    return places | {"": at}


def gated_bytes(spec: EncoderSpec, tape: Tape) -> int:
    """Return the bytes of gate and up side by side, where the MLP has a gate."""
    return 4 * 2 * spec.intermediate_size * tape.max_tokens if spec.gated else 0


def device_bytes(file: EncoderFile, tape: Tape) -> tuple[int, int]:
    """Return the bytes that an encoder takes on a GPU: weights; activations of a pass.

    Libraries of products and the driver take their own beside it.
    """
    wide = widen_tape(tape)
    passing = wide.arena_bytes + gated_bytes(file.spec, wide) + place_args(file.spec, wide)[""]
    return sum(entry.bytes for entry in file.weights), passing


def fitting_kernels(
    spec: EncoderSpec, kernels: Mapping[str, KernelEntry]
) -> dict[str, KernelEntry]:
    """Return the kernels of a module without those made for other encoders beside this one."""
    own = {"W": spec.weight_format("words"), "HD": -(-spec.head_dim // WARP) * WARP}
    return {
        name: kernel
        for name, kernel in kernels.items()
        if all(kernel.binding.get(param, value) == value for param, value in own.items())
    }


def product_ends(spec: EncoderSpec) -> dict[str, str]:
    """Return operator -> the kernel that takes the activation of what a product gave."""
    ends = {"up": f"activate_rows_{spec.activation}", "gate_up": f"gate_rows_{spec.activation}"}
    return ends if spec.head == "tanh" else ends | {"pooler": f"activate_rows_{spec.head}"}
