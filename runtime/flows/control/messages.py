"""What passes between the control plane of workflows and those who do the work.

Orders go out of `Wavefront.orders`, reports come in through `Wavefront.tell`. A `job` numbers a
piece of work; reports about jobs that ended or were cancelled are ignored.

Whoever does the work keeps no state of a search: every order carries all it needs, so that one
that was lost with its worker can simply be done again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from dovetail.ir.errors import DovetailError, describe_error
from dovetail.ir.live_graph import LiveGraph, Rewrite
from dovetail.ir.workflow import Function, Generation, Name, Rerank, Retrieval
from dovetail.runtime.flows.workflow_run import Call
from dovetail.runtime.index.cursor import Hit
from dovetail.runtime.index.documents import Document
from dovetail.runtime.index.scans import Part

Device: TypeAlias = Literal["cpu", "gpu"]


class Source(msgspec.Struct, frozen=True):
    """Which run of which node of which request a piece of work is for."""

    request: int
    node: Name
    round: int


# ---- orders: work ----


class Generate(msgspec.Struct, frozen=True):
    """Have the engine reply to `prompt` under the node's options -> Progressed*, Finished(text).

    steps: decode steps between two reports of progress (a generation sub-stage); 0 = no reports.
    provisional: speculative; nobody may see its text before `Started` names its job.
    """

    job: int
    source: Source
    node: Generation
    prompt: str
    steps: int = 0
    provisional: bool = False


class Embed(msgspec.Struct, frozen=True):
    """Turn a text into a vector -> Finished(vector). Orders given together may share a batch.

    query: for a search of `index` (its encoder, with the prompt for queries), else by `model`.
    """

    job: int
    source: Source
    text: str
    model: str | None = None
    query: bool = False
    index: str | None = None


class RankDocuments(msgspec.Struct, frozen=True):
    """Have a cross-encoder score documents for a text -> Finished(the node's best ones).

    documents: what the state has there, as `find_best` takes it.
    """

    job: int
    source: Source
    node: Rerank
    query: str
    documents: Any


class Invoke(msgspec.Struct, frozen=True):
    """Call the Python function of a node, apart from the control plane -> Finished(value)."""

    job: int
    source: Source
    call: Call

    def run(self) -> object:
        """Call it."""
        assert isinstance(self.call.node, Function)
        return self.call.node.call(self.call.state)


class Choose(msgspec.Struct, frozen=True):
    """Call the functions of edges, apart from the control plane -> Finished(what follows)."""

    job: int
    run: Callable[[], object]


class FindClusters(msgspec.Struct, frozen=True):
    """Find the clusters of a query: as many as the index probes -> Probed.

    known: documents of the request's last search; the report tells how far from them the query is.
    """

    job: int
    source: Source
    node: Retrieval
    vector: bytes
    known: tuple[int, ...] = ()


class ScanClusters(msgspec.Struct, frozen=True):
    """A retrieval sub-stage: clusters of several searches of one index, together -> Scanned.

    One is under way on each device at a time. sources: the search that each part is of.
    """

    job: int
    device: Device
    index: str | None
    parts: tuple[Part, ...]
    sources: tuple[Source, ...]


class Copy(msgspec.Struct, frozen=True):
    """Copy clusters to an index's cache on the device, which keeps what is hot -> Finished(None).

    Runs beside scans, which use neither what comes nor what has to go meanwhile.
    """

    job: int
    index: str | None
    load: tuple[int, ...]


# ---- orders: what follows from work ----


class Cancel(msgspec.Struct, frozen=True):
    """Nobody waits any more for a job that is no scan or copy; free what it holds."""

    job: int


class Started(msgspec.Struct, frozen=True):
    """A node began; for those who watch the request.

    job, prompt: of its generation, None and empty for others. The text of that, past and future,
    may be shown from now on: if it was provisional, it is the real one now.
    """

    source: Source
    job: int | None = None
    prompt: str = ""


class Written(msgspec.Struct, frozen=True):
    """A node has written its output; for those who watch the request."""

    source: Source
    value: Any


class Rewrote(msgspec.Struct, frozen=True):
    """A transformation has rewritten a request's graph (0: no request's); for those who watch."""

    request: int
    rewrite: Rewrite


class Deliver(msgspec.Struct, frozen=True):
    """A request is over: its state at END, or why it failed. The last order about it.

    graph: what ran, where it did not fail.
    """

    request: int
    state: Mapping[str, Any] | None
    error: DovetailError | None = None
    graph: LiveGraph | None = None


Work: TypeAlias = (
    Generate | Embed | RankDocuments | Invoke | Choose | FindClusters | ScanClusters | Copy
)
Order: TypeAlias = Work | Cancel | Started | Written | Rewrote | Deliver


# ---- reports ----


class Progressed(msgspec.Struct, frozen=True):
    """A generation has written `tokens` tokens so far."""

    job: int
    text: str
    tokens: int


class Finished(msgspec.Struct, frozen=True):
    """A job is done. value: text of Generate, vector of Embed, result of others.

    Of Copy the clusters that did not arrive, None if all did.
    """

    job: int
    value: Any = None


class Probed(msgspec.Struct, frozen=True):
    """The clusters of a query, nearest centroid first, and the distances to these.

    known: distance of each document asked for that is still there. version: of the documents that
    the search sees to its end. patience: clusters without change after which it may end, as was
    measured for the index; None: it was not.
    """

    job: int
    clusters: tuple[int, ...]
    centroids: tuple[float, ...]
    known: Mapping[int, float]
    version: int = 0
    patience: int | None = None


class Scanned(msgspec.Struct, frozen=True):
    """A scan is done, part by part. seconds: that its device was busy with it.

    absent: clusters that were to be on the device and were not: they were scanned elsewhere.
    """

    job: int
    found: tuple[Part, ...]
    seconds: float
    absent: tuple[int, ...] = ()


class Failed(msgspec.Struct, frozen=True):
    """A job could not be done, and trying again will not help."""

    job: int
    error: DovetailError


def as_ours(error: BaseException) -> DovetailError:
    """Return an error of users' code or values as one for users."""
    return error if isinstance(error, DovetailError) else DovetailError(describe_error(error))


Report: TypeAlias = Progressed | Finished | Probed | Scanned | Failed


# ---- what is looked up without work ----


class Catalog(Protocol):
    """What is known of indexes without touching vectors. Quick, and without side effects."""

    def sizes(self, index: str | None) -> Sequence[int]:
        """Return the number of vectors in each cluster."""

    def documents(self, node: Retrieval, hits: Sequence[Hit]) -> list[Document]:
        """Return the documents of hits, in their order: the value of a retrieval."""
