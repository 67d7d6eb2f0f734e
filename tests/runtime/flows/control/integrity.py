"""What always holds of searches, hot sets and the control plane, whatever was done to them."""

from __future__ import annotations

from dovetail.runtime.flows.control.wavefront import Wavefront
from dovetail.runtime.index.cursor import Cursor
from dovetail.runtime.retrieval.hot import HotSet


def check_cursor(cursor: Cursor) -> None:
    assert 0 <= cursor.position <= len(cursor.clusters)
    assert len(set(cursor.clusters)) == len(cursor.clusters), "a cluster is probed once"
    assert cursor.best == sorted(set(cursor.best)) and len(cursor.best) <= cursor.depth
    assert len({i for _, i in cursor.best}) == len(cursor.best), "a document is found once"
    assert not set(cursor.seeds) & set(cursor.clusters[: cursor.position])


def check_hot(hot: HotSet) -> None:
    held = set(hot.residents)
    if hot._swap is not None:
        assert not held & (set(hot._swap.load) | set(hot._swap.drop))
        held |= set(hot._swap.load)
    assert sum(hot._bytes[cluster] for cluster in held) <= hot._capacity


def check_wavefront(front: Wavefront) -> None:
    """Every job is someone's, every request has one, and no search loses a part."""
    searches, replies = front._searches, front._replies
    jobs = {job: waiter.request for job, waiter in front._board._waiters.items()}
    asked = {request for request in jobs.values() if request is not None}
    assert asked <= set(front._tickets), "a job of a request that is over"
    waits = asked | {search.source.request for search in searches.active}
    assert waits == set(front._tickets), "a request that nothing is done for"
    for search in searches._active:
        assert not search.over
        lots = (*searches._busy.values(), *searches._failed)
        held = [cs for lot in lots for s, cs in lot.takes if s is search]
        assert len(held) == search.scans and sum(map(len, held)) <= search.taken
        if search.cursor is not None:
            check_cursor(search.cursor)
            assert not search.cursor.done, "a search that is done is over"
    for job, reply in replies._active.items():
        assert reply.job == job and not reply.over
    for reply in replies.active:
        assert reply.job in jobs, "a reply that nobody writes"
        guess = front._tickets[reply.source.request].guesses.get(reply.key)
        assert (reply.call is None) == (guess is reply)


def is_idle(front: Wavefront) -> bool:
    """Tell whether no request is under way."""
    return not front._tickets
