"""The tiny world's questions on the real engine here: `App.run` beside LangGraph with its nodes.

In: nothing but this repository. Out: rows of seconds for a burst of requests, in turns. LangGraph
runs one request after the other (`one`), or all side by side on its threads (`batch`); both ask the
same engine, encoder and index, and must give the same answers.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from common import interleave
from dovetail.compiler.pipeline import compile_model
from dovetail.compiler.write.index_build import IndexRequest, build_index_folder
from dovetail.ir.index_file import EmbedderEntry, Passage
from dovetail.ir.workflow import Embedding, Generation, Retrieval, Workflow
from dovetail.runtime.app import App, load
from dovetail.runtime.flows import service
from dovetail.runtime.flows.control.wavefront import Wavefront
from dovetail.runtime.index.documents import Document
from dovetail.runtime.retrieval.collection import Collection
from dovetail.runtime.retrieval.folder import open_index
from dovetail.tiny_world import ENCODER, LLAMA, corpus
from dovetail.tiny_world.prompts import MAX_TOKENS
from dovetail.tiny_world.questions import SINGLE, TWO_HOP
from rag_cells import GRAPHS
from rag_planes import Timed

CLUSTERS = 64


@dataclass(frozen=True, slots=True)
class PlainServices:
    """What nodes call, one call at a time."""

    app: App
    encoder: App
    collection: Collection
    nprobe: int

    def generate(self, prompt: str, node: Generation) -> str:
        """See Services."""
        (found,) = self.app.generate(prompt, **node.options)
        return found.text or ""

    def retrieve(self, query: str | NDArray[np.float32], node: Retrieval) -> list[Document]:
        """See Services."""
        vector = self.encoder.embed([query])[0] if isinstance(query, str) else query
        return self.collection.find(vector, node.topk, self.nprobe, node.filters)

    def embed(self, text: str, node: Embedding) -> NDArray[np.float32]:
        """See Services."""
        return self.encoder.embed([text])[0]


@contextmanager
def open_services(folder: Path, nprobe: int) -> Iterator[PlainServices]:
    """Yield the tiny world's Llama, encoder and index, compiled into `folder`."""
    for model, name in ((LLAMA, "app"), (ENCODER, "encoder")):
        compile_model(model, output=folder / f"{name}.dove", effort="none")
    passages = [Passage(key=str(p.id), text=p.document) for p in corpus.passages()]
    engine = load(folder / "app.dove", deterministic=True)  # answers do not depend on batches
    with engine as app, load(folder / "encoder.dove") as encoder:
        request = IndexRequest(output=folder / "idx", clusters=CLUSTERS)
        entry = EmbedderEntry(name="tiny-world-encoder", fingerprint="")
        build_index_folder(passages, encoder, entry, request, lambda *_: None)
        app.add_index(folder / "idx", nprobe=nprobe, embed=encoder.embed)
        yield PlainServices(app, encoder, open_index(folder / "idx"), nprobe)


def pick_questions(count: int) -> list[str]:
    """Return questions of the dev split, half of them of two hops."""
    asked = corpus.questions("dev")
    kinds = [[q.question for q in asked if q.kind == kind] for kind in (SINGLE, TWO_HOP)]
    return [text for pair in zip(*kinds, strict=False) for text in pair][:count]


def run_ours(app: App, workflow: Workflow, texts: Sequence[str]) -> list[str]:
    """Return the answers of our runtime to requests that come at once."""
    jobs = [app.submit_workflow(workflow, {"input": text}) for text in texts]
    return [job.result().outputs["answer"] for job in jobs]


@contextmanager
def timed_control(timed: list[Timed]) -> Iterator[None]:
    """Have the control planes of apps that begin a workflow meanwhile timed, and kept in a list."""

    def make(*arguments: Any) -> Timed:
        timed.append(Timed(Wavefront(*arguments)))
        return timed[-1]

    with patch.object(service, "Wavefront", make):
        yield


def measure_tiny(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row for each workflow."""
    from baselines.langgraph_app import compile_graph

    with tempfile.TemporaryDirectory() as folder:
        timed: list[Timed] = []
        with timed_control(timed), open_services(Path(folder), CLUSTERS) as services:
            texts = pick_questions(options.requests)
            return [
                _measure(
                    name,
                    make(max_tokens=MAX_TOKENS).workflow(),
                    services,
                    texts,
                    compile_graph,
                    timed,
                )
                for name, make in GRAPHS.items()
            ]


def _measure(
    name: str,
    workflow: Workflow,
    services: PlainServices,
    texts: Sequence[str],
    compile_graph: Callable[..., Any],
    timed: list[Timed],
) -> dict[str, Any]:
    graph = compile_graph(workflow, services)
    inputs = [{"input": text} for text in texts]
    answers: dict[str, list[str]] = {}
    control: list[float] = []

    def ours() -> None:
        before, start = sum(plane.seconds for plane in timed), time.perf_counter()
        keep("ours", run_ours(services.app, workflow, texts))
        taken = sum(plane.seconds for plane in timed) - before
        control.append(taken / (time.perf_counter() - start))

    def keep(way: str, found: list[str]) -> None:
        assert answers.setdefault("first", found) == found, f"{way} answers otherwise"

    at_once = {"max_concurrency": len(texts)}
    samples = interleave(
        {
            "one": lambda: keep("one", [graph.invoke(i)["answer"] for i in inputs]),
            "batch": lambda: keep("batch", [r["answer"] for r in graph.batch(inputs, at_once)]),
            "dovetail": ours,
        },
        rounds=3,
    )
    row: dict[str, Any] = {"group": "tiny", "workflows": name, "requests": len(texts)}
    row |= {f"{way}_seconds": sample.median for way, sample in samples.items()}
    row["dovetail_control"] = statistics.median(control)
    seconds = samples["dovetail"].median
    return row | {f"vs_{way}": samples[way].median / seconds for way in ("one", "batch")}
