"""The tiny world under many subsets of the transformations; hot clusters on torch's CPU device.

200 requests of all five library workflows, the first ones alone and the others at once; each answer
is that of the plain order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("faiss")

from dovetail import load
from dovetail.compiler.pipeline import compile_model
from dovetail.compiler.write.index_build import IndexRequest, build_index_folder, describe_embedder
from dovetail.ir.index_file import Passage
from dovetail.runtime import app as loading
from dovetail.runtime.flows import service
from dovetail.runtime.flows.control.costs import StepCost
from dovetail.runtime.flows.control.front import Statistics
from dovetail.runtime.flows.control.settings import WavefrontSettings
from dovetail.runtime.flows.control.transformation import REGISTRY
from dovetail.runtime.flows.service import FlowSettings
from dovetail.runtime.flows.services import perform
from dovetail.runtime.flows.workflow_run import run_in_order
from dovetail.runtime.retrieval.folder import open_index
from dovetail.runtime.retrieval.hot import HotStatistics
from dovetail.tiny_world import ENCODER, LLAMA, corpus
from dovetail.tiny_world.questions import SINGLE, TWO_HOP
from tests.dovetail.test_app_workflows import GRAPHS, NPROBE, PlainServices, World, comparable

REQUESTS, PASSAGES, CLUSTERS = 200, 400, 16
ALONE = 25
"""Requests that come one by one, so that the engine has room for guesses; some of these hold."""
SUBSETS = [
    *(
        frozenset(found)
        for size in (0, 1, 2, len(REGISTRY))
        for found in combinations(REGISTRY, size)
    ),
    *(
        frozenset(name for name in REGISTRY if draw.random() < 0.5)
        for draw in map(Random, range(64))
    ),
]
ROOM = 100 * 4 * 128
"""Bytes of some of the vectors, so that clusters come and go."""


@dataclass(frozen=True)
class Case:
    """Requests, and what the plain order makes of each."""

    artifact: Path
    world: World
    requests: tuple[tuple[str, str], ...]
    wanted: tuple[dict[str, Any], ...]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    work = tmp_path_factory.mktemp("subsets")
    compile_model(LLAMA, output=work / "app.dove", effort="none", weight_dtype="f32")
    compile_model(ENCODER, output=work / "encoder.dove", effort="none", weight_dtype="f32")
    asked = [q for q in corpus.questions("dev") if q.kind in (SINGLE, TWO_HOP)]
    asked = asked[:: len(asked) // (REQUESTS // len(GRAPHS))][: REQUESTS // len(GRAPHS)]
    gold = {name for question in asked for name in question.gold}
    every = corpus.passages()
    kept = [p for p in every if p.id in gold] + [p for p in every if p.id not in gold][:PASSAGES]
    passages = [Passage(key=p.id, title=p.title, text=p.text) for p in kept]
    with load(work / "app.dove", deterministic=True) as app, load(work / "encoder.dove") as encoder:
        request, entry = IndexRequest(output=work / "idx", clusters=CLUSTERS), describe_embedder
        build_index_folder(passages, encoder, entry("tiny", "", {}, None), request, lambda *_: None)
        world = World(app, encoder, work / "idx", tuple(asked))
        services = PlainServices(world, open_index(world.folder))
        requests = tuple((name, q.question) for q in asked for name in GRAPHS)
        wanted = tuple(
            run_in_order(
                GRAPHS[name].workflow(), {"input": text}, lambda call: perform(call, services)
            )
            for name, text in requests
        )
        yield Case(work / "app.dove", world, requests, wanted)


def serve(case: Case, subset: frozenset[str]) -> tuple[Statistics, HotStatistics]:
    """Serve all requests and compare every output; return what came of guesses and of clusters.

    What a step of the engine costs is given: measured of a toy, it would say what else the machine
    does, and guesses might never seem to pay.
    """
    settings = WavefrontSettings(
        transformations=subset, refresh=5, fixed_clusters=2, generation_load=REQUESTS
    )
    flows = FlowSettings(wavefront=settings, cluster_bytes=ROOM)
    beside = patch.object(loading, "_gpu_of", lambda _: "torch:cpu")
    cost = patch.object(service, "measure_step", lambda _: StepCost(fixed=1.0))
    with beside, cost, load(case.artifact, deterministic=True, workflows=flows) as app:
        app.add_index(case.world.folder, nprobe=NPROBE, embed=case.world.encoder.embed)
        asked = [(GRAPHS[name], {"input": text}) for name, text in case.requests]
        results = [app.run(*request) for request in asked[:ALONE]]
        jobs = [app.submit_workflow(*request) for request in asked[ALONE:]]
        results += [job.result() for job in jobs]
        guesses, (hot,) = app.flows.statistics, app.flows.hot.values()
    for result, wanted, request in zip(results, case.wanted, case.requests, strict=True):
        assert comparable(dict(result.outputs)) == comparable(wanted), request
    return guesses, hot


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("subset", dict.fromkeys(SUBSETS), ids=lambda s: "-".join(sorted(s)) or "-")
def test_200_requests_are_answered_as_in_the_plain_order(
    case: Case, subset: frozenset[str]
) -> None:
    assert len(case.requests) == REQUESTS
    guesses, hot = serve(case, subset)
    print(guesses, hot)
    may_guess = {"split", "speculate_generation"} <= subset  # a search that is not cut has no parts
    assert bool(guesses.accepted) == bool(guesses.rejected) == may_guess
    assert guesses.attempted == guesses.accepted + guesses.rejected
    assert not guesses.scouts or "speculate_retrieval" in subset
    assert not hot.hits or {"put", "prefetch"} <= subset
