"""Prometheus metrics of a server under vLLM's names and buckets, and those that vLLM has not.

In: requests that end, pieces that are sent, refusals; the served models. Out: the text of
`/metrics`. What engines, workflows and encoders know of themselves is read when somebody asks; all
values grow only, but for gauges.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily as Count
from prometheus_client.metrics_core import GaugeMetricFamily as Gauge
from prometheus_client.metrics_core import HistogramMetricFamily as Histograms
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dovetail.runtime.embed.service import EmbeddingService
from dovetail.runtime.engine.tally import Histogram, Tally
from dovetail.runtime.flows.events import WorkflowResult
from dovetail.runtime.hosting.generator import Job
from dovetail.runtime.machine.seat import Board
from dovetail.runtime.server.models import Models, ServedModel
from dovetail.topology.textfile import show_ids

Labels: TypeAlias = tuple[str, ...]
Values: TypeAlias = Mapping[Any, float] | Mapping[Any, Histogram] | float | Histogram
"""A value, or values by what the label of a metric says beyond those of all, or all such labels."""

LABELS = ("model_name", "engine")

FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))

HISTOGRAMS: dict[str, tuple[str, tuple[str, ...], tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Arrival to first token.", LABELS, FIRST_TOKEN),
    "inter_token_latency_seconds": ("Between two tokens of a stream.", LABELS, BETWEEN_TOKENS),
    "e2e_request_latency_seconds": ("Arrival to last token.", LABELS, REQUEST),
    "request_queue_time_seconds": ("Arrival to the first step.", LABELS, REQUEST),
    "request_prefill_time_seconds": ("First step to first token.", LABELS, REQUEST),
    "request_decode_time_seconds": ("First to last token.", LABELS, REQUEST),
    "request_prompt_tokens": ("Tokens of prompts.", LABELS, TOKENS),
    "request_generation_tokens": ("Tokens of answers.", LABELS, TOKENS),
    "workflow_latency_seconds": (
        "Run time of the nodes of workflows.",
        ("workflow", "node"),
        REQUEST,
    ),
}
"""Words, labels and buckets."""
SPANS = (
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
)
"""Histograms of the times between arrival, first step, first token and last token."""
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "prompt_tokens": ("Tokens of prompts.", LABELS),
    "generation_tokens": ("Tokens that were generated.", LABELS),
    "prefix_cache_queries": ("Prompt tokens that were looked up in the prefix cache.", LABELS),
    "prefix_cache_hits": ("Prompt tokens that were found in it.", LABELS),
    "num_preemptions": ("Preemptions: requests that gave way and were computed again.", LABELS),
    "offloaded_requests": ("Requests computed with their KV beside the accelerator.", LABELS),
    "request_success": ("Requests that ended, by reason.", (*LABELS, "finished_reason")),
    "admission_rejections": ("Requests that were refused, by reason.", ("reason",)),
    "http_requests": ("Replies by path and status.", ("path", "status")),
    "workflow_runs": ("Runs of workflows that ended well.", ("workflow",)),
    "transformations_left": (
        "Runs of workflows in which a transformation was never applied, by the last reason.",
        ("transformation", "reason"),
    ),
    "embedded_texts": ("Texts that were embedded or ranked.", LABELS),
}


def _load(path: str) -> Callable[[ServedModel], Values]:
    """Return what reads a figure of a model's engine; nothing where no engine is."""
    read = attrgetter(path)
    return lambda model: read(model.app.generator.host.load) if model.file else {}


def _drafts(name: str) -> Callable[[ServedModel], Values]:
    """Return what reads a count of drafts; nothing where none are made."""

    def read(model: ServedModel) -> Values:
        counts = model.app.generator.host.load.drafts if model.file else {}
        return counts.get(name, 0) if counts else {}

    return read


def _results(model: ServedModel) -> Values:
    found = model.app.flows.statistics
    return {"accepted": found.accepted, "rejected": found.rejected}


def _accuracy(model: ServedModel) -> Values:
    found = model.app.flows.statistics
    return found.accuracy if found.attempted else {}


def _hits(model: ServedModel) -> Values:
    hot = model.app.flows.hot.items()
    return {index: found.hits / found.scanned for index, found in hot if found.scanned}


def _scans(model: ServedModel) -> Values:
    return {device: seen for device, seen in model.app.flows.scans.items() if any(seen.counts)}


def _services(model: ServedModel) -> Iterable[EmbeddingService]:
    return {found.service for found in model.app.embeddings.encoders.values()}


def _spilled(model: ServedModel) -> Values:
    return sum((Counter(service.spilled) for service in _services(model)), Counter())


def _held(part: int) -> Callable[[ServedModel], Values]:
    """Return what reads the queues of encoders: queries held, or the part that is full."""

    def read(model: ServedModel) -> Values:
        return {name: held[part] for one in _services(model) for name, held in one.held.items()}

    return read


def _division(read: Callable[[Board], Values]) -> Callable[[ServedModel], Values]:
    """Return what reads how the CPUs are divided; nothing where the workers do not share them."""
    return lambda model: {} if model.app.board is None else read(model.app.board)


def _plan(model: ServedModel) -> Values:
    if not model.file:
        return {}
    plan = model.app.generator.host.service
    phases = (("prefill", plan.prefill), ("decode", plan.decode))
    return {
        (name, plan.processes_of(name), phase.threads, show_ids(phase.cpus)): 1
        for name, phase in phases
    }


@dataclass(frozen=True)
class Figure:
    """A metric whose values are read when somebody asks. labels: beyond those of all."""

    kind: type[Count | Gauge | Histograms]
    text: str
    read: Callable[[ServedModel], Values]
    labels: Labels = ()


by_device = partial(Figure, labels=("device",))

FIGURES: dict[str, Figure] = {
    "num_requests_running": Figure(Gauge, "Requests that are being computed.", _load("running")),
    "num_requests_waiting": Figure(Gauge, "Requests that wait.", _load("waiting")),
    "kv_cache_usage_perc": Figure(
        Gauge, "Fraction of the KV blocks in use, 0 to 1.", _load("kv_usage")
    ),
    "cpu_attn_seconds": Figure(
        Count, "Time of the CPU's attention beside an accelerator.", _load("waits.attention")
    ),
    "pipeline_bubble_seconds": by_device(
        Count,
        "Time that a device waited for the other in steps that used both.",
        _load("waits.bubbles"),
    ),
    "kv_pool_usage_ratio": by_device(
        Gauge, "Fraction of a device's KV blocks in use, 0 to 1.", _load("pools")
    ),
    "swapped_requests": by_device(
        Count, "Requests whose KV moved to a device from the other one.", _load("swaps")
    ),
    "kv_pool_requests": by_device(
        Gauge, "Requests that are being computed with their KV in a device's pool.", _load("homes")
    ),
    "step_tokens": Figure(
        Count,
        "Tokens that steps computed: of prompts (prefill) and answers (decode).",
        _load("tokens"),
        ("phase",),
    ),
    "plan_info": Figure(
        Gauge,
        "The plan in force, as labels: processes, threads of each, PUs of all.",
        _plan,
        ("phase", "processes", "threads", "cpus"),
    ),
    "cpu_share_cores": Figure(
        Gauge,
        "CPUs that the worker of a stage keeps while others work.",
        _division(lambda board: {stage: len(cpus) for stage, cpus in board.shares.items()}),
        ("stage",),
    ),
    "cpu_busy_seconds": Figure(
        Count,
        "Seconds of cores that a stage has worked; the rate is how many cores it keeps busy.",
        _division(lambda board: {stage: board.used[stage] for stage in board.shares}),
        ("stage",),
    ),
    "cpu_divisions": Figure(
        Count,
        "How often the CPUs were divided anew because the load had changed.",
        _division(lambda board: board.changes),
    ),
    "iteration_tokens_total": Figure(Histograms, "Tokens computed per step.", _load("steps")),
    "spec_decode_num_drafts": Figure(
        Count, "Drafts of tokens that steps verified.", _drafts("drafts")
    ),
    "spec_decode_num_draft_tokens": Figure(
        Count, "Tokens of these drafts.", _drafts("draft_tokens")
    ),
    "spec_decode_num_accepted_tokens": Figure(
        Count, "Tokens of these drafts that became part of answers.", _drafts("accepted_tokens")
    ),
    "speculations": Figure(
        Count, "Speculative steps of workflows that have ended, by result.", _results, ("result",)
    ),
    "speculation_accept_ratio": Figure(
        Gauge, "Accepted speculative steps over those that were begun.", _accuracy
    ),
    "ivf_gpu_cache_hit_ratio": Figure(
        Gauge, "Clusters scanned on the GPU over those of all searches.", _hits, ("index",)
    ),
    "embed_queue_texts": by_device(Gauge, "Texts that wait or run in a device's queue.", _held(0)),
    "embed_queue_usage_ratio": by_device(
        Gauge, "Fraction of a device's queue that is full, 0 to 1.", _held(1)
    ),
    "embed_spill": by_device(
        Count, "Texts that a device embedded because accelerators were full.", _spilled
    ),
    "retrieval_substage_seconds": by_device(
        Histograms, "Run time of sub-stages of searches.", _scans
    ),
}

BUSY_AT = dict.fromkeys(("/v1/embeddings", "/v1/rerank", "/rerank", "/embed"), "embedding_slo")
"""What was full where BUSY was the answer, if not the engine's queue."""
REASONS = (
    *("queue_full", "embedding_slo"),
    *("request_too_large", "context_length_exceeded", "body_too_large"),
)
"""Reasons of refusals: no room now, or never."""


class ServerMetrics(Collector):
    """All figures of one server; used on its event loop alone.

    They are kept as plain sums and tallies, for requests count often: they become metrics when
    somebody asks.
    """

    def __init__(self, models: Models, prefix: str) -> None:
        self._models, self._prefix = models, prefix
        self._counts: defaultdict[str, Counter[Labels]] = defaultdict(Counter)
        self._tallies: dict[str, dict[Labels, Tally]] = {name: {} for name in HISTOGRAMS}
        self._progress: dict[str, dict[int, float]] = {}  # when choices last got a token
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        """Return the exposition text."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield what was counted, as the registry asks."""
        for name, (text, labels, _) in HISTOGRAMS.items():
            histogram = Histograms(f"{self._prefix}:{name}", text, labels=labels)
            for values, tally in self._tallies[name].items():
                _add(histogram, values, tally.read())
            yield histogram
        for name, (text, labels) in COUNTERS.items():
            counter = Count(f"{self._prefix}:{name}", text, labels=labels)
            for values, count in self._counts[name].items():
                counter.add_metric(values, count)
            yield counter
        yield from self._figures()

    def reply(self, path: str, status: int) -> None:
        """Count a reply."""
        self._counts["http_requests"][path, str(status)] += 1

    def reject(self, path: str, code: str | None) -> None:
        """Count a refusal at `path` with the error's `code`, if it was one for lack of room."""
        reason = BUSY_AT.get(path, "queue_full") if code == "busy" else code
        if reason in REASONS:
            self._counts["admission_rejections"][reason,] += 1

    def workflow(self, id: str, result: WorkflowResult) -> None:
        """Count a run that has ended, what it was left without, and the seconds of its nodes."""
        self._counts["workflow_runs"][id,] += 1
        for name, why in result.left.items():
            self._counts["transformations_left"][name, why.reason] += 1
        for ran in result.timeline:
            self._tally("workflow_latency_seconds", ran.end - ran.start, id, str(ran.node))

    def embed(self, model: ServedModel, texts: int, tokens: int) -> None:
        """Count texts that went through an encoder."""
        self._count("embedded_texts", model, texts)
        self._count("prompt_tokens", model, tokens)

    def piece(self, model: ServedModel, id: str, place: int, tokens: int) -> None:
        """Note that a choice of a stream got `tokens` more."""
        now = time.perf_counter()
        last = self._progress.setdefault(id, {})
        if place in last and tokens:
            self._observe("inter_token_latency_seconds", model, (now - last[place]) / tokens)
        last[place] = now

    def finish(self, model: ServedModel, id: str, arrival: float, job: Job) -> None:
        """Count a job that has ended, well or not."""
        self._progress.pop(id, None)
        request = getattr(job, "request", None)  # none where it was refused
        if request is None or request.finish_reason is None:
            return
        metrics = request.metrics
        self._count("request_success", model, 1, request.finish_reason)
        self._count("prompt_tokens", model, request.prompt_length)
        self._count("generation_tokens", model, request.generated)
        self._count("prefix_cache_queries", model, request.prompt_length)
        self._count("prefix_cache_hits", model, metrics.cached_tokens)
        self._count("num_preemptions", model, metrics.preemptions)
        self._count("offloaded_requests", model, metrics.offloaded)
        self._observe("request_prompt_tokens", model, request.prompt_length)
        self._observe("request_generation_tokens", model, request.generated)
        self._observe("e2e_request_latency_seconds", model, time.perf_counter() - arrival)
        times = itertools.pairwise(
            (metrics.arrival, metrics.started, metrics.first_token, metrics.last_token)
        )
        for name, (start, end) in zip(SPANS, times, strict=True):
            if start is not None and end is not None:
                self._observe(name, model, end - start)
        if metrics.ttft is not None:
            self._observe("time_to_first_token_seconds", model, metrics.ttft)

    def _figures(self) -> Iterator[Metric]:
        for name, one in FIGURES.items():
            labels = (*LABELS, *one.labels)
            family = one.kind(f"{self._prefix}:{name}", one.text, labels=labels)
            for model in self._models:
                if not model.whole:  # its app stands under an id of its own: told once
                    continue
                found = one.read(model)
                by_label = found.items() if isinstance(found, Mapping) else [((), found)]
                for label, value in by_label:
                    more = label if isinstance(label, tuple) else (label,)
                    _add(family, (model.id, "0", *map(str, more)), value)
            yield family

    def _observe(self, name: str, model: ServedModel, value: float) -> None:
        self._tally(name, value, model.id, "0")

    def _tally(self, name: str, value: float, *labels: str) -> None:
        found = self._tallies[name]
        if labels not in found:
            found[labels] = Tally(HISTOGRAMS[name][2])
        found[labels].add(value)

    def _count(self, name: str, model: ServedModel, amount: int, *labels: str) -> None:
        self._counts[name][model.id, "0", *labels] += amount


def _add(
    family: Count | Gauge | Histograms, labels: Sequence[str], value: float | Histogram
) -> None:
    if isinstance(family, Histograms):
        assert isinstance(value, Histogram)
        bounds = (*map(floatToGoString, value.bounds), "+Inf")
        buckets = list(zip(bounds, itertools.accumulate(value.counts), strict=True))
        family.add_metric(labels, buckets, value.total)
    else:
        assert not isinstance(value, Histogram)
        family.add_metric(labels, value)
