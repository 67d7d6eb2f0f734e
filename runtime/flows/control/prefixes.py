"""With which documents prompts have begun lately: the engine has their KV, as far as memory goes.

In: documents of prompts as they are sent. Out: an order of other documents that begins with as many
letters as possible of one that was sent. Bounded; the least recently sent is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from dovetail.ir.workflow import Generation
from dovetail.runtime.flows.prompts import MARK, FilledPrompt
from dovetail.runtime.flows.workflow_run import Call
from dovetail.runtime.index.documents import Document

KEPT = 4096
"""Beginnings that are remembered."""
Beginning: TypeAlias = tuple[str, tuple[int, ...]]
"""What a prompt says before its documents, and the first of these."""


@dataclass(frozen=True, slots=True)
class Opening:
    """The beginning of a prompt up to documents that may stand in any order.

    name: of the state, where they are. head: what is said before them.
    """

    call: Call
    name: str
    head: str
    documents: tuple[Document, ...]

    @classmethod
    def of(cls, call: Call, free: Collection[str]) -> Opening | None:
        """Return that of a call, None where it reads none of the outputs whose order is free."""
        assert isinstance(call.node, Generation), "it has no prompt"
        name = next((name for name in call.node.reads if name in free), None)
        if name is None or len(call.state[name]) < 2:
            return None
        marked = FilledPrompt.of(call.node.prompt, {**call.state, name: MARK})
        return cls(call, name, marked.partition(MARK)[0], tuple(call.state[name]))

    @property
    def ids(self) -> tuple[int, ...]:
        """Its documents, in the order of the prompt."""
        return tuple(document.id for document in self.documents)

    def arrange(self, ids: Sequence[int]) -> Opening:
        """Return it with its documents in another order."""
        by_id = {document.id: document for document in self.documents}
        return replace(self, documents=tuple(by_id[id_] for id_ in ids))

    def prompt(self) -> FilledPrompt:
        """Return the prompt that has its documents in this order."""
        prompt = self.call.node.prompt  # type: ignore[union-attr]
        made = FilledPrompt.of(prompt, {**self.call.state, self.name: list(self.documents)})
        made.plain = FilledPrompt.of(prompt, self.call.state)
        return made


class Prefixes:
    """What prompts have begun with, the latest last."""

    def __init__(self, most: int = KEPT) -> None:
        self._most, self._kept = most, OrderedDict[Beginning, None]()

    def keep(self, opening: Opening) -> None:
        """Take that a prompt was sent."""
        ids = opening.ids
        for end in range(len(ids), 0, -1):  # what is longest is forgotten first
            self._kept.pop((opening.head, ids[:end]), None)
            self._kept[opening.head, ids[:end]] = None
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def shared(self, opening: Opening) -> int:
        """Return how many letters of its documents stand where they stood in one that was sent."""
        ids, letters = opening.ids, 0
        for end, document in enumerate(opening.documents, 1):
            if (opening.head, ids[:end]) not in self._kept:
                break
            letters += len(str(document))
        return letters

    def arrange(self, opening: Opening) -> Opening:
        """Return it with its documents so that it shares most, the others in the order they had."""
        sizes = {document.id: len(str(document)) for document in opening.documents}
        best: tuple[int, ...] = ()
        sent = [best]  # beginnings that were sent
        for ids in sent:  # it grows meanwhile
            best = max(best, ids, key=lambda ids: sum(sizes[id_] for id_ in ids))
            longer = [(*ids, id_) for id_ in sizes if id_ not in ids]
            sent += [ids for ids in longer if (opening.head, ids) in self._kept]
        return opening.arrange([*best, *(id_ for id_ in opening.ids if id_ not in best)])
