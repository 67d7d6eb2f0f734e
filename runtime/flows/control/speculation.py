"""Work begun on a guess while engine or index have room (HedraRAG §4.3).

In: searches and replies under way. Out: generations begun on the documents found so far, which
count only if their prompt turns out to be the true one; and scouts, searches with what is written
so far of a reply, which only tell the true search where to look first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import dist

from dovetail.ir.transform import roll_back, speculate_generation, speculate_retrieval
from dovetail.runtime.flows.control.ahead import Prompt, prompts_after, search_after
from dovetail.runtime.flows.control.board import Board, Waiter
from dovetail.runtime.flows.control.costs import Guessed, Learned
from dovetail.runtime.flows.control.messages import Catalog, Commit, Embed, Finished
from dovetail.runtime.flows.control.replies import PendingReply, Replies
from dovetail.runtime.flows.control.search import Search
from dovetail.runtime.flows.control.searches import Searches
from dovetail.runtime.flows.control.settings import (
    REORDER,
    SPECULATE_GENERATION,
    SPECULATE_RETRIEVAL,
    WavefrontSettings,
)
from dovetail.runtime.flows.control.ticket import Ticket
from dovetail.runtime.flows.workflow_run import Call


@dataclass(slots=True)
class Statistics:
    """Guesses begun, those that held, those that did not, and scouts sent."""

    attempted: int = 0
    accepted: int = 0
    rejected: int = 0
    scouts: int = 0

    @property
    def accuracy(self) -> float:
        """Accepted guesses over those that were begun; 0 where none was."""
        return self.accepted / self.attempted if self.attempted else 0.0


class Speculation:
    """Guesses and scouts of all requests."""

    def __init__(
        self,
        settings: WavefrontSettings,
        learned: Learned,
        board: Board,
        catalog: Catalog,
        tickets: Mapping[int, Ticket],
        searches: Searches,
        replies: Replies,
    ) -> None:
        self._settings, self._learned = settings, learned
        self._board, self._catalog, self._tickets = board, catalog, tickets
        self._searches, self._replies = searches, replies
        self._changed = False  # since the last look for guesses
        self.statistics = Statistics()
        # Whether some guess was under way after they were weighed last.
        self._paid = settings.allows(SPECULATE_GENERATION)

    # ---- speculative generation ----

    def pays(self) -> bool:
        """Tell whether a generation may be begun on part of a search, for all that is known."""
        return self._paid and self._replies.load < self._most_load

    @property
    def _most_load(self) -> float:
        """Generations under way up to which one is begun on a guess."""
        most = self._settings.generation_load
        return self._learned.room if most is None else most

    def guess(self, now: float) -> None:
        """Begin generations on partial results, the nearest k-th document first, while it pays."""
        if not self._changed or not self._settings.allows(SPECULATE_GENERATION):
            return
        self._changed = False
        if self._replies.load >= self._most_load:
            return
        open_ = [search for search in self._searches.active if self._may_guess(search)]
        left = self._searches.seconds_left() if open_ else {}
        weighed = False
        for search in sorted(open_, key=lambda search: search.steps.partial[-1][0]):
            if (load := self._replies.load) >= self._most_load:
                break
            for prompt in self._prompts(search):
                guessed = Guessed(
                    prompt.node.name,
                    len(prompt.text),
                    search.node.name,
                    left[search],
                    search.share,
                )
                weighed = True
                if self._learned.guess_gain(guessed, load) > 0:
                    self._begin(search, prompt, now)
        if weighed:
            self._paid = any(ticket.guesses for ticket in self._tickets.values())

    def _may_guess(self, search: Search) -> bool:
        """Tell whether enough is found and nothing is begun on it yet."""
        if search.call is None or not search.steps.position:
            return False
        ticket = self._tickets[search.source.request]
        return (
            not any(guess.search is search for guess in ticket.guesses.values())
            and len(search.steps.partial) == search.node.topk
            and search.partial_ids != search.tried
        )

    def _prompts(self, search: Search) -> list[Prompt]:
        """Return the generations that would follow if what is found by now were all."""
        ticket, call = self._tickets[search.source.request], search.call
        assert call is not None
        documents = self._catalog.documents(search.node, search.steps.partial)
        return prompts_after(ticket.run, call, documents)

    def _begin(self, search: Search, prompt: Prompt, now: float) -> None:
        ticket = self._tickets[search.source.request]
        search.tried = search.partial_ids
        ahead = search_after(ticket.run.workflow, prompt.node.name)
        ticket.nodes[search.source.node, search.source.round] = search.last
        guess = speculate_generation(ticket.graph, search.ended, ticket.node(prompt.call))
        reply = PendingReply(
            ticket.graph,
            guess,
            ticket.source(prompt.call),
            prompt.node,
            prompt.text,
            None,
            now,
            ahead,
            search=search,
            ids=search.tried,
        )
        self._replies.begin(reply)
        ticket.guesses[reply.key] = reply
        self.statistics.attempted += 1

    def look_again(self) -> None:
        """Take that the engine has more room, or a search has found more, than before."""
        self._changed = True

    def check(self, search: Search) -> None:
        """Roll back what was begun on documents that are not the nearest any more.

        Documents once displaced do not come back, so waiting for the end would only cost time.
        """
        self.look_again()
        for guess in self._guesses(search):
            if guess.ids != search.partial_ids:
                self.reject(guess)

    def settle(self, search: Search) -> None:
        """Roll back what was begun on a search that is over, and not committed."""
        for guess in self._guesses(search):
            self.reject(guess)

    def commit(self, ticket: Ticket, call: Call, prompt: str) -> PendingReply | None:
        """Return the reply that was begun to just this prompt; roll back one to another."""
        key = call.node.name, call.round
        guess = ticket.guesses.get(key)
        if guess is None:
            return None
        if guess.prompt != prompt:
            self.reject(guess)
            return None
        del ticket.guesses[key]
        self.statistics.accepted += 1
        guess.call = call
        self._board.add(Commit(guess.job, guess.source))
        return guess

    def _guesses(self, search: Search) -> list[PendingReply]:
        guesses = self._tickets[search.source.request].guesses
        return [guess for guess in guesses.values() if guess.search is search]

    def reject(self, guess: PendingReply) -> None:
        """Roll a guess back: it did not hold, or the engine could not write it."""
        del self._tickets[guess.source.request].guesses[guess.key]
        roll_back(guess.graph, guess.work)
        self.statistics.rejected += 1
        self.look_again()
        self._replies.drop(guess)

    # ---- speculative retrieval ----

    def sense(self, reply: PendingReply) -> None:
        """Have what is written so far turned into a vector, if a search may follow from it."""
        if reply.embedding or not self._may_scout(reply):
            return
        assert reply.ahead is not None
        index, text = reply.ahead.index, reply.text

        def embedded(report: Finished, now: float) -> None:
            if reply.vector is not None:
                reply.drift = dist(reply.vector, report.value)
            reply.vector, reply.embedding = report.value, 0

        reply.embedding = self._board.post(
            lambda job: Embed(job, reply.source, text, query=True, index=index, provisional=True),
            Waiter(reply.source.request, embedded, lambda error, now: None),  # and no scout is sent
        )

    def scout(self, now: float) -> None:
        """Send scouts while the index has room, for the replies whose meaning changes least."""
        steady = [reply for reply in self._replies.active if reply.drift is not None]
        for reply in sorted(steady, key=lambda reply: reply.drift or 0.0):
            left = self._learned.reply(reply.node.name) - (now - reply.began)
            if left > self._learned.budget() and self._may_scout(reply):
                self._send(reply, now)

    def _may_scout(self, reply: PendingReply) -> bool:
        """Tell whether a scout would show the search after a reply its way; the first one lacks it.

        Without reordering nobody would look where it found something.
        """
        if reply.call is None or reply.ahead is None:
            return False
        ticket = self._tickets[reply.source.request]
        return (
            self._settings.transformations >= {SPECULATE_RETRIEVAL, REORDER}
            and self._searches.load < self._settings.retrieval_load
            and reply.ahead.name not in ticket.scouts
            and reply.ahead.index not in ticket.histories
            and self._learned.scout_gain(reply.ahead.name) > 0
        )

    def _send(self, reply: PendingReply, now: float) -> None:
        ahead = reply.ahead
        assert ahead is not None
        source = replace(reply.source, node=ahead.name)
        ticket = self._tickets[source.request]
        assert reply.ended is not None, "nothing is written before a sub-stage is over"
        work = speculate_retrieval(ticket.graph, reply.ended)
        scout = Search(ticket.graph, work, source, ahead, None, reply.vector, now)
        ticket.scouts[ahead.name] = scout
        self.statistics.scouts += 1
        self._searches.begin(scout, None)
