"""The process in which plans are replayed: `python -P -m dovetail.compiler.replay_child`.

In: a `ReplayJob` on stdin. Out: `ReplayTimes` on stdout. Each plan is loaded once, with its own
threads and processes; then all of them serve a request in turns, so that noise hits them alike.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count

import msgspec

from dovetail.compiler.replay import ReplayJob, ReplayTimes
from dovetail.ir.model import KV_BLOCK
from dovetail.runtime.app import App, load
from dovetail.runtime.cpu_time import busy_seconds, process_seconds


def replay(job: ReplayJob) -> ReplayTimes:
    """Run a job; the first round warms up and counts only where it is the only one."""
    numbers = count()
    blocks = job.batch * (-(-(job.prompt + job.new_tokens) // KV_BLOCK) + 1)
    with ExitStack() as stack:
        apps = [
            stack.enter_context(load(job.artifact, plan=plan, kv_blocks=blocks))
            for plan in job.plans
        ]
        end = time.perf_counter() + job.seconds
        rounds: list[list[tuple[float, float]]] = []
        others: list[float] = []
        while len(rounds) <= job.rounds and (not rounds or time.perf_counter() < end):
            busy, own, start = busy_seconds(), _own_seconds(apps), time.perf_counter()
            rounds.append([_serve(app, job, numbers) for app in apps])
            spent = busy_seconds() - busy - (_own_seconds(apps) - own)
            others.append(max(0.0, spent / (time.perf_counter() - start)))
    first = 1 if len(rounds) > 1 else 0
    prefill, decode = (
        tuple(tuple(round_[i][phase] for round_ in rounds[first:]) for i in range(len(job.plans)))
        for phase in (0, 1)
    )
    return ReplayTimes(prefill=prefill, decode=decode, others=tuple(others[first:]))


def _own_seconds(apps: Sequence[App]) -> float:
    """Return the CPU seconds of this process and of the processes of its groups."""
    pids = [pid for app in apps if app.engine.group for pid in app.engine.group.pids]
    return time.process_time() + sum(map(process_seconds, pids))


def _serve(app: App, job: ReplayJob, numbers: count[int]) -> tuple[float, float]:
    """Return seconds of one prompt that no request had before, and of one decode step."""
    prompts = [
        random.Random(next(numbers)).choices(range(job.vocab_size), k=job.prompt)
        for _ in range(job.batch)
    ]
    start = app.engine.device.now()
    done = app.generate(prompts, max_tokens=job.new_tokens, ignore_eos=True)
    first = max(d.metrics.first_token or start for d in done)
    last = max(d.metrics.last_token or first for d in done)
    return (first - start) / job.batch, (last - first) / (job.new_tokens - 1)


if __name__ == "__main__":
    found = replay(msgspec.json.decode(sys.stdin.buffer.read(), type=ReplayJob))
    sys.stdout.buffer.write(msgspec.json.encode(found))
