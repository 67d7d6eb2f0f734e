"""Where the time of a decode step goes: call by call in the tapes, and outside of them.

In: an idle engine. Out: a `CallProfile`, a row for each operator, which together make up the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dovetail.ir.errors import SpecError
from dovetail.ir.model import KV_BLOCK
from dovetail.runtime.engine.engine import Engine
from dovetail.runtime.engine.profiler import idle_executor
from dovetail.runtime.native.tape import BoundTape
from dovetail.runtime.schedule.request import Request, SamplingParams

BUDGET = 10.0
"""Seconds that a profile takes at most by default."""
WARM_STEPS, LEAST_STEPS, MOST_STEPS = 4, 8, 400
"""Steps that are not counted, and those that are."""
OUTSIDE = ("before", "between", "after")
"""Python and the start of threads: before the forward tape, then up to sampling, after that."""

_Times = npt.NDArray[np.int64]
_COME, _BEGUN, _ENDED, _JOINED, _LAST = range(5)  # abi.TIMES: of an entry and its reduction


@dataclass(frozen=True, slots=True)
class CallRow:
    """What the calls of an operator took, microseconds of a median step.

    op: of the tape, or one of OUTSIDE. step_us: in kernels, on average over the threads. wait_us:
    until all threads are done with it and the next entry begins. share: of both in the step.
    weight_bytes: of the matrices that a step multiplies by; weight_gb_s: of these, in the
    kernels' time.
    """

    op: str
    kernel: str
    calls: int
    call_us: float
    step_us: float
    wait_us: float
    share: float
    weight_bytes: int = 0

    weight_gb_s: float | None = None


@dataclass(frozen=True, slots=True)
class CallProfile:
    """`rows` in the order of a step; step_us is the median of `steps`, whose sum differs a little.

    context: tokens of each sequence, on average.
    """

    threads: int
    sequences: int
    context: int
    steps: int
    step_us: float
    rows: tuple[CallRow, ...]


def profile_calls(
    engine: Engine, *, sequences: int = 1, context: int = 128, seconds: float = BUDGET
) -> CallProfile:
    """Decode `sequences` requests that begin with `context` tokens, and time every call.

    Raises:
        SpecError: the engine is busy, is a group of processes, or does not hold so many tokens.
        DovetailError: why a request failed.
    """
    executor = idle_executor(engine)
    requests = _submit(engine, sequences, context)
    tapes = (executor.model.decode, executor.sampler)
    spans: list[tuple[float, float]] = []
    try:
        while any(request.generated < WARM_STEPS for request in requests):
            _step(engine, requests)
        with _timed(tapes[0]) as forwards, _timed(tapes[1]) as samples:
            deadline = engine.scheduler.clock() + seconds
            while not requests[0].finished and (
                len(spans) < LEAST_STEPS or engine.scheduler.clock() < deadline
            ):
                start = engine.scheduler.clock()
                _step(engine, requests)
                spans.append((start, engine.scheduler.clock()))
    finally:
        for request in requests:
            if not request.finished:
                engine.finish(request, "abort")
    steps = np.array(spans) * 1e9
    return CallProfile(
        threads=executor.model.decode.plan.threads,
        sequences=sequences,
        context=sum(len(request.tokens) for request in requests) // sequences - len(spans) // 2,
        steps=len(spans),
        step_us=_median(steps[:, 1] - steps[:, 0]),
        rows=tuple(_rows(tapes, (np.stack(forwards), np.stack(samples)), steps, sequences)),
    )


def _step(engine: Engine, requests: Sequence[Request]) -> None:
    """Run a step; raises what made one of `requests` fail, which gets no further."""
    engine.step()
    for request in requests:
        if request.error is not None:
            raise request.error


def _submit(engine: Engine, sequences: int, context: int) -> list[Request]:
    """Return new requests, all of which are under way for as long as the profile takes."""
    limits = engine.scheduler.limits
    least = sequences * (1 + WARM_STEPS) + LEAST_STEPS  # the first ones decode beside prompts
    room = min(limits.max_context, engine.scheduler.pool.free_blocks // sequences * KV_BLOCK)
    if sequences > limits.max_step_sequences or room < context + least:
        raise SpecError(
            f"{sequences} sequences behind {context} tokens cannot be decoded at once; a step "
            f"takes {limits.max_step_sequences}, and {max(0, room - least)} tokens of each are the "
            "most"
        )
    steps = min(least + MOST_STEPS, room - context)
    params = SamplingParams(max_tokens=steps, ignore_eos=True)
    vocabulary = engine.spec.vocab_size
    prompts = [  # no two begin alike: they would share blocks
        [(number + place) % vocabulary for place in range(context)] for number in range(sequences)
    ]
    return [request for prompt in prompts for request in engine.submit(prompt, params)]


@contextmanager
def _timed(tape: BoundTape) -> Iterator[list[_Times]]:
    """Give what each run of `tape` notes."""
    noted: list[_Times] = []
    tape.times = noted
    try:
        yield noted
    finally:
        tape.times = None


def _rows(
    tapes: Sequence[BoundTape], times: Sequence[_Times], steps: npt.NDArray[np.float64], rows: int
) -> Iterator[CallRow]:
    """Yield the rows of a step: what lies outside of the tapes, and each operator of them.

    times: [step][entry][thread][abi.TIMES] of each tape; steps: [step][begin, end]; nanoseconds.
    """
    whole = _median(steps[:, 1] - steps[:, 0])
    before = steps[:, 0]
    for outside, tape, noted in zip(OUTSIDE, tapes, times, strict=False):
        yield _outside(outside, noted[:, 0, 0, _COME] - before, whole)
        yield from _operators(tape, noted, rows, whole)
        before = noted.max(axis=(1, 2, 3)).astype(np.float64)
    yield _outside(OUTSIDE[-1], steps[:, 1] - before, whole)


def _outside(name: str, nanoseconds: npt.NDArray[np.float64], whole: float) -> CallRow:
    taken = _median(nanoseconds)
    return CallRow(name, "", 1, taken, taken, 0.0, taken / whole)


def _operators(tape: BoundTape, noted: _Times, rows: int, whole: float) -> Iterator[CallRow]:
    entries = tape.tape.entries
    ran = np.flatnonzero(noted[0, :, 0, _BEGUN])  # others had no rows
    times = noted[:, ran].astype(np.float64)
    reduces = times[..., _LAST] > 0
    ends = np.where(reduces, times[..., _LAST], times[..., _ENDED])
    between = np.where(reduces, times[..., _JOINED] - times[..., _ENDED], 0.0)
    last = np.broadcast_to(ends[:, -1:].max(2, keepdims=True), ends[:, -1:].shape)
    following = np.concatenate([times[:, 1:, :, _BEGUN], last], 1)
    inside = (ends - times[..., _BEGUN] - between).mean(2)
    waits = (following - ends + between).mean(2)
    names = [entries[i].op for i in ran]
    for op in dict.fromkeys(names):
        places = [place for place, name in enumerate(names) if name == op]
        first = entries[ran[places[0]]]
        read = sum(tape.product_bytes(entries[ran[place]], rows) for place in places)
        taken, waited = (_median(found[:, places].sum(1)) for found in (inside, waits))
        yield CallRow(
            op=op,
            kernel=tape.kernel(first, rows),
            calls=len(places),
            call_us=taken / len(places),
            step_us=taken,
            wait_us=waited,
            share=(taken + waited) / whole,
            weight_bytes=read,
            weight_gb_s=read / taken / 1e3 if read else None,
        )


def _median(nanoseconds: npt.NDArray[np.float64]) -> float:
    """Return microseconds."""
    return float(np.median(nanoseconds)) / 1e3
