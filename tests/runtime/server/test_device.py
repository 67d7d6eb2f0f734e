"""A server whose engine computes on a torch device beside the CPU: answers, metrics, deaths."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

pytest.importorskip("faiss")
pytest.importorskip("torch")

import dovetail
from tests.runtime.server.live import Live, http, serving
from tests.runtime.server.test_figures import Server
from tests.runtime.server.test_workers import ENGINE, worker

PROMPTS = [f"Question: What is the capital of {name}?\nAnswer:" for name in ("Zorvia", "Ossa")]
PROMPTS += ["Once upon a time " * n for n in (1, 2, 8)]
ASKED: dict[str, Any] = {"max_tokens": 24, "temperature": 0}
CONTEXT, BLOCKS = 300, 3


@pytest.fixture(scope="module")
def beside(artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server on torch's CPU device, whose pool of KV holds short requests alone."""
    flags = ("--device", "torch:cpu", "--offload", "auto", "--gpu-blocks", BLOCKS)
    flags += ("--max-num-seqs", 4)
    env = {"DOVETAIL_SERVE_MAX_MODEL_LEN": str(CONTEXT)}
    log = tmp_path_factory.mktemp("log") / "serve.log"
    with serving(artifacts["llama"], *flags, log=log, env=env) as server:
        yield server


@pytest.fixture(scope="module")
def wanted(artifacts: dict[str, Path]) -> list[str]:
    """What the CPU alone answers."""
    with dovetail.load(artifacts["llama"], deterministic=True) as app:
        return [str(found.text) for found in app.generate(PROMPTS, **ASKED)]


def figure(server: Live, name: str, label: str = "") -> float:
    text = http.get(f"{server.url}/metrics").text
    found = re.findall(rf"^dovetail:{name}{{.*{label}.*}} (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def test_streams_are_those_of_the_cpu_and_what_does_not_fit_the_device_is_offloaded(
    beside: Live, wanted: list[str]
) -> None:
    before = figure(beside, "offloaded_requests_total")
    with (
        openai.OpenAI(base_url=beside.v1, api_key="unused", max_retries=0, timeout=200) as client,
        ThreadPoolExecutor(len(PROMPTS)) as threads,
    ):

        def stream(prompt: str) -> str:
            found = client.completions.create(model="llama", prompt=prompt, stream=True, **ASKED)
            return "".join(chunk.choices[0].text for chunk in found if chunk.choices)

        assert list(threads.map(stream, PROMPTS)) == wanted
    assert figure(beside, "offloaded_requests_total") > before
    for name in ("cpu_attn_seconds_total", "pipeline_bubble_seconds_total"):
        assert figure(beside, name) > 0


def test_the_context_is_what_the_server_was_told(beside: Live) -> None:
    (model,) = http.get(f"{beside.v1}/models").json()["data"]
    assert model["max_model_len"] == CONTEXT
    reply = http.post(f"{beside.v1}/completions", json={"prompt": [5] * CONTEXT, "max_tokens": 2})
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_the_process_that_holds_the_device_comes_back_when_it_is_killed(
    beside: Live, wanted: list[str]
) -> None:
    """In the middle of a stream that the CPU attends for, of which no word is heard any more."""
    holder = worker(beside, ENGINE)
    assert holder is not None
    assert holds_torch(holder) and not holds_torch(psutil.Process(beside.process.pid))
    cut_stream(beside)
    reply = http.post(f"{beside.v1}/completions", json={"prompt": PROMPTS[-1], **ASKED})
    assert reply.json()["choices"][0]["text"] == wanted[-1]
    found = worker(beside, ENGINE)
    assert found is not None and found.pid != holder.pid and holds_torch(found)
    assert figure(beside, "offloaded_requests_total") > 0


def cut_stream(server: Live) -> None:
    """Kill the engine's process once a stream of thousands of steps has begun; its end says so."""
    body = {"prompt": PROMPTS[-1:] * 8, "n": 8, **ASKED, "max_tokens": 200}
    body |= {"ignore_eos": True, "stream": True}
    with http.stream("POST", f"{server.v1}/completions", json=body) as reply:
        lines = filter(None, reply.iter_lines())
        next(lines)
        holder = worker(server, ENGINE)
        assert holder is not None
        holder.kill()
        *_, told, _ = lines
    assert json.loads(told[6:])["error"]["code"] == "engine_error"


def holds_torch(process: psutil.Process) -> bool:
    return any("libtorch" in file.path for file in process.memory_maps())


def test_a_request_that_outgrows_the_devices_pool_goes_to_the_cpu(
    artifacts: dict[str, Path],
) -> None:
    body = {"prompt": [7] * 40, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    with dovetail.load(artifacts["llama"], deterministic=True) as app:
        (alone,) = app.generate([body["prompt"]], max_tokens=60, ignore_eos=True)
    with dovetail.load(artifacts["llama"], device="torch:cpu", gpu_blocks=4, apart=True) as app:
        server = Server(app)
        assert server.figure("swapped_requests_total") == 0
        reply = server.ask("POST", "/v1/completions", body).json()
        assert reply["choices"][0]["text"] == alone.text
        assert server.figure("swapped_requests_total", device="cpu") == 1
        assert server.figure("offloaded_requests_total") == 1
        assert server.figure("num_preemptions_total") == 0


def test_without_offloading_requests_give_way_to_each_other(artifacts: dict[str, Path]) -> None:
    body = {"prompt": [[7] * 30, [8] * 30], "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    with dovetail.load(artifacts["llama"], deterministic=True) as app:
        alone = app.generate(body["prompt"], max_tokens=40, ignore_eos=True)
    with dovetail.load(
        artifacts["llama"], device="torch:cpu", offload="off", gpu_blocks=5, apart=True
    ) as app:
        server = Server(app)
        reply = server.ask("POST", "/v1/completions", body).json()
        assert [choice["text"] for choice in reply["choices"]] == [found.text for found in alone]
        assert server.figure("num_preemptions_total") >= 1
        for name in ("swapped_requests_total", "offloaded_requests_total"):
            assert server.figure(name) == 0
