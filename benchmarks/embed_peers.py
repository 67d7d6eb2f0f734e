"""The sides of `embed.py`'s throughput part: ours, sentence-transformers, ONNX Runtime, OpenVINO.

In: the files of a model, threads. Out: sides with `settings`, `vectors` and `run`, each for a
process of its own (`generate_workers.Worker`). All take texts and give vectors, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common import run_quiet
from embed_models import LONGEST, EncoderFiles

Rows = npt.NDArray[np.float32]
CHUNK = 32
"""Texts that peers run together, sorted by length: sentence-transformers' default."""


class Side:
    """What all sides share: a timed call."""

    def settings(self) -> str:
        """Return version and settings for the reader."""
        raise NotImplementedError

    def vectors(self, texts: Sequence[str]) -> Rows:
        """Return a row for each text."""
        raise NotImplementedError

    def run(self, texts: Sequence[str], calls: int) -> tuple[float, float]:
        """Return the seconds of each of some calls, and the cores that others used meanwhile."""

        def call() -> None:
            for _ in range(calls):
                self.vectors(texts)

        region = run_quiet(call)
        return region.seconds / calls, region.others


class Dovetail(Side):
    """Our side: `App.embed`."""

    def __init__(self, artifact: str, threads: int) -> None:
        import dovetail

        self._version = dovetail.__version__
        self._app = dovetail.load(artifact, threads=threads)
        self._threads = threads

    def settings(self) -> str:
        """See Side."""
        return f"dovetail {self._version}, float32, {self._threads} threads"

    def vectors(self, texts: Sequence[str]) -> Rows:
        """See Side."""
        return self._app.embed(texts)


class SentenceTransformers(Side):
    """The peer most people use, on torch."""

    def __init__(self, folder: str, threads: int) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(threads)
        self._model = SentenceTransformer(folder, device="cpu")
        self._threads = threads

    def settings(self) -> str:
        """See Side."""
        names = ("sentence-transformers", "torch")
        found = ", ".join(f"{name} {version(name)}" for name in names)
        return f"{found}, float32, {self._threads} threads, batches of {CHUNK}"

    def vectors(self, texts: Sequence[str]) -> Rows:
        """See Side."""
        return np.asarray(
            self._model.encode(
                list(texts),
                batch_size=CHUNK,
                show_progress_bar=False,
                normalize_embeddings=True,
            )
        )


class _Graph(Side):
    """A runtime of ONNX graphs: texts are sorted by length, and padded in parts."""

    def __init__(self, folder: str) -> None:
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        self._tokenizer.enable_truncation(LONGEST)
        self._tokenizer.enable_padding()

    def vectors(self, texts: Sequence[str]) -> Rows:
        """See Side."""
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        parts = [order[i : i + CHUNK] for i in range(0, len(order), CHUNK)]
        rows = [self._vectors([texts[i] for i in part]) for part in parts]
        found = np.concatenate(rows)
        out = np.empty_like(found)
        out[order] = found
        return out

    def _vectors(self, texts: list[str]) -> Rows:
        read = self._tokenizer.encode_batch(texts)
        ids = np.array([each.ids for each in read], np.int64)
        mask = np.array([each.attention_mask for each in read], np.int64)
        return self.infer({"input_ids": ids, "attention_mask": mask})

    def infer(self, inputs: dict[str, Any]) -> Rows:
        """Return the vectors of one padded batch."""
        raise NotImplementedError


class OnnxRuntime(_Graph):
    """The peer: ONNX Runtime with all of its graph optimizations."""

    def __init__(self, folder: str, graph: str, threads: int) -> None:
        import onnxruntime

        super().__init__(folder)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(
            graph, options, providers=["CPUExecutionProvider"]
        )
        self._threads = threads

    def settings(self) -> str:
        """See Side."""
        found = f"onnxruntime {version('onnxruntime')}, CPU, all optimizations"
        return f"{found}, float32, {self._threads} threads, batches of {CHUNK}"

    def infer(self, inputs: dict[str, Any]) -> Rows:
        """See _Graph."""
        (rows,) = self._session.run(None, inputs)
        return np.asarray(rows)


class OpenVino(_Graph):
    """The peer: OpenVINO, for latency, kept from computing in bfloat16."""

    def __init__(self, folder: str, graph: str, threads: int) -> None:
        import openvino

        super().__init__(folder)
        settings = {
            "INFERENCE_PRECISION_HINT": "f32",
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
        }
        self._model = openvino.Core().compile_model(graph, "CPU", settings)
        self._threads = threads

    def settings(self) -> str:
        """See Side."""
        found = f"openvino {version('openvino')}, LATENCY"
        return f"{found}, float32, {self._threads} threads, batches of {CHUNK}"

    def infer(self, inputs: dict[str, Any]) -> Rows:
        """See _Graph."""
        return np.array(self._model(inputs)[0])


OURS = "dovetail"
PEERS = {
    "sentence-transformers": "sentence_transformers",
    "onnxruntime": "onnxruntime",
    "openvino": "openvino",
}
"""Peers and the modules that they need."""


def side_makers(files: EncoderFiles, threads: int) -> dict[str, tuple[Callable[..., Side], Any]]:
    """Return how each side that is installed is made: a class and its arguments."""
    folder, graph = str(files.folder), str(files.graph)
    makers: dict[str, tuple[Callable[..., Side], Any]] = {
        OURS: (Dovetail, (str(files.artifact), threads)),
        "sentence-transformers": (SentenceTransformers, (folder, threads)),
        "onnxruntime": (OnnxRuntime, (folder, graph, threads)),
        "openvino": (OpenVino, (folder, graph, threads)),
    }
    return {n: made for n, made in makers.items() if n == OURS or find_spec(PEERS[n]) is not None}
