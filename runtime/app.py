"""An opened artifact that generates: `load` and `App`, what a user of the runtime holds.

In: prompts (text or token ids) and options with vLLM's names. Out: completions or a stream.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from types import TracebackType
from typing import Self, TypeAlias

from dovetail.ir.artifact import ServicePlan
from dovetail.ir.errors import RankError, RequestError
from dovetail.runtime.artifact import Artifact, open_artifact
from dovetail.runtime.engine import LOST, Engine
from dovetail.runtime.request import Chunk, Completion, Request, SamplingParams, State
from dovetail.runtime.tokenizer import TextStream, Tokenizer
from dovetail.topology.hardware import read_hardware

Prompt: TypeAlias = str | Sequence[int]


def load(
    path: str | os.PathLike[str],
    *,
    plan: ServicePlan | None = None,
    threads: int | None = None,
    kv_blocks: int | None = None,
    deterministic: bool = False,
    check_weights: bool = False,
) -> App:
    """Open the artifact at `path` for generation on this machine.

    Args:
        path: the artifact directory.
        plan: processes, threads and PUs to run with instead of the artifact's plan.
        threads: use this many threads in both phases of each process instead of the plan's.
        kv_blocks: size of the KV pool in blocks of 16 tokens; default from the plan or memory.
        deterministic: give a prompt the same logits, bit for bit, whatever else is in the batch,
            in one step or several, with any `plan`, `threads` and `kv_blocks`. It costs time.
        check_weights: also check the chunk hashes of the weights (reads all of them).

    Raises:
        ArtifactError: the artifact is damaged, too new, or does not fit this machine.
        CapacityError: there is not enough memory, or threads cannot be started.
        RequestError: `threads` or `kv_blocks` is below 1.
        SpecError: the model cannot be shared by the processes of `plan`.
        RankError: a process could not be started.
    """
    for name, value in (("threads", threads), ("kv_blocks", kv_blocks)):
        if value is not None and value < 1:
            raise RequestError(f"{name} must be at least 1, not {value}")
    hardware = read_hardware()
    artifact = open_artifact(path, hardware, check_weights=check_weights)
    part = next(iter(artifact.models.values()))
    engine = Engine(
        artifact,
        part,
        hardware,
        plan=plan,
        threads=threads,
        kv_blocks=kv_blocks,
        deterministic=deterministic,
    )
    return App(artifact, engine, Tokenizer(part.tokenizer) if part.tokenizer else None)


class _Job:
    """One request with its text, as the thread that waits for it sees it."""

    def __init__(self, request: Request, text: TextStream | None) -> None:
        self.request, self.text = request, text
        self.read = 0  # generated tokens already passed on

    @property
    def done(self) -> bool:
        return self.request.state is State.FINISHED


class App:
    """A loaded artifact. Threads may call it at the same time; their requests share batches."""

    def __init__(self, artifact: Artifact, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self.artifact, self.engine, self.tokenizer = artifact, engine, tokenizer
        self._lock = threading.Lock()
        self._jobs: dict[int, _Job] = {}
        self._closed = False

    def generate(self, prompts: Prompt | Sequence[Prompt], **options: object) -> list[Completion]:
        """Return the completions of `prompts` in order, `n` for each.

        Args:
            prompts: one prompt or several, each a text or a list of token ids.
            **options: `max_tokens temperature top_p top_k min_p seed stop ignore_eos logprobs n`.

        Raises:
            RequestError: an option or a prompt is wrong; nothing has been generated.
            CapacityError: a request is larger than the whole KV pool.
            RankError: a process of the group died; the requests under way are lost.
        """
        params = SamplingParams.make(options)
        jobs = self._submit([self._encode(p) for p in _as_list(prompts)], params)
        try:
            while not all(job.done for job in jobs):
                self._step(jobs)
            _check_lost(jobs)
        finally:
            self._abandon(jobs)
        return [_completion(job) for job in jobs]

    def stream(self, prompt: Prompt, **options: object) -> Iterator[Chunk]:
        """Yield the completion of one prompt piece by piece; options as for `generate`, n = 1.

        Leaving the iterator early drops the request.
        """
        params = SamplingParams.make(options)
        if params.n != 1:
            raise RequestError(f"a stream has one completion: n must be 1, not {params.n}")
        return self._stream(self._encode(prompt), params)

    def close(self) -> None:
        """End the threads; the app cannot be used afterwards. Safe to call twice."""
        with self._lock:
            self._closed = True
            self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _stream(self, prompt: list[int], params: SamplingParams) -> Iterator[Chunk]:
        jobs = self._submit([prompt], params)
        job = jobs[0]
        try:
            shown = 0
            while not job.done:
                self._step(jobs)
                _check_lost(jobs)
                text = "" if job.text is None else job.text.text[shown:]
                shown += len(text)
                fresh = tuple(job.request.output[job.read :])
                job.read += len(fresh)
                if fresh or job.done:
                    yield Chunk(text, fresh, job.request.finish_reason)
        finally:
            self._abandon(jobs)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    f"{self.artifact.path} has no tokenizer, so prompts must be lists of token ids"
                )
            return self.tokenizer.encode(prompt)
        if not _is_listed(prompt) or any(
            isinstance(t, bool) or not hasattr(t, "__index__") for t in prompt
        ):
            raise RequestError("a prompt must be a text or a list of token ids")
        return [int(t) for t in prompt]

    def _submit(self, prompts: list[list[int]], params: SamplingParams) -> list[_Job]:
        if params.stop and self.tokenizer is None:
            raise RequestError(f"{self.artifact.path} has no tokenizer, so `stop` cannot be used")
        with self._lock:
            if self._closed:
                raise RequestError("the app is closed; load the artifact again")
            for prompt in prompts:  # all or none
                self.engine.scheduler.check(prompt, params)
            requests = [r for prompt in prompts for r in self.engine.submit(prompt, params)]
            jobs = [_Job(request, self._text_stream(params)) for request in requests]
            self._jobs.update((job.request.id, job) for job in jobs)
        return jobs

    def _text_stream(self, params: SamplingParams) -> TextStream | None:
        return TextStream(self.tokenizer, params.stop) if self.tokenizer else None

    def _step(self, mine: list[_Job]) -> None:
        """Run a step for everybody, unless another thread has finished `mine` meanwhile."""
        with self._lock:
            if self._closed:
                raise RequestError("the app was closed while it was generating")
            if all(job.done for job in mine):
                return
            for request in self.engine.step():
                self._extend_text(self._jobs[request.id])

    def _extend_text(self, job: _Job) -> None:
        request, text = job.request, job.text
        if text is None:
            return
        text.push(request.tokens[-1])
        if text.stopped and not job.done:
            self.engine.finish(request, "stop")
        if text.stopped:
            request.finish_reason = "stop"
        elif job.done:
            text.close()

    def _abandon(self, jobs: list[_Job]) -> None:
        """Forget `jobs`; end those that an error or an early exit left unfinished."""
        with self._lock:
            for job in jobs:
                self._jobs.pop(job.request.id, None)
                if not job.done:
                    self.engine.finish(job.request, "abort")


def _is_listed(value: object) -> bool:
    """Tell whether `value` is a list, tuple or array: ordered, and no text or bytes."""
    return hasattr(value, "__iter__") and not isinstance(value, str | bytes | Mapping | Set)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not _is_listed(prompts):
        raise RequestError("prompts must be texts or lists of token ids")
    listed = list(prompts)
    if listed and all(hasattr(item, "__index__") for item in listed):
        return [listed]  # type: ignore[list-item]
    if not all(isinstance(item, str | Sequence) or hasattr(item, "__len__") for item in listed):
        raise RequestError("prompts must be texts or lists of token ids")
    return listed  # type: ignore[return-value]


def _check_lost(jobs: Sequence[_Job]) -> None:
    """Raise RankError where a request was lost in a step that another thread ran."""
    if any(job.request.finish_reason == LOST for job in jobs):
        raise RankError("a process of the group has died; send the request again")


def _completion(job: _Job) -> Completion:
    request = job.request
    assert request.finish_reason is not None
    return Completion(
        text=None if job.text is None else job.text.text,
        token_ids=tuple(request.output),
        finish_reason=request.finish_reason,
        logprobs=None if request.params.logprobs is None else tuple(request.logprobs),
        metrics=request.metrics,
    )
