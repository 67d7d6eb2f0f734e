"""All searches and generations under way, and the scan that is under way on each device.

In: searches and replies as they come, reports. Out: orders to probe, scan, copy and generate; each
back when a sub-stage or the whole of it is over. Which clusters a sub-stage holds, and where they
are scanned, its nodes in the graphs say.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import dist, inf
from typing import Any, TypeAlias

from dovetail.ir.errors import DovetailError, WorkflowError
from dovetail.ir.graph import GPU
from dovetail.ir.live_graph import LiveNode
from dovetail.ir.transform import split_reply
from dovetail.ir.workflow import Generation
from dovetail.runtime.flows.control import messages
from dovetail.runtime.flows.control.front import REORDER, SPLIT, Front
from dovetail.runtime.flows.control.settings import MEASURED
from dovetail.runtime.flows.control.transformations import Prefetch
from dovetail.runtime.flows.control.work import NextStage, Reply, ScanBatch, Search, Takes
from dovetail.runtime.flows.prompts import pack_vector
from dovetail.runtime.index.cursor import SearchHistory, begin_search
from dovetail.runtime.retrieval.budget import count_vectors

Tell: TypeAlias = Callable[[Any], None]
Fail: TypeAlias = Callable[[Any, DovetailError], None]


class Searches:
    """Searches of all requests."""

    def __init__(self, front: Front, changed: Tell, ended: Tell, failed: Fail) -> None:
        """These are told of a search: when it has got further, is over, has failed."""
        self._front = front
        self._changed, self._ended, self._failed = changed, ended, failed
        front.choose = self._choose
        self._again: list[ScanBatch] = []  # that failed where others may succeed
        self._since_refresh = 0
        self._newest = -inf  # when the first search of a request began last

    def seek(self, search: Search) -> None:
        """Begin a search that a call waits for; its query is embedded first, where it is a text."""
        if search.job:
            return
        self._front.order(messages.Started(search.source))
        if isinstance(search.query, bytes):
            self._come(search, search.query)
        else:
            self._embed(search, search.query)

    def _embed(self, search: Search, text: str) -> None:
        front, source, index = self._front, search.source, search.spec.index
        began = front.now

        def embedded(report: messages.Finished) -> None:
            front.costs.embedded(front.now - began)
            self._come(search, pack_vector(report.value))

        search.job = front.post(
            lambda job: messages.Embed(job, source, text, query=True, index=index),
            source.request,
            embedded,
            partial(self._failed, search),
        )

    def _come(self, search: Search, query: bytes) -> None:
        ticket = self._front.ticket(search)
        history = ticket.history(search.spec)
        if (scout := ticket.scouts.pop(search.spec.name, None)) is not None:
            self.drop(scout)
            scout.show(search.node)
        search.query, search.earlier = query, ticket.searched
        self.begin(search, history)

    def begin(self, search: Search, history: SearchHistory | None) -> None:
        """Have the clusters of a search found; `history` is of the request's last one."""
        front = self._front
        search.began, used = front.now, history if REORDER in front.asked else None
        known = tuple(id_ for _, id_ in used.hits) if used else ()
        source, query = search.source, search.query
        assert isinstance(query, bytes), "a text is embedded first"
        if search.call is not None:
            front.costs.begun(front.now)
            if not search.earlier:
                self._newest = search.began
        insort(front.searches, search, key=lambda each: (each.source.request, each.began))
        search.job = front.post(
            lambda job: messages.FindClusters(job, source, search.spec, query, known),
            source.request,
            partial(self._probed, search, used),
            partial(self._fail, [search]),
        )

    def drop(self, search: Search) -> None:
        """Forget a search; scans that hold it go on, but nothing comes of them."""
        if not search.over:
            self._leave(search)
            self._front.cancel(search.job)

    def drop_request(self, request: int) -> None:
        """Forget all searches of a request."""
        for search in [s for s in self._front.searches if s.source.request == request]:
            self.drop(search)

    def leave(self, index: str) -> None:
        """End all searches of an index whose place another one takes: they are halfway in it.

        What is embedded for one is embedded anew: the other may have another encoder.
        """
        front = self._front
        said = f"index {index!r} was replaced while it was searched; run the workflow again"
        self._fail([s for s in front.searches if s.spec.index == index], WorkflowError(said))
        for ticket in front.tickets.values():
            ticket.ended.pop(index, None)
        for search in [n.work for n in front.ready if isinstance(n.work, Search) and n.work.job]:
            if search.spec.index == index and isinstance(search.query, str):
                front.cancel(search.job)
                self._embed(search, search.query)

    # ---- sub-stages ----

    def prepare(self) -> None:
        """Begin a cycle: what failed to be scanned goes first."""
        front = self._front
        front.due = self._since_refresh >= front.settings.refresh and "gpu" not in front.busy
        while "cpu" not in front.busy and self._again:
            self._redo(self._again.pop(0))

    def _choose(self) -> NextStage | None:
        if "cpu" in self._front.busy or not (chosen := self._chosen()):
            return None
        index = chosen[0].spec.index
        return NextStage(chosen, index, self._front.catalog.sizes(index))

    def _chosen(self) -> list[Search]:
        """Return the searches of one index that the next sub-stage may scan for.

        The oldest request goes first, so that what ends soonest is not held up by what came later;
        where no more come, the one that has searched least, whose replies will take longest. A
        search that has begun nothing is before those that have, for its taste. Scouts are sent
        where no other search waits.
        """
        front = self._front
        waiting = [search for search in front.searches if search.waiting]
        waiting = [search for search in waiting if search.call is not None] or waiting
        same = [s for s in waiting if s.spec.index == waiting[0].spec.index]
        if SPLIT in front.asked and len(same) > 1:
            if self._draining():
                same.sort(key=lambda search: search.earlier)
            new = front.new(same)
            same.sort(key=lambda search: search not in new)  # stable
        return same

    def _draining(self) -> bool:
        """Tell whether requests stopped coming, and all that is left takes less than a reply.

        Searches of one request wait for its replies. Were the oldest request still first, at the
        end only those of the last one would be left, and the index idle between them.
        """
        front = self._front
        if front.now - self._newest <= front.backlog:
            return False
        runs = {id(ticket.run.workflow): ticket.run.workflow for ticket in front.tickets.values()}
        nodes = ((flow.name, node) for flow in runs.values() for node in flow.nodes.values())
        asked = ((flow, node.name) for flow, node in nodes if isinstance(node, Generation))
        replies = map(front.costs.reply, asked)
        return front.backlog < max(replies, default=0.0) < front.now - self._newest

    def dispatch(self) -> bool:
        """Order the scans of the next sub-stage; tell whether another one may begin beside them."""
        front, stage = self._front, self._front.stage
        if front.due:
            self._since_refresh = 0
            for index in front.hot:
                front.hot[index].fade()
        if not stage:
            return front.emptied  # others may wait for the CPU
        here, there = Takes(), Takes()
        for search in stage.searches:
            for side in search.sides:
                (there if side.device == GPU else here).append((search, side.clusters))
            search.begin_stage()
        if here:
            self._scan(front.batch(here, stage.sizes))
        if there:
            self._scan(ScanBatch("gpu", there, 0.0))
        self._since_refresh += 1
        return "cpu" not in front.busy

    def _scan(self, batch: ScanBatch) -> None:
        front, began, index = self._front, self._front.now, batch.takes[0][0].spec.index
        parts = tuple(search.part(clusters) for search, clusters in batch.takes)
        sources = tuple(search.source for search, _ in batch.takes)
        for search, _ in batch.takes:
            search.scans += 1
        front.busy[batch.device] = batch
        front.post(
            lambda job: messages.ScanClusters(job, batch.device, index, parts, sources),
            None,
            lambda report: self._scanned(batch, report, front.now - began),
            partial(self._lost, batch),
        )

    def _redo(self, batch: ScanBatch) -> None:
        """Have the CPU scan what failed, on the device or beside others: it has all vectors."""
        for search, _ in batch.takes:
            search.scans -= 1
            if batch.device == "gpu":
                search.leave_device()
        takes = [(search, clusters) for search, clusters in batch.takes if not search.over]
        if takes:
            sizes = self._front.catalog.sizes(takes[0][0].spec.index)
            self._scan(self._front.batch(takes, sizes))

    def copy(self, node: LiveNode) -> None:
        """Order a copy to the device.

        Another index may take the place of the one it is for, with a hot set of its own.
        """
        graph, wanted = self._front.ready[node], node.work
        assert isinstance(wanted, Prefetch), "what is copied is said by a transformation"
        index, swap = wanted.index, wanted.swap

        def copied(missing: Iterable[int]) -> None:
            wanted.hot.settle()
            wanted.hot.lose(missing)
            if graph is self._front.beside:
                graph.remove(node)
            elif node in graph:
                graph.finish(node)

        graph.begin(node)
        self._front.post(
            lambda job: messages.Copy(job, index, swap.load),
            None,
            lambda report: copied(report.value or ()),
            lambda error: copied(swap.load),
        )

    # ---- reports ----

    def _probed(self, search: Search, used: SearchHistory | None, report: messages.Probed) -> None:
        front, clusters = self._front, report.clusters
        search.centroids = dict(zip(clusters, report.centroids, strict=True))
        search.version, search.known = report.version, used
        asked = front.settings.patience
        search.patience = report.patience if asked == MEASURED else asked
        search.cursor = begin_search(clusters, search.spec.topk, used, report.known)
        search.look()
        sizes = front.catalog.sizes(search.spec.index)
        search.left = count_vectors(clusters, sizes)
        front.left += search.left
        search.node.clusters = clusters
        if front.costs.stage is None and search.left:
            front.costs.searched(front.costs.scan_seconds([search.left]))
        if search.cursor.done:
            self.end(search)
        else:
            front.news.found.append(search)

    def _scanned(self, batch: ScanBatch, report: messages.Scanned, elapsed: float) -> None:
        front, index = self._front, batch.takes[0][0].spec.index
        del front.busy[batch.device]
        if batch.device == "cpu":
            front.costs.scanned(batch.predicted, report.seconds, elapsed - batch.shared)
        sizes, hot = front.catalog.sizes(index), front.hot.get(index)
        if hot is not None:
            hot.lose(report.absent)
        for (search, clusters), found in zip(batch.takes, report.found, strict=True):
            if search.over:
                continue
            if hot is not None:
                hot.count(clusters)
            vectors = count_vectors(clusters, sizes)
            search.left -= vectors
            front.left -= vectors
            if not search.find(found):
                continue
            if search.steps.done:
                self.end(search)
            else:
                front.news.scanned.append(search)
                self._changed(search)

    def end(self, search: Search) -> None:
        """Take that a search is over; what it has not scanned is left out."""
        search.end()
        costs, name = self._front.costs, search.named
        if search.seen:
            costs.searched(self._front.now - search.began)
            for share, ids in search.seen:
                costs.stayed(name, share, ids == search.nearest)
        if search.call is not None:
            costs.note_needed(name, search.needed())
        self._leave(search)
        self._ended(search)

    def _leave(self, search: Search) -> None:
        search.over = True
        self._front.leave_out(search)

    def _lost(self, batch: ScanBatch, error: DovetailError) -> None:
        del self._front.busy[batch.device]
        if batch.device == "gpu":
            if (hot := self._front.hot.get(batch.takes[0][0].spec.index)) is not None:
                hot.lose({cluster for _, clusters in batch.takes for cluster in clusters})
            self._again.append(batch)
            return
        searches = dict.fromkeys(search for search, _ in batch.takes)
        if len(searches) == 1:
            self._fail([*searches], error)
            return
        for search in searches:  # one may be wrong, so they are tried one by one
            takes = [take for take in batch.takes if take[0] is search]
            self._again.append(ScanBatch("cpu", takes, 0.0))

    def _fail(self, searches: Sequence[Search], error: DovetailError) -> None:
        for search in searches:
            if not search.over:
                self.drop(search)
                self._failed(search, error)


class Replies:
    """Generations of all requests."""

    def __init__(self, front: Front, ended: Tell, failed: Fail) -> None:
        """These are told of a reply: when it is over, has failed."""
        self._front, self._ended, self._failed = front, ended, failed

    def begin(self, reply: Reply) -> None:
        """Have the engine write a reply."""
        reply.began, provisional = self._front.now, reply.call is None
        order = reply.source, reply.spec, reply.prompt, reply.steps, provisional
        reply.job = self._front.post(
            lambda job: messages.Generate(job, *order),
            reply.source.request,
            partial(self._reported, reply),
            partial(self._fail, reply),
        )
        reply.graph.begin(reply.node)

    def read(self, node: LiveNode) -> None:
        """Have what is written of a reply turned into a vector."""
        reply: Reply = node.work
        assert reply.ahead is not None, "nobody would search with it"
        source, text, index = reply.source, reply.text, reply.ahead.index

        def embedded(report: messages.Finished) -> None:
            if reply.vector is not None:
                reply.drift = dist(reply.vector, report.value)
            reply.vector, reply.read = report.value, None
            reply.graph.remove(node)

        reply.graph.begin(node)
        reply.reads = self._front.post(
            lambda job: messages.Embed(job, source, text, query=True, index=index),
            source.request,
            embedded,
            lambda error: None,  # and no scout is sent
        )

    def drop(self, reply: Reply) -> None:
        """Forget a reply."""
        self._end(reply)
        self._front.cancel(reply.job)

    def drop_request(self, request: int) -> None:
        """Forget all replies to a request."""
        for reply in [r for r in self._front.replies if r.source.request == request]:
            self.drop(reply)

    def leave(self, index: str) -> None:
        """Forget the vectors of replies that were made for an index whose place another takes."""
        for reply in self._front.replies:
            if reply.ahead is not None and reply.ahead.index == index:
                self._unread(reply)
                reply.vector = reply.drift = None

    def _end(self, reply: Reply) -> None:
        """Take that a reply is over, and that nobody will look at what was written on the way."""
        reply.over = True
        self._front.replies.pop(reply, None)
        self._unread(reply)

    def _unread(self, reply: Reply) -> None:
        self._front.cancel(reply.reads)
        if reply.read is not None:
            reply.graph.remove(reply.read)
            reply.read = None

    def _reported(self, reply: Reply, report: messages.Progressed | messages.Finished) -> None:
        if isinstance(report, messages.Progressed):
            if (steps := report.tokens - reply.tokens) > 0:
                reply.text, reply.tokens, reply.ended = report.text, report.tokens, reply.node
                reply.node = split_reply(reply.graph, reply.node, steps)
                self._front.news.progressed.append(reply)
            return
        self._end(reply)
        reply.graph.finish(reply.node)
        self._front.costs.replied(reply.named, self._front.now - reply.began)
        reply.text = report.value
        self._ended(reply)

    def _fail(self, reply: Reply, error: DovetailError) -> None:
        self._end(reply)
        self._failed(reply, error)
