"""Traffic tells of the first and last request; models are exchanged under requests that go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.ir.errors import RequestError
from dovetail.runtime.app import load
from dovetail.runtime.server.app import make_app
from dovetail.runtime.server.context import ServerContext, ServeSettings, Traffic
from dovetail.runtime.server.models import Models, ServedModel


class Told:
    """A watcher that keeps what it hears."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def busy(self) -> None:
        self.said.append("busy")

    def idle(self) -> None:
        self.said.append("idle")


@given(st.lists(st.sampled_from(["begin", "end"]), max_size=30))
def test_the_first_request_and_the_last_are_told_of(steps: list[str]) -> None:
    traffic, told = Traffic(), Told()
    traffic.watch(told.busy, told.idle)
    under_way: list[int] = []
    for step in steps:
        if step == "begin":
            under_way.append(traffic.begin())
        elif under_way:
            traffic.end(under_way.pop(0))
        assert traffic.under_way() == set(under_way)
        assert (told.said[-1] == "busy") == bool(under_way)
    assert all(a != b for a, b in zip(told.said, told.said[1:], strict=False))


def test_requests_that_come_later_are_not_waited_for() -> None:
    traffic = Traffic()
    first, second = traffic.begin(), traffic.begin()
    with ThreadPoolExecutor(1) as pool:
        waited = pool.submit(traffic.wait_for, traffic.under_way())
        traffic.begin()
        traffic.end(first)
        assert not waited.done()
        traffic.end(second)
        waited.result()
    traffic.wait_for({first, second})


def test_a_request_under_way_ends_on_the_app_that_it_began_on(
    make_artifact: Callable[..., Path],
) -> None:
    old, new = load(make_artifact()), load(make_artifact(name="new.dove"))
    models = Models([ServedModel("toy", old)])
    server = ServerContext(models, ServeSettings(log_requests=False))
    asgi: Any = make_app(server)
    body = {"prompt": [1, 2, 3], "max_tokens": 100, "ignore_eos": True, "n": 8}

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(asgi)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            first = asyncio.ensure_future(client.post("/v1/completions", json=body))
            while not (old.engine.scheduler.requests or first.done()):
                await asyncio.sleep(0)
            models.take(models.exchange("toy", new))
            earlier = server.traffic.under_way()
            second = await client.post("/v1/completions", json=body)
            found = [await first, second]
            assert server.traffic.under_way().isdisjoint(earlier)
            old.close()
            found.append(await client.post("/v1/completions", json=body))
            return found

    found = asyncio.run(run())
    assert [reply.status_code for reply in found] == [200] * 3
    assert {reply.json()["usage"]["completion_tokens"] for reply in found} == {800}
    with pytest.raises(RequestError):
        old.generate([[1]])
    new.close()
