"""What a caller sees of a workflow: events while it runs, a result when it is over.

In: nodes as they begin and end, pieces of replies, sub-stages. Out: values only. Times are seconds
since the workflow was submitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from dovetail.ir.graph import ExecutionGraph
from dovetail.ir.live_graph import Left, LiveGraph, Rewrite
from dovetail.ir.workflow import Name


@dataclass(frozen=True, slots=True)
class NodeStarted:
    """A node began its `round`-th loop. kind: generation, retrieval, embedding, rerank or function.

    prompt: of a generation, as it was sent; of messages what they say.
    """

    node: Name
    round: int
    kind: str
    at: float
    prompt: str = ""


@dataclass(frozen=True, slots=True)
class NodeText:
    """A piece of the reply that a generation node is writing."""

    node: Name
    round: int
    text: str
    token_ids: tuple[int, ...]
    at: float


@dataclass(frozen=True, slots=True)
class SubStage:
    """A retrieval node has had some of its clusters scanned, in `seconds` of the device."""

    node: Name
    clusters: int
    device: str
    seconds: float
    at: float


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A transformation has rewritten the request's graph at a node, to gain so many seconds."""

    transformation: str
    node: str
    gain: float
    at: float


@dataclass(frozen=True, slots=True)
class NodeFinished:
    """A node has written its output."""

    node: Name
    round: int
    value: Any
    at: float


Event: TypeAlias = NodeStarted | NodeText | SubStage | Rewritten | NodeFinished


@dataclass(frozen=True, slots=True)
class NodeTime:
    """When a node ran. prompt: of a generation, as it was sent; of messages what they say."""

    node: Name
    round: int
    kind: str
    start: float
    end: float
    prompt: str = ""


@dataclass(frozen=True, slots=True)
class WorkflowResult:
    """What a workflow came to.

    outputs: the inputs, and what the nodes on the ways to END have written. timeline: its nodes
    in the order in which they ended. seconds: from its submission to its end. notes: a sentence for
    each thing that went otherwise than was asked, such as documents that a prompt had no room for.
    """

    outputs: Mapping[str, Any]
    timeline: tuple[NodeTime, ...]
    seconds: float
    live: LiveGraph
    notes: tuple[str, ...] = ()

    @property
    def rewrites(self) -> tuple[Rewrite, ...]:
        """What transformations have done to its graph, with the seconds that each was to gain."""
        return tuple(self.live.rewrites)

    @property
    def left(self) -> dict[str, Left]:
        """By transformation that might have been applied and never was: why it was not."""
        applied = {rewrite.transformation for rewrite in self.live.rewrites}
        return {name: why for name, why in self.live.left.items() if name not in applied}

    @property
    def graph(self) -> ExecutionGraph:
        """What ran: sub-stages, guesses that held, devices; `contract` gives what was computed."""
        return self.live.freeze()
