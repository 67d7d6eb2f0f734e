"""Requests that mean harm, each by itself: `python attack_requests.py NAME HOST PORT SECONDS`.

An attack is sent again and again for some seconds. Out: the statuses and first words of replies
with their counts, as JSON. The benchmark `attacks.py` and the tests run it as a process apart.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

MIB = 1 << 20
SPIN = "spin"
"""A chat that says this hangs `HANGING_TEMPLATE`."""
HANGING_TEMPLATE = (
    "{% if messages[-1].content == '" + SPIN + "' %}{% for a in range(99999) %}"
    "{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% for message in messages %}{{ '<|user|>' + message.content + '<|end|>' }}{% endfor %}"
    "{{ '<|assistant|>' }}"
)
WORKFLOW = """from dovetail import END, START, RAGraph

graph = RAGraph("ask")
graph.add_generation("answer", prompt="{input}", output="answer", max_tokens=1)
graph.add_edge(START, "answer")
graph.add_edge("answer", END)
"""
"""What the attacks of workflows ask: its prompt is the input."""


@dataclass(frozen=True, slots=True)
class Attack:
    """What is sent on a connection: `parts` at once, or with seconds of `pause` in between.

    statuses: those that may come, 0 where the connection ends without a reply. share: of their
    speed in peace, what honest streams must keep.
    """

    parts: Callable[[], list[bytes]]
    statuses: tuple[int, ...] = (400,)
    share: float = 0.9
    pause: float = 0.0


def post(path: str, body: object) -> bytes:
    """Return a request with a JSON body, on a connection of its own."""
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(text)}\r\nconnection: close"
    return head.encode() + b"\r\n\r\n" + text


def chat(model: str, content: str) -> bytes:
    """Return a chat of one token."""
    messages = [{"role": "user", "content": content}]
    return post("/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": 1})


def ask_workflow(text: str) -> bytes:
    """Return a run of the workflow `ask`."""
    return post("/v1/workflows/ask/runs", {"inputs": {"input": text}})


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
WORDS = "Zorvia " * (10 * MIB // 7)
GAP = 0.05
"""Seconds between two of a kind: what one does is asked here, not what a flood does."""
CUT = (400, 408, 431, 0)
"""What may come where headers do not end: the server need not read them all before it closes."""
ATTACKS = {
    "workflow input of 10 MB": Attack(lambda: [ask_workflow(WORDS)]),
    "workflow word of 10 MB": Attack(lambda: [ask_workflow("a" * 10 * MIB)]),
    "chat of 10 MB": Attack(lambda: [chat("llm", WORDS)]),
    "completion of 10 MB": Attack(
        lambda: [post("/v1/completions", {"model": "llm", "prompt": WORDS})]
    ),
    "embedding of 10 MB": Attack(
        lambda: [post("/v1/embeddings", {"model": "encoder", "input": WORDS})], (200, 400)
    ),
    "header of 128 MB": Attack(lambda: [HEAD + b"x: ", *[b"a" * MIB] * 128], CUT),
    "a million headers": Attack(lambda: [HEAD, *[b"x: a\r\n" * 10_000] * 100], CUT),
    "headers that never end": Attack(lambda: [HEAD, *[b"x"] * 60], CUT, pause=0.1),
    "length of 5000 digits": Attack(
        lambda: [HEAD + b"content-length: " + b"9" * 5000 + b"\r\n\r\n"], (400, 413, 431)
    ),
    "template that never ends": Attack(lambda: [chat("llm", SPIN)], (400, 500, 503), 0.45),
}


def send(attack: Attack, parts: list[bytes], host: str, port: int, until: float) -> str:
    """Send the parts of an attack once; return status and message of what is answered."""
    try:
        with socket.create_connection((host, port), timeout=60) as line:
            with suppress(ConnectionError):
                for part in parts:
                    line.sendall(part)
                    if attack.pause and time.monotonic() > until:
                        return "0 not answered yet"
                    time.sleep(attack.pause)
            return read(line)
    except OSError as error:
        return f"0 {type(error).__name__}"


def read(line: socket.socket) -> str:
    """Return status and message of a reply; the server closes the connection behind it."""
    found = b""
    with suppress(ConnectionError):
        while part := line.recv(1 << 16):
            found += part
    if not found:
        return "0 closed"
    head, _, body = found.partition(b"\r\n\r\n")
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body.decode("latin-1")
    return f"{head.split()[1].decode()} {message[:160]}"


def repeat(name: str, host: str, port: int, seconds: float) -> dict[str, int]:
    """Send an attack until the time is over; return what was answered, with counts."""
    until = time.monotonic() + seconds
    attack, answers = ATTACKS[name], Counter[str]()
    parts = attack.parts()
    while time.monotonic() < until:
        answers[send(attack, parts, host, port, until)] += 1
        time.sleep(GAP)
    return dict(answers)


if __name__ == "__main__":
    name, host, port, seconds = sys.argv[1:]
    print(json.dumps(repeat(name, host, int(port), float(seconds))))
