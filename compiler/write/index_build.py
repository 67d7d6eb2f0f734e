"""The build of a retrieval index: a corpus and an encoder -> an index folder.

Passages are embedded in slices, and each slice is on the disk before the next begins: a build that
was interrupted goes on from there. What the index in that place has of them is not embedded again.
The folder itself is there whole or not at all.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import filelock
import msgspec
import numpy as np

from dovetail.codegen.catalog import retrieval_kernels
from dovetail.codegen.isa.target import Target
from dovetail.compiler.rules.shared_kernels import target_kernels
from dovetail.compiler.write.earlier_index import EarlierIndex, Embeds, Rows, read_earlier
from dovetail.compiler.write.report import our_version
from dovetail.compiler.write.writer import BUILDING, write_artifact, write_libraries
from dovetail.ir.errors import ArtifactError, SpecError
from dovetail.ir.index_file import (
    DOCUMENTS,
    OFFSETS,
    VECTORS,
    EarlyEnd,
    EmbedderEntry,
    IndexManifest,
    Passage,
)
from dovetail.runtime.index.build import build_index, check_wish
from dovetail.runtime.index.cursor import choose_probes
from dovetail.runtime.index.documents import divide, encode_passages
from dovetail.runtime.index.early_stop import calibrate
from dovetail.runtime.index.ivf import IvfIndex

SLICE = 256
"""Passages that are embedded before they are kept: what an interrupted build loses at most."""
QUERIES, WORDS = 1000, 12
"""Queries on which an early end is chosen, and on which it is checked; words of each."""
UNIT = 1e-3
"""How far from 1 the lengths of vectors may be that are compared by inner product by default."""
QUERY_PROMPTS, PASSAGE_PROMPTS = (
    ("query", "search_query", "web_search_query"),
    ("passage", "document", "search_document"),
)
"""Names under which encoders keep what goes before a query, and before a passage."""

SHOWN = ("dim", "clusters", "codes", "metric")
"""What manifest and report tell of an index."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRequest:
    """What to build.

    clusters: None = chosen by the number of passages. metric: None = inner product for unit
    vectors, else L2. target: the instruction set to build scan kernels for, if any. cut: gives the
    parts of a text that the encoder takes whole, each behind another text; None: it takes all.
    """

    output: Path
    codes: str = "flat"
    metric: str | None = None
    clusters: int | None = None
    seed: int = 0
    target: Target | None = None
    cut: Callable[[str, str], Sequence[str]] | None = None


class IndexReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a build did. resumed: passages that an earlier, interrupted build had embedded.

    divided: passages that the encoder could not take whole, and so are found part by part.
    kept: passages whose vectors the index in that place had before.
    """

    path: str
    documents: int
    resumed: int
    dim: int
    clusters: int
    codes: str
    metric: str
    bytes: int
    embedder: str
    divided: int = 0
    kept: int = 0


def build_index_folder(
    passages: Sequence[Passage],
    encoder: Embeds,
    embedder: EmbedderEntry,
    request: IndexRequest,
    progress: Progress,
) -> IndexReport:
    """Embed passages, cluster their vectors and write an index folder with its documents.

    Raises:
        SpecError: the request does not fit the corpus, or the output cannot be written to.
        ArtifactError: another build writes to the same place, or the disk is full.
    """
    if abs(request.seed) >= 1 << 31:  # a C int of faiss
        raise SpecError(f"the seed {request.seed} is too large; give one below {1 << 31}")
    divided, before = 0, embedder.passage_prompt
    if (cut := request.cut) is not None:
        passages, divided = divide(passages, lambda text, head: cut(text, before + head))
    check_wish(len(passages), request.clusters, request.codes, request.metric or "l2")
    lines, offsets = encode_passages(passages)
    identity = hashlib.sha256(lines + msgspec.json.encode(embedder)).hexdigest()
    with write_artifact(request.output, kind=IndexManifest) as folder:
        with _open_partial(request.output, identity) as partial:
            resumed = partial.count
            earlier = read_earlier(request.output, embedder)
            vectors = _embed_all(passages, encoder, embedder, earlier, partial, progress)
            index = _cluster(vectors, request, progress)
            early = _calibrate(index, passages, encoder, embedder, progress)
            facts: dict[str, Any] = {name: getattr(index, name) for name in SHOWN}
            facts["documents"] = len(passages)
            progress("write", 0, 1)
            _write_index(index, folder.path_for(VECTORS))
            folder.add_file(VECTORS)
            folder.write_bytes(DOCUMENTS, lines)
            np.save(folder.path_for(OFFSETS), offsets)
            folder.add_file(OFFSETS)
            libraries = {}
            if (target := request.target) is not None:
                kernels = target_kernels(target, retrieval_kernels(target), None, here=False)
                libraries[target.name] = kernels
            write_libraries(folder, libraries)
            folder.commit(
                producer=f"dovetail {our_version()}",
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                **facts,
                embedder=embedder,
                targets=tuple(libraries),
                early=early,
            )
            partial.remove()
            progress("write", 1, 1)
    return IndexReport(
        path=str(request.output),
        **facts,
        resumed=resumed,
        bytes=sum(entry.bytes for entry in folder.files.values()),
        embedder=embedder.name,
        divided=divided,
        kept=earlier.used,
    )


def describe_embedder(
    name: str, fingerprint: str, prompts: dict[str, str], default: str | None
) -> EmbedderEntry:
    """Return the entry of an encoder: its prompts of queries and passages by their usual names."""
    fallback = prompts.get(default or "", "")

    def choose(names: Sequence[str]) -> str:
        return next((prompts[n] for n in names if n in prompts), fallback)

    return EmbedderEntry(
        name=name,
        fingerprint=fingerprint,
        query_prompt=choose(QUERY_PROMPTS),
        passage_prompt=choose(PASSAGE_PROMPTS),
    )


# ---- the steps ----


class _State(msgspec.Struct, frozen=True):
    """`state.json` beside vectors that a build has so far. identity: of corpus and embedder."""

    identity: str
    dim: int


@dataclass(slots=True)
class _Partial:
    """Vectors of an unfinished build, on the disk slice by slice."""

    folder: Path
    identity: str
    dim: int = 0

    @property
    def count(self) -> int:
        """Whole vectors so far."""
        path = self.folder / "vectors.f32"
        return path.stat().st_size // (4 * self.dim) if self.dim and path.exists() else 0

    def append(self, rows: Rows) -> None:
        """Keep the vectors of one slice."""
        kept = self.count
        if not self.dim:
            self.dim = rows.shape[1]
            state = msgspec.json.encode(_State(self.identity, self.dim))
            (self.folder / "state.json").write_bytes(state)
        with (self.folder / "vectors.f32").open("ab") as file:
            file.truncate(kept * 4 * self.dim)  # a kill may have left part of a vector
            file.write(np.ascontiguousarray(rows, np.float32).tobytes())

    def read(self) -> Rows:
        """Return all vectors so far."""
        values = np.fromfile(self.folder / "vectors.f32", np.float32, self.count * self.dim)
        return values.reshape(-1, self.dim)

    def remove(self) -> None:
        """Drop it all: the index is written."""
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def _open_partial(output: Path, identity: str) -> Iterator[_Partial]:
    """Open what an interrupted build of the same corpus and embedder left, else begin anew.

    It stays until the index is written, but without vectors, which nothing could go on from.
    """
    folder = output.with_name(output.name + BUILDING)
    lock = filelock.FileLock(f"{folder}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise ArtifactError(f"another build is writing {output}; wait until it is done") from None
    try:
        try:
            state = msgspec.json.decode((folder / "state.json").read_bytes(), type=_State)
        except (OSError, msgspec.DecodeError):
            state = _State("", 0)
        if state.identity != identity:
            shutil.rmtree(folder, ignore_errors=True)
            state = _State(identity, 0)
        folder.mkdir(exist_ok=True)
        partial = _Partial(folder, identity, state.dim)
        try:
            yield partial
        except OSError as error:
            if not partial.count:
                raise
            raise ArtifactError(
                f"cannot write {output}: {error.strerror or error}; the vectors of {partial.count} "
                f"passages are kept in {folder}: the same build goes on from them, or remove it"
            ) from error
        finally:
            if not partial.count:
                partial.remove()
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)  # first: then nobody else can have got it
        lock.release()


def _embed_all(
    passages: Sequence[Passage],
    encoder: Embeds,
    embedder: EmbedderEntry,
    earlier: EarlierIndex,
    partial: _Partial,
    progress: Progress,
) -> Rows:
    progress("embed", partial.count, len(passages))
    for first in range(partial.count, len(passages), SLICE):
        texts = [passage.embedded for passage in passages[first : first + SLICE]]
        rows = earlier.complete(texts, encoder, embedder.passage_prompt)
        if not np.isfinite(rows).all():
            raise SpecError("the encoder gave vectors that are not finite; compile it as f32")
        partial.append(rows)
        progress("embed", first + len(texts), len(passages))
    return partial.read()


def _cluster(vectors: Rows, request: IndexRequest, progress: Progress) -> IvfIndex:
    progress("cluster", 0, 1)
    unit = bool((np.abs(np.linalg.norm(vectors, axis=1) - 1) < UNIT).all())
    index = build_index(
        vectors,
        clusters=request.clusters,
        codes=request.codes,
        metric=request.metric or ("ip" if unit else "l2"),
        seed=request.seed,
    )
    progress("cluster", 1, 1)
    return index


def _write_index(index: IvfIndex, path: Path) -> None:
    """Write an index; OSError, as of other files, where faiss says at its end why it could not."""
    try:
        index.write(path)
    except RuntimeError as error:
        reason = str(error).rpartition("(")[2].rstrip(")")
        raise OSError(errno.EIO, reason, str(path)) from error


def _calibrate(
    index: IvfIndex,
    passages: Sequence[Passage],
    encoder: Embeds,
    embedder: EmbedderEntry,
    progress: Progress,
) -> tuple[EarlyEnd, ...]:
    """Measure when searches may end, with some words of passages for queries.

    Of an index that is small, or searched whole, nothing is left out.
    """
    nprobe = choose_probes(index.clusters)
    if len(passages) < 2 * QUERIES or nprobe == index.clusters:
        return ()
    rng, rows = np.random.default_rng(0), list[Rows]()
    chosen = rng.choice(len(passages), 2 * QUERIES, replace=False).tolist()
    texts = [_some_words(passages[row].text, rng) for row in chosen]
    for first in range(0, len(texts), SLICE):
        progress("calibrate", first, len(texts))
        rows.append(encoder.embed(texts[first : first + SLICE], prompt=embedder.query_prompt))
    queries = np.concatenate(rows)
    wider = sorted({nprobe, min(4 * nprobe, index.clusters)})
    found = tuple(end for width in wider for end in calibrate(index, queries, width))
    progress("calibrate", len(texts), len(texts))
    return found


def _some_words(text: str, rng: np.random.Generator) -> str:
    words = text.split()
    first = int(rng.integers(max(1, len(words) - WORDS + 1)))
    return " ".join(words[first : first + WORDS])
