"""The libraries that our GEMM is compared with: torch, oneDNN, OpenVINO and numpy/OpenBLAS.

In: the plain weights of `Operands` and a thread count. Out: per type of weights, library and M a
function that runs products on copies in turn. Weights are rounded, quantised and packed, where a
library does that ahead of time, before any clock starts; activations are in the type that the
library likes best, so that it converts nothing that it need not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch

from gemm_ours import Array, Operands

Product = Callable[[int], Any]
"""Runs that many products, one copy of the weight after the other; returns the last result: an
array or torch's or OpenVINO's tensor, which `as_array` reads."""
GROUP, WIDE_GROUP = 32, 128
"""Values of a row that share a scale, where a library lets one choose: as in our formats, and more
where it may be faster."""
TRIALS = 3
"""Timed passes over all copies by which a peer's setting is chosen for an M, after one that is not
timed: it packs."""
ENGINES = torch.backends.quantized.supported_engines
SATURATES = "x86" in ENGINES and not torch.cpu._is_vnni_supported()
"""Whether sums of two products of 8 bits have but 16 bits; rows of 7 bits keep them exact."""
TORCH_BLOCK = 2
"""`innerKTiles` of torch's packing of 4 bits, which it ignores on CPUs."""


class Peer(Protocol):
    """A library bound to one weight and thread count.

    held_by: the environment variable that holds it to an older instruction set, empty for none.
    chosen: the setting of the M that is bound, empty where there is but one.
    """

    needs: ClassVar[tuple[str, ...]]
    setting: ClassVar[str]
    held_by: ClassVar[str]
    chosen: str

    def __init__(self, operands: Operands, threads: int) -> None:
        """Prepare the weight copies as the library likes them."""

    def bind(self, m: int) -> Product:
        """Return the product with the first `m` rows of the activations."""


def in_turn(once: Iterable[Callable[[], Any]]) -> Product:
    """Return a product that goes round through `once`, one function per copy of the weight."""
    functions, turn = list(once), 0

    def run(calls: int) -> Any:
        nonlocal turn
        out = None
        for _ in range(calls):
            out = functions[turn % len(functions)]()
            turn += 1
        return out

    return run


def fastest(products: Sequence[Product], calls: int) -> int:
    """Return which product takes least for so many calls, the best of TRIALS."""

    def seconds(product: Product) -> float:
        start = time.perf_counter()
        product(calls)
        return time.perf_counter() - start

    times = [[seconds(product) for product in products] for _ in range(1 + TRIALS)]
    return int(np.min(times[1:], axis=0).argmin())


def as_array(found: Any) -> Array:
    """Return a product's result as float32."""
    if isinstance(found, torch.Tensor):
        array: Array = found.float().numpy()
        return array
    if isinstance(found, np.ndarray):
        return found
    if str(found.element_type) == "<Type: 'bfloat16'>":
        bits = torch.from_numpy(np.frombuffer(found.data, np.int16).copy())
        return as_array(bits.view(torch.bfloat16).reshape(tuple(found.shape)))
    array = found.data
    return array


# ---- torch ----


class Torch:
    """torch.nn.functional.linear: MKL for float32, oneDNN for bfloat16; packs on every call."""

    needs = ("torch",)
    setting = "torch.nn.functional.linear, torch.set_num_threads"
    held_by = "MKL_ENABLE_INSTRUCTIONS"
    chosen = ""
    kind = torch.float32

    def __init__(self, operands: Operands, threads: int) -> None:
        torch.set_num_threads(threads)
        self._weights = [self._prepare(torch.from_numpy(w)) for w in operands.plain]
        self._a = torch.from_numpy(operands.dense).to(self.kind)

    def _prepare(self, weight: torch.Tensor) -> Any:
        return weight.to(self.kind)

    def bind(self, m: int) -> Product:
        """Return the product with the first `m` rows of the activations."""
        rows = self._a[:m]
        return in_turn(self._once(rows, weight) for weight in self._weights)

    def _once(self, rows: torch.Tensor, weight: Any) -> Callable[[], torch.Tensor]:
        return lambda: torch.nn.functional.linear(rows, weight)


class TorchBf16(Torch):
    """As above, rows and results too."""

    held_by = "ONEDNN_MAX_CPU_ISA"
    kind = torch.bfloat16


class OneDnn(Torch):
    """oneDNN through torch, as torch.compile freezes a linear layer: packed for this very M."""

    setting = "torch.ops.mkldnn._linear_pointwise on _reorder_linear_weight(weight, M)"
    held_by = "ONEDNN_MAX_CPU_ISA"

    def _once(self, rows: torch.Tensor, weight: Any) -> Callable[[], torch.Tensor]:
        ops = torch.ops.mkldnn
        packed = ops._reorder_linear_weight(weight, len(rows))
        return lambda: ops._linear_pointwise(rows, packed, None, "none", [], "")


class OneDnnBf16(OneDnn):
    """As above, rows and results too."""

    kind = torch.bfloat16


class TorchInt8(Torch):
    """Torch's dynamic quantised linear: int8 by column, rows to uint8 in the call, float32 out."""

    engine = "x86" if "x86" in ENGINES else "qnnpack"
    setting = f"torch.ops.quantized.linear_dynamic, engine {engine}, reduce_range {SATURATES}"
    held_by = ""

    def _prepare(self, weight: torch.Tensor) -> Any:
        torch.backends.quantized.engine = self.engine
        codes = torch.quantize_per_channel(
            weight, column_scales(weight).double(), torch.zeros(len(weight)).long(), 0, torch.qint8
        )
        return torch.ops.quantized.linear_prepack(codes, None)

    def _once(self, rows: torch.Tensor, weight: Any) -> Callable[[], torch.Tensor]:
        return lambda: torch.ops.quantized.linear_dynamic(rows, weight, SATURATES)


class OneDnnInt8(TorchInt8):
    """The same by oneDNN."""

    engine = "onednn"
    setting = f"torch.ops.quantized.linear_dynamic, engine {engine}, reduce_range {SATURATES}"
    held_by = "ONEDNN_MAX_CPU_ISA"


class TorchWeights8(Torch):
    """Torch's product of bfloat16 rows with int8 by column, as torchao's weight-only linear."""

    setting = "torch._weight_int8pack_mm, bfloat16"
    held_by = ""
    kind = torch.bfloat16

    def _prepare(self, weight: torch.Tensor) -> Any:
        scales = column_scales(weight)
        return (weight / scales[:, None]).round().to(torch.int8), scales.to(self.kind)

    def _once(self, rows: torch.Tensor, weight: Any) -> Callable[[], torch.Tensor]:
        return lambda: torch._weight_int8pack_mm(rows, *weight)


class TorchWeights4(Torch):
    """Torch's product of bfloat16 rows with 4 bits in groups, as torchao's weight-only linear."""

    setting = f"torch.ops.aten._weight_int4pack_mm_for_cpu, groups of {GROUP}, bfloat16"
    held_by = ""
    kind = torch.bfloat16

    def _prepare(self, weight: torch.Tensor) -> Any:
        groups = weight.view(len(weight), -1, GROUP)
        low = groups.amin(2, keepdim=True)
        step = (groups.amax(2, keepdim=True) - low) / 15
        codes = ((groups - low) / step).round().clamp(0, 15).int().view(weight.shape)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, TORCH_BLOCK)
        scales = torch.cat([step, low + 8 * step], 2).transpose(0, 1)
        return packed, scales.contiguous().to(self.kind)

    def _once(self, rows: torch.Tensor, weight: Any) -> Callable[[], torch.Tensor]:
        packed, scales = weight
        return lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, GROUP, scales)


def column_scales(weight: torch.Tensor) -> torch.Tensor:
    """Return the scale of each column of a product, of int8."""
    return weight.abs().amax(1) / 127


# ---- OpenVINO ----


class OpenVino:
    """OpenVINO's CPU plug-in: a matrix product with a constant weight, M left open, one stream.

    Of float32 it multiplies by MLAS here (`gemm_mlas_f32` in its runtime model), which goes by
    CPUID alone.

    hints: precisions to try where the CPU has bfloat16, the first one elsewhere.
    """

    needs = ("openvino",)
    setting = "MatMul with constant weight, NUM_STREAMS 1, INFERENCE_PRECISION_HINT f32"
    held_by = ""
    hints: ClassVar[tuple[str, ...]] = ("f32",)

    def __init__(self, operands: Operands, threads: int) -> None:
        import openvino

        self._a, core = operands.dense, openvino.Core()
        self._held: list[Any] = []
        self.chosen = ""
        native = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        self.ways: list[dict[str, Any]] = [
            {"INFERENCE_PRECISION_HINT": hint, **groups}
            for hint in (self.hints if native else self.hints[:1])
            for groups in self._groups(operands.k)
        ]
        models = [self._model(weight) for weight in operands.plain]
        shared = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
        self._requests = [
            [core.compile_model(m, "CPU", shared | way).create_infer_request() for m in models]
            for way in self.ways
        ]

    def _groups(self, _k: int) -> Sequence[dict[str, Any]]:
        """Return options of how rows are quantised, to try each; of products that quantise none."""
        return ({},)

    def _model(self, weight: Array) -> Any:
        from openvino import opset13 as op

        return self._product(op.constant(weight, shared_memory=True), weight.shape[1])

    def _product(self, weight: Any, k: int, kind: Any = np.float32) -> Any:
        """Return the product of rows of `kind` with a weight that is part of the model."""
        import openvino
        from openvino import opset13 as op

        a = op.parameter([-1, k], kind)
        return openvino.Model([op.matmul(self._rows(a), weight, False, True)], [a])

    def _rows(self, a: Any) -> Any:
        return a

    def _tensor(self, m: int) -> Any:
        import openvino

        return openvino.Tensor(self._a[:m], shared_memory=True)

    def _named(self, bits: npt.NDArray[Any], shape: tuple[int, ...], kind: Any) -> Any:
        """Return a tensor of a type that numpy has not; the memory is kept, which it is over."""
        import openvino

        self._held.append(bits)
        return openvino.Tensor(bits, openvino.Shape(shape), kind)

    def bind(self, m: int) -> Product:
        """Return the product with the first `m` rows, in the way that is fastest for them."""
        rows = self._tensor(m)

        def once(request: Any) -> Callable[[], Any]:
            request.set_input_tensor(rows)

            def run() -> Any:
                request.infer()
                return request.get_output_tensor()

            return run

        products = [in_turn(map(once, requests)) for requests in self._requests]
        if len(products) == 1:
            return products[0]
        best = fastest(products, len(self._requests[0]))
        self.chosen = ", ".join(f"{option} {value}" for option, value in self.ways[best].items())
        return products[best]


class OpenVinoBf16(OpenVino):
    """Rows, weight and result of bfloat16."""

    setting = "MatMul of bfloat16, NUM_STREAMS 1, INFERENCE_PRECISION_HINT bf16"
    hints = ("bf16",)

    def _model(self, weight: Array) -> Any:
        from openvino import Type
        from openvino import opset13 as op

        return self._product(op.constant(self._bf16(weight)), weight.shape[1], Type.bf16)

    def _tensor(self, m: int) -> Any:
        return self._bf16(self._a[:m])

    def _bf16(self, values: Array) -> Any:
        from openvino import Type

        bits = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return self._named(bits, values.shape, Type.bf16)


class OpenVinoInt8(OpenVino):
    """A weight of int8 by column, rows quantised in groups in the call: how it runs LLMs."""

    setting = (
        "MatMul with a compressed weight, NUM_STREAMS 1, the fastest of INFERENCE_PRECISION_HINT "
        f"f32 and bf16 and DYNAMIC_QUANTIZATION_GROUP_SIZE {GROUP}, {WIDE_GROUP} and K"
    )
    hints = ("f32", "bf16")
    largest = 127
    """Of the codes of weights."""

    def _groups(self, k: int) -> Sequence[dict[str, Any]]:
        return [{"DYNAMIC_QUANTIZATION_GROUP_SIZE": size} for size in (GROUP, WIDE_GROUP, k)]

    def _model(self, weight: Array) -> Any:
        from openvino import opset13 as op

        scales = np.abs(weight).max(1, keepdims=True) / np.float32(self.largest)
        codes = op.constant(np.rint(weight / scales).astype(np.int8))
        return self._product(_scaled(codes, scales), weight.shape[1])


class OpenVinoStatic8(OpenVinoInt8):
    """Rows quantised by one scale that is known before: how it runs models of int8."""

    setting = (
        "MatMul of FakeQuantize rows with int8 by column, NUM_STREAMS 1, the fastest of "
        "INFERENCE_PRECISION_HINT f32 and bf16"
    )
    largest = 63 if SATURATES else 127  # as NNCF's `overflow_fix` has it

    def _groups(self, _k: int) -> Sequence[dict[str, Any]]:
        return ({},)

    def _rows(self, a: Any) -> Any:
        from openvino import opset13 as op

        low = -np.abs(self._a).max()
        ends = low, np.float32(-low * 127 / 128)
        return op.fake_quantize(a, *ends, *ends, 256)


class OpenVinoInt4(OpenVinoInt8):
    """A weight of 4 bits in groups, rows quantised in groups in the call."""

    def _model(self, weight: Array) -> Any:
        from openvino import Type
        from openvino import opset13 as op

        n, k = weight.shape
        groups = weight.reshape(n, -1, GROUP)
        scales = np.abs(groups).max(2, keepdims=True) / np.float32(7)
        pairs = np.rint(groups / scales).astype(np.int8).reshape(-1, 2) & 15
        packed = (pairs[:, 0] | pairs[:, 1] << 4).astype(np.uint8)
        codes = op.constant(self._named(packed, groups.shape, Type.i4))
        whole = op.reshape(_scaled(codes, scales), op.constant([n, k]), False)
        return self._product(whole, k)


def _scaled(codes: Any, scales: Array) -> Any:
    from openvino import opset13 as op

    return op.multiply(op.convert(codes, np.float32), op.constant(scales))


# ---- numpy ----


class OpenBlas:
    """numpy.matmul: OpenBLAS, which packs the weight on every call."""

    needs = ("threadpoolctl",)
    setting = "numpy.matmul into a kept result, threadpoolctl limits"
    held_by = "OPENBLAS_CORETYPE"
    chosen = ""

    def __init__(self, operands: Operands, threads: int) -> None:
        import threadpoolctl

        threadpoolctl.threadpool_limits(limits=threads, user_api="blas")
        self._weights, self._a = operands.plain, operands.dense

    def bind(self, m: int) -> Product:
        """Return the product with the first `m` rows of the activations."""
        rows = self._a[:m]
        out = np.empty((m, len(self._weights[0])), np.float32)

        def once(weight: npt.NDArray[np.float32]) -> Callable[[], Array]:
            return lambda: np.matmul(rows, weight.T, out=out)

        return in_turn(once(weight) for weight in self._weights)


PEERS: dict[str, dict[str, type[Peer]]] = {
    "f32": {
        "torch": Torch,
        "onednn": OneDnn,
        "openvino": OpenVino,
        "openblas": OpenBlas,
    },
    "bf16": {"torch": TorchBf16, "onednn": OneDnnBf16, "openvino": OpenVinoBf16},
    "int8": {
        "torch": TorchInt8,
        "torch_weights": TorchWeights8,
        "onednn": OneDnnInt8,
        "openvino": OpenVinoInt8,
        "openvino_static": OpenVinoStatic8,
    },
    "int4": {"torch": TorchWeights4, "openvino": OpenVinoInt4},
}
"""By type of weights."""


def present_peers(dtype: str) -> dict[str, type[Peer]]:
    """Return the peers whose packages are installed, and have their engine on this machine."""
    return {
        name: peer
        for name, peer in PEERS[dtype].items()
        if all(find_spec(package) for package in peer.needs)
        and (not issubclass(peer, TorchInt8) or peer.engine in ENGINES)
        and (peer is not OneDnnBf16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    }


def describe_peers(peers: Mapping[str, type[Peer]]) -> list[dict[str, Any]]:
    """Return version, settings and thread rule of each peer, for the report."""
    versions = {
        "onednn": f"torch {torch.__version__}",
        "openblas": f"numpy {np.__version__}: {_openblas()}",
    }
    return [
        {
            "name": name,
            "version": versions.get(name) or version(peer.needs[0]),
            "setting": peer.setting,
            "threads": "as the row says",
            **({"build": torch.__config__.show().splitlines()[1:8]} if name == "torch" else {}),
        }
        for name, peer in peers.items()
    ]


def _openblas() -> str:
    from threadpoolctl import threadpool_info

    found = [
        f"{i['internal_api']} {i['version']}" for i in threadpool_info() if i["user_api"] == "blas"
    ]
    return ", ".join(found) or "no BLAS found"
