"""A toy app with a toy index: a model whose words are a hash of all before them, so that any other
prompt gives another reply, and an encoder that adds up random vectors of words."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("faiss")

from dovetail.compiler.write.index_build import IndexRequest, build_index_folder
from dovetail.ir.index_file import EmbedderEntry, Passage
from dovetail.ir.workflow import Embedding, Generation, Retrieval
from dovetail.runtime.app import App, load
from dovetail.runtime.flows.service import FlowSettings
from dovetail.runtime.index.documents import Document
from dovetail.runtime.retrieval.collection import Collection
from dovetail.runtime.retrieval.folder import open_index
from tests.runtime.text.test_tokenizer import toy_tokenizer

DIM, COUNT, CLUSTERS, NPROBE = 16, 300, 12, 12


def embed(texts: Sequence[str], *, prompt: str | None = None) -> np.ndarray:
    """Return unit vectors [n, DIM]."""
    rows = np.stack([sum((word_vector(word) for word in t.split()), np.zeros(DIM)) for t in texts])
    return (rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)).astype(np.float32)


def word_vector(word: str) -> np.ndarray:
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "little")
    return np.random.default_rng(seed).standard_normal(DIM)


class Encoder:
    def embed(self, texts: Sequence[str], /, *, prompt: str | None = None) -> np.ndarray:
        return embed(texts, prompt=prompt)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index folder of COUNT passages of three words each."""
    path = tmp_path_factory.mktemp("index") / "idx"
    rng = np.random.default_rng(1)
    passages = [
        Passage(
            key=f"p{i}",
            text=" ".join(f"w{word}" for word in rng.integers(1, 97, 3)),
            metadata={"parity": i % 2},
        )
        for i in range(COUNT)
    ]
    request = IndexRequest(output=path, clusters=CLUSTERS)
    entry = EmbedderEntry(name="toy", fingerprint="")
    build_index_folder(passages, Encoder(), entry, request, lambda *_: None)
    return path


@dataclass(frozen=True)
class PlainServices:
    """What nodes call, one call at a time: the plain meaning of a workflow."""

    app: App
    collection: Collection

    def generate(self, prompt: str, node: Generation) -> str:
        (found,) = self.app.generate(prompt, **node.options)
        return found.text or ""

    def retrieve(self, query: str | np.ndarray, node: Retrieval) -> list[Document]:
        vector = embed([query])[0] if isinstance(query, str) else query
        return self.collection.find(vector, node.topk, NPROBE, node.filters)

    def embed(self, text: str, node: Embedding) -> np.ndarray:
        return embed([text])[0]


@pytest.fixture
def open_app(
    make_artifact: Callable[..., Path], folder: Path, tmp_path: Path
) -> Iterator[Callable[..., App]]:
    """Return what opens an app on the toy model and the toy index."""
    opened: list[App] = []

    def open_(workflows: FlowSettings | None = None, **options: object) -> App:
        name = f"toy{len(opened)}.dove"
        tokenizer = toy_tokenizer(tmp_path / "toy.json")
        path = make_artifact(name=name, tokenizer=tokenizer, kv_blocks=256)
        app = load(path, workflows=workflows, **options)  # type: ignore[arg-type]
        app.add_index(folder, nprobe=NPROBE, embed=embed)
        opened.append(app)
        return app

    yield open_
    for app in opened:
        app.close()


@pytest.fixture
def app(open_app: Callable[..., App]) -> App:
    return open_app()


@pytest.fixture
def services(app: App, folder: Path) -> PlainServices:
    return PlainServices(app, open_index(folder))
