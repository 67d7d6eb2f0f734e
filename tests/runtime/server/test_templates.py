"""A model whose chat template never ends, beside one of an honest template."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import httpx

from dovetail.tiny_world import LLAMA
from tests.dovetail.commands import compile_with
from tests.runtime.server.live import http, serving
from tests.runtime.text.test_chat_template import ENDLESS

NAMES = ("--served-model-name", "bad", "--served-model-name", "good")


def body(model: str, text: str = "loop") -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": model, "messages": messages, "max_tokens": 1}


def test_a_template_that_never_ends_is_that_requests_error_and_the_server_answers_and_ends(
    artifacts: dict[str, Path], tmp_path: Path
) -> None:
    def burn() -> None:
        with httpx.Client(timeout=200) as client:
            while not ended.is_set():
                try:
                    client.post(f"{server.v1}/chat/completions", json=body("bad"))
                except httpx.HTTPError:  # the server is gone
                    return

    bad, ended = compile_with(LLAMA, tmp_path, ENDLESS), threading.Event()
    with serving(bad, artifacts["llama"], *NAMES, log=tmp_path / "log") as server:
        for path in (f"{server.v1}/chat/completions", f"{server.url}/tokenize"):
            reply = http.post(path, json=body("bad"))
            assert reply.status_code == 400
            assert reply.json()["error"]["message"] == (
                "the model's chat template does not take these messages: it is not done within 1 s"
            )
            for model, text in (("bad", "Hi"), ("good", "loop")):
                assert http.post(path, json=body(model, text)).status_code == 200
        threads = [threading.Thread(target=burn) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(5):
                assert http.get(f"{server.url}/health").status_code == 200
                answer = http.post(f"{server.v1}/chat/completions", json=body("good"))
                assert answer.status_code == 200
            assert server.stop(signal.SIGTERM) == 0
        finally:
            ended.set()
            for thread in threads:
                thread.join()
    assert "Traceback" not in (tmp_path / "log").read_text()
