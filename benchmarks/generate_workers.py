"""Sides of `generate.py`, each in its own process so that thread pools do not fight.

In: messages (method, arguments) over a pipe. Out: the method's result. A side that is not asked
anything sleeps on its pipe.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from common import timed_region
from dovetail.runtime.plan import SchedulerSettings


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
    """Our side: one artifact, loaded anew when the number of threads changes."""

    def __init__(self, artifact: str) -> None:
        import dovetail

        self._load = dovetail.load
        self._artifact = artifact
        self._app: Any = None
        self._threads = 0

    def load(self, threads: int) -> dict[str, float]:
        """Load with `threads` threads; return seconds, and resident bytes added by some tokens."""
        if self._app is not None:
            self._app.close()
        before, start = resident_bytes(), time.perf_counter()
        anew = SchedulerSettings(keep_prefixes=False)  # a prompt that is run again costs the same
        self._app = self._load(self._artifact, threads=threads, settings=anew)
        seconds = time.perf_counter() - start
        self._threads = threads
        self._app.generate([[1, 2, 3]], max_tokens=2, ignore_eos=True)
        return {"seconds": seconds, "bytes": resident_bytes() - before}

    def run(self, prompt: list[int], new_tokens: int, threads: int) -> dict[str, Any]:
        """Generate; return seconds to the first token, seconds per further token, and the ids."""
        if threads != self._threads:
            self.load(threads)
        options = {"max_tokens": new_tokens, "ignore_eos": True}
        with timed_region() as region:
            (found,) = self._app.generate([prompt], **options)
        metrics = found.metrics
        return {
            "prefill": metrics.ttft,
            "decode": (metrics.last_token - metrics.first_token) / (new_tokens - 1),
            "ids": list(found.token_ids),
            "others": region.others,
        }

    def bandwidth(self, threads: int) -> float:
        """Return the bytes per second that `threads` threads read here and now."""
        from dovetail.compiler.roofline import measure_read_bandwidth

        return measure_read_bandwidth(threads)

    def weights_bandwidth(self, threads: int) -> float:
        """Return the bytes per second that `threads` threads read of the very pages of weights.

        On a guest these may be slower than others: 8 of 33 GB/s were seen, for as long as they
        lay in the page cache.
        """
        from dovetail.compiler.roofline import measure_read_bandwidth

        (file,) = Path(self._artifact).glob("models/*/weights/weights.bin")
        return measure_read_bandwidth(threads, data=np.memmap(file, np.float32, "r"))


class Transformers:
    """The peer: transformers on torch, its default attention, a KV cache, no gradients."""

    def __init__(self, model: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()

    def settings(self) -> str:
        """Return what a reader needs to know of this peer."""
        import transformers

        attention = self._model.config._attn_implementation
        return (
            f"transformers {transformers.__version__}, torch {self._torch.__version__}, "
            f"{attention}, {self._model.dtype}"
        )

    def run(self, prompt: list[int], new_tokens: int, threads: int) -> dict[str, Any]:
        """Generate greedily with a bare loop, which costs less than `generate`."""
        torch = self._torch
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        with timed_region() as region, torch.no_grad():
            start = time.perf_counter()
            found = self._model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
            ids = [int(found.logits[0, -1].argmax())]
            first = time.perf_counter()
            for _ in range(new_tokens - 1):
                found = self._model(
                    torch.tensor([[ids[-1]]]),
                    past_key_values=found.past_key_values,
                    use_cache=True,
                )
                ids.append(int(found.logits[0, -1].argmax()))
            last = time.perf_counter()
        return {
            "prefill": first - start,
            "decode": (last - first) / (new_tokens - 1),
            "ids": ids,
            "others": region.others,
        }


def resident_bytes() -> int:
    """Return the resident memory of this process, mapped files included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0
