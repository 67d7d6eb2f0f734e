"""What an app and its retrieval worker say to each other.

A request carries all it needs, so that one that was lost with a worker is simply sent to the next.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from dovetail.ir.index_file import IndexManifest, Passage
from dovetail.runtime.child.framing import ErrorText
from dovetail.runtime.index.scans import Part
from dovetail.runtime.retrieval.budget import ScanCost

ADVICE = (
    "give the encoder that the index was built with: `--model embedder=ENCODER` of `compile`, "
    "`run` or `serve`, or `embed=` of add_index"
)

# ---- requests ----


class Room(msgspec.Struct, frozen=True):
    """Memory for hot clusters of an index: `bytes` of stored vectors on a device of torch's."""

    gpu: str
    bytes: int


class OpenIndex(msgspec.Struct, frozen=True, tag=True):
    """Open the index folder at `path` under a name -> Opened.

    manifest: of the index that is meant; another one may have been written in its place. threads:
    that search together. kernels: whether generated kernels scan its lists, or faiss; None:
    whichever is measured to be faster. room: for hot clusters on a GPU, None for none. first: what
    the app's encoder makes of the first passage, where it is to fit the stored vector; same: not by
    its length alone.
    """

    index: str
    path: str
    manifest: IndexManifest
    threads: int = 1
    kernels: bool | None = None
    room: Room | None = None
    first: bytes = b""
    same: bool = False


class SearchQuery(msgspec.Struct, frozen=True):
    """A vector (float32 bytes), filters, and documents whose distances to it are wanted.

    topk: documents wanted, for which more clusters are found where filters let few through.
    """

    vector: bytes
    filters: dict[str, Any] = {}
    known: tuple[int, ...] = ()
    topk: int = 1


class ProbeQueries(msgspec.Struct, frozen=True, tag=True):
    """Find the `nprobe` clusters of each query -> ProbedQueries."""

    index: str
    queries: tuple[SearchQuery, ...]
    nprobe: int


class ScanParts(msgspec.Struct, frozen=True, tag=True):
    """Scan parts of several searches together -> ScannedParts.

    hot: where the index has its hot clusters, beside other work of the worker.
    """

    index: str
    parts: tuple[Part, ...]
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
    passages, float32 [n, d]. remove: keys of documents, or ids. known: whether it has the ids of
    all that is to go, also of what passages take the place of: so that no key is looked up.
    """

    index: str
    first: int
    passages: tuple[Passage, ...]
    vectors: bytes
    remove: tuple[str | int, ...]
    known: bool = False


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


Body: TypeAlias = OpenIndex | ProbeQueries | ScanParts | CopyClusters | ChangeIndex | RestoreIndex


class WorkerRequest(msgspec.Struct, frozen=True):
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


class ScannedParts(msgspec.Struct, frozen=True, tag=True):
    """Part by part, what was found; what was asked is left out.

    missed: how many clusters of parts were to be among the hot ones, and were scanned where the
    others are. absent: those of them that are not there as the documents are now.
    """

    parts: tuple[Part, ...]
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


Answer: TypeAlias = Opened | ProbedQueries | ScannedParts | Copied | Changed


class WorkerReply(msgspec.Struct, frozen=True):
    """The answer to the request of that number or an error; its begin, and the seconds it took.

    began: on this machine's monotonic clock (`time.perf_counter`), which processes share.
    """

    number: int
    body: Answer | None
    began: float
    seconds: float
    error: ErrorText | None = None


class WorkerReady(msgspec.Struct, frozen=True):
    """A worker has started."""
