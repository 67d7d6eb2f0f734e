"""What must hold for KV pools and queues at any time: shared by tests."""

from __future__ import annotations

from dovetail.runtime.schedule.kv_pool import KvPool, blocks_for
from dovetail.runtime.schedule.queue import RequestQueues, by_order


def check_integrity(checked: KvPool | RequestQueues) -> None:
    """Assert that a pool's blocks, or queues, requests and the tables of both pools, agree."""
    if isinstance(checked, KvPool):
        _check_pool(checked)
    else:
        _check_queues(checked)


def _check_pool(pool: KvPool) -> None:
    """Assert that every block is free or counted once per holder, and that hashes agree."""
    counts = [0] * pool.n_blocks
    for table in pool._tables.values():
        assert len(set(table.blocks)) == len(table.blocks), "a table holds a block twice"
        assert len(table.hashes) <= len(table.blocks), "a hash without a block"
        for block in table.blocks:
            counts[block] += 1
    assert counts == pool._references, "reference counts do not match the tables"
    free = sorted([*pool._blank, *pool._kept, *pool._popular])
    assert free == [b for b, n in enumerate(counts) if n == 0], "wrong free lists"
    assert pool._block_of == {h: b for b, h in pool._hash_of.items()}, "hash maps disagree"
    kept = {b for b in pool._hash_of if not counts[b]}
    assert kept == {*pool._kept, *pool._popular}, (
        "a free block with a hash is not kept, or the reverse"
    )
    assert pool._shared <= set(pool._hash_of), "a shared block without a hash"
    assert set(pool._popular) <= pool._shared, "nobody shared a block that stays for that"
    assert len(pool._popular) <= pool.n_blocks // 2, "too many blocks stay"
    assert pool.keep or not kept, "a block is kept"
    if (states := pool.states) is not None:
        assert set(states._held) == set(pool._tables), "states and tables of other sequences"
        slots = [*states._blank, *states._held.values(), *states._kept.values()]
        assert sorted(slots) == list(range(states.count)), "a slot is lost, or has two holders"


def _check_queues(queues: RequestQueues) -> None:
    for home, pool in queues.pools.items():
        _check_pool(pool)
        running = queues.running[home]
        assert set(pool._tables) == {r.id for r in running}, "tables without their requests"
        assert all(r.home is home and not r.finished for r in running)
        assert running == sorted(running, key=by_order), "a run queue is out of order"
        for request in running:
            held = len(pool.table(request.id))
            assert held >= blocks_for(request.computed), "stored tokens without a block"
    assert queues.waiting == sorted(queues.waiting, key=by_order), "waiting is out of order"
    assert all(r.home is None and not r.finished for r in queues.waiting)
    queued = [r.id for queue in (queues.waiting, *queues.running.values()) for r in queue]
    assert sorted(queued) == sorted(queues.requests), "a request is lost or in two queues"
