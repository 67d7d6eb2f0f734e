"""A model whose chat template never ends, beside one of an honest template."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import httpx

from dovetail.tiny_world import LLAMA
from tests.dovetail.commands import compile_with
from tests.runtime.server.live import http, serving
from tests.runtime.text.test_chat_template import ENDLESS

BEGIN = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<|user|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<|user|>": {"id": "<|user|>", "ids": [2], "tokens": ["<|user|>"]}},
}
"""A mark before each text."""
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


def test_what_goes_to_a_template_and_to_a_tokenizer_is_as_the_request_says(tmp_path: Path) -> None:
    """How much to reason; and whether special tokens go before a prompt."""
    source = shutil.copytree(LLAMA, tmp_path / "source")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["post_processor"] = BEGIN
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    one = compile_with(source, tmp_path, "{{ reasoning_effort }}{{ messages[0].content }}")
    effort = "so that all is thought of"
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", chat),
        ("chat/completions", {**chat, "chat_template_kwargs": {"reasoning_effort": effort}}),
        ("chat/completions", {**chat, "reasoning_effort": effort}),
        ("responses", {"input": "Hi", "max_output_tokens": 1, "reasoning": {"effort": effort}}),
        ("completions", {"prompt": "Hi"}),
        ("completions", {"prompt": "Hi", "add_special_tokens": False}),
    ]
    with serving(one, log=tmp_path / "log") as server:
        replies = [http.post(f"{server.v1}/{path}", json=body).json() for path, body in asked]
    usages = [reply["usage"] for reply in replies]
    none, *told, special, plain = [u.get("prompt_tokens") or u["input_tokens"] for u in usages]
    assert len(set(told)) == 1 and told[0] > none
    assert special == plain + 1 == none + 1
