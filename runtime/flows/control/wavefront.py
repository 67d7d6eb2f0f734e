"""The control plane: runs of workflows on one side, orders and reports on the other.

In: runs as they are submitted, reports. Out: orders. Each cycle (`orders`) looks at what is ready
in all requests, reorders, splits and guesses where that is predicted to pay, and starts the next
sub-stage of whichever device is idle; no request waits for another's stage to end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import numpy as np

from dovetail.ir.errors import DovetailError, WorkflowError
from dovetail.ir.live_graph import CHECK, LiveNode, State
from dovetail.ir.transform import roll_back
from dovetail.ir.workflow import Embedding, Function, Generation, Retrieval
from dovetail.runtime.flows.control.ahead import search_after
from dovetail.runtime.flows.control.board import Board, Callbacks, Waiter
from dovetail.runtime.flows.control.costs import Learned, StageCosts
from dovetail.runtime.flows.control.messages import (
    Catalog,
    Deliver,
    Embed,
    Finished,
    Invoke,
    Order,
    Report,
    Started,
    Written,
)
from dovetail.runtime.flows.control.replies import PendingReply, Replies
from dovetail.runtime.flows.control.search import Search
from dovetail.runtime.flows.control.searches import Searches
from dovetail.runtime.flows.control.settings import WavefrontSettings
from dovetail.runtime.flows.control.speculation import Speculation, Statistics
from dovetail.runtime.flows.control.ticket import Ticket
from dovetail.runtime.flows.services import text_of
from dovetail.runtime.flows.workflow_run import Call, WorkflowRun
from dovetail.runtime.retrieval.hot import HotSet


class Wavefront:
    """All requests under way. Not for several threads at once. learned: what is known of costs.

    Answers are those of `run_in_order`, whatever the settings, the order and speed of reports.
    """

    def __init__(
        self,
        settings: WavefrontSettings,
        costs: StageCosts,
        catalog: Catalog,
        hot: Mapping[str | None, HotSet] | None = None,
    ) -> None:
        """Schedule by `settings`; hot: the cache on the device, of each index that has one."""
        self._catalog, self._tickets = catalog, dict[int, Ticket]()
        self._numbers = count(1)
        self._board, self.learned = Board(), Learned(costs)
        board, learned = self._board, self.learned
        searching: Callbacks[Search] = Callbacks(
            lambda search, now: self._speculation.check(search), self._searched, self._search_failed
        )
        self._searches = Searches(settings, learned, board, catalog, hot or {}, searching)
        replying: Callbacks[PendingReply] = Callbacks(
            lambda reply, now: self._speculation.sense(reply), self._replied, self._reply_failed
        )
        self._replies = Replies(settings, learned, board, replying)
        self._speculation = Speculation(
            settings, learned, board, catalog, self._tickets, self._searches, self._replies
        )

    @property
    def statistics(self) -> Statistics:
        """What came of guesses."""
        return self._speculation.statistics

    def submit(self, run: WorkflowRun, now: float) -> int:
        """Take a run that has not begun; return the number of the request."""
        ticket = Ticket(next(self._numbers), run)
        self._tickets[ticket.number] = ticket
        self._advance(ticket, now)
        return ticket.number

    def tell(self, report: Report, now: float) -> None:
        """Take what came of a job; reports about jobs that are over change nothing."""
        self._board.tell(report, now)

    def orders(self, now: float) -> tuple[Order, ...]:
        """Return what is to be done now, each order once."""
        self._speculation.scout(now)
        pays = self._speculation.pays()
        self._searches.dispatch(self._replies.load, self._longest_reply, pays, now)
        self._speculation.guess(now)
        return self._board.take()

    def cancel(self, request: int) -> None:
        """End a request, if it is under way; it is not delivered."""
        if (ticket := self._tickets.get(request)) is not None:
            self._close(ticket)

    def _longest_reply(self) -> float:
        """Predict the seconds of the longest reply to a request under way; 0 if none has one."""
        nodes = (node for t in self._tickets.values() for node in t.run.workflow.nodes.values())
        replies = (self.learned.reply(n.name) for n in nodes if isinstance(n, Generation))
        return max(replies, default=0.0)

    # ---- the way of a request ----

    def _advance(self, ticket: Ticket, now: float) -> None:
        """Begin what is ready; deliver when all is over."""
        try:
            for call in ticket.run.ready():
                if ticket.over:
                    return
                _BEGIN[type(call.node)](self, ticket, call, ticket.node(call), now)
        except WorkflowError as error:
            self._deliver(ticket, None, error)
            return
        if not ticket.over and ticket.run.done:
            self._deliver(ticket, ticket.run.result, None)

    def _finish(self, ticket: Ticket, call: Call, value: Any, now: float) -> None:
        self._board.add(Written(ticket.source(call), value))
        node = ticket.node(call)
        if node.state is State.RUNNING:
            ticket.graph.finish(node)
        try:
            ticket.run.finish(call, value)
        except WorkflowError as error:
            self._deliver(ticket, None, error)
            return
        self._advance(ticket, now)

    def _fail(self, ticket: Ticket, node: object, error: DovetailError) -> None:
        if not isinstance(error, WorkflowError):  # which names its node
            cause, error = error, WorkflowError(f"node {node!r} failed: {error}")
            error.__cause__ = cause
        self._deliver(ticket, None, error)

    def _deliver(
        self, ticket: Ticket, state: Mapping[str, Any] | None, error: DovetailError | None
    ) -> None:
        self._close(ticket)
        for scout in ticket.scouts.values():  # which no search has come to use
            roll_back(ticket.graph, scout.work)
        self._board.add(Deliver(ticket.number, state, error, None if error else ticket.graph))

    def _close(self, ticket: Ticket) -> None:
        """Free all that a request holds."""
        ticket.over = True
        self._speculation.look_again()
        self._searches.drop_request(ticket.number)
        self._replies.drop_request(ticket.number)
        self._board.cancel_request(ticket.number)
        del self._tickets[ticket.number]

    # ---- beginning calls ----

    def _generate(self, ticket: Ticket, call: Call, work: LiveNode, now: float) -> None:
        assert isinstance(call.node, Generation)
        prompt = text_of(call)
        reply = self._speculation.commit(ticket, call, prompt)
        if reply is None:
            source, ahead = ticket.source(call), search_after(ticket.run.workflow, call.node.name)
            reply = PendingReply(ticket.graph, work, source, call.node, prompt, call, now, ahead)
            self._replies.begin(reply)
        self._board.add(Started(reply.source, reply.job))
        if reply.over:
            self._replied(reply, now)

    def _retrieve(self, ticket: Ticket, call: Call, work: LiveNode, now: float) -> None:
        assert isinstance(call.node, Retrieval)
        node, query = call.node, call.state[call.node.query]
        self._board.add(Started(ticket.source(call)))
        if isinstance(query, np.ndarray):
            self._search(ticket, call, work, query, now)
            return
        source, text = ticket.source(call), text_of(call)
        self._board.post(
            lambda job: Embed(job, source, text, query=True, index=node.index),
            self._waiter(
                ticket,
                call,
                lambda report, now: self._search(ticket, call, work, report.value, now),
            ),
        )

    def _search(self, ticket: Ticket, call: Call, work: LiveNode, vector: Any, now: float) -> None:
        assert isinstance(call.node, Retrieval)
        history = ticket.history(call.node)
        if (scout := ticket.scouts.pop(call.node.name, None)) is not None:
            self._searches.drop(scout)
            scout.show(work)
        source, earlier = ticket.source(call), ticket.searched
        search = Search(ticket.graph, work, source, call.node, call, vector, now, earlier)
        self._searches.begin(search, history)

    def _embed(self, ticket: Ticket, call: Call, work: LiveNode, now: float) -> None:
        assert isinstance(call.node, Embedding)
        ticket.graph.begin(work)
        source, text, model = ticket.source(call), text_of(call), call.node.model
        self._board.add(Started(source))
        self._board.post(lambda job: Embed(job, source, text, model), self._waiter(ticket, call))

    def _invoke(self, ticket: Ticket, call: Call, work: LiveNode, now: float) -> None:
        ticket.graph.begin(work)
        source = ticket.source(call)
        self._board.add(Started(source))
        self._board.post(lambda job: Invoke(job, source, call), self._waiter(ticket, call))

    def _waiter(
        self, ticket: Ticket, call: Call, take: Callable[[Finished, float], None] | None = None
    ) -> Waiter:
        """Return what waits for a call's job: `take` its report, or else end the call with it."""
        return Waiter(
            ticket.number,
            take or (lambda report, now: self._finish(ticket, call, report.value, now)),
            lambda error, now: self._fail(ticket, call.node.name, error),
        )

    # ---- what searches and replies tell ----

    def _searched(self, search: Search, now: float) -> None:
        if search.call is None:
            return  # its ticket keeps what it found
        ticket = self._tickets[search.source.request]
        ticket.nodes[search.source.node, search.source.round] = search.last
        ticket.histories[search.node.index] = search.history()
        ticket.searched += 1
        documents = self._catalog.documents(search.node, search.steps.partial)
        self._finish(ticket, search.call, documents, now)
        if not ticket.over:
            self._speculation.settle(search)

    def _search_failed(self, search: Search, error: DovetailError, now: float) -> None:
        ticket = self._tickets[search.source.request]
        if search.call is None:
            if ticket.scouts.pop(search.source.node, None) is not None:
                roll_back(ticket.graph, search.work)
        else:
            self._fail(ticket, search.source.node, error)

    def _replied(self, reply: PendingReply, now: float) -> None:
        self._speculation.look_again()
        if reply.call is not None:
            ticket = self._tickets[reply.source.request]
            if (node := ticket.nodes[reply.key]).part == CHECK:
                ticket.graph.begin(node)
            else:
                ticket.nodes[reply.key] = reply.work
            self._finish(ticket, reply.call, reply.text, now)

    def _reply_failed(self, reply: PendingReply, error: DovetailError, now: float) -> None:
        self._speculation.look_again()
        if reply.call is None:
            self._speculation.reject(reply)
        else:
            self._fail(self._tickets[reply.source.request], reply.source.node, error)


_BEGIN: dict[type, Callable[[Wavefront, Ticket, Call, LiveNode, float], None]] = {
    Generation: Wavefront._generate,
    Retrieval: Wavefront._retrieve,
    Embedding: Wavefront._embed,
    Function: Wavefront._invoke,
}
