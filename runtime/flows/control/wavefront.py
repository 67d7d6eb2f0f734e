"""The control plane: runs of workflows on one side, orders and reports on the other.

In: runs as they are submitted, reports. Out: orders. In each cycle (`orders`) the transformations
are asked one after the other for places in the graphs of all requests; each is kept where it is
predicted to pay. What is ready then is begun; no request waits for another's stage to end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, TypeAlias

from dovetail.ir.errors import DovetailError, WorkflowError, describe_error
from dovetail.ir.graph import EMBEDDING, FUNCTION, GENERATION, RERANK, RETRIEVAL, VALIDATE
from dovetail.ir.live_graph import (
    CHECK,
    COPY,
    GUESS,
    READ,
    SCOUT,
    Left,
    LiveGraph,
    LiveNode,
    Rewrite,
    State,
)
from dovetail.ir.transform import roll_back
from dovetail.ir.workflow import START, Embedding, Function, Generation, Place, Rerank, Retrieval
from dovetail.ir.workflow import State as WorkflowState
from dovetail.runtime.flows.control import messages
from dovetail.runtime.flows.control.costs import StageCosts
from dovetail.runtime.flows.control.front import Front, Statistics, Ticket
from dovetail.runtime.flows.control.running import Replies, Searches
from dovetail.runtime.flows.control.settings import WavefrontSettings
from dovetail.runtime.flows.control.transformation import Transformation
from dovetail.runtime.flows.control.work import Reply, Search
from dovetail.runtime.flows.prompts import query_of, text_of
from dovetail.runtime.flows.workflow_run import Call, WorkflowRun
from dovetail.runtime.retrieval.hot import HotSet

Go: TypeAlias = Callable[[Sequence[Place] | None], None]
"""Has a run go on to what was chosen; None: to where its edges lead, which is known at once."""
log = logging.getLogger("dovetail")
NO_GAIN = Left("gain", "it is predicted to gain nothing")
WHOLE = Left("whole", "the search was too short to be cut, so nothing was known before its end")


class Wavefront:
    """All requests under way. Not for several threads at once.

    Answers are those of `run_in_order`, whatever the settings, the order and speed of reports.
    """

    def __init__(
        self,
        settings: WavefrontSettings,
        costs: StageCosts,
        catalog: messages.Catalog,
        hot: Mapping[str | None, HotSet] | None = None,
    ) -> None:
        """Schedule by `settings`; hot: the cache on the device, of each index that has one.

        Raises SpecError where the settings name a transformation that is not registered.
        """
        self.front = front = Front(settings, costs, catalog, {} if hot is None else hot)
        self.statistics: Statistics = front.statistics
        """What came of guesses."""
        self._numbers = count(1)
        self._searches = Searches(front, self._searched_on, self._searched, self._search_failed)
        self._replies = Replies(front, self._replied, self._reply_failed)

    def submit(self, run: WorkflowRun, now: float) -> int:
        """Take a run that has not begun; return the number of the request."""
        self.front.now = now
        number = next(self._numbers)
        graph = LiveGraph(run.workflow.template, self.front.ready, number)
        self.front.tickets[number] = ticket = Ticket(number, run, graph)
        self._choose(ticket, START, run.inputs, run.begin)
        return number

    def tell(self, report: messages.Report, now: float) -> None:
        """Take what came of a job; reports about jobs that are over change nothing."""
        self.front.now = now
        self.front.tell(report)

    def cancel(self, request: int) -> None:
        """End a request, if it is under way; it is not delivered."""
        if (ticket := self.front.tickets.get(request)) is not None:
            self._close(ticket)

    def leave(self, index: str, now: float) -> None:
        """Fail the searches of an index whose place another one takes."""
        self.front.now = now
        self._replies.leave(index)
        self._searches.leave(index)

    def orders(self, now: float) -> tuple[messages.Order, ...]:
        """Return what is to be done now, each order once."""
        self.front.now = now
        self.front.ask()
        while self._cycle():
            pass
        return self.front.take()

    # ---- a cycle ----

    def _cycle(self) -> bool:
        """Transform the graphs and begin what is ready; tell whether there may be more to do."""
        front = self.front
        self._searches.prepare()
        ready = self._admit()
        for kind in tuple(front.asked.values()):
            for found, rewrite in self._ask(kind) if front.wakes(kind) else ():
                self._rewrote(found, rewrite)
                ready += self._admit()
        for node in ready:
            if node in front.ready:
                _BEGIN[node.kind, node.part](self, node)
        more = self._searches.dispatch()
        front.turn()
        return bool(front.ready.fresh) or more

    def _ask(self, kind: type[Transformation]) -> Iterator[tuple[Transformation, Rewrite]]:
        """Apply a transformation wherever it pays; yield each place and what was done there.

        One that fails is asked no longer; the request whose graph it was rewriting fails.
        """
        front, begun = self.front, None
        try:
            for found in kind.fits(front):
                if (seconds := found.gain(front.costs)) <= 0:
                    why = getattr(found, "why_not", None)
                    front.leave(kind.name, found.graph, why(front.costs) if why else NO_GAIN)
                    continue
                begun, name = found.graph, found.node.name
                found.apply(begun)
                begun = None
                yield found, Rewrite(kind.name, name, seconds)
        except Exception as error:
            said = f"transformation {kind.name!r} has failed: {describe_error(error)}"
            log.exception("%s; it is asked no longer", said)
            front.give_up(kind.name, said)
            if begun is not None and (ticket := front.tickets.get(begun.number)) is not None:
                advice = "it is asked no longer: run the workflow again"
                self._deliver(ticket, None, WorkflowError(f"{said}; {advice}"))

    def _rewrote(self, found: Transformation, rewrite: Rewrite) -> None:
        """Take note of what was applied."""
        graph, search = found.graph, found.node.work
        if graph.number:  # else of copies for all requests, and never over
            graph.rewrites.append(rewrite)
        self.front.order(messages.Rewrote(graph.number, rewrite))
        if isinstance(search, Search) and search.node not in search.graph:
            self._searches.end(search)  # its rest was left out

    def _admit(self) -> list[LiveNode]:
        """Take note of what calls, rewrites and reports have made ready; return these nodes."""
        front, found = self.front, list[LiveNode]()
        while front.ready.fresh:
            node = front.ready.fresh.popleft()
            if node not in front.ready or node.work is None:  # its call has not come
                continue
            found.append(node)
            if (admit := _ADMIT.get((node.kind, node.part))) is not None:
                admit(self, node)
        return found

    def _expect(self, node: LiveNode) -> None:
        """Count a generation that will be begun."""
        reply: Reply = node.work
        reply.node = node
        self.front.replies[reply] = None
        self.front.news.begins = True
        if node.part == GUESS:
            self.front.ticket(reply).guesses[reply.key] = reply
            self.statistics.attempted += 1

    def _send(self, node: LiveNode) -> None:
        """Have a scout look for clusters, if it has not."""
        search: Search = node.work
        if not search.job:
            self.front.ticket(search).scouts[search.source.node] = search
            self.statistics.scouts += 1
            self._searches.begin(search, None)

    # ---- the way of a request ----

    def _advance(self, ticket: Ticket) -> None:
        """Put the calls that may be made now into the graph; deliver when all is over."""
        try:
            for call in ticket.run.ready():
                if ticket.over:
                    return
                _ARRIVE[type(call.node)](self, ticket, call)
        except WorkflowError as error:
            self._deliver(ticket, None, error)
            return
        if not ticket.over and ticket.run.done:
            self._deliver(ticket, ticket.run.result, None)

    def _finish(self, ticket: Ticket, call: Call, value: Any) -> None:
        self.front.order(messages.Written(ticket.source(call), value))
        node = ticket.node(call)
        if node.state is State.RUNNING:
            ticket.graph.finish(node)
        state = {**call.state, call.node.output: value}
        self._choose(ticket, call.node.name, state, partial(ticket.run.finish, call, value))

    def _choose(self, ticket: Ticket, place: Place, state: WorkflowState, go: Go) -> None:
        """Let a request go on; where functions choose how, once they have: they may take long."""
        if place not in ticket.run.workflow.asking:
            self._go_on(ticket, go, None)
            return
        self.front.post(
            lambda job: messages.Choose(job, partial(ticket.run.choose, place, state)),
            ticket.number,
            lambda report: self._go_on(ticket, go, report.value),
            partial(self._fail, ticket, place),
        )

    def _go_on(self, ticket: Ticket, go: Go, chosen: Sequence[Place] | None) -> None:
        try:
            go(chosen)
        except WorkflowError as error:
            self._deliver(ticket, None, error)
            return
        self._advance(ticket)

    def _fail(self, ticket: Ticket, node: object, error: DovetailError) -> None:
        if not isinstance(error, WorkflowError):  # which names its node
            cause, error = error, WorkflowError(f"node {node!r} failed: {error}")
            error.__cause__ = cause
        self._deliver(ticket, None, error)

    def _deliver(
        self, ticket: Ticket, state: Mapping[str, Any] | None, error: DovetailError | None
    ) -> None:
        scouts = tuple(ticket.scouts.values())
        self._close(ticket)
        for scout in scouts:  # which no search has come to use
            roll_back(ticket.graph, scout.node)
        self.front.order(
            messages.Deliver(ticket.number, state, error, None if error else ticket.graph)
        )

    def _close(self, ticket: Ticket) -> None:
        """Free all that a request holds."""
        ticket.over = self.front.news.room = True
        self._searches.drop_request(ticket.number)
        self._replies.drop_request(ticket.number)
        self.front.cancel_request(ticket.number)
        ticket.graph.close()
        del self.front.tickets[ticket.number]

    # ---- calls that may be made ----

    def _generate(self, ticket: Ticket, call: Call) -> None:
        guess = ticket.guesses.get((call.node.name, call.round))
        prompt = guess.asked if guess and guess.holds(call) else text_of(call)
        if guess and guess.asked == prompt:
            self._commit(ticket, call, guess)
            return
        if guess:
            self._reject(guess)
        reply = ticket.reply(call, prompt)
        reply.call = call
        self._hold(ticket, call, reply)

    def _retrieve(self, ticket: Ticket, call: Call) -> None:
        assert isinstance(call.node, Retrieval)
        search = Search(ticket.graph, ticket.source(call), call.node.filled(call.state), call)
        search.query, search.node = query_of(call), ticket.node(call)
        self._hold(ticket, call, search)

    def _wait(self, ticket: Ticket, call: Call) -> None:
        """Take a call of an embedding, a rerank or a function."""
        source = ticket.source(call)
        order: Callable[[int], messages.Order]
        match call.node:
            case Embedding() as node:
                order = partial(messages.Embed, source=source, text=text_of(call), model=node.model)
            case Rerank() as node:
                about = {"query": text_of(call), "documents": call.state[node.documents]}
                order = partial(messages.RankDocuments, source=source, node=node, **about)
            case _:
                order = partial(messages.Invoke, source=source, call=call)
        self._hold(ticket, call, (ticket, call, order))

    def _hold(self, ticket: Ticket, call: Call, work: object) -> None:
        """Have the node of a call begin once it is ready, and do this."""
        node = ticket.node(call)
        node.work = work
        self.front.ready.fresh.append(node)

    # ---- beginning what is ready ----

    def _write(self, node: LiveNode) -> None:
        reply: Reply = node.work
        self._replies.begin(reply)
        if reply.call is not None:
            self.front.order(messages.Started(reply.source, reply.job, reply.prompt))

    def _start(self, node: LiveNode) -> None:
        ticket, call, make = node.work
        ticket.graph.begin(node)
        self.front.order(messages.Started(ticket.source(call)))
        self.front.post(
            make,
            ticket.number,
            lambda report: self._finish(ticket, call, report.value),
            partial(self._fail, ticket, call.node.name),
        )

    def _pass(self, node: LiveNode) -> None:
        """Take the text of a guess that has held for the true one."""
        reply: Reply = node.work
        assert reply.call is not None, "it has not been checked"
        reply.graph.begin(node)
        self._finish(self.front.ticket(reply), reply.call, reply.text)

    # ---- what searches and replies tell ----

    def _searched_on(self, search: Search) -> None:
        """Roll back what was begun on documents that are not the nearest any more.

        Documents once displaced do not come back, so waiting for the end would only cost time.
        """
        self.front.news.room = True
        for guess in self._guesses(search):
            if guess.ids != search.nearest:
                self._reject(guess)

    def _searched(self, search: Search) -> None:
        if search.call is None:
            return  # its ticket keeps what it found
        ticket = self.front.ticket(search)
        try:
            documents = search.documents(self.front.catalog)
        except DovetailError as error:  # their file was damaged meanwhile
            self._search_failed(search, error)
            return
        ticket.nodes[search.source.node, search.source.round] = search.node
        ticket.ended[search.spec.index] = search
        ticket.searched += 1
        self._explain(ticket, search)
        self._finish(ticket, search.call, documents)
        if not ticket.over:
            for guess in self._guesses(search):
                self._reject(guess)

    def _explain(self, ticket: Ticket, search: Search) -> None:
        """Say why nothing was begun on a search before its end, where there was no part of it."""
        if len(search.seen) < 2 and self.front.prompted(search):
            for kind in self.front.asked.values():
                if kind.guesses and kind.name not in ticket.graph.left:
                    self.front.leave(kind.name, ticket.graph, WHOLE)

    def _search_failed(self, search: Search, error: DovetailError) -> None:
        ticket = self.front.ticket(search)
        if search.call is not None:
            self._fail(ticket, search.source.node, error)
        elif ticket.scouts.pop(search.source.node, None) is not None:
            roll_back(ticket.graph, search.node)

    def _replied(self, reply: Reply) -> None:
        self.front.news.room = True
        if reply.call is not None and reply.node.part != GUESS:  # else its check is ready now
            ticket = self.front.ticket(reply)
            ticket.nodes[reply.key] = reply.node
            self._finish(ticket, reply.call, reply.text)

    def _reply_failed(self, reply: Reply, error: DovetailError) -> None:
        self.front.news.room = True
        if reply.call is None:
            self._reject(reply)
        else:
            self._fail(self.front.ticket(reply), reply.source.node, error)

    # ---- guesses ----

    def _guesses(self, search: Search) -> list[Reply]:
        guesses = self.front.ticket(search).guesses
        return [guess for guess in guesses.values() if guess.search is search]

    def _commit(self, ticket: Ticket, call: Call, guess: Reply) -> None:
        """Take a reply that was begun to just what a call asks."""
        del ticket.guesses[guess.key]
        self.statistics.accepted += 1
        guess.call = call
        self._hold(ticket, call, guess)
        self.front.order(messages.Started(guess.source, guess.job, guess.prompt))

    def _reject(self, guess: Reply) -> None:
        """Roll a guess back: it did not hold, or the engine could not write it."""
        del self.front.ticket(guess).guesses[guess.key]
        roll_back(guess.graph, guess.node)
        self.statistics.rejected += 1
        self.front.news.room = True
        self._replies.drop(guess)


_ARRIVE: dict[type, Callable[[Wavefront, Ticket, Call], None]] = {
    Generation: Wavefront._generate,
    Retrieval: Wavefront._retrieve,
    Embedding: Wavefront._wait,
    Rerank: Wavefront._wait,
    Function: Wavefront._wait,
}
Do: TypeAlias = Callable[[Wavefront, LiveNode], None]
_ADMIT: dict[tuple[str, str], Do] = {
    (GENERATION, ""): Wavefront._expect,
    (GENERATION, GUESS): Wavefront._expect,
    (VALIDATE, CHECK): Wavefront._pass,
    (RETRIEVAL, SCOUT): Wavefront._send,
}
"""What is done at once with a node that is ready, by its kind and part."""
_BEGIN: dict[tuple[str, str], Do] = {
    (GENERATION, ""): Wavefront._write,
    (GENERATION, GUESS): Wavefront._write,
    (RETRIEVAL, ""): lambda front, node: front._searches.seek(node.work),
    (RETRIEVAL, SCOUT): lambda front, node: None,  # it was sent
    (EMBEDDING, ""): Wavefront._start,
    (EMBEDDING, READ): lambda front, node: front._replies.read(node),
    (RERANK, ""): Wavefront._start,
    (FUNCTION, ""): Wavefront._start,
    (FUNCTION, COPY): lambda front, node: front._searches.copy(node),
}
"""What is done with it once all transformations have been asked."""
