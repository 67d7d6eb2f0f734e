"""One request's way through a workflow: what may run now, and what follows when it has run.

In: a Workflow, the inputs, results as they come. Out: calls that are ready, and at the end the
state. Pure: a runner decides when and where calls run, and cannot change what comes out.

Work is tagged with the loops it went through (its round). A node runs for a round once nothing
under way can still bring more to it in that round; so joins do not depend on who is faster.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import Any, TypeAlias

from msgspec import Struct

from dovetail.ir.errors import WorkflowError, describe_error
from dovetail.ir.workflow import (
    END,
    START,
    Name,
    Node,
    Place,
    State,
    Terminal,
    Workflow,
)

Stamped = Mapping[str, tuple[int, Any]]
"""Name -> the round in which its value was written (-1 for inputs), and the value."""


Key: TypeAlias = tuple[int, Place]
"""A round of a place."""
_BEGIN: Key = (0, START)


class Call(Struct, frozen=True):
    """One run of a node; node and round name it, whatever ran before or beside it.

    rounds: in which round each value of the state was written, -1 for inputs.
    """

    node: Node
    round: int
    state: State
    rounds: Mapping[str, int]


class WorkflowRun:
    """The state of one request. Not for several threads at once."""

    def __init__(self, workflow: Workflow, inputs: Mapping[str, object]) -> None:
        """Raises WorkflowError where an input is missing, unknown, or null and read as a text."""
        for name in sorted(set(workflow.inputs) ^ set(inputs), key=str):
            fault = "missing" if name in workflow.inputs else "no input of it"
            known = ", ".join(map(repr, workflow.inputs))
            raise WorkflowError(
                f"workflow {workflow.name!r}: {name!r} is {fault}; its inputs are {known}"
            )
        for name in dict.fromkeys(name for node in workflow.nodes.values() for name in node.reads):
            if inputs.get(name, "") is None:
                raise WorkflowError(
                    f"workflow {workflow.name!r}: the input {name!r} is null; give a text"
                )
        self.workflow, self.inputs = workflow, inputs
        self._waiting: dict[Key, list[Stamped]] = defaultdict(list)
        self._awaits: dict[Key, set[Key]] = {}  # who may still bring more to a place that waits
        self._running: dict[Key, Stamped] = {}
        self._calls: dict[Key, Call] = {}
        self._runs: Counter[Name] = Counter()
        self._running[_BEGIN] = {name: (-1, value) for name, value in inputs.items()}

    @property
    def done(self) -> bool:
        """Whether nothing is under way or ready any more."""
        return not self._running and all(place is END for _, place in self._waiting)

    @property
    def result(self) -> dict[str, Any]:
        """What reached END: the inputs and all outputs on the ways there."""
        assert self.done, "the run is not over"
        ends = sorted(self._waiting, key=itemgetter(0))
        merged = _merge(state for key in ends for state in self._waiting[key])
        return {name: value for name, (_, value) in merged.items()}

    def ready(self) -> tuple[Call, ...]:
        """Return the calls that may run now, side by side; each is returned once.

        Raises WorkflowError where a node ran too often or reads what is not there yet, and where
        nobody has called `begin`, as `finish`.
        """
        if _BEGIN in self._running:
            self.begin()
        order = self.workflow.order
        found = [key for key, awaited in self._awaits.items() if not awaited]
        found.sort(key=lambda key: (key[0], order[key[1]]))
        return tuple(self._start(key) for key in found)

    def choose(self, place: Place, state: State) -> tuple[Place, ...]:
        """Return what follows a place in a state. For any thread, beside all else.

        Raises WorkflowError where a function on an edge fails or names no node.
        """
        chosen = list[Place]()
        for edge in self.workflow.edges[place]:
            try:
                found = edge.next(MappingProxyType(state))
            except (Exception, SystemExit) as error:  # as sys.exit(): nobody else would tell
                raise WorkflowError(
                    f"workflow {self.workflow.name!r}: the choice after node {place!r} failed: "
                    f"{describe_error(error)}"
                ) from error
            for target in found:
                allowed = self.workflow.order if edge.targets is None else edge.targets
                if target is START or target not in allowed:
                    raise WorkflowError(
                        f"workflow {self.workflow.name!r}: the choice after node {place!r} gave "
                        f"{target!r}, which is none of the nodes it may lead to"
                    )
                chosen.append(target)
        return tuple(chosen)

    def begin(self, chosen: Sequence[Place] | None = None) -> None:
        """Pass the inputs on to what `choose` gave; it is asked here where it was not; as it."""
        self._send(START, 0, self._running.pop(_BEGIN), chosen)

    def finish(self, call: Call, value: object, chosen: Sequence[Place] | None = None) -> None:
        """Take the result of a call; `chosen` as of `begin`."""
        key = (call.round, call.node.name)
        assert self._calls.pop(key) is call, "a call finishes once"
        state = {**self._running.pop(key), call.node.output: (call.round, value)}
        for awaited in self._awaits.values():
            awaited.discard(key)
        self._send(call.node.name, call.round, state, chosen)

    def fork(self) -> WorkflowRun:
        """Return a run that is where this one is, and goes on without changing this one."""
        fork = object.__new__(WorkflowRun)
        fork.__dict__.update(self.__dict__)
        fork._waiting = defaultdict(
            list, {key: list(found) for key, found in self._waiting.items()}
        )
        fork._awaits = {key: set(awaited) for key, awaited in self._awaits.items()}
        fork._running, fork._calls = dict(self._running), dict(self._calls)
        fork._runs = self._runs.copy()
        return fork

    def _may_bring(self, source: Key, target: Key) -> bool:
        """Tell whether what is under way may still bring more to a place in its round."""
        loops = self.workflow.away[source[1]].get(target[1])
        return loops is not None and source[0] + loops <= target[0]

    def _arrive(self, key: Key, state: Stamped) -> None:
        """Take what comes to a place; if it is the first, note who waits for whom."""
        if key not in self._waiting and key[1] is not END:
            under_way = [*self._awaits, *self._running]
            for other, awaited in self._awaits.items():
                if self._may_bring(key, other):
                    awaited.add(key)
            self._awaits[key] = {other for other in under_way if self._may_bring(other, key)}
        self._waiting[key].append(state)

    def _start(self, key: Key) -> Call:
        round_, place = key
        assert not isinstance(place, Terminal)
        node = self.workflow.nodes[place]
        self._runs[place] += 1
        if self._runs[place] > self.workflow.max_steps:
            raise WorkflowError(
                f"workflow {self.workflow.name!r}: node {place!r} has run "
                f"{self.workflow.max_steps} times; end its loop sooner or give a larger max_steps"
            )
        del self._awaits[key]
        stamped = _merge(self._waiting.pop(key))
        state = MappingProxyType({name: value for name, (_, value) in stamped.items()})
        for name in node.reads:
            if name not in state:
                raise WorkflowError(
                    f"workflow {self.workflow.name!r}: node {place!r} reads {name!r} before any "
                    "node has written it"
                )
        self._running[key] = stamped
        rounds = {name: written for name, (written, _) in stamped.items()}
        call = self._calls[key] = Call(node, round_, state, rounds)
        return call

    def _send(
        self, source: Place, round_: int, state: Stamped, chosen: Sequence[Place] | None
    ) -> None:
        """Pass a state on along all edges that leave `source`."""
        order = self.workflow.order
        if chosen is None:
            chosen = self.workflow.straight.get(source)
        if chosen is None:
            chosen = self.choose(source, {name: value for name, (_, value) in state.items()})
        for target in chosen or (END,):  # chosen nothing: it ends there
            later = round_ + (order[target] <= order[source])
            self._arrive((later, target), state)


def run_in_order(
    workflow: Workflow, inputs: Mapping[str, object], do: Callable[[Call], object]
) -> dict[str, Any]:
    """Return the state at END, each call made by `do` after the one before: the plain meaning."""
    run = WorkflowRun(workflow, inputs)
    while not run.done:
        for call in run.ready():
            run.finish(call, do(call))
    return run.result


def _merge(states: Iterable[Stamped]) -> dict[str, tuple[int, Any]]:
    """Return all that was written, of each name what was written in the latest round.

    A name has one writer, which runs once a round: equal rounds mean the same value.
    """
    merged: dict[str, tuple[int, Any]] = {}
    for state in states:
        for name, stamped in state.items():
            if name not in merged or stamped[0] > merged[name][0]:
                merged[name] = stamped
    return merged
