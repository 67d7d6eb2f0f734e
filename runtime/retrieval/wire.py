"""What an app and its retrieval worker say to each other, as msgpack after its length.

In: structs. Out: bytes on a socket, and back. A request carries all it needs, so that one that was
lost with a worker is simply sent to the next.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from math import inf
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from dovetail.ir import errors
from dovetail.ir.errors import DeviceError, DovetailError
from dovetail.ir.index_file import Passage
from dovetail.runtime.framing import pack_value, receive_value
from dovetail.runtime.retrieval.budget import ScanCost
from dovetail.runtime.retrieval.cursor import Hit
from dovetail.runtime.sim.machines import Machine

MAX_MESSAGE = 1 << 30

T = TypeVar("T")


# ---- requests ----


class EmulatedGpu(msgspec.Struct, frozen=True, tag=True):
    """A GPU one does not have: seconds of each scan and copy; bytes/s of its memory and link."""

    launch: float
    bandwidth: float
    link: float

    @classmethod
    def of(cls, machine: Machine) -> EmulatedGpu:
        """Return one accelerator of a machine class: a scan is bound by its memory."""
        return cls(machine.stage.value, machine.bandwidth.value, machine.link.value)


class TorchGpu(msgspec.Struct, frozen=True, tag=True):
    """A device by torch's name, `cuda:0` or `torch:cpu`.

    patience: seconds without an answer after which it is given up: what is asked of it at once, a
    cluster's copy or the scans of a sub-stage, takes milliseconds. opening_patience: the same while
    it is opened, when torch is imported and its driver started.
    """

    name: str
    patience: float = 10.0
    opening_patience: float = 60.0


Gpu: TypeAlias = EmulatedGpu | TorchGpu


class Room(msgspec.Struct, frozen=True):
    """Memory of a GPU for hot clusters of an index: `bytes` of stored vectors."""

    gpu: Gpu
    bytes: int


class OpenIndex(msgspec.Struct, frozen=True, tag=True):
    """Open the index folder at `path` under a name -> Opened.

    threads: that search together. kernels: whether generated kernels scan its lists, or faiss;
    None: whichever is measured to be faster. room: for hot clusters on a GPU, None for none.
    """

    index: str
    path: str
    threads: int = 1
    kernels: bool | None = None
    room: Room | None = None


class Query(msgspec.Struct, frozen=True):
    """A vector (float32 bytes), filters, and documents whose distances to it are wanted."""

    vector: bytes
    filters: dict[str, Any] = {}
    known: tuple[int, ...] = ()


class ProbeQueries(msgspec.Struct, frozen=True, tag=True):
    """Find the `nprobe` clusters of each query -> ProbedQueries."""

    index: str
    queries: tuple[Query, ...]
    nprobe: int


class Piece(msgspec.Struct, frozen=True):
    """Some clusters of a search, the distances of their centroids, and how many hits are wanted.

    bound: distance beyond which hits are of no use. version: of the documents that it is to see.
    """

    vector: bytes
    filters: dict[str, Any]
    clusters: tuple[int, ...]
    centroids: tuple[float, ...]
    depth: int
    bound: float = inf
    version: int = 0


class ScanPieces(msgspec.Struct, frozen=True, tag=True):
    """Scan pieces of several searches together -> ScannedPieces.

    hot: where the index has its hot clusters, beside other work of the worker.
    """

    index: str
    pieces: tuple[Piece, ...]
    hot: bool = False


class CopyClusters(msgspec.Struct, frozen=True, tag=True):
    """Drop all hot clusters but `keep`, and copy `load` to the GPU, beside scans -> Copied.

    room: bytes that they may take from now on.
    """

    index: str
    load: tuple[int, ...]
    keep: tuple[int, ...]
    room: int


class ChangeIndex(msgspec.Struct, frozen=True, tag=True):
    """Add and remove documents at once -> Changed. Searches under way do not see it.

    first: id of the first passage, one more than that of the last document so far. vectors: of the
    passages, float32 [n, d]. remove: keys of documents, or ids.
    """

    index: str
    first: int
    passages: tuple[Passage, ...]
    vectors: bytes
    remove: tuple[str | int, ...]


class RestoreIndex(msgspec.Struct, frozen=True, tag=True):
    """Be as after the first `version` changes, which another worker made -> Changed.

    ids, passages, vectors: of documents that were added and are there. remove: ids of others that
    are not. count: documents that there had been. What was restored before stays.
    """

    index: str
    ids: tuple[int, ...]
    passages: tuple[Passage, ...]
    vectors: bytes
    remove: tuple[int, ...]
    version: int
    count: int


Body: TypeAlias = OpenIndex | ProbeQueries | ScanPieces | CopyClusters | ChangeIndex | RestoreIndex


class Request(msgspec.Struct, frozen=True):
    """A request and its number."""

    number: int
    body: Body


# ---- replies ----


class Opened(msgspec.Struct, frozen=True, tag=True):
    """What is in an index: values of a vector, `l2` or `ip`, and vectors in each cluster.

    kernels: whether generated ones scan it. query_prompt, passage_prompt: what goes before texts.
    code_bytes: of a stored vector. hot: what scans of hot clusters cost, None where there can be
    none; why_cold: the reason, where it is not the size of their memory.
    """

    dim: int
    metric: str
    sizes: tuple[int, ...]
    kernels: bool = False
    query_prompt: str = ""
    passage_prompt: str = ""
    code_bytes: int = 0
    hot: ScanCost | None = None
    why_cold: str = ""


class ProbedQuery(msgspec.Struct, frozen=True):
    """Clusters of one query, nearest centroid first; documents that are there -> distance."""

    clusters: tuple[int, ...]
    centroids: tuple[float, ...]
    known: dict[int, float]


class ProbedQueries(msgspec.Struct, frozen=True, tag=True):
    """Query by query. version: of the documents that scans of these are to see."""

    queries: tuple[ProbedQuery, ...]
    version: int = 0


class ScannedPiece(msgspec.Struct, frozen=True):
    """Hits of one piece, nearest first, and the cluster of each."""

    hits: tuple[Hit, ...]
    homes: tuple[int, ...]


class ScannedPieces(msgspec.Struct, frozen=True, tag=True):
    """Piece by piece. seconds: by the clock of what scanned.

    missed: how many clusters of pieces were to be among the hot ones, and were scanned where the
    others are. absent: those of them that are not there as the documents are now.
    """

    pieces: tuple[ScannedPiece, ...]
    seconds: float = 0.0
    missed: int = 0
    absent: tuple[int, ...] = ()


class Copied(msgspec.Struct, frozen=True, tag=True):
    """The hot clusters hold so many bytes of vectors now. missing: those that did not arrive."""

    held: int
    missing: tuple[int, ...] = ()


class Changed(msgspec.Struct, frozen=True, tag=True):
    """Documents have changed: vectors in each cluster now; ids of those that were removed.

    forgotten: ids of documents that no search will find any more, as nothing keeps them.
    """

    sizes: tuple[int, ...]
    removed: tuple[int, ...] = ()
    forgotten: tuple[int, ...] = ()


class Refused(msgspec.Struct, frozen=True, tag=True):
    """An error: its class in `ir.errors` and its text."""

    error: str
    message: str

    def make(self) -> DovetailError:
        """Return the error."""
        found = getattr(errors, self.error, DeviceError)
        known = isinstance(found, type) and issubclass(found, DovetailError)
        return (found if known else DeviceError)(self.message)


Answer: TypeAlias = Opened | ProbedQueries | ScannedPieces | Copied | Changed | Refused


class Reply(msgspec.Struct, frozen=True):
    """The answer to the request of that number; when it was begun, and the seconds it took.

    began: on this machine's monotonic clock (`time.perf_counter`), which processes share.
    """

    number: int
    body: Answer
    began: float
    seconds: float


class Ready(msgspec.Struct, frozen=True):
    """A worker has started."""


# ---- on the socket ----


def send(link: socket.socket, value: msgspec.Struct) -> None:
    """Send a struct after its length; OSError where the peer is gone."""
    link.sendall(pack_value(value))


def receive_struct(link: socket.socket, kind: type[T]) -> T | None:
    """Return the next struct, or None when the peer has hung up."""
    return receive_value(link, kind, MAX_MESSAGE)


def pack_vector(vector: NDArray[np.float32]) -> bytes:
    """Return a vector as the bytes of its float32 values."""
    return np.ascontiguousarray(vector, np.float32).tobytes()


def unpack_vectors(vectors: Sequence[bytes]) -> NDArray[np.float32]:
    """Return vectors of one length as rows."""
    return np.frombuffer(b"".join(vectors), np.float32).reshape(len(vectors), -1)
