"""Serving as NEO's acceptance test has it (B6.10).

Prompts, ends, refusals, clients that leave, and lengths at Poisson arrivals with their latency per
token.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from starlette.types import Message

from dovetail.runtime.app import App, load
from dovetail.runtime.server.app import make_app
from dovetail.runtime.server.context import ServerContext, ServeSettings
from dovetail.runtime.server.models import Models, ServedModel
from tests.dovetail.commands import dovetail
from tests.runtime.schedule.integrity import check_integrity
from tests.runtime.server.live import Live, http
from tests.runtime.server.openai_calls import PROMPT
from tests.topology.corpus import corpus_file


def test_texts_and_ids_streams_ends_and_refusals(
    live: Live, client: openai.OpenAI, offline: App
) -> None:
    assert offline.tokenizer is not None
    ids = offline.tokenizer.encode(PROMPT)
    (wanted,) = offline.generate([PROMPT], max_tokens=60)
    for prompt in (PROMPT, ids):
        asked: Any = {"model": "llama", "prompt": prompt, "max_tokens": 60}
        whole = client.completions.create(**asked)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (wanted.text, "stop")
        chunks = list(client.completions.create(**asked, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == wanted.text
        cut = client.completions.create(**{**asked, "max_tokens": 3})
        assert cut.choices[0].finish_reason == "length"
        assert cut.usage is not None and cut.usage.completion_tokens == 3
    for prompt in ("Zorvia " * 1100, [5] * 1024):
        reply = http.post(f"{live.v1}/completions", json={"prompt": prompt})
        assert reply.status_code == 400 and live.process.poll() is None
    assert client.completions.create(model="llama", prompt=PROMPT, max_tokens=1).choices


def test_a_client_that_leaves_frees_its_blocks_within_an_iteration(
    make_artifact: Callable[..., Path],
) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 4}
    steps: list[int] = []
    with load(make_artifact()) as app:
        server = ServerContext(Models([ServedModel("toy", app)]), ServeSettings(log_requests=False))
        scheduler, drop = app.engine.scheduler, app.generator.drop

        def dropped(jobs: Any) -> Any:
            steps.append(scheduler.plans)
            future = drop(jobs)
            if future is not None:  # called between two steps
                future.add_done_callback(lambda _: steps.append(scheduler.plans))
            return future

        app.generator.drop = dropped  # type: ignore[method-assign]
        while len(steps) < 2:  # a busy client may leave after the end
            steps.clear()
            asyncio.run(leave_early(make_app(server), body))
        assert steps[1] - steps[0] <= 1
        assert (
            not scheduler.requests
            and app.engine.scheduler.pool.free_blocks == app.engine.scheduler.pool.n_blocks
        )
        check_integrity(app.engine.scheduler.pool)


async def leave_early(asgi: Any, body: object) -> None:
    """Send a request and hang up when its first piece comes."""
    leaving, sent = asyncio.Event(), iter([msgspec.json.encode(body)])

    async def receive() -> Message:
        if (content := next(sent, None)) is not None:
            return {"type": "http.request", "body": content, "more_body": False}
        await leaving.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            leaving.set()

    await asgi(make_scope(), receive, send)


def make_scope() -> dict[str, Any]:
    """A POST to /v1/completions, as a server hands it over."""
    request = httpx.Request("POST", "http://x/v1/completions")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "headers": [(b"host", b"x"), (b"content-type", b"application/json")],
        "scheme": "http",
        "path": request.url.path,
        "raw_path": request.url.raw_path,
        "query_string": b"",
        "server": ("x", 80),
        "client": ("y", 1),
    }


def replay(live: Live, lengths: Path, rate: float) -> dict[str, Any]:
    files = ("--dataset-name", "azure", "--dataset-path", lengths)
    flags = ("--num-prompts", 100, "--request-rate", rate, "--ignore-eos", "--json")
    done = dovetail("bench", "serve", "--base-url", live.url, "--model", "llama", *files, *flags)
    assert done.code == 0, done.err
    result: dict[str, Any] = msgspec.json.decode(done.out)
    return result


def test_a_hundred_requests_at_poisson_arrivals(live: Live, tmp_path: Path) -> None:
    """Lengths a tenth of those of NEO's OSC set: means 33 and 4.5 tokens."""
    rng, file = random.Random(0), tmp_path / "lengths.csv"
    rows = [(rng.randint(20, 46), rng.randint(2, 7)) for _ in range(100)]
    lines = [f"{read},{written}" for read, written in rows]
    file.write_text("\n".join(["input_tokens,output_tokens", *lines]))
    found = replay(live, file, 100.0)
    assert (found["completed"], found["failed"]) == (100, 0), found["errors"]
    assert found["total_output_tokens"] == sum(written for _, written in rows)
    assert 0 < found["mean_per_token_ms"] < found["mean_e2el_ms"]


@pytest.mark.long
def test_a_hundred_requests_of_the_published_lengths(live: Live) -> None:
    found = replay(live, corpus_file("traces/osc_summarize_lengths_neo.csv"), 4.0)
    assert (found["completed"], found["failed"]) == (100, 0), found["errors"]
    assert found["mean_per_token_ms"] > 0
