"""What apps know of themselves, as metrics: engines, guesses, hot clusters, sub-stages, encoders.

In: the served models. Out: families for Prometheus, read from the apps when somebody asks. All
values grow only, but for those of the moment and for ratios.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dovetail.runtime.server.models import Models, ServedModel
from dovetail.runtime.tally import Histogram

LABELS = ("model_name", "engine")

Values: TypeAlias = Iterator[tuple[tuple[str, ...], float]]
"""Values of the labels that a metric has beyond those of all, and its value."""


def _engine(model: ServedModel) -> Values:
    if model.file is not None:
        yield (), float(model.app.generator.host.load.waits.attention)


def _bubbles(model: ServedModel) -> Values:
    if model.file is not None:
        for device, seconds in model.app.generator.host.load.waits.bubbles.items():
            yield (device,), seconds


def _pools(model: ServedModel) -> Values:
    if model.file is not None:
        for device, usage in model.app.generator.host.load.pools.items():
            yield (device,), usage


def _swaps(model: ServedModel) -> Values:
    if model.file is not None:
        for device, count in model.app.generator.host.load.swaps.items():
            yield (device,), count


def _guesses(model: ServedModel) -> Values:
    found = model.app.flows.statistics
    for result in ("accepted", "rejected"):
        yield (result,), getattr(found, result)


def _accuracy(model: ServedModel) -> Values:
    if model.app.flows.statistics.attempted:
        yield (), model.app.flows.statistics.accuracy


def _hits(model: ServedModel) -> Values:
    for index, found in model.app.flows.hot.items():
        if found.scanned:
            yield (index,), found.hits / found.scanned


def _spilled(model: ServedModel) -> Values:
    for service in {found.service for found in model.app.embeddings.encoders.values()}:
        for device, count in service.spilled.items():
            yield (device,), count


_Family: TypeAlias = type[CounterMetricFamily] | type[GaugeMetricFamily]
FIGURES: dict[str, tuple[_Family, str, tuple[str, ...], Callable[[ServedModel], Values]]] = {
    "cpu_attn_seconds": (
        CounterMetricFamily,
        "Of the CPU's attention beside an accelerator.",
        (),
        _engine,
    ),
    "pipeline_bubble_seconds": (
        CounterMetricFamily,
        "That a device waited for the other in steps that used both.",
        ("device",),
        _bubbles,
    ),
    "kv_pool_usage_ratio": (
        GaugeMetricFamily,
        "Part of a device's KV blocks that is in use, 0 to 1.",
        ("device",),
        _pools,
    ),
    "swapped_requests": (
        CounterMetricFamily,
        "Requests whose KV went to a device from the other one.",
        ("device",),
        _swaps,
    ),
    "speculations": (
        CounterMetricFamily,
        "Guesses of workflows that have ended, by what came of them.",
        ("result",),
        _guesses,
    ),
    "speculation_accept_ratio": (
        GaugeMetricFamily,
        "Accepted guesses over those that were begun.",
        (),
        _accuracy,
    ),
    "ivf_gpu_cache_hit_ratio": (
        GaugeMetricFamily,
        "Clusters scanned on the GPU over those of all searches.",
        ("index",),
        _hits,
    ),
    "embed_spill": (
        CounterMetricFamily,
        "Texts that a device embedded because accelerators were full.",
        ("device",),
        _spilled,
    ),
}
"""Names, kinds, words, labels beyond those of all, and where the values come from."""


class Figures(Collector):
    """The figures of all apps of a server."""

    def __init__(self, models: Models, prefix: str) -> None:
        self._models, self._prefix = models, prefix

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        for name, (family, text, labels, read) in FIGURES.items():
            found = family(f"{self._prefix}:{name}", text, labels=(*LABELS, *labels))
            for model in self._models:
                for values, value in read(model):
                    found.add_metric((model.id, "0", *values), value)
            yield found
        yield self._steps()
        yield self._sub_stages()

    def _steps(self) -> Metric:
        name, text = f"{self._prefix}:iteration_tokens_total", "Tokens that a step computed."
        found = HistogramMetricFamily(name, text, labels=LABELS)
        for model in self._models:
            if model.file is not None:
                steps = model.app.generator.host.load.steps
                add_histogram(found, (model.id, "0"), steps)
        return found

    def _sub_stages(self) -> Metric:
        name = f"{self._prefix}:retrieval_substage_seconds"
        labels = (*LABELS, "device")
        found = HistogramMetricFamily(name, "Of sub-stages of searches.", labels=labels)
        for model in self._models:
            for device, seen in model.app.flows.scans.items():
                if any(seen.counts):
                    add_histogram(found, (model.id, "0", device), seen)
        return found


def add_histogram(family: HistogramMetricFamily, labels: Sequence[str], seen: Histogram) -> None:
    """Add the samples of one set of labels."""
    bounds = (*map(floatToGoString, seen.bounds), "+Inf")
    buckets = list(zip(bounds, itertools.accumulate(seen.counts), strict=True))
    family.add_metric(labels, buckets, seen.total)
