"""Processes behind the port that are killed under load, and a server that is told to go.

Clients go on until they are told to stop; what is waited for are their answers, deaths and births.
"""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil
import pytest

pytest.importorskip("faiss")

from dovetail.compiler.pipeline import compile_model
from dovetail.runtime.app import App
from dovetail.tiny_world import LLAMA
from tests.runtime.server.live import Live, http, serving
from tests.runtime.server.test_workflow_endpoint import QUESTION, index

__all__ = ["index"]  # a fixture

ENGINE, ENCODER, INDEX = "hosting.worker", "embed.process", "retrieval.worker"
TEMPLATES = "template_worker"
LOST = "lost"
PROMPT = "Question: What is the capital of Zorvia?\nAnswer:"
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
LONG = {**BODY, "max_tokens": 900, "stream": True}
TEXT = "Zorvia lies on the river Ossa."


def worker(server: Live, kind: str) -> psutil.Process | None:
    for child in psutil.Process(server.process.pid).children():
        try:
            if any(kind in word for word in child.cmdline()):
                return child
        except psutil.NoSuchProcess:
            continue
    return None


def read_stream(client: httpx.Client, url: str, body: dict[str, Any]) -> str:
    """Return the text of a stream, or LOST where the engine's process died in it."""
    text, last = "", ""
    with client.stream("POST", f"{url}/completions", json={**body, "stream": True}) as reply:
        if reply.status_code != 200:
            reply.read()
            return lost(reply)
        for line in filter(None, reply.iter_lines()):
            chunk = None if line == "data: [DONE]" else msgspec.json.decode(line[6:])
            if chunk and "error" in chunk:
                assert chunk["error"]["code"] == "engine_error"
                return LOST
            elif chunk:
                text += chunk["choices"][0]["text"]
            last = line
    assert last == "data: [DONE]"
    return text


def lost(reply: httpx.Response) -> str:
    """Return LOST where a reply says that the engine's process died."""
    error = reply.json()["error"]
    assert reply.status_code == 500 and error["code"] == "engine_error", error
    assert "killed by signal 9" in error["message"]
    assert reply.headers["x-should-retry"] == "true"
    return LOST


def generate(client: httpx.Client, url: str) -> str:
    reply = client.post(f"{url}/completions", json=BODY)
    return reply.json()["choices"][0]["text"] if reply.status_code == 200 else lost(reply)


def embed(client: httpx.Client, url: str) -> str:
    reply = client.post(f"{url}/embeddings", json={"model": "encoder", "input": TEXT})
    assert reply.status_code == 200, reply.text
    return repr(np.round(reply.json()["data"][0]["embedding"], 4).tolist())


def run_workflow(client: httpx.Client, url: str) -> str:
    body = {"inputs": {"input": QUESTION}}
    reply = client.post(f"{url}/workflows/one-shot/runs", json=body)
    return str(reply.json()["outputs"]) if reply.status_code == 200 else lost(reply)


CLIENTS: dict[str, Callable[[httpx.Client, str], str]] = {
    "stream": lambda client, url: read_stream(client, url, BODY),
    "generate": generate,
    "embed": embed,
    "workflow": run_workflow,
}


class Load:
    """A client of each kind that asks again and again, and what it was answered."""

    def __init__(self, url: str) -> None:
        self._url, self._end = url, threading.Event()
        self.news = threading.Condition()
        self.answers: dict[str, list[str]] = {kind: [] for kind in CLIENTS}
        self.faults: list[Exception] = []
        self._threads = [threading.Thread(target=self._ask, args=(kind,)) for kind in CLIENTS]

    def _ask(self, kind: str) -> None:
        with httpx.Client(timeout=200) as client:
            while not self._end.is_set():
                try:
                    answer = CLIENTS[kind](client, self._url)
                except Exception as error:
                    self.faults.append(error)
                    answer = repr(error)
                with self.news:
                    self.answers[kind].append(answer)
                    self.news.notify_all()

    def wait_for_more(self, wanted: dict[str, str]) -> None:
        """Return once each client has been answered right twice more."""
        begun = {kind: len(found) for kind, found in self.answers.items()}

        def served() -> bool:
            right = (self.answers[kind][n:].count(wanted[kind]) for kind, n in begun.items())
            return bool(self.faults) or all(count >= 2 for count in right)

        with self.news:
            self.news.wait_for(served)
        assert not self.faults

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()


@contextmanager
def whole_server(artifacts: dict[str, Path], index: Path, log: Path) -> Iterator[Live]:
    """A server with a worker of each kind."""
    flags = ("--workflow", "one-shot", "--index", index, "--deterministic", "--no-log-requests")
    with serving(*artifacts.values(), *flags, log=log) as server:
        yield server


def named_memory(process: psutil.Process) -> list[str]:
    """Return the files in /dev/shm that a process maps: they would outlive it."""
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    return [line for line in maps.splitlines() if "/dev/shm/" in line]


def test_what_is_killed_comes_back_and_others_do_not_notice(
    artifacts: dict[str, Path], index: Path, offline: App, tmp_path: Path
) -> None:
    with whole_server(artifacts, index, tmp_path / "log") as server:
        with httpx.Client(timeout=200) as client:
            wanted = {kind: ask(client, server.v1) for kind, ask in CLIENTS.items()}
        assert wanted["stream"] == wanted["generate"]
        found = offline.generate(PROMPT, max_tokens=40, ignore_eos=True)[0].text
        assert wanted["generate"] == found and LOST not in wanted.values()
        with Load(server.v1) as load:
            for kind in (ENGINE, ENCODER, INDEX):
                load.wait_for_more(wanted)
                victim = worker(server, kind)
                assert victim is not None and not named_memory(victim)
                victim.kill()
                psutil.wait_procs([victim])
                load.wait_for_more(wanted)
                successor = worker(server, kind)
                assert successor is not None and successor.pid != victim.pid
                while (health := http.get(f"{server.url}/health")).status_code == 503:
                    assert health.json()["status"] == "restarting"
                assert health.json() == {"status": "ok"}
        for kind, answers in load.answers.items():
            found = {wanted[kind]} if kind == "embed" else {wanted[kind], LOST}
            assert set(answers) <= found
    assert "Traceback" not in (tmp_path / "log").read_text()


def kill_in_stream(server: Live) -> dict[str, Any]:
    """Kill the engine when a stream has begun; return the last event of that."""
    victim = worker(server, ENGINE)
    with http.stream("POST", f"{server.v1}/completions", json=LONG) as reply:
        lines = filter(None, reply.iter_lines())
        next(lines)
        if victim is not None:
            victim.kill()
        *_, last, done = lines
    assert done == "data: [DONE]"
    found: dict[str, Any] = msgspec.json.decode(last[6:])
    return found


def kill_in_events(server: Live) -> list[dict[str, Any]]:
    """Kill the engine when a stream of `/v1/responses` has begun; return all events."""
    victim = worker(server, ENGINE)
    body = {"input": "a", "stream": True, "temperature": 2}  # which goes on and on
    with http.stream("POST", f"{server.v1}/responses", json=body) as reply:
        lines = reply.iter_lines()
        told = [next(lines), next(lines)]
        if victim is not None:
            victim.kill()
        told += lines
    return [msgspec.json.decode(line[6:]) for line in told if line.startswith("data: ")]


def test_an_engine_that_is_killed_ends_its_streams_and_health_tells_of_it(
    artifacts: dict[str, Path], tmp_path: Path
) -> None:
    """Tried until it was killed before all was written, then until a successor was caught starting.

    That one is stopped, and requests wait for it.
    """
    with serving(artifacts["llama"], log=tmp_path / "log") as server, httpx.Client() as client:
        found: dict[str, Any] = {}
        while "error" not in found:
            found = kill_in_stream(server)
        events: list[dict[str, Any]] = []
        while not events or events[-1]["type"] != "error":
            events = kill_in_events(server)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert found["error"]["type"] == "server_error"
        assert found["error"]["code"] == "engine_error"
        assert "killed by signal 9" in found["error"]["message"]
        asked = f"{server.v1}/completions"
        assert http.post(asked, json=BODY).status_code == 200
        victim = worker(server, ENGINE)
        while http.get(f"{server.url}/health/ready").status_code == 200:
            assert victim is not None
            victim.kill()
            psutil.wait_procs([victim])
            while (victim := worker(server, ENGINE)) is None:
                pass
            victim.suspend()
        health = http.get(f"{server.url}/health").json()
        assert health["status"] == "restarting" and "killed by signal 9" in health["reason"]
        assert http.get(f"{server.url}/health/live").status_code == 200
        with pytest.raises(httpx.ReadTimeout):
            client.post(asked, json=BODY, timeout=0.2)
        assert victim is not None
        victim.resume()
        assert http.post(asked, json=BODY).status_code == 200
        assert http.get(f"{server.url}/health/ready").json() == {"status": "ok"}


def test_an_artifact_may_be_replaced_while_it_is_served(
    artifacts: dict[str, Path], tmp_path: Path
) -> None:
    """What is mapped is served on. An engine that is lost then comes back with the same model only.

    The other one has the same tokens and other weights.
    """
    served, log = shutil.copytree(artifacts["llama"], tmp_path / "llama.dove"), tmp_path / "log"
    other = shutil.copytree(LLAMA, tmp_path / "other")
    (other / "config.json").write_text(
        (other / "config.json").read_text().replace("10000.0", "20000.0")
    )

    def kill() -> None:
        victim = worker(server, ENGINE)
        assert victim is not None
        victim.kill()
        psutil.wait_procs([victim])

    with serving(served, "--deterministic", log=log) as server, httpx.Client(timeout=200) as client:
        wanted = generate(client, server.v1)
        for model in (LLAMA, other):
            compile_model(model, output=served, effort="none", threads=1, weight_dtype="f32")
            assert generate(client, server.v1) == wanted
            kill()
            if model == LLAMA:
                while (found := client.post(f"{server.v1}/completions", json=BODY)).is_error:
                    assert found.json()["error"]["code"] == "engine_error"
                assert found.json()["choices"][0]["text"] == wanted
        said = ""
        while "killed by signal" in (said or "killed by signal"):
            reply = client.post(f"{server.v1}/completions", json=BODY)
            assert reply.status_code == 500
            said = reply.json()["error"]["message"]
        assert "was replaced by another model while it was served" in said
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=pytest.mark.long) for number in (signal.SIGKILL, signal.SIGINT)]
    + [signal.SIGTERM],
)
def test_nothing_is_left_of_a_server_that_goes(
    artifacts: dict[str, Path], index: Path, tmp_path: Path, number: int
) -> None:
    """With a stream under way: a signal lets it end, but for SIGKILL, which none of them sees."""
    with whole_server(artifacts, index, tmp_path / "log") as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) == 4
        with http.stream(
            "POST", f"{server.v1}/completions", json={**LONG, "max_tokens": 200}
        ) as reply:
            lines = reply.iter_lines()
            next(lines)
            if number == signal.SIGKILL:
                for child in children:
                    child.suspend()
            server.process.send_signal(number)
            if number == signal.SIGKILL:
                with pytest.raises(httpx.HTTPError):
                    list(lines)
            else:
                assert list(filter(None, lines))[-1] == "data: [DONE]"
        assert server.process.wait(60) == (-number if number == signal.SIGKILL else 0)
        assert psutil.wait_procs(children, timeout=60)[1] == []
