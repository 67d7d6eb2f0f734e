"""A server's life: settings from three places, keys, limits, BUSY, clients that leave, draining."""

from __future__ import annotations

import re
import resource
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from dovetail.ir.errors import SpecError
from dovetail.runtime.server.context import ServeSettings
from dovetail.runtime.server.models import Models
from dovetail.runtime.server.run import serve
from dovetail.tiny_world import LLAMA
from tests.caches import link_cache
from tests.dovetail.commands import dovetail
from tests.runtime.server.live import Live, connect, http, serving

LONG = {"prompt": [5] * 420, "max_tokens": 530, "ignore_eos": True, "temperature": 0}
"""All that the KV of the small server holds."""
HELLO = [{"role": "user", "content": "Hello"}]
KEY = {"authorization": "Bearer second"}
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer second\r\n"


@pytest.fixture(scope="module")
def guarded(artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A small server: settings from a file, from the environment and from flags."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "keys").write_text("first\nsecond\n")
    config = folder / "serve.yaml"
    text = f"max-queue: 1\nkv_blocks: 60\napi-key-file: {folder / 'keys'}\nport: 1\ntune: off\n"
    config.write_text(
        f"{text}device: cpu\napi-key: third\nlog-requests: false\nmodels: {artifacts['llama']}\n"
    )
    env = {"DOVETAIL_SERVE_CORS_ALLOW_ORIGIN": "https://page.example"}
    flags = ("--config", config, "--max-body-bytes", 20_000, "--body-seconds", 2)
    with serving(*flags, log=folder / "log", env=env) as server:
        yield server


def gauge(server: Live, name: str) -> float:
    """Return a figure of `/metrics`, summed over its labels."""
    text = http.get(f"{server.url}/metrics").text
    return sum(map(float, re.findall(rf"^dovetail:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))


def figure(server: Live, name: str) -> float:
    """Return one figure of `/metrics` by its name and labels, 0 where it is not there yet."""
    lines = http.get(f"{server.url}/metrics").text.splitlines()
    found = (line for line in lines if line.startswith(f"dovetail:{name} "))
    return float(next(found, "0").split()[-1])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot: 8000", "has no option prot"),
        ("port: [1, 2]", "port must be one value"),
        ("api-key: {a: b}", "api_key must be one value or a list"),
        ("- port", "must hold keys"),
        ("port: 'a", "is not a YAML file"),
        ("port: " + "[" * 3000, "is not a YAML file"),
    ],
)
def test_a_wrong_file_of_flags_is_told(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "serve.yaml").write_text(text)
    done = dovetail("serve", "--config", tmp_path / "serve.yaml")
    assert done.code == 2 and said in " ".join(re.sub("[│─╭╮╰╯]", " ", done.err).split())


@pytest.mark.parametrize("port", ["taken", -1, 65536])
def test_a_port_that_cannot_be_had_is_one_sentence(port: str | int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        number = other.getsockname()[1] if port == "taken" else int(port)
        said = rf"cannot listen on 127.0.0.1:{number} \([^()]*(\(\))?[^()]*\); choose another"
        with pytest.raises(SpecError, match=said):
            serve(Models([]), ServeSettings(port=number), workflows={}, ready=pytest.fail)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--ping-seconds", 0), "--ping-seconds must be more than 0, not 0.0"),
        (("--head-seconds", "nan"), "--head-seconds must be more than 0"),
        (("--max-body-bytes", -1), "--max-body-bytes must be more than 0"),
        (("--send-seconds", "inf"), "--send-seconds must be at most 86400, not inf"),
        (("--timeline", "nowhere/trace.json"), "no folder that can be written to"),
        (("--metrics-prefix", "a b"), "--metrics-prefix 'a b' cannot begin a metric's name"),
        (("--host", "\u00e9..b"), "cannot listen on \u00e9..b:0"),
        (("--served-model-name", ""), "a model needs a name"),
    ],
)
def test_what_would_only_harm_later_is_refused_at_once(
    artifacts: dict[str, Path], flags: tuple[object, ...], said: str
) -> None:
    done = dovetail("serve", artifacts["llama"], "--port", 0, *flags)
    assert done.code == 2 and said in done.err


def test_a_key_is_needed_but_for_health(guarded: Live) -> None:
    assert http.get(f"{guarded.url}/health").status_code == 200
    for headers in ({}, {"authorization": "Bearer fourth"}, {"authorization": "Bearer"}):
        reply = http.get(f"{guarded.v1}/models", headers=headers)
        assert reply.status_code == 401
        error = reply.json()["error"]
        assert error["type"] == "authentication_error" and "`x-api-key: KEY`" in error["message"]
    for headers in (KEY, {"authorization": "Bearer third"}, {"x-api-key": "first"}):
        assert http.get(f"{guarded.v1}/models", headers=headers).status_code == 200


def test_pages_of_the_origin_may_call(guarded: Live) -> None:
    asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
    found = http.options(f"{guarded.v1}/completions", headers=asked)
    assert found.headers["access-control-allow-origin"] == "https://page.example"
    asked["origin"] = "https://other.example"
    assert http.options(f"{guarded.v1}/completions", headers=asked).status_code == 400
    refused = http.get(f"{guarded.v1}/models", headers={"origin": "https://page.example"})
    shown = refused.headers["access-control-expose-headers"]
    assert {"x-request-id", "retry-after-ms", "x-should-retry"} <= set(shown.split(", "))


@pytest.mark.parametrize("known", [True, False], ids=["length", "chunked"])
def test_long_bodies_are_refused(guarded: Live, known: bool) -> None:
    body = b'{"prompt": "' + b"a" * 30_000 + b'"}'
    content: Any = body if known else iter([body])
    reply = http.post(f"{guarded.v1}/completions", content=content, headers=KEY)
    assert reply.status_code == 413 and reply.json()["error"]["code"] == "body_too_large"


def test_what_can_never_fit_is_refused_for_good(guarded: Live) -> None:
    body = {**LONG, "max_tokens": 560}  # the context has room for them, the pool does not
    reply = http.post(f"{guarded.v1}/completions", json=body, headers=KEY)
    assert reply.status_code == 400 and reply.headers["x-should-retry"] == "false"
    assert reply.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": HELLO, "max_tokens": 1000}),
        ("messages", {"messages": HELLO, "max_tokens": 1000}),
        ("responses", {"input": "Hello", "max_output_tokens": 1000}),
        ("completions", {"prompt": "Hello", "max_tokens": 1000}),
    ],
)
def test_what_is_refused_before_it_streams_gets_its_status(
    guarded: Live, path: str, body: dict[str, Any]
) -> None:
    reply = http.post(f"{guarded.v1}/{path}", json={**body, "stream": True}, headers=KEY)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["code"] == "request_too_large"


def test_busy_is_429_with_a_time_to_come_back(guarded: Live) -> None:
    """While one waits for memory; tried until it came before that one had it."""
    url, rejected = f"{guarded.v1}/completions", gauge(guarded, "admission_rejections_total")
    few, statuses = {"prompt": ["a", "b", "c"], "max_tokens": 2}, list[int]()
    with ThreadPoolExecutor(2) as pool:
        while True:
            others = [pool.submit(http.post, url, json=LONG, headers=KEY) for _ in range(2)]
            while not gauge(guarded, "num_requests_waiting") and not all(o.done() for o in others):
                pass
            reply = http.post(url, json=few, headers=KEY)
            statuses += [other.result().status_code for other in others]
            if reply.status_code != 200:
                break
    assert reply.status_code == 429 and reply.json()["error"]["type"] == "rate_limit_error"
    assert int(reply.headers["retry-after"]) >= 1 and float(reply.headers["retry-after-ms"]) > 0
    assert reply.headers["x-should-retry"] == "true"
    assert set(statuses) <= {200, 429}  # of two that come at once one may find the other waiting
    found = gauge(guarded, "admission_rejections_total")
    assert found == rejected + 1 + statuses.count(429)
    one = http.post(url, json={"prompt": "a", "max_tokens": 2}, headers=KEY)
    assert one.status_code == 200
    assert gauge(guarded, "num_requests_running") == gauge(guarded, "num_requests_waiting") == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(guarded: Live, stream: bool) -> None:
    """Tried until a client left before its request had ended: a busy machine may be too slow."""
    body = msgspec.json.encode({**LONG, "n": 2, "stream": stream})
    aborted = 'request_success_total{engine="0",finished_reason="abort",model_name="llama"}'
    before = figure(guarded, aborted)
    while figure(guarded, aborted) == before:
        ended = gauge(guarded, "request_success_total")
        with connect(guarded) as client:
            client.sendall(HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body))
            if stream:
                assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
            while (
                gauge(guarded, "num_requests_running") == 0
                and gauge(guarded, "request_success_total") == ended
            ):
                pass
        while gauge(guarded, "request_success_total") < ended + 2:
            pass
    assert gauge(guarded, "num_requests_running") == gauge(guarded, "num_requests_waiting") == 0


def test_a_body_that_does_not_come_times_out(guarded: Live) -> None:
    with connect(guarded) as client:
        client.sendall(HEAD + b"content-length: 9\r\n\r\n{")
        assert b" 408 " in client.recv(1 << 16)


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
    assert "waiting for running ones" in log and "Traceback" not in log


def test_what_outlives_the_drain_is_told_and_leaves_no_traceback(
    artifacts: dict[str, Path], tmp_path: Path
) -> None:
    """The request is one whose body never comes."""
    log = tmp_path / "log"
    with serving(artifacts["llama"], "--drain-seconds", 1, log=log) as server:
        with connect(server) as client:
            client.sendall(HEAD + b"expect: 100-continue\r\ncontent-length: 9\r\n\r\n{")
            assert b" 100 " in client.recv(1 << 16)  # the request has begun
            assert server.stop() == 0
            assert b" 503 " in client.recv(1 << 16)
    assert "Cancel 1 running task" in log.read_text() and "Traceback" not in log.read_text()


def test_a_model_is_compiled_once_and_served(artifacts: dict[str, Path], tmp_path: Path) -> None:
    assert artifacts["llama"].is_dir()  # its kernels are in the cache
    env = {"DOVETAIL_CACHE": str(link_cache(tmp_path))}
    for i, name in enumerate(("one", "two")):
        log = tmp_path / name
        with serving(LLAMA, "--served-model-name", name, log=log, env=env) as server:
            body = {"model": name, "prompt": "Question:", "max_tokens": 2}
            assert http.post(f"{server.v1}/completions", json=body).status_code == 200
        assert ("compiling" in log.read_text()) == (i == 0)


def test_clients_are_not_bound_by_the_soft_limit_of_open_files(
    artifacts: dict[str, Path], tmp_path: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        with serving(artifacts["encoder"], log=tmp_path / "log") as server, ExitStack() as idle:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for _ in range(300):
                idle.enter_context(connect(server))
            assert http.get(f"{server.url}/health").status_code == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_client_that_takes_nothing_of_its_stream_is_let_go(
    artifacts: dict[str, Path], tmp_path: Path
) -> None:
    """The stream is longer than what the system keeps of it for a client."""
    body = {**LONG, "n": 8, "logprobs": 20, "stream": True}
    text, log = msgspec.json.encode(body), tmp_path / "log"
    with serving(artifacts["llama"], "--send-seconds", 0.5, log=log) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            client.connect((host, int(port)))
            head = HEAD + b"x-request-id: stalled\r\ncontent-length: %d\r\n\r\n"
            client.sendall(head % len(text) + text)
            while not (found := re.search(r"completions (\d+) .* id=stalled", log.read_text())):
                assert server.process.poll() is None
        assert found[1] == "499"
        assert gauge(server, "num_requests_running") == gauge(server, "num_requests_waiting") == 0
        assert http.post(f"{server.v1}/completions", json={"prompt": "a"}).status_code == 200


def certify(folder: Path) -> tuple[Path, Path]:
    """Return the files of a key and of its certificate."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificate of this test")
    key, certificate = folder / "key.pem", folder / "cert.pem"
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
    return key, certificate


def test_a_client_that_makes_no_tls_handshake_is_let_go(
    artifacts: dict[str, Path], tmp_path: Path
) -> None:
    key, certificate = certify(tmp_path)
    flags = ("--ssl-keyfile", key, "--ssl-certfile", certificate, "--head-seconds", 0.5)
    trust = ssl.create_default_context(cafile=str(certificate))
    with serving(artifacts["encoder"], *flags, log=tmp_path / "log") as server:
        host, port = server.url.removeprefix("https://").split(":")
        for said in (b"", b"\x16\x03\x01\x02\x00"):  # the second one begins a handshake
            with socket.create_connection((host, int(port)), timeout=30) as client:
                client.sendall(said)
                with suppress(ConnectionResetError):
                    assert client.recv(1) == b""
        reply = httpx.get(f"{server.url}/health", verify=trust, timeout=200)
        assert reply.status_code == 200


@pytest.mark.long
def test_tls_files_make_https(artifacts: dict[str, Path], tmp_path: Path) -> None:
    key, certificate = certify(tmp_path)
    flags = ("--ssl-keyfile", key, "--ssl-certfile", certificate)
    trust = ssl.create_default_context(cafile=str(certificate))
    with serving(artifacts["encoder"], *flags, log=tmp_path / "log") as server:
        assert server.url.startswith("https://")
        assert httpx.get(f"{server.url}/health", verify=trust, timeout=200).json() == {
            "status": "ok"
        }
