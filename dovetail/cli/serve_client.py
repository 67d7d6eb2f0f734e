"""A load test's client: streams from any OpenAI-compatible server, timed token by token.

In: planned requests and a server's URL. Out: `Timing`s, and vLLM's figures over them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx2
import msgspec
import numpy as np

from dovetail.cli.serve_load import Planned, Target
from dovetail.errors import SpecError

METRICS = ("ttft", "tpot", "itl", "e2el", "per_token")


class _Error(msgspec.Struct, frozen=True):
    message: str
    param: str | None = None


class _Failure(msgspec.Struct, frozen=True):
    """OpenAI's envelope of errors."""

    error: _Error


@dataclass(slots=True)
class Timing:
    """One request: seconds on one clock, when text came, tokens, and why it failed."""

    sent: float
    came: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str | None = None
    counted: bool = False  # by the server

    @property
    def ttft(self) -> float:
        """Seconds to the first text."""
        return self.came[0] - self.sent if self.came else self.e2el

    @property
    def e2el(self) -> float:
        """Seconds to the end."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float:
        """Seconds for each token after the first."""
        return (self.e2el - self.ttft) / max(1, self.output_tokens - 1)

    @property
    def per_token(self) -> float:
        """Seconds of the whole request for each token of its answer (NEO Fig. 6)."""
        return self.e2el / max(1, self.output_tokens)

    @property
    def itl(self) -> list[float]:
        """Seconds between pieces of text."""
        return [b - a for a, b in pairwise(self.came)]


def ask_model(target: Target) -> tuple[str, int | None]:
    """Return the model's id, the server's first if None, and its context if the server tells.

    Raises SpecError where there is no server.
    """
    url = target.root + "/v1/models"
    try:
        reply = httpx2.get(url, headers=target.headers, timeout=30)
        reply.raise_for_status()
        listed = reply.json()["data"]
        found = next(one for one in listed if target.model in (None, one["id"]))
        return found["id"], found.get("max_model_len")
    except (
        *(httpx2.HTTPError, httpx2.InvalidURL),
        *(ValueError, KeyError, TypeError, StopIteration),
    ) as error:
        if target.model is not None and isinstance(error, StopIteration):
            raise SpecError(f"{target.root} does not serve {target.model!r}") from None
        raise SpecError(
            f"{url} does not list models ({error}); is that the server's address? If none runs, "
            "start one with `dovetail serve MODEL`"
        ) from None


def count_answers(timings: Sequence[Timing], count: Callable[[str], int]) -> None:
    """Count the tokens of answers by their text where the server has not told their number."""
    for timing in timings:
        if not timing.counted:
            timing.output_tokens = count(timing.text)


async def run_load(target: Target, planned: Sequence[Planned]) -> tuple[list[Timing], float]:
    """Send all requests at their times; return how each went, and the seconds it took in all."""
    most = target.max_concurrency
    room = asyncio.Semaphore(most) if most else None
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=most or 256)
    async with httpx2.AsyncClient(
        limits=limits, timeout=target.timeout, headers=target.headers
    ) as client:
        start = time.perf_counter()

        async def one(request: Planned) -> Timing:
            await asyncio.sleep(max(0.0, start + request.at - time.perf_counter()))
            async with room or nullcontext():
                return await _send(client, target, request)

        found = await asyncio.gather(*map(one, planned))
        return found, time.perf_counter() - start


async def _send(client: httpx2.AsyncClient, target: Target, request: Planned) -> Timing:
    body = msgspec.json.encode(target.body(request))
    timing = Timing(time.perf_counter())
    try:
        try:
            await _post(client, target, body, timing)
        except httpx2.RemoteProtocolError:
            if timing.came:
                raise
            # some servers close a connection that they had said they keep
            await _post(client, target, body, timing)
    except (httpx2.HTTPError, msgspec.DecodeError) as error:
        timing.error = f"{type(error).__name__} {error}"
    timing.ended = time.perf_counter()
    return timing


async def _post(client: httpx2.AsyncClient, target: Target, body: bytes, timing: Timing) -> None:
    headers = {"content-type": "application/json"}
    async with client.stream("POST", target.url, content=body, headers=headers) as reply:
        if reply.status_code != 200:
            timing.error = f"{reply.status_code} {_said(await reply.aread())}"
        else:
            await _read(reply, timing)


def _said(body: bytes) -> str:
    """Return the sentence of an error, with the field that it is about; else what the body has."""
    try:
        error = msgspec.json.decode(body, type=_Failure).error
    except msgspec.DecodeError:
        return body.decode(errors="replace")[:300]
    return f"{error.param}: {error.message}" if error.param else error.message


async def _read(reply: httpx2.Response, timing: Timing) -> None:
    done = False
    async for event in httpx2.EventSource(reply):
        if event.data == "[DONE]":
            done = True
            continue
        if not event.data:
            continue
        chunk = msgspec.json.decode(event.data)
        if "error" in chunk:
            timing.error = _said(event.data.encode())
        for choice in chunk.get("choices") or ():  # some servers send null
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            if text:
                timing.came.append(time.perf_counter())
                timing.text += text
        if usage := chunk.get("usage"):
            timing.prompt_tokens = usage["prompt_tokens"]
            timing.output_tokens = usage["completion_tokens"]
            timing.counted = True
    timing.output_tokens = timing.output_tokens or len(timing.came)
    if not done and timing.error is None:
        timing.error = "the stream was cut"


def summarize(
    timings: Sequence[Timing],
    seconds: float,
    goodput: Mapping[str, float],
    percentiles: Sequence[float],
) -> dict[str, Any]:
    """Return vLLM's figures, times in milliseconds, as the bounds of `goodput` by metric are."""
    good = [timing for timing in timings if timing.error is None]
    output = sum(timing.output_tokens for timing in good)
    read = sum(timing.prompt_tokens for timing in good)
    kept = sum(
        all(getattr(timing, name) * 1e3 <= most for name, most in goodput.items())
        for timing in good
    )
    found: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(timings) - len(good),
        "total_input_tokens": read,
        "total_output_tokens": output,
        "request_throughput": len(good) / seconds,
        "request_goodput": kept / seconds if goodput else None,
        "slo_attainment": kept / len(timings) if goodput else None,
        "output_throughput": output / seconds,
        "total_token_throughput": (output + read) / seconds,
    }
    for name in METRICS:
        values = [getattr(timing, name) for timing in good]
        if name == "itl":
            values = [gap for gaps in values for gap in gaps]
        times = np.asarray(values or [0.0]) * 1e3
        found[f"mean_{name}_ms"] = float(times.mean())
        found[f"median_{name}_ms"] = float(np.median(times))
        found[f"std_{name}_ms"] = float(times.std())
        for percentile in percentiles:
            found[f"p{percentile:g}_{name}_ms"] = float(np.percentile(times, percentile))
    return found
