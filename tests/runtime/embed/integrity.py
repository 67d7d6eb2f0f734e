"""Whether the queue manager's counts are exact."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.runtime.embed.device_queue import EmbedQuery, QueryState, urgency
from dovetail.runtime.embed.queue import QueueManager
from dovetail.runtime.embed.service import EmbeddingService


def check_integrity(manager: QueueManager) -> None:
    """Assert that every query is in exactly one place, and that all counts are exact."""
    found: list[EmbedQuery] = []
    for name, queue in manager._queues.items():
        running = [query for batch in queue.running.values() for query in batch.queries]
        assert len(queue.running) <= queue.spec.instances, name
        assert queue.waiting == sorted(queue.waiting, key=urgency), name
        assert all(query.state is QueryState.WAITING for query in queue.waiting), name
        assert not any(query.cancelled for query in queue.waiting), name
        assert all(query.state is QueryState.RUNNING for query in running), name
        assert queue.counts == count(manager, queue.waiting), name
        assert queue.held == count(manager, [*queue.waiting, *running]), name
        assert queue.load == load(manager, name), name
        assert all(query.device == name for query in (*queue.waiting, *running)), name
        found += [*queue.waiting, *running]
    assert len(found) == len(manager._alive), "a query is in two places, or lost"
    assert {query.number for query in found} == set(manager._alive)


def count(manager: QueueManager, queries: Sequence[EmbedQuery]) -> list[int]:
    counts = [0] * len(manager.classes)
    for query in queries:
        counts[query.kind] += 1
    return counts


def load(manager: QueueManager, name: str) -> int:
    """The load of a device by its counts, added up anew."""
    queue = manager._queues[name]
    return sum(n * share for n, share in zip(queue.held, queue.shares, strict=True))


def held(service: EmbeddingService) -> dict[str, int]:
    """How many queries wait or run on each device."""
    with service._work:
        return {name: sum(queue.held) for name, queue in service.manager._queues.items()}
