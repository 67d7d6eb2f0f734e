"""One request: its run, what its searches leave each other, and the guesses about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from dovetail.ir.workflow import Name, Retrieval
from dovetail.runtime.retrieval.cursor import SearchHistory
from dovetail.runtime.wavefront.messages import Source
from dovetail.runtime.wavefront.replies import Reply
from dovetail.runtime.wavefront.search import Search
from dovetail.runtime.wavefront.trace import Trace
from dovetail.runtime.workflow_run import Call, WorkflowRun

Key: TypeAlias = tuple[Name, int]
"""Node and round: which call of a request."""


@dataclass(frozen=True, slots=True)
class Guess:
    """A reply that was begun on what a search had found so far.

    ids: the documents it was begun on.
    """

    reply: Reply
    search: Search
    ids: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Ticket:
    """A request under way. histories: of its last search of each index.

    guesses: by the call they are for; attempts: on which sub-stages that was begun. scouts:
    searches ahead of the node that they prepare. searched: how many searches are over.
    """

    number: int
    run: WorkflowRun
    trace: Trace
    histories: dict[str | None, SearchHistory] = field(default_factory=dict)
    guesses: dict[Key, Guess] = field(default_factory=dict)
    attempts: dict[Key, list[str]] = field(default_factory=dict)
    scouts: dict[Name, Search] = field(default_factory=dict)
    searched: int = 0
    over: bool = False

    def source(self, call: Call) -> Source:
        """Return what a piece of work for a call is marked with."""
        return Source(self.number, call.node.name, call.round)

    def history(self, node: Retrieval) -> SearchHistory | None:
        """Return what the next search can use: of its scout if there was one, or of the last."""
        scout = self.scouts.get(node.name)
        if scout is not None and scout.cursor is not None and scout.cursor.position:
            return scout.history()
        return self.histories.get(node.index)
