"""Three separate services that share the cores: llama.cpp's server, OpenVINO's encoder, faiss.

In: a GGUF file, an encoder's folder, passages. Out: clients of `mixed.py`, whose requests go to the
services one after another, as an application puts them together. Each service has all cores and is
a process of its own. The first one decodes 16 requests together, as the server does by default.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embed_models import pooled_module
from embed_peers import OpenVino
from http_servers import PATH, Listening, serve_llamacpp
from llamacpp import find_programs

SLOTS, CONTEXT = 16, 2048
Rows = npt.NDArray[np.float32]
_held: dict[str, Any] = {}
"""What a service's process has."""


def there() -> bool:
    """Tell whether all three services can be started here."""
    return find_programs() is not None and find_spec("openvino") is not None


class Services:
    """Asks the three services."""

    def __init__(
        self, server: Listening, encoder: ProcessPoolExecutor, index: ProcessPoolExecutor
    ) -> None:
        self._server, self._encoder, self._index = server, encoder, index

    def embed(self, texts: Sequence[str]) -> Rows:
        """Return the vectors of texts."""
        return self._encoder.submit(_encode, list(texts)).result()

    def search(self, vector: Rows, count: int) -> list[int]:
        """Return the numbers of the nearest passages."""
        return self._index.submit(_search, vector, count).result()

    def complete(self, prompt: str, tokens: int) -> list[float]:
        """Return when each token of an answer came."""
        asked = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        link = http.client.HTTPConnection(self._server.host, self._server.port)
        link.request("POST", PATH, json.dumps(asked), {"Content-Type": "application/json"})
        reply = link.getresponse()
        came = [
            time.perf_counter() for line in reply if line.startswith(b"data: {") and b"text" in line
        ]
        link.close()
        assert reply.status == 200 and came, "the peer has not answered"
        return came


@contextmanager
def open_services(
    model: Path, encoder: Path, work: Path, passages: Sequence[str], threads: int
) -> Iterator[Services]:
    """Start the services and yield what asks them, once all passages are indexed."""
    graph = work / "encoder.xml"
    if not graph.exists():
        _convert(encoder, graph)
    spawn = get_context("spawn")
    with (
        ProcessPoolExecutor(1, spawn, _open_encoder, (str(encoder), str(graph), threads)) as first,
        ProcessPoolExecutor(1, spawn) as second,
        serve_llamacpp(model, threads, SLOTS, CONTEXT) as server,
    ):
        services = Services(server, first, second)
        rows = [services.embed(passages[i : i + 64]) for i in range(0, len(passages), 64)]
        second.submit(_open_index, np.concatenate(rows)).result()
        yield services


def _convert(encoder: Path, target: Path) -> None:
    import openvino
    import torch

    ids = torch.randint(1000, 2000, (2, 16))
    example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    made = openvino.convert_model(pooled_module(encoder), example_input=example)
    openvino.save_model(made, target, compress_to_fp16=False)


def _open_encoder(folder: str, graph: str, threads: int) -> None:
    _held["encoder"] = OpenVino(folder, graph, threads)


def _encode(texts: list[str]) -> Rows:
    found: Rows = _held["encoder"].vectors(texts)
    return found


def _open_index(rows: Rows) -> None:
    import faiss

    lists = int(len(rows) ** 0.5)
    index = faiss.index_factory(rows.shape[1], f"IVF{lists},Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(rows)
    index.add(rows)
    index.nprobe = max(1, lists // 4)
    _held["index"] = index


def _search(vector: Rows, count: int) -> list[int]:
    found: list[int] = _held["index"].search(vector.reshape(1, -1), count)[1][0].tolist()
    return found
