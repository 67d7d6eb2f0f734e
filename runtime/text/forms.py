"""Grammars of the forms that answers are asked for in: each is tried once, apart.

In: forms, from any thread. Out: grammars, or the reason why there is none.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from concurrent.futures import Future
from functools import partial

from dovetail.ir.errors import RequestError
from dovetail.runtime.child.supervisor import CLOSED
from dovetail.runtime.schedule.structured import StructuredOutputs
from dovetail.runtime.text.template_process import SHARED

KEPT = 64
"""Forms whose grammars are known: those that were asked for last."""


class Forms:
    """What makes grammars of forms. For any thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[StructuredOutputs, str] = OrderedDict()
        self._pinned: dict[StructuredOutputs, str] = {}
        self._lock = threading.Lock()
        SHARED.take()
        self._end = weakref.finalize(self, SHARED.give_back)

    def find(self, form: StructuredOutputs) -> str | None:
        """Return the grammar of a form that was tried before, at once."""
        with self._lock:
            if form in self._known:
                self._known.move_to_end(form)
            return self._pinned.get(form) or self._known.get(form)

    def start(self, form: StructuredOutputs) -> Future[str]:
        """Return the future of a grammar; RequestError where the form cannot be followed.

        Also DeviceError where its process cannot be started.
        """
        found: Future[str]
        if (known := self.find(form)) is not None:
            found = Future()
            found.set_result(known)
            return found
        if not self._end.alive:
            raise RequestError(CLOSED)
        found = SHARED.try_form(form)
        found.add_done_callback(partial(self._keep, form))
        return found

    def write(self, form: StructuredOutputs) -> str:
        """Return the grammar that `start` promises; waits, so that no event loop may call it."""
        return self.start(form).result()

    def pin(self, form: StructuredOutputs) -> None:
        """Have the grammar of a form known for good; raises as `write`."""
        found = self.write(form)
        with self._lock:
            self._pinned[form] = found

    def warm(self) -> None:
        """Have the process begun that tries forms; nobody waits for that."""
        self.start(StructuredOutputs(json_object=True))

    def close(self) -> None:
        """Use the process no more."""
        self._end()

    def _keep(self, form: StructuredOutputs, tried: Future[str]) -> None:
        if tried.cancelled() or tried.exception() is not None:
            return
        with self._lock:
            self._known[form] = tried.result()
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
