"""Metrics that engines, workflows and encoders feed: what was done is what `/metrics` shows."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import httpx
import pytest

pytest.importorskip("faiss")

import dovetail
from dovetail import END, START, RAGraph
from dovetail.runtime.app import App, load
from dovetail.runtime.embed.device_queue import QueueSpec, length_classes
from dovetail.runtime.embed.queue import QueueManager
from dovetail.runtime.embed.service import EmbeddingService
from dovetail.runtime.flows.service import FlowSettings
from dovetail.runtime.hosting.process import EngineProcess
from dovetail.runtime.machine.seat import SEARCH_SLOT, Board, Seat
from dovetail.runtime.schedule.plan import SchedulerSettings
from dovetail.runtime.server.app import make_app
from dovetail.runtime.server.context import ServerContext, ServeSettings
from dovetail.runtime.server.models import Models, ServedModel
from dovetail.runtime.server.served_workflow import ServedWorkflow
from dovetail.runtime.server.timeline import ServerTimeline
from dovetail.runtime.timeline import Timeline
from dovetail.topology.division import PREFILL, SEARCHES, STAGES
from tests.runtime.embed.test_service import LINE, Toy
from tests.runtime.flows.conftest import PlainServices, app, folder, open_app, services
from tests.runtime.flows.test_hot import open_hot, run_some, statistics, without

__all__ = ["app", "folder", "open_app", "open_hot", "services"]  # fixtures


class Server:
    """An application without a socket, over apps that exist."""

    def __init__(self, app: App, flows: Mapping[str, ServedWorkflow] | None = None) -> None:
        models, settings = Models([ServedModel("toy", app)]), ServeSettings(log_requests=False)
        self._asgi: Any = make_app(ServerContext(models, settings, flows or {}))

    def ask(self, method: str, path: str, body: object = None) -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(self._asgi)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                return await client.request(method, path, json=body)

        return asyncio.run(run())

    def figure(self, name: str, **labels: str) -> float:
        """Return the sum of all samples of a metric whose labels include these."""
        text = self.ask("GET", "/metrics").text
        found = re.findall(rf"^dovetail:{name}{{(.*)}} (\S+)$", text, re.MULTILINE)
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        return sum(float(value) for shown, value in found if wanted <= set(shown.split(",")))


def test_drafts_are_counted_as_vllm_names_them(make_artifact: Callable[..., Path]) -> None:
    with load(make_artifact(kv_blocks=64), speculative_config={"method": "suffix"}) as app:
        server, scheduler = Server(app), app.engine.scheduler
        assert scheduler.speculation is not None
        names = ("drafts", "draft_tokens", "accepted_tokens")
        scheduler.speculation.counts.update(dict(zip(names, (3, 14, 9), strict=True)))
        found = [server.figure(f"spec_decode_num_{name}_total") for name in names]
    assert found == [3, 14, 9]


def test_who_keeps_which_cores_and_works_on_them_is_shown(
    make_artifact: Callable[..., Path],
) -> None:
    with load(make_artifact(kv_blocks=64)) as app:
        server = Server(app)
        assert "cpu_share_cores{" not in server.ask("GET", "/metrics").text, "nobody shares them"
        app.board = board = Board()
        for changes, shares in enumerate(
            ({PREFILL: (0, 1), SEARCHES: (1,)}, {SEARCHES: (0, 2, 3)})
        ):
            board.divide(shares)
            kept = {stage: server.figure("cpu_share_cores", stage=stage) for stage in STAGES}
            assert kept == {stage: len(shares.get(stage, ())) for stage in STAGES}
            assert server.figure("cpu_divisions_total", model_name="toy") == changes
        seat = Seat(board, SEARCH_SLOT)
        clock = {"perf_counter.side_effect": [10.0, 12.5]}  # other threads keep theirs
        with patch("dovetail.runtime.machine.seat.time", **clock):
            seat.take(SEARCHES)
            seat.leave()
        assert server.figure("cpu_busy_seconds_total", stage=SEARCHES) == 3 * 2.5, "alone, on all"


def test_steps_are_counted_by_their_tokens(make_artifact: Callable[..., Path]) -> None:
    with load(make_artifact(kv_blocks=64), apart=True) as app:
        server = Server(app)
        assert server.figure("iteration_tokens_total_count") == 0
        body = {"prompt": [1, 2, 3], "max_tokens": 6, "ignore_eos": True}
        assert server.ask("POST", "/v1/completions", body).status_code == 200
        assert server.figure("iteration_tokens_total_count", model_name="toy") == 6
        assert server.figure("iteration_tokens_total_sum") == 3 + 5  # the last is not computed on
        assert server.figure("iteration_tokens_total_bucket", le="1.0") == 5
        assert server.figure("iteration_tokens_total_bucket", le="8.0") == 6
        of_phase = partial(server.figure, "step_tokens_total")
        assert (of_phase(phase="prefill"), of_phase(phase="decode")) == (3, 5)
        host = app.generator.host
        assert isinstance(host, EngineProcess) and host.pid is not None
        os.kill(host.pid, signal.SIGKILL)
        while not (host.deaths and app.ready):
            time.sleep(0.01)
        assert server.figure("iteration_tokens_total_count") == 6, "what was counted stays"
        assert server.ask("POST", "/v1/completions", body).status_code == 200
        assert server.figure("iteration_tokens_total_count") == 12
        assert (of_phase(phase="prefill"), of_phase(phase="decode")) == (6, 10)


def test_sub_stages_guesses_and_hot_clusters_are_those_of_workflows(
    open_hot: Callable[..., App], services: PlainServices
) -> None:
    app = open_hot(without("speculate_retrieval"))  # no job hears of scouts that outlive it
    server = Server(app)
    assert server.figure("retrieval_substage_seconds_count") == 0
    steps = run_some(app, services)
    while not (app.flows.statistics.attempted and statistics(app).hits):  # copies take their time
        steps += run_some(app, services, 20)
    for device in ("cpu", "gpu"):
        count = server.figure("retrieval_substage_seconds_count", device=device)
        assert 0 < count <= sum(step.device == device for step in steps)
    found = statistics(app)
    ratio = server.figure("ivf_gpu_cache_hit_ratio", index="idx")
    assert ratio == found.hits / found.scanned > 0
    guesses = app.flows.statistics
    assert server.figure("speculation_accept_ratio") == guesses.accuracy
    for result in ("accepted", "rejected"):
        assert server.figure("speculations_total", result=result) == getattr(guesses, result)


DEPTHS = (("npu", 1), ("cpu", 8))


@contextmanager
def two_devices(path: Path) -> Iterator[App]:
    """An encoder whose accelerator holds one text; others go to the CPU."""
    with dovetail.load(path) as app:
        ((name, found),) = app.embeddings.encoders.items()
        specs = [QueueSpec(device, device != "cpu", (n,), (LINE,)) for device, n in DEPTHS]
        manager = QueueManager(specs, length_classes((512,), name), arrival="closed")
        instances = {"npu": [{name: Toy()}], "cpu": [{name: Toy()}]}
        service = EmbeddingService(instances, manager, slo=30.0)
        whole, found.service = found.service, service
        try:
            yield app
        finally:
            found.service = whole
            service.close()


def test_texts_that_spill_and_texts_that_are_refused_are_counted(
    artifacts: dict[str, Path],
) -> None:
    with two_devices(artifacts["encoder"]) as app:
        server = Server(app)
        assert server.figure("embed_spill_total", device="cpu") == 0
        assert server.ask("POST", "/v1/embeddings", {"input": ["a", "b", "c"]}).status_code == 200
        assert server.figure("embed_spill_total", device="cpu") == 2
        assert server.figure("embed_spill_total", device="npu") == 0
        refused = server.ask("POST", "/v1/embeddings", {"input": ["a"] * 10})
        assert refused.json()["error"]["code"] == "request_too_large"
        reasons = "admission_rejections_total"
        assert server.figure(reasons, reason="request_too_large") == 1
        assert server.figure("embed_spill_total", device="cpu") == 2  # none of them was taken


def test_refusals_have_a_reason(make_artifact: Callable[..., Path]) -> None:
    few = SchedulerSettings(offload="off", max_waiting=1)
    with load(make_artifact(kv_blocks=8), settings=few) as app:
        server = Server(app)
        with patch.object(app.engine, "step", lambda: []):  # one waits meanwhile
            job = app.submit([1], max_tokens=1)
            assert server.ask("POST", "/v1/completions", {"prompt": [2]}).status_code == 429
        job.result()
        assert server.figure("admission_rejections_total", reason="queue_full") == 1
        for body, reason in (
            ({"prompt": [1] * 250}, "request_too_large"),
            ({"prompt": [1] * 256}, "context_length_exceeded"),
        ):
            assert server.ask("POST", "/v1/completions", body).status_code in (400, 429)
            assert server.figure("admission_rejections_total", reason=reason) == 1
        assert server.ask("POST", "/v1/completions", {"prompt": []}).status_code == 400
        assert server.figure("admission_rejections_total") == 3


def test_a_run_is_refused_while_as_many_wait_as_may(open_app: Callable[..., App]) -> None:
    """The one that waits is at a function, which ends when the other has been refused."""
    app, begun, gate = open_app(FlowSettings(max_waiting=1)), Event(), Event()
    g = RAGraph("gated")
    g.add_function("f", lambda state: begun.set() or gate.wait(120), "n")
    g.add_generation("say", prompt="w1 w2", max_tokens=3)  # runs without one wait for no engine
    for source, target in ((START, "f"), ("f", "say"), ("say", END)):
        g.add_edge(source, target)
    model = ServedModel("toy", app)
    server = Server(app, {"gated": ServedWorkflow("gated", model, g.workflow())})
    first = app.submit_workflow(g, {"input": "x"})
    assert begun.wait(120)
    for stream in (False, True):
        body = {"inputs": {"input": "x"}, "stream": stream}
        refused = server.ask("POST", "/v1/workflows/gated/runs", body)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "busy"
        assert int(refused.headers["retry-after"]) >= 1
    assert server.figure("admission_rejections_total", reason="queue_full") == 2
    gate.set()
    assert first.result(120).outputs["n"] is True
    assert server.ask("POST", "/v1/workflows/gated/runs", body).status_code == 200


class Ending(ServerContext):
    """A server whose recording ends, on another thread, as soon as somebody has looked at it."""

    timeline = property(  # type: ignore[assignment]
        lambda self: self.__dict__.pop("told", None),
        lambda self, value: self.__dict__.update(told=value),
    )


@pytest.mark.parametrize("path", ["/version", "/v1/completions"])
def test_a_request_outlives_a_recording(make_artifact: Callable[..., Path], path: str) -> None:
    with load(make_artifact()) as app:
        server = Server(app)
        context = Ending(Models([ServedModel("toy", app)]), ServeSettings(log_requests=False))
        context.timeline = ServerTimeline(Timeline(), ServedModel("toy", app))
        server._asgi = make_app(context)
        body = {"prompt": [1, 2, 3], "max_tokens": 2}
        reply = server.ask("POST", path, body) if path != "/version" else server.ask("GET", path)
    assert reply.status_code == 200, reply.text
