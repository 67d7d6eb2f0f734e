"""OpenVINO GenAI's continuous batching behind HTTP: `/health` and `/v1/completions`, no more.

It has no server of its own. One thread steps the pipeline, one for each connection waits; a reply
comes whole. Precisions are its defaults, prefixes are cached.

    python benchmarks/openvino_server.py FILE.gguf --port 8000
"""

from __future__ import annotations

import argparse
import json
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STEP_TOKENS = 4096
"""Tokens of a step at most."""


@dataclass(slots=True)
class Waiting:
    """A request under way. handle: of the pipeline; tokens: of the reply so far."""

    handle: Any
    reply: Future[list[int]] = field(default_factory=Future)
    tokens: list[int] = field(default_factory=list)


class Engine:
    """The pipeline and the thread that steps it."""

    def __init__(self, options: argparse.Namespace) -> None:
        import openvino_genai

        self._api = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = STEP_TOKENS
        scheduler.max_num_seqs = options.slots
        scheduler.cache_size = options.kv_gib
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            options.model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": options.threads}, {}
        )
        self._tokenizer = self._pipeline.get_tokenizer()
        self._waiting: list[Waiting] = []
        self._number = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._step, daemon=True).start()

    def complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a request of `/v1/completions`; greedy."""
        config = self._api.GenerationConfig(
            max_new_tokens=asked["max_tokens"],
            ignore_eos=asked.get("ignore_eos", False),
            do_sample=False,
            apply_chat_template=False,
        )
        prompt = self._tokenizer.encode(asked["prompt"]).input_ids
        with self._changed:
            self._number += 1
            handle = self._pipeline.add_request(self._number, prompt, config)
            waiting = Waiting(handle)
            self._waiting.append(waiting)
            self._changed.notify()
        tokens = waiting.reply.result()
        usage = {"prompt_tokens": prompt.shape[1], "completion_tokens": len(tokens)}
        return {"choices": [{"text": self._tokenizer.decode(tokens)}], "usage": usage}

    def _step(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                open_ = list(self._waiting)
            self._pipeline.step()
            ended = [waiting for waiting in open_ if self._read(waiting)]
            with self._changed:
                self._waiting = [one for one in self._waiting if one not in ended]

    def _read(self, waiting: Waiting) -> bool:
        """Take what is new of a reply; return whether it is over."""
        while waiting.handle.can_read():
            for output in waiting.handle.read().values():
                waiting.tokens += output.generated_ids
        over = bool(waiting.handle.get_status() != self._api.GenerationStatus.RUNNING)
        if over:
            waiting.reply.set_result(waiting.tokens)
        return over


def main() -> None:
    """Serve until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--slots", type=int, default=16, help="sequences at once")
    parser.add_argument("--kv-gib", type=int, default=2, help="of keys and values")
    options = parser.parse_args()
    engine = Engine(options)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send({"status": "ok"})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._send(engine.complete(json.loads(body)))

        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def _send(self, found: dict[str, Any]) -> None:
            body = json.dumps(found).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

    Server((options.host, options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
