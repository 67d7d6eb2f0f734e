"""The work that `generate.py` times, and our side of it, in a process of its own.

Each side has one, so that thread pools do not fight. In: messages (method, arguments) over a pipe.
Out: the method's result. A side that is not asked anything sleeps on its pipe.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from common import family, timed_region
from dovetail.runtime.schedule.plan import SchedulerSettings


@dataclass(frozen=True, slots=True)
class Work:
    """`batch` sequences at once, each of `prompt` tokens in and `new` out; which phase counts."""

    phase: str
    batch: int
    prompt: int
    new: int

    @property
    def counted(self) -> int:
        """Return the tokens of the phase that counts, over all sequences."""
        return self.batch * (self.prompt if self.phase == "prefill" else self.new - 1)

    def prompts(self, vocabulary: int, turn: int) -> list[list[int]]:
        """Return random token ids, others in each turn, so that no cache of prompts helps."""
        draw = random.Random(f"{self} {turn}")
        return [
            [draw.randrange(3, vocabulary) for _ in range(self.prompt)] for _ in range(self.batch)
        ]


class Worker(AbstractContextManager["Worker"]):
    """A side in a child process: `call("name", ...)` runs that method there and waits."""

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, make, args), daemon=True)
        self._process.start()
        other.close()

    def call(self, method: str, *args: Any) -> Any:
        """Return what `method` returns in the child; RuntimeError with its traceback on failure."""
        self._pipe.send((method, args))
        ok, value = self._pipe.recv()
        if not ok:
            raise RuntimeError(value)
        return value

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pipe.close()
        self._process.join(timeout=10)
        self._process.kill()


def _serve(pipe: Connection, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    side = None
    try:
        while True:
            method, values = pipe.recv()
            try:
                side = side or make(*args)
                answer = (True, getattr(side, method)(*values))
            except Exception:
                answer = (False, traceback.format_exc())
            pipe.send(answer)
    except (EOFError, BrokenPipeError):
        return  # the parent has gone


class Dovetail:
    """Our side: one artifact. All prompts of a run are taken in together, as by the peers."""

    def __init__(self, artifact: str, threads: int) -> None:
        self._artifact, self._threads = artifact, threads
        (file,) = Path(artifact).glob("models/*/model.json")
        self._model = json.loads(file.read_text())
        self._weights = file.parent / "weights/weights.bin"

    def load(self) -> dict[str, float]:
        """Load; return the seconds until it had answered with a token.

        `share`: bytes of memory that some tokens have added, KV apart, over the file of weights.
        """
        import dovetail

        load = dovetail.load  # imports what it takes
        before, start = resident_bytes(), time.perf_counter()
        # a prompt that is run again costs the same; a step takes as many rows as fit
        anew = SchedulerSettings(offload="off", keep_prefixes=False)
        self._app = load(self._artifact, threads=self._threads, settings=anew)
        self._app.generate([[3]], max_tokens=1, ignore_eos=True)
        seconds = time.perf_counter() - start
        self._app.generate([[3, 4, 5]], max_tokens=2, ignore_eos=True)
        added = resident_bytes() - before
        return {"seconds": seconds, "share": added / self._weights.stat().st_size}

    def settings(self) -> dict[str, str]:
        """Return what a reader needs to know of this side: version, widths of weights and KV."""
        spec = self._model["spec"]
        kinds = dict.fromkeys([spec["weight_dtype"], *(kind for _, kind in spec["formats"])])
        return {
            "settings": f"dovetail {version('dovetail')}",
            "weights": "+".join(kinds),
            "kv": spec["kv_dtype"],
        }

    def sizes(self) -> dict[str, int]:
        """Return words of the vocabulary, tokens of context, bytes of weights of a decode step.

        Of experts those of one request's step; experts: how many a layer has, 0 for one dense part.
        """
        spec, weights = self._model["spec"], self._model["weights"]
        experts = spec.get("experts") or {"used": 1, "count": 1}
        parts = {True: experts["used"] / experts["count"], False: 1.0}
        step = sum(
            int(w["bytes"] * parts[w["name"].endswith((".gate_up", ".down"))])
            for w in weights
            if w["name"] not in READ_BY_ROW
        )
        names = ("vocab_size", "max_context")
        figures = {"step_bytes": step, "experts": (spec.get("experts") or {}).get("count", 0)}
        return {**{name: spec[name] for name in names}, **figures}

    def run(self, work: Work, prompts: list[list[int]]) -> dict[str, Any]:
        """Generate; return seconds until all had a first token, and from the first one to the last.

        `others`: cores that other processes used; `peak`: resident bytes at most.
        """
        reset_peak()
        options = {"max_tokens": work.new, "ignore_eos": True, "temperature": 0.0}
        with timed_region() as region:
            found = self._app.generate(prompts, **options)
        firsts = [one.metrics.first_token for one in found]
        return {
            "prefill": max(firsts) - min(one.metrics.arrival for one in found),
            "decode": max(one.metrics.last_token for one in found) - min(firsts),
            "others": region.others,
            "peak": peak_bytes(),
        }


class Memory:
    """The read bandwidth here and now, in a process whose memory is nobody's figure."""

    def bandwidth(self, artifact: str, threads: int) -> tuple[float, float]:
        """Return bytes per second that the threads read: of memory, and of the weights' own pages.

        On a guest these may be slower than others: 8 of 33 GB/s were seen, for as long as they
        lay in the page cache.
        """
        from dovetail.compiler.measure.roofline import measure_read_bandwidth

        (weights,) = Path(artifact).glob("models/*/weights/weights.bin")
        pages = np.memmap(weights, np.float32, "r")
        return measure_read_bandwidth(threads), measure_read_bandwidth(threads, data=pages)


READ_BY_ROW = ("embed", "rope_cos", "rope_sin")
"""Tables of which a step reads one row for each sequence."""


def resident_bytes() -> int:
    """Return the resident memory of this process, mapped files included, apart from KV.

    The pool of KV is the largest mapping without a file: most of it is never touched.
    """
    mappings = read_mappings(Path("/proc/self/smaps").read_text())
    pool = max((each for each in mappings if not each[2]), default=(0, 0, ""))
    return sum(resident for _, resident, _ in mappings) - pool[1]


def read_mappings(text: str) -> list[tuple[int, int, str]]:
    """Return size and resident bytes of each mapping in `smaps`, and the name of its file."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            name = words[5] if len(words) > 5 else ""
        elif words[0] == "Size:":
            size = int(words[1]) << 10
        elif words[0] == "Rss:":
            found.append((size, int(words[1]) << 10, name))
    return found


def peak_bytes(pid: int | None = None) -> int:
    """Return the peaks of resident memory of a process, this one by default, and those below it."""
    return sum(_memory(each, "VmHWM:") for each in family(pid or os.getpid()))


def reset_peak() -> None:
    """Have `peak_bytes` of this process count from now on, where the kernel allows it."""
    for pid in family(os.getpid()):
        with suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def _memory(pid: int, name: str) -> int:
    with suppress(OSError):  # the process may end meanwhile
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) << 10
    return 0
