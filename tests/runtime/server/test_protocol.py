"""What comes before the key: heads that are too large, too slow or no HTTP, and what they cost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvicorn
from uvicorn.server import ServerState

from dovetail.runtime.server import protocol
from dovetail.runtime.server.protocol import HEAD_BYTES, HEADERS
from tests.runtime.server.live import Live, connect, http, serving

GET = b"GET /health/live HTTP/1.1\r\nhost: a\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
LENGTH = POST + b"content-length: %b\r\n\r\n"
KIB = b"a" * 1024
KEY = "schlüssel-ключ"


@pytest.fixture(scope="module")
def hasty(artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with keys that waits for headers half a second."""
    log = tmp_path_factory.mktemp("hasty") / "log"
    flags = ("--head-seconds", 0.5, "--api-key", KEY, "--api-key", "plain")
    with serving(artifacts["encoder"], *flags, log=log) as server:
        yield server
    assert "Traceback" not in log.read_text()


def send(client: socket.socket, parts: Iterable[bytes]) -> None:
    """Send as far as the other side takes it."""
    try:
        for part in parts:
            client.sendall(part)
    except OSError:
        pass


def answer(live: Live, *parts: bytes) -> tuple[int, dict[str, Any]]:
    """Return the status and the error that the last reply has, once the connection is closed."""
    with connect(live) as client:
        send(client, parts)
        return read(client)


def read(client: socket.socket) -> tuple[int, dict[str, Any]]:
    found = b""
    while part := client.recv(1 << 16):
        found += part
    head, _, body = found.rpartition(b"\r\n\r\n")
    status = int(head[head.rindex(b"HTTP/1.1 ") :].split()[1])
    error: dict[str, Any] = msgspec.json.decode(body)["error"]
    return status, error


LARGE: dict[str, tuple[bytes, ...]] = {
    "a header without end": (GET, b"x: ", *[KIB] * 200),
    "a name without end": (GET, *[KIB] * 200),
    "an address without end": (b"GET /", *[KIB] * 200),
    "a whole header that is too long": (GET, b"x: " + KIB * 65 + b"\r\n\r\n"),
    "headers without end": (GET, *[b"x: " + KIB + b"\r\n"] * 200),
    "too many headers": (GET, b"x: y\r\n" * HEADERS, b"\r\n"),
    "headers without end behind a body": (CHUNKED, b"1\r\n{\r\n0\r\nx: ", *[KIB] * 200),
    "too many headers behind a body": (CHUNKED, b"0\r\n", b"x: y\r\n" * HEADERS, b"\r\n"),
    "a chunk's extension without end": (CHUNKED, b"1;x=", *[KIB] * 200),
    "empty lines without end": (b"\r\n" * HEAD_BYTES,),
}


@pytest.mark.parametrize("name", LARGE)
def test_what_is_too_large_is_refused_before_the_key_is_asked_for(hasty: Live, name: str) -> None:
    status, error = answer(hasty, *LARGE[name])
    assert status == 431 and f"{HEADERS} headers" in error["message"]
    assert http.get(f"{hasty.url}/health/live").status_code == 200


WRONG: dict[str, tuple[bytes, str]] = {
    "a length of 5,000 zeros": (
        POST + b"content-length: " + b"0" * 5000 + b"\r\n\r\n",
        "19 digits",
    ),
    "a length of 5,000 digits": (LENGTH % (b"9" * 5000), "HTTP"),
    "a chunk of 5,000 digits": (CHUNKED + b"f" * 5000 + b"\r\n", "HTTP"),
    "a chunk of no digits": (CHUNKED + b"x\r\n", "HTTP"),
    "no HTTP": (b"\x00\xff" * 100, "HTTP"),
    "an address in bytes": (b"GET /\xff\xfe HTTP/1.1\r\nhost: a\r\n\r\n", "HTTP"),
    "a method of a proxy": (b"CONNECT :: HTTP/1.1\r\nhost: a\r\n\r\n", "HTTP"),
    "a way through": (b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", "HTTP"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_request_is_a_400_of_one_sentence(hasty: Live, name: str) -> None:
    sent, said = WRONG[name]
    status, error = answer(hasty, sent.replace(b"host: a", b"authorization: Bearer plain"))
    assert status == 400 and said in error["message"], error


@pytest.mark.parametrize("cut", [9, -9])
def test_an_offer_of_another_protocol_is_not_taken_up(hasty: Live, cut: int) -> None:
    """Java's client offers HTTP/2 with a request that has a body; the next one comes after it."""
    offer = b"connection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAEA\r\nupgrade: h2c\r\n"
    body = b'{"input": "a"}'
    key = b"authorization: Bearer plain\r\n"
    head = b"POST /v1/embeddings HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n" % len(body)
    sent = head + key + offer + b"\r\n" + body
    last = GET.replace(b"/health/live", b"/v1/none") + key + b"connection: close\r\n\r\n"
    with connect(hasty) as client:
        found = b""
        send(client, (sent[:cut], sent[cut:]))
        while not found.endswith(b"}"):
            found += client.recv(1 << 16)
        assert found.startswith(b"HTTP/1.1 200 ")
        client.sendall(last)
        status, _ = read(client)
    assert status == 404


LATE: dict[str, bytes] = {
    "half an address": b"GET /hea",
    "half a header": GET + b"x: ",
    "all but the last line": GET,
    "an empty line": b"\r\n",
    "half a second head": GET + b"\r\n" + GET,
}


@pytest.mark.parametrize("name", LATE)
def test_heads_that_do_not_come_time_out(hasty: Live, name: str) -> None:
    status, error = answer(hasty, LATE[name])
    assert status == 408 and "0.5 s" in error["message"]


def test_a_head_in_trickles_times_out_too(hasty: Live) -> None:
    """Each byte comes soon enough, and all of them too late."""
    with connect(hasty) as client:
        client.sendall(GET)
        client.settimeout(0.05)
        found = b""
        while b"\r\n\r\n" not in found:
            send(client, [b"x"])
            try:
                found += client.recv(1 << 16)
            except TimeoutError:
                continue
        assert found.startswith(b"HTTP/1.1 408 ")


def test_a_client_that_says_nothing_is_let_go(hasty: Live) -> None:
    with connect(hasty) as client:
        assert client.recv(1) == b""


def test_the_rest_of_a_refused_body_is_not_waited_for(hasty: Live) -> None:
    with connect(hasty) as client:
        client.sendall(POST + b"content-length: 1000000\r\n\r\n{")
        status, error = read(client)
    assert status == 401 and error["type"] == "authentication_error"


def test_ordinary_clients_notice_nothing(hasty: Live) -> None:
    """Many requests on a connection, in pieces and together; bodies that take their time."""
    chunks = (b'{"input": ', b'"a"', b"}")
    url, key = f"{hasty.v1}/embeddings", {"authorization": "Bearer plain"}
    for _ in range(3):
        assert http.post(url, content=iter(chunks), headers=key).status_code == 200
    with connect(hasty) as client:
        client.sendall(GET[:9])
        client.sendall(GET[9:] + b"\r\n" + GET + b"\r\n" + GET + b"connection: close\r\n\r\n")
        found = b""
        while part := client.recv(1 << 16):
            found += part
    assert found.count(b"HTTP/1.1 200 ") == 3
    large = {f"x-{i}": "a" * 500 for i in range(HEADERS - 20)}
    assert http.get(f"{hasty.url}/health/live", headers=large).status_code == 200


def test_keys_of_any_letters_are_compared_as_bytes(hasty: Live) -> None:
    def status(key: bytes) -> int:
        headers = {b"authorization": b"Bearer " + key}
        return http.get(f"{hasty.v1}/models", headers=headers).status_code

    assert status(KEY.encode()) == 200 and status(b"plain") == 200
    for wrong in (KEY.encode("latin-1", "replace"), KEY.encode()[:-1], b"plai\xf1", b"\xff" * 9):
        assert status(wrong) == 401


@asynccontextmanager
async def bare(app: Any) -> AsyncIterator[asyncio.StreamWriter]:
    """Yield a connection to an application alone."""
    config = uvicorn.Config(app, lifespan="off")
    config.load()
    made = partial(
        protocol.BoundedProtocol,
        config=config,
        server_state=ServerState(),
        app_state={},
        head_seconds=3600.0,
    )
    server = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0)
    async with server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        yield writer
        writer.close()


def test_a_refused_client_that_sends_on_is_not_read_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 3600.0)

    async def refuse() -> None:
        async with bare(lambda: None) as writer:
            writer.write(GET + b"x: ")
            with pytest.raises(ConnectionError):
                for _ in range(1 << 16):  # 64 MiB
                    writer.write(KIB)
                    await writer.drain()

    asyncio.run(refuse())


def test_offers_of_another_protocol_may_come_together() -> None:
    """Each is a request of its own version of HTTP."""
    versions, wanted = [], ["1.1"] * 1200 + ["1.0"]

    async def offer() -> None:
        done = asyncio.Event()

        async def app(scope: Any, _receive: Any, send: Any) -> None:
            versions.append(scope["http_version"])
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})
            if len(versions) == len(wanted):
                done.set()

        async with bare(app) as writer:
            head = GET + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n"
            writer.write(head * 1200 + head.replace(b"HTTP/1.1", b"HTTP/1.0"))
            await asyncio.wait_for(done.wait(), 20)

    asyncio.run(offer())
    assert versions == wanted


def test_a_client_that_goes_ends_its_requests_before_the_last_one_too() -> None:
    async def leave() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def app(_scope: Any, receive: Any, _send: Any) -> None:
            begun.set()
            while (await receive())["type"] != "http.disconnect":
                pass
            ended.set()

        async with bare(app) as writer:
            writer.write((GET + b"\r\n") * 2)  # the second one waits for the first one's reply
            await begun.wait()
            writer.close()
            await asyncio.wait_for(ended.wait(), 20)

    asyncio.run(leave())
