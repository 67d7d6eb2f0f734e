"""The peers of `generate.py`: llama.cpp, OpenVINO GenAI, vLLM. Each is optional.

In: a GGUF file, of which vLLM gets a bfloat16 copy in its own format. Out: sides with `load`,
`settings` and `run` as `generate_workers.Dovetail` has them, for `generate_workers.Worker`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from common import timed_region
from generate_workers import Work, peak_bytes, reset_peak
from llamacpp import BENCH, Batched, find_programs, parse_batched, run_measured

CONVERTS = ("transformers", "accelerate")
"""What writes a GGUF file's weights in another format."""
TRIES = 4
"""Runs of `llama-batched-bench` until one prints its figures: at times it ends before its log."""


@dataclass(frozen=True, slots=True)
class Flags:
    """How `llama-batched-bench` is run: flash attention, rows of a step, one cache for all."""

    flash: str = "auto"
    rows: int = 512
    unified: bool = False

    def arguments(self) -> list[str]:
        """Return the command line."""
        unified = "-kvu" if self.unified else "-no-kvu"
        return ["-fa", self.flash, "-ub", str(self.rows), unified]


def other_flags(work: Work) -> Iterator[Callable[[Flags], Flags]]:
    """Yield the changes of flags that may make this work faster, to be tried one by one."""
    yield lambda best: replace(best, flash="on")
    yield lambda best: replace(best, flash="off")
    if work.batch > 1:
        yield lambda best: replace(best, unified=True)
    if work.phase == "prefill":
        for rows in (128, 256, 2048):
            if rows < 2 * work.batch * work.prompt:
                yield lambda best, rows=rows: replace(best, rows=rows)  # type: ignore[misc]


class LlamaCpp:
    """llama.cpp's `llama-batched-bench`, a process for each run, in the flags found fastest."""

    def __init__(self, model: str, threads: int) -> None:
        programs = find_programs()
        assert programs is not None, "a peer that is absent is left out"
        self._programs, self._model, self._threads = programs, model, threads
        self._flags: dict[Work, Flags] = {}

    def load(self) -> dict[str, float]:
        """Return the seconds of a process beyond those of its one token in and one out."""
        work = Work("prefill", 1, 1, 2)
        times = []
        for _ in range(3):
            found, seconds, _ = self._bench(work, Flags())
            times.append(seconds - found.prefill - found.decode)
        return {"seconds": statistics.median(times)}

    def settings(self) -> dict[str, str]:
        """Return what a reader needs to know of this peer."""
        return {"settings": f"llama.cpp {self._programs.build}", "weights": "file", "kv": "f16"}

    def tune(self, work: Work) -> str:
        """Find the fastest flags for this work; return them."""
        best = Flags()
        least = self._seconds(work, best)
        for change in other_flags(work):
            tried = change(best)
            seconds = self._seconds(work, tried)
            if seconds < least:
                best, least = tried, seconds
        self._flags[work] = best
        return " ".join(best.arguments())

    def run(self, work: Work, prompts: list[list[int]]) -> dict[str, Any]:
        """As `Dovetail.run`; the program draws its prompts itself."""
        with timed_region() as region:
            found, _, peak = self._bench(work, self._flags.get(work, Flags()))
        return {
            "prefill": found.prefill,
            "decode": found.decode,
            "others": region.others,
            "peak": peak,
        }

    def _seconds(self, work: Work, flags: Flags) -> float:
        found, _, _ = self._bench(work, flags)
        return found.prefill if work.phase == "prefill" else found.decode

    def _bench(self, work: Work, flags: Flags) -> tuple[Batched, float, int]:
        context = work.batch * (-(-(work.prompt + work.new) // 256) * 256)
        command = [self._programs.path(BENCH), "-m", self._model, "-t", str(self._threads)]
        command += ["-c", str(context), "-npp", str(work.prompt), "-ntg", str(work.new - 1)]
        command += ["-npl", str(work.batch), "--output-format", "jsonl", *flags.arguments()]
        for _ in range(TRIES):
            text, seconds, peak = run_measured(command)
            if found := parse_batched(text):
                return found, seconds, peak
        raise RuntimeError(f"{BENCH} printed no figures for {self._model}")


class OpenVino:
    """OpenVINO GenAI's paged pipeline of the file, its own defaults of precision."""

    def __init__(self, model: str, threads: int) -> None:
        self._model, self._threads = model, threads
        self._number = 0

    def load(self) -> dict[str, float]:
        """Load; return the seconds until it had answered with a token."""
        import openvino
        import openvino_genai

        self._tensor, self._api = openvino.Tensor, openvino_genai
        start = time.perf_counter()
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # a prompt that is run again must cost the same
        scheduler.max_num_batched_tokens = 4096
        scheduler.cache_size = 1  # GiB of keys and values
        options = {"INFERENCE_NUM_THREADS": self._threads, "KV_CACHE_PRECISION": "u8"}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            self._model, scheduler, "CPU", options, {}
        )
        self.run(Work("prefill", 1, 1, 1), [[3]])
        return {"seconds": time.perf_counter() - start}

    def settings(self) -> dict[str, str]:
        """Return what a reader needs to know of this peer."""
        name = f"OpenVINO GenAI {version('openvino-genai')}"
        return {"settings": name, "weights": "file", "kv": "u8"}

    def run(self, work: Work, prompts: list[list[int]]) -> dict[str, Any]:
        """As `Dovetail.run`."""
        reset_peak()
        options = {"max_new_tokens": work.new, "ignore_eos": True, "do_sample": False}
        config = self._api.GenerationConfig(**options)
        waiting = []
        with timed_region() as region:
            start = time.perf_counter()
            for ids in prompts:
                self._number += 1
                tensor = self._tensor(np.array([ids], np.int64))
                waiting.append(self._pipeline.add_request(self._number, tensor, config))
            handles, begun, first = list(waiting), 0.0, 0.0
            while self._pipeline.has_non_finished_requests():
                self._pipeline.step()
                if not waiting:
                    continue
                now = time.perf_counter()
                waiting = [handle for handle in waiting if not handle.can_read()]
                if len(waiting) < len(handles):
                    begun = begun or now
                first = now
            last = time.perf_counter()
        return {
            "prefill": first - start,
            "decode": last - begun,
            "others": region.others,
            "peak": peak_bytes(),
        }


class Vllm:
    """vLLM on the CPU in bfloat16, offline."""

    def __init__(self, model: str, threads: int) -> None:
        self._model, self._threads = model, threads

    def load(self) -> dict[str, float]:
        """Load; return the seconds until it had answered with a token."""
        import os

        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{self._threads - 1}"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a side may have no children
        import vllm

        self._api = vllm
        start = time.perf_counter()
        self._engine = vllm.LLM(
            model=self._model,
            dtype="bfloat16",
            enable_prefix_caching=False,
            max_num_batched_tokens=4096,
            max_model_len=4352,
            max_num_seqs=16,
            disable_log_stats=False,
        )
        self.run(Work("prefill", 1, 1, 1), [[3]])
        return {"seconds": time.perf_counter() - start}

    def settings(self) -> dict[str, str]:
        """Return what a reader needs to know of this peer."""
        return {"settings": f"vLLM {self._api.__version__}", "weights": "bf16", "kv": "bf16"}

    def run(self, work: Work, prompts: list[list[int]]) -> dict[str, Any]:
        """As `Dovetail.run`."""
        options = {"max_tokens": work.new, "ignore_eos": True, "temperature": 0.0}
        with timed_region() as region:
            found = self._engine.generate(
                [{"prompt_token_ids": ids} for ids in prompts],
                self._api.SamplingParams(**options),
                use_tqdm=False,
            )
        times = [one.metrics for one in found]
        firsts = [one.first_token_ts for one in times]
        return {
            "prefill": max(firsts) - min(one.queued_ts for one in times),
            "decode": max(one.last_token_ts for one in times) - min(firsts),
            "others": region.others,
            "peak": peak_bytes(),
        }


def write_bfloat16(file: Path, target: Path) -> None:
    """Write a GGUF file's weights as a Hugging Face directory in bfloat16, for vLLM."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"gguf_file": file.name, "dtype": torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(file.parent, **options)
    model.hf_quantizer = None  # its weights are plain bfloat16 now
    del model.config.quantization_config
    part = target.with_name(f"{target.name}.part")
    model.save_pretrained(part)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(part)
    part.rename(target)


@dataclass(frozen=True, slots=True)
class Peer:
    """A side, what names what it lacks, and how what it reads in place of the file is made."""

    side: Callable[[str, int], Any]
    missing: Callable[[], str]
    suffix: str = ""
    prepare: Callable[[Path, Path], None] | None = None


def modules_missing(*names: str) -> Callable[[], str]:
    """Return what names those modules that are not installed."""
    return lambda: ", ".join(name for name in names if find_spec(name) is None)


def programs_missing() -> str:
    """Name llama.cpp's programs where there are none."""
    return "" if find_programs() else f"{BENCH} (in the folder DOVETAIL_PEERS, or on PATH)"


PEERS = {
    "llamacpp": Peer(LlamaCpp, programs_missing),
    "openvino": Peer(OpenVino, modules_missing("openvino_genai", "openvino_tokenizers")),
    "vllm": Peer(Vllm, modules_missing("vllm", *CONVERTS), "-bf16", write_bfloat16),
}


class MayLack(Protocol):
    """What may be absent. missing: names what lacks for it, nothing where it is there."""

    @property
    def missing(self) -> Callable[[], str]:
        """Return what names it."""
        ...


def installed_peers(names: Iterable[str], peers: Mapping[str, MayLack] = PEERS) -> list[str]:
    """Return those of the peers asked for that this machine has; say which are absent."""
    found = []
    for name in names:
        if missing := peers[name].missing():
            print(f"{name} is absent: {missing} is not installed", flush=True)
        else:
            found.append(name)
    return found
