"""The libraries that our GEMM is compared with: torch/MKL, oneDNN, OpenVINO and numpy/OpenBLAS.

In: the plain weight copies of `Operands` and a thread count. Out: per library and M a function that
runs products on the copies in turn. Libraries that pack weights do so before any clock starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch

from gemm_ours import Array, Operands

Product = Callable[[int], Array]
"""Runs that many products, one copy of the weight after the other; returns the last result."""


class Peer(Protocol):
    """A library bound to one weight and thread count.

    held_by: the environment variable that holds it to an older instruction set, empty for none.
    """

    needs: ClassVar[tuple[str, ...]]
    setting: ClassVar[str]
    held_by: ClassVar[str]

    def __init__(self, operands: Operands, threads: int) -> None:
        """Prepare the weight copies as the library likes them."""

    def bind(self, m: int) -> Product:
        """Return the product with the first `m` rows of the activations."""


def in_turn(once: Iterable[Callable[[], Array]]) -> Product:
    """Return a product that goes round through `once`, one function per copy of the weight."""
    functions, turn = list(once), 0

    def run(calls: int) -> Array:
        nonlocal turn
        out: Array = np.empty(0, np.float32)
        for _ in range(calls):
            out = functions[turn % len(functions)]()
            turn += 1
        return out

    return run


class Torch:
    """torch.nn.functional.linear: MKL, which packs the weight on every call."""

    needs = ("torch",)
    setting = "torch.nn.functional.linear, torch.set_num_threads"
    held_by = "MKL_ENABLE_INSTRUCTIONS"

    def __init__(self, operands: Operands, threads: int) -> None:
        torch.set_num_threads(threads)
        self._weights = [torch.from_numpy(weight) for weight in operands.plain]
        self._a = torch.from_numpy(operands.dense)

    def bind(self, m: int) -> Product:
        """Return the product with the first `m` rows of the activations."""
        rows = self._a[:m]

        def once(weight: torch.Tensor) -> Callable[[], Array]:
            return lambda: torch.nn.functional.linear(rows, weight).numpy()

        return in_turn(once(weight) for weight in self._weights)


class OneDnn:
    """oneDNN through torch, as torch.compile freezes a linear layer: packed for this very M."""

    needs = ("torch",)
    setting = "torch.ops.mkldnn._linear_pointwise on _reorder_linear_weight(weight, M)"
    held_by = "ONEDNN_MAX_CPU_ISA"

    def __init__(self, operands: Operands, threads: int) -> None:
        torch.set_num_threads(threads)
        self._weights = [torch.from_numpy(weight) for weight in operands.plain]
        self._a = torch.from_numpy(operands.dense)

    def bind(self, m: int) -> Product:
        """Return the product with the first `m` rows of the activations."""
        rows, ops = self._a[:m], torch.ops.mkldnn

        def once(packed: Any) -> Callable[[], Array]:
            return lambda: ops._linear_pointwise(rows, packed, None, "none", [], "").numpy()

        return in_turn(once(ops._reorder_linear_weight(weight, m)) for weight in self._weights)


class OpenVino:
    """OpenVINO's CPU plug-in: a matrix product with a constant weight, M left open, one stream.

    It multiplies by MLAS here (`gemm_mlas_f32` in its runtime model), which goes by CPUID alone.
    """

    needs = ("openvino",)
    setting = "MatMul with constant weight, NUM_STREAMS 1, INFERENCE_PRECISION_HINT f32"
    held_by = ""

    def __init__(self, operands: Operands, threads: int) -> None:
        import openvino

        self._tensor, self._a = openvino.Tensor, operands.dense
        core = openvino.Core()
        options = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "f32",
            "NUM_STREAMS": 1,
        }
        self._requests = [
            core.compile_model(_matmul_model(weight), "CPU", options).create_infer_request()
            for weight in operands.plain
        ]

    def bind(self, m: int) -> Product:
        """Return the product with the first `m` rows of the activations."""
        rows = self._tensor(self._a[:m], shared_memory=True)

        def once(request: Any) -> Callable[[], Array]:
            request.set_input_tensor(rows)

            def run() -> Array:
                request.infer()
                out: Array = request.get_output_tensor().data
                return out

            return run

        return in_turn(once(request) for request in self._requests)


def _matmul_model(weight: Array) -> Any:
    import openvino
    from openvino import opset13 as op

    a = op.parameter([-1, weight.shape[1]], np.float32)
    product = op.matmul(a, op.constant(weight, shared_memory=True), False, True)
    return openvino.Model([product], [a])


class OpenBlas:
    """numpy.matmul: OpenBLAS, which packs the weight on every call."""

    needs = ("threadpoolctl",)
    setting = "numpy.matmul into a kept result, threadpoolctl limits"
    held_by = "OPENBLAS_CORETYPE"

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


PEERS: dict[str, type[Peer]] = {
    "torch": Torch,
    "onednn": OneDnn,
    "openvino": OpenVino,
    "openblas": OpenBlas,
}


def present_peers() -> dict[str, type[Peer]]:
    """Return the peers whose packages are installed."""
    return {
        name: peer
        for name, peer in PEERS.items()
        if all(find_spec(package) for package in peer.needs)
    }


def describe_peers(peers: Iterable[str]) -> list[dict[str, Any]]:
    """Return version, settings and thread rule of each peer, for the report."""
    versions = {
        "torch": torch.__version__,
        "onednn": f"torch {torch.__version__}",
        "openblas": f"numpy {np.__version__}: {_openblas()}",
    }
    return [
        {
            "name": name,
            "version": str(versions[name] if name in versions else version(name)),
            "setting": PEERS[name].setting,
            "threads": "as the row says",
            **({"build": torch.__config__.show().splitlines()[1:8]} if name == "torch" else {}),
        }
        for name in peers
    ]


def _openblas() -> str:
    from threadpoolctl import threadpool_info

    found = [
        f"{i['internal_api']} {i['version']}" for i in threadpool_info() if i["user_api"] == "blas"
    ]
    return ", ".join(found) or "no BLAS found"
