"""A server's life: settings from three places, keys, limits, BUSY, clients that leave, draining."""

from __future__ import annotations

import re
import shutil
import signal
import ssl
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from dovetail.tiny_world import LLAMA
from tests.runtime.server.live import Live, http, serving

LONG = {"prompt": [5] * 500, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
"""Holds more than half of the small server's KV, until its client leaves."""
NEXT = {"prompt": [6] * 530, "max_tokens": 2, "temperature": 0}
"""Has no room beside it."""
KEY = {"authorization": "Bearer second"}


@pytest.fixture(scope="module")
def guarded(artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A small server: settings from a file, from the environment and from flags."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "keys").write_text("first\nsecond\n")
    config = folder / "serve.yaml"
    config.write_text(f"max-queue: 1\nkv_blocks: 60\napi-key-file: {folder / 'keys'}\nport: 1\n")
    env = {"DOVETAIL_SERVE_CORS_ALLOW_ORIGIN": "https://page.example"}
    flags = ("--config", config, "--max-body-bytes", 20_000, "--ping-seconds", 0.2)
    with serving(artifacts["llama"], *flags, log=folder / "log", env=env) as server:
        yield server


def gauge(server: Live, name: str) -> float:
    """Return a figure of `/metrics`, summed over its labels."""
    text = http.get(f"{server.url}/metrics").text
    return sum(map(float, re.findall(rf"^dovetail:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))


def test_a_key_is_needed_but_for_health(guarded: Live) -> None:
    assert http.get(f"{guarded.url}/health").status_code == 200
    for headers in ({}, {"authorization": "Bearer third"}, {"authorization": "Bearer"}):
        reply = http.get(f"{guarded.v1}/models", headers=headers)
        assert reply.status_code == 401
        assert reply.json()["error"]["type"] == "authentication_error"
    assert http.get(f"{guarded.v1}/models", headers=KEY).status_code == 200


def test_pages_of_the_origin_may_call(guarded: Live) -> None:
    asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
    found = http.options(f"{guarded.v1}/completions", headers=asked)
    assert found.headers["access-control-allow-origin"] == "https://page.example"
    asked["origin"] = "https://other.example"
    assert http.options(f"{guarded.v1}/completions", headers=asked).status_code == 400


@pytest.mark.parametrize("known", [True, False], ids=["length", "chunked"])
def test_long_bodies_are_refused(guarded: Live, known: bool) -> None:
    body = b'{"prompt": "' + b"a" * 30_000 + b'"}'
    content: Any = body if known else iter([body])
    reply = http.post(f"{guarded.v1}/completions", content=content, headers=KEY)
    assert reply.status_code == 413 and reply.json()["error"]["code"] == "body_too_large"


def test_what_can_never_fit_is_refused_for_good(guarded: Live) -> None:
    body = {**LONG, "max_tokens": 1000}
    reply = http.post(f"{guarded.v1}/completions", json=body, headers=KEY)
    assert reply.status_code == 400 and reply.headers["x-should-retry"] == "false"
    assert reply.json()["error"]["code"] == "request_too_large"


def test_busy_is_429_with_a_time_to_come_back(guarded: Live) -> None:
    url = f"{guarded.v1}/completions"
    with (
        ThreadPoolExecutor(1) as threads,
        http.stream("POST", url, json={**LONG, "stream": True}, headers=KEY) as first,
    ):
        next(first.iter_lines())
        second = threads.submit(http.post, url, json=NEXT, headers=KEY)
        while gauge(guarded, "num_requests_waiting") < 1:
            assert not second.done()
        third = http.post(url, json=NEXT, headers=KEY)
        first.close()
        assert second.result().status_code == 200
    assert third.status_code == 429 and third.json()["error"]["type"] == "rate_limit_error"
    assert int(third.headers["retry-after"]) >= 1 and float(third.headers["retry-after-ms"]) > 0
    assert third.headers["x-should-retry"] == "true"
    assert gauge(guarded, "admission_rejections_total") >= 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(guarded: Live, stream: bool) -> None:
    before = gauge(guarded, "request_success_total")
    url, body = f"{guarded.v1}/completions", {**LONG, "n": 2, "stream": stream}
    with httpx.Client(timeout=200) as client, ThreadPoolExecutor(1) as threads:
        if stream:
            with client.stream("POST", url, json=body, headers=KEY) as reply:
                next(reply.iter_lines())
        else:
            sent = threads.submit(client.post, url, json=body, headers=KEY)
            while (
                gauge(guarded, "num_requests_running") + gauge(guarded, "num_requests_waiting") == 0
            ):
                assert not sent.done()
            client.close()
            assert sent.exception() is not None
    while gauge(guarded, "request_success_total") < before + 2:
        pass
    assert gauge(guarded, "num_requests_running") == gauge(guarded, "num_requests_waiting") == 0


def test_silence_is_filled_with_comments(guarded: Live) -> None:
    url = f"{guarded.v1}/completions"
    body = {**LONG, "stream": True}
    with (
        http.stream("POST", url, json=body, headers=KEY) as first,
        http.stream("POST", url, json={**NEXT, "stream": True}, headers=KEY) as second,
    ):
        assert next(second.iter_lines()) == ": ping"
        assert first.status_code == second.status_code == 200


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_what_runs_ends_before_the_server_does(
    artifacts: dict[str, Path], tmp_path: Path, number: int
) -> None:
    body = {**LONG, "prompt": "Question:", "max_tokens": 100, "stream": True}
    with serving(artifacts["llama"], log=tmp_path / "log") as server:
        with http.stream("POST", f"{server.v1}/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            server.process.send_signal(number)
            found = [line for line in lines if line]
        assert found[-1] == "data: [DONE]" and '"finish_reason":"length"' in found[-2]
        assert server.process.wait(60) == 0
    log = (tmp_path / "log").read_text()
    assert "waiting for those under way" in log and "Traceback" not in log


def test_a_model_is_compiled_once_and_served(tmp_path: Path) -> None:
    env = {"DOVETAIL_CACHE": str(tmp_path / "cache"), "DOVETAIL_SERVE_KV_DTYPE": "bf16"}
    for i, name in enumerate(("one", "two")):
        log = tmp_path / name
        with serving(LLAMA, "--served-model-name", name, log=log, env=env) as server:
            body = {"model": name, "prompt": "Question:", "max_tokens": 2}
            assert http.post(f"{server.v1}/completions", json=body).status_code == 200
        assert ("compiling" in log.read_text()) == (i == 0)


@pytest.mark.long
def test_tls_files_make_https(artifacts: dict[str, Path], tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificate of this test")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    files = [
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    subprocess.run([*make, *files], check=True, capture_output=True)
    flags = ("--ssl-keyfile", key, "--ssl-certfile", certificate)
    trust = ssl.create_default_context(cafile=str(certificate))
    with serving(artifacts["encoder"], *flags, log=tmp_path / "log") as server:
        assert server.url.startswith("https://")
        assert httpx.get(f"{server.url}/health", verify=trust, timeout=200).json() == {
            "status": "ok"
        }
