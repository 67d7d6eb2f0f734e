"""The sides of `serve.py`: each takes requests as they arrive and batches them its own way.

In: arrivals. Out: when each request had its first and its last token. A side lives in a process of
its own (`generate_workers.Worker`) and sleeps while another one is measured.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import timed_region
from dovetail.cli.serve_client import run_load
from dovetail.cli.serve_load import Planned
from http_servers import serve_llamacpp
from llamacpp import find_programs
from serve_load import Arrival, Served

SLOTS = 64
"""Sequences that run at the same time at most, on every side."""
STEP_TOKENS = 512
"""Rows of a step at most, on every side."""
PAGE = 256
"""Tokens of a page of transformers' cache, its default."""


def replay(
    arrivals: Sequence[Arrival],
    submit: Callable[[int, Arrival], object],
    poll: Callable[[float | None], bool],
) -> float:
    """Submit at the arrival times; `poll(seconds)` works or waits so long, None = to the end.

    Returns the start on `time.perf_counter`. `poll` tells whether requests are under way.
    """
    start = time.perf_counter()
    for number, arrival in enumerate(arrivals):
        while (left := start + arrival.at - time.perf_counter()) > 0:
            poll(left)
        submit(number, arrival)
    while poll(None):
        pass
    return start


def served(start: float, arrival: Arrival, first: float, last: float, tokens: int) -> Served:
    """Return the latencies of a request, counted from when it was due."""
    tpot = (last - first) / (tokens - 1) if tokens > 1 else None
    return Served(first - start - arrival.at, tpot)


class DovetailServer:
    """Our side: one app; requests are submitted as jobs."""

    def __init__(self, artifact: str, threads: int) -> None:
        import dovetail
        from dovetail.runtime.schedule.plan import ON_CPU

        self._version = dovetail.__version__
        anew = replace(ON_CPU, keep_prefixes=False)  # a rate's prompts are those of the one before
        self._app = dovetail.load(artifact, threads=threads, settings=anew)

    def settings(self) -> str:
        """Return what a reader needs to know of this side."""
        return f"dovetail {self._version}, {self._app.engine.scheduler.pool.n_blocks} KV blocks"

    def serve(self, arrivals: Sequence[Arrival]) -> dict[str, Any]:
        """Serve all; return latencies, seconds until all were done, and how busy others were."""
        jobs: list[Any] = []

        def submit(_: int, arrival: Arrival) -> None:
            options = {"max_tokens": arrival.answer, "ignore_eos": True}
            jobs.append(self._app.submit(arrival.prompt, **options))

        def poll(seconds: float | None) -> bool:
            if seconds is not None:
                time.sleep(seconds)
            return False

        with timed_region() as region:
            start = replay(arrivals, submit, poll)
            found = [job.result() for job in jobs]
        times = [
            served(start, a, f.metrics.first_token, f.metrics.last_token, len(f.token_ids))
            for a, f in zip(arrivals, found, strict=True)
        ]
        return {"served": times, "seconds": region.seconds, "others": region.others}

    def close(self) -> None:
        """End its threads."""
        self._app.close()

    def decode_rate(self, batch: int, tokens: int) -> float:
        """Return tokens per second of decoding `batch` sequences together, prompts of 32."""
        prompts = [[3 + i * 7 + j for j in range(32)] for i in range(batch)]
        found = self._app.generate(prompts, max_tokens=tokens, ignore_eos=True)
        first = max(f.metrics.first_token for f in found)
        last = max(f.metrics.last_token for f in found)
        return batch * (tokens - 1) / (last - first)

    def scheduler_fraction(self, running: int, tokens: int) -> dict[str, Any]:
        """Return the share of planning in steps that decode the most sequences, and that number."""
        with tempfile.TemporaryDirectory(prefix="dovetail-serve-") as folder:
            file = Path(folder) / "timeline.json"
            with self._app.record(file):
                prompts = [[3 + i, 5, 7, 9] for i in range(running)]
                self._app.generate(prompts, max_tokens=tokens, ignore_eos=True)
            events = json.loads(file.read_text())["traceEvents"]
        return planning_share([event for event in events if event["ph"] == "X"])


def planning_share(spans: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return `fraction`: time of `schedule` over time of `step`, in the fullest steps alone."""
    steps: list[dict[str, Any]] = []
    for span in spans:  # in order of time: a step comes before its parts
        if span["name"] == "step":
            steps.append({"step": span["dur"], "decode": 0})
        elif span["name"] == "forward":
            steps[-1]["decode"] = span["args"]["decode"]
        elif span["name"] == "schedule":
            steps[-1]["schedule"] = span["dur"]
    most = max(step["decode"] for step in steps)
    full = [step for step in steps if step["decode"] == most]
    planning = sum(step["schedule"] for step in full)
    return {"fraction": planning / sum(step["step"] for step in full), "running": most}


class TransformersServer:
    """transformers' continuous batching: its own thread, paged cache, scheduler."""

    def __init__(self, model: str, context: int, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype="auto", attn_implementation="sdpa"
        ).eval()
        self._manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(eos_token_id=-1, do_sample=False),
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=SLOTS * -(-context // PAGE),
                page_size=PAGE,
                max_batch_tokens=STEP_TOKENS,
                max_requests_per_batch=SLOTS,
                auto_switch_to_flash=False,
                allow_block_sharing=False,
            ),
        )
        self._manager.start()

    def settings(self) -> str:
        """Return what a reader needs to know of this side."""
        import torch

        return (
            f"transformers {version('transformers')}, torch {torch.__version__}, continuous "
            f"batching, {self._model.config._attn_implementation}, {self._model.dtype}"
        )

    def serve(self, arrivals: Sequence[Arrival]) -> dict[str, Any]:
        """As `DovetailServer.serve`."""
        found: dict[int, Any] = {}
        left = len(arrivals)

        def submit(number: int, arrival: Arrival) -> None:
            self._manager.add_request(
                arrival.prompt,
                request_id=str(number),
                max_new_tokens=arrival.answer,
                record_timestamps=True,
            )

        def poll(seconds: float | None) -> bool:
            nonlocal left
            result = self._manager.get_result(timeout=1.0 if seconds is None else seconds)
            if result is not None and result.is_finished():
                if result.error:
                    raise RuntimeError(result.error)
                found[int(result.request_id)] = result
                left -= 1
            if not self._manager.is_running():
                raise RuntimeError("the thread of transformers' continuous batching has ended")
            return left > 0

        with timed_region() as region:
            start = replay(arrivals, submit, poll)
        times = []
        for number, arrival in enumerate(arrivals):
            stamps = found[number].timestamps
            times.append(served(start, arrival, stamps[0], stamps[-1], len(stamps)))
        return {"served": times, "seconds": region.seconds, "others": region.others}

    def close(self) -> None:
        """End its thread, which would keep the process alive."""
        self._manager.stop(block=True)


class LlamaCppServer:
    """llama.cpp's own server in a process of its own, over HTTP: some ms that ours does not pay."""

    def __init__(self, model: str, context: int, threads: int) -> None:
        self._stack = ExitStack()
        options = (threads, SLOTS, context, "-kvu", "-ub", str(STEP_TOKENS))
        self._server = self._stack.enter_context(serve_llamacpp(Path(model), *options))

    def settings(self) -> str:
        """Return what a reader needs to know of this side."""
        programs = find_programs()
        assert programs is not None, "a peer that is absent is left out"
        return f"llama-server {programs.build}, {SLOTS} slots, unified f16 KV"

    def serve(self, arrivals: Sequence[Arrival]) -> dict[str, Any]:
        """As `DovetailServer.serve`."""
        planned = [
            Planned(arrival.at, len(arrival.prompt), arrival.answer, seed=number)
            for number, arrival in enumerate(arrivals)
        ]
        with timed_region() as region:
            found, _ = asyncio.run(run_load(self._server.target(), planned))
        if errors := [timing.error for timing in found if timing.error]:
            raise RuntimeError(errors[0])
        times = [
            Served(timing.ttft, timing.tpot if arrival.answer > 1 else None)
            for timing, arrival in zip(found, arrivals, strict=True)
        ]
        return {"served": times, "seconds": region.seconds, "others": region.others}

    def close(self) -> None:
        """End the server."""
        self._stack.close()
