"""The process in which plans are replayed.

In: a `ReplayJob`. Out: `ReplayTimes`. Each plan is loaded once, with its own
threads and processes; then all of them serve requests in turns, so that noise hits them alike.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from statistics import fmean

from dovetail.compiler.plan.replay import ReplayJob, ReplayTimes
from dovetail.ir.artifact import ServicePlan
from dovetail.ir.model import KV_BLOCK
from dovetail.ir.schedule import ScheduleFile, ScheduleTable
from dovetail.runtime.artifact import Artifact, open_artifact
from dovetail.runtime.child.framing import Channel
from dovetail.runtime.engine.engine import Engine
from dovetail.runtime.engine.executor import open_on_cpu
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.machine.cpu_time import busy_seconds, process_seconds
from dovetail.runtime.schedule.kv_pool import blocks_for
from dovetail.runtime.schedule.plan import SchedulerSettings
from dovetail.runtime.schedule.request import Request, SamplingParams
from dovetail.topology.hardware import HardwareSpec, read_hardware

SETTINGS = SchedulerSettings(offload="off")
"""Prompts in as few steps as they fit, so that plans are compared over the same steps."""


def replay(job: ReplayJob) -> ReplayTimes:
    """Run a job; the first round warms up and counts only where it is the only one."""
    hardware = read_hardware()
    artifact = open_artifact(Path(job.artifact), hardware)
    draw = random.Random(0)
    with ExitStack() as stack:
        engines = [
            stack.enter_context(_open(artifact, hardware, plan, job, tables))
            for plan, tables in zip(job.plans, job.tables or repeat(()), strict=False)
        ]
        end = time.perf_counter() + job.seconds
        rounds: list[list[tuple[float, float]]] = []
        others: list[float] = []
        while len(rounds) <= job.rounds and (
            len(rounds) < job.least_rounds or time.perf_counter() < end
        ):
            busy, own, start = busy_seconds(), _own_seconds(engines), time.perf_counter()
            turn = -1 if len(rounds) % 2 else 1  # nobody always follows the same one
            found = [Round(engine, job, draw).serve() for engine in engines[::turn]]
            rounds.append(found[::turn])
            spent = busy_seconds() - busy - (_own_seconds(engines) - own)
            others.append(max(0.0, spent / (time.perf_counter() - start)))
    first = 1 if len(rounds) > 1 else 0
    prefill, decode = (
        tuple(tuple(round_[i][phase] for round_ in rounds[first:]) for i in range(len(job.plans)))
        for phase in (0, 1)
    )
    return ReplayTimes(prefill=prefill, decode=decode, others=tuple(others[first:]))


@contextmanager
def _open(
    artifact: Artifact,
    hardware: HardwareSpec,
    plan: ServicePlan,
    job: ReplayJob,
    tables: tuple[ScheduleTable, ...],
) -> Iterator[Engine]:
    part = next(iter(artifact.models.values()))
    if tables:
        part = replace(part, schedules=ScheduleFile(tables=tables))
    room = _room(job, part.file.max_step_tokens)
    blocks = sum(blocks_for(n + room) for n in job.prompts)
    blocks += max(job.batches) * (blocks_for(KV_BLOCK + room) + 1)
    options = EngineOptions(plan=plan, kv_blocks=blocks, settings=SETTINGS)
    engine = open_on_cpu(artifact, part, hardware, options)
    try:
        yield engine
    finally:
        engine.close()


def _room(job: ReplayJob, max_step_tokens: int) -> int:
    """Return the tokens that a request may get: while others' prompts are computed, too."""
    begun = sum(job.prompts) + KV_BLOCK * max(job.batches)
    return begun // max_step_tokens + 4 + (job.steps + 1) * len(job.batches)


def _own_seconds(engines: Sequence[Engine]) -> float:
    """Return the CPU seconds of this process and of the processes of its groups."""
    pids = [pid for engine in engines if (group := engine.executor.group) for pid in group.pids]
    return time.process_time() + sum(map(process_seconds, pids))


@dataclass(frozen=True, slots=True)
class Round:
    """One plan's turn: prompts that no request had before, then decode steps of fewer and fewer."""

    engine: Engine
    job: ReplayJob
    draw: random.Random

    def serve(self) -> tuple[float, float]:
        """Return seconds of a token of the prompts, and of a decoded token."""
        start = time.perf_counter()
        running = self._start([self._tokens(length) for length in self.job.prompts])
        prefill = time.perf_counter() - start
        decode = self._decode(running)
        self._end(running)
        return prefill / sum(self.job.prompts), decode

    def _decode(self, running: list[Request]) -> float:
        """Return the mean seconds of a token over the batches, the largest batch first.

        Where more sequences are wanted than there are prompts, they go on from these: their KV is
        shared and need not be computed, their contexts are of the same lengths.
        """
        whole = [r.tokens[: r.prompt_length // KV_BLOCK * KV_BLOCK] for r in running]
        more = range(max(self.job.batches) - len(running))
        running += self._start([[*whole[i % len(whole)], *self._tokens(1)] for i in more])
        per_token = []
        for batch in sorted(self.job.batches, reverse=True):
            self._end(running[batch:])
            del running[batch:]
            self._step(running)  # threads go over to decoding, or lose their last neighbour
            start = time.perf_counter()
            for _ in range(self.job.steps):
                self._step(running)
            per_token.append((time.perf_counter() - start) / (self.job.steps * batch))
        return fmean(per_token)

    def _tokens(self, count: int) -> list[int]:
        return self.draw.choices(range(self.job.vocab_size), k=count)

    def _start(self, prompts: Sequence[list[int]]) -> list[Request]:
        """Return requests that have their first tokens."""
        room = _room(self.job, self.engine.scheduler.limits.max_step_tokens)
        params = SamplingParams(max_tokens=room, ignore_eos=True)
        requests = [request for tokens in prompts for request in self.engine.submit(tokens, params)]
        while not all(request.output for request in requests):
            self._step(requests)
        return requests

    def _end(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if not request.finished:  # a short context ends one early
                self.engine.finish(request, "stop")

    def _step(self, running: Sequence[Request]) -> None:
        """Run a step; raises what made one of `running` fail."""
        self.engine.step()
        for request in running:
            if request.error is not None:
                raise request.error


def serve(channel: Channel) -> None:
    """Run one job."""
    job = channel.receive(ReplayJob)
    if job is not None:
        channel.send(replay(job))
