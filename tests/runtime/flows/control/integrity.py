"""What always holds of searches, hot sets and the control plane, whatever was done to them."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.ir.graph import ORDERS
from dovetail.ir.live_graph import COPY, SCOUT, LiveGraph, State
from dovetail.ir.workflow import label
from dovetail.runtime.flows.control.messages import (
    Copy,
    Embed,
    FindClusters,
    Generate,
    Invoke,
    Order,
    RankDocuments,
    ScanClusters,
)
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
    assert sum(hot.bytes[cluster] for cluster in held) <= hot.capacity


def check_wavefront(front: Wavefront) -> None:
    """Every job is someone's, every request has one, and no search loses a part."""
    state = front.front
    jobs = {job: waiter.request for job, waiter in state._waiters.items()}
    asked = {request for request in jobs.values() if request is not None}
    assert asked <= set(state.tickets), "a job of a request that is over"
    waits = asked | {search.source.request for search in state.known}
    assert waits == set(state.tickets), "a request that nothing is done for"
    for search in state.searches:
        assert not search.over
        lots = (*state.busy.values(), *front._searches._again)
        held = [cs for batch in lots for s, cs in batch.takes if s is search]
        assert len(held) == search.scans and sum(map(len, held)) <= len(search.taken)
        if search.cursor is not None:
            check_cursor(search.cursor)
            assert not search.cursor.done, "a search that is done is over"
    for reply in state.replies:
        assert not reply.over and reply.job in jobs, "a reply that nobody writes"
        guess = state.tickets[reply.source.request].guesses.get(reply.key)
        assert (reply.call is None) == (guess is reply)
    failed = {name for name, why in state.statistics.left.items() if why.reason == "failed"}
    assert not failed, "a transformation that raises"
    assert not state.ready.fresh, "what is ready is begun"
    for graph in (state.beside, *(ticket.graph for ticket in state.tickets.values())):
        check_ready(graph)


def check_ready(graph: LiveGraph) -> None:
    """What is counted is what there is: a node is ready once all that it waits for is over."""
    for node in graph:
        before = [source for source, kind in graph.before(node) if ORDERS[kind]]
        open_ = [source for source in before if source.state is not State.OVER]
        assert node.waits == len(open_)
        assert (node in graph.ready) == (node.state is State.WAITING and not open_)
        assert node.state is State.WAITING or not open_, "it began too soon"


def check_dispatched(front: Wavefront, orders: Sequence[Order]) -> None:
    """What is ordered is of a node that is ready, or was and has begun."""
    state = front.front
    for order in orders:
        if isinstance(order, Copy):
            graphs = [state.beside, *(ticket.graph for ticket in state.tickets.values())]
            copies = [n for graph in graphs for n in graph if n.part == COPY]
            assert any(node.state is State.RUNNING for node in copies)
        elif isinstance(
            order, Generate | Embed | RankDocuments | Invoke | FindClusters | ScanClusters
        ):
            sources = order.sources if isinstance(order, ScanClusters) else (order.source,)
            for source in sources:
                if (ticket := state.tickets.get(source.request)) is None:
                    continue  # it has ended since
                under_way = [
                    n for n in ticket.graph if n.state is State.RUNNING or n in state.ready
                ]
                call = f"{label(source.node)}#{source.round}"
                roots = {node.root for node in under_way}
                scout = any(node.part == SCOUT for node in under_way)
                assert call in roots or (scout and not isinstance(order, Generate | Invoke)), order


def is_idle(front: Wavefront) -> bool:
    """Tell whether no request is under way."""
    return not front.front.tickets
