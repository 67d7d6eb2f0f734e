"""Texts to vectors and scores: tokenising, prompts and the encoders of an artifact.

In: texts or token ids. Out: float32 rows in order (`embed`), or documents by score (`rerank`). All
work goes through the queues of `runtime/embed/`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeVar, Unpack, get_type_hints

import numpy as np

from dovetail.ir.encoder import EncoderSpec
from dovetail.ir.errors import RequestError
from dovetail.ir.options import check_names, check_types
from dovetail.runtime.embed.service import EmbeddingService, EmbedJob
from dovetail.runtime.native.encoder import Ids, Rows, check_ids
from dovetail.runtime.text.tokenizer import (
    BYTES_PER_TOKEN,
    SHORT,
    beginning,
    check_unicode,
    read_tokenizer,
)

if TYPE_CHECKING:
    import tokenizers

TextOrIds: TypeAlias = str | Sequence[int] | Ids
SLICE = 1024
"""Texts that are tokenised at once: what a call holds beside token ids."""
FEW = 4
"""Texts that one thread tokenises, in about 0.15 ms each."""
Started: TypeAlias = tuple[EmbedJob, Callable[[Rows], Rows]]
StartedRerank: TypeAlias = "tuple[EmbedJob, Callable[[Rows], list[Ranked]]]"
T = TypeVar("T")


class EmbedOptions(TypedDict, total=False):
    """Options of `App.embed`, which says what they mean."""

    model: str | None
    prompt_name: str | None
    prompt: str | None
    dimensions: int | None
    wait: bool


class RerankOptions(TypedDict, total=False):
    """Options of `App.rerank`, which says what they mean."""

    model: str | None
    top_n: int | None
    instruction: str | None
    wait: bool


EMBED_TYPES, RERANK_TYPES = get_type_hints(EmbedOptions), get_type_hints(RerankOptions)


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document of a `rerank`: its place in what was given, its score, its text."""

    index: int
    score: float
    document: str


class TextEncoder:
    """An encoder behind the queues that all encoders share, and the reader of its texts.

    Texts become token ids by its tokenizer.json. They are cut to the letters that its tokens may
    have before they are tokenised, and then to the tokens that it takes.
    """

    def __init__(
        self, name: str, spec: EncoderSpec, path: Path | None, service: EmbeddingService
    ) -> None:
        """The file at `path` is read when a text first needs it; None: it takes only token ids."""
        self.name, self.spec, self.service = name, spec, service
        self._path = path

    @cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        if self._path is None:
            raise RequestError("this encoder has no tokenizer, so texts must be lists of token ids")
        found = read_tokenizer(self._path)
        found.enable_truncation(self.spec.max_tokens)
        return found

    def read(
        self,
        texts: TextOrIds | Sequence[TextOrIds],
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> list[Ids]:
        """Return checked token ids of each text, special tokens included; ids stay as they are.

        A prompt goes before each text; RequestError for an unknown name of one.
        """
        listed, before = _as_texts(texts), self.choose_prompt(prompt_name, prompt)
        places = [i for i, text in enumerate(listed) if isinstance(text, str)]
        found: list[Sequence[int] | Ids] = [() if isinstance(t, str) else t for t in listed]
        for first in range(0, len(places), SLICE):
            part = places[first : first + SLICE]
            encodings = self._encode([self._cut(listed[i], i, before) for i in part])
            for place, encoding in zip(part, encodings, strict=True):
                found[place] = np.array(encoding.ids, np.int32)
        return check_ids(self.spec, found)

    def divide(self, text: str, before: str = "") -> list[str]:
        """Return the parts of a text that this encoder takes whole with `before` before each.

        They are cut between words. A text is one part where `before` leaves no room.
        """
        parts, most = list[str](), self.spec.max_tokens * BYTES_PER_TOKEN - len(before)
        while (end := self._end(before, text[:most])) < len(text):
            between = text.rfind(" ", 1, end + 1)
            end = between if 2 * between > end else end  # else it has no words
            while end > 1 and self._end(before, text[:end]) < end:  # tokens at a cut are others
                end -= max(1, end // 16)
            if end <= 1:
                return [*parts, text]
            parts.append(text[:end].rstrip())
            text = text[end:].lstrip()
        return [*parts, text] if text or not parts else parts

    def unknown(self, texts: Sequence[str]) -> float:
        """Return the part of the tokens of texts that stands for words it does not know."""
        mark = getattr(self._tokenizer.model, "unk_token", None)
        found = self._encode([self._cut(text, number) for number, text in enumerate(texts)])
        tokens = [token for encoding in found for token in encoding.tokens]
        return sum(token == mark for token in tokens) / max(1, len(tokens))

    def _end(self, before: str, text: str) -> int:
        """Return how many letters of a text are read behind another one."""
        encoding = self._tokenizer.encode(before + text)
        if not encoding.overflowing:
            return len(text)
        return max((end for _, end in encoding.offsets), default=0) - len(before)

    def read_pairs(
        self, query: str, documents: Sequence[object], instruction: str | None = None
    ) -> Iterator[tuple[Ids, Ids]]:
        """Yield (token ids, segments) of the query beside each document; the longer one is cut.

        instruction: what makes a document a good one, for models that are told.
        """
        asked = self._cut(query, 0)
        if self.spec.template:
            values = {"query": asked, "instruction": self.choose_prompt(None, instruction)}
            for ids in self._fill(values, documents):
                yield ids, np.zeros_like(ids)
            return
        if instruction is not None:
            raise RequestError("this cross-encoder takes no instruction; omit it")
        pairs = [(asked, self._cut(text, i)) for i, text in enumerate(documents)]
        segments = self.spec.token_types > 1  # a tokenizer may tell them to a model without
        for first in range(0, len(pairs), SLICE):
            for encoding in self._tokenizer.encode_batch(pairs[first : first + SLICE]):
                kinds = np.array(encoding.type_ids, np.int32)
                yield np.array(encoding.ids, np.int32), kinds if segments else np.zeros_like(kinds)

    def _fill(self, values: Mapping[str, str], documents: Sequence[object]) -> Iterator[Ids]:
        """Yield the template's tokens with each document in its place, which is cut at its end."""
        before, _, after = self.spec.template.partition("{document}")
        names = re.compile(rf"{{({'|'.join(values)})}}")
        before, after = (names.sub(lambda name: values[name[1]], part) for part in (before, after))
        end = self._tokenizer.encode(after, add_special_tokens=False).ids
        texts = [before + self._cut(text, i) for i, text in enumerate(documents)]
        for first in range(0, len(texts), SLICE):
            part = texts[first : first + SLICE]
            for encoding in self._tokenizer.encode_batch_fast(part, add_special_tokens=False):
                ids = encoding.ids[: self.spec.max_tokens - len(end)]
                yield np.array([*ids, *end], np.int32)

    def cutter(self, dimensions: int | None) -> Callable[[Rows], Rows]:
        """Return what cuts rows to so many values, of length 1 again where whole ones are."""
        if dimensions is None or dimensions == (dim := self.spec.dim):
            return lambda rows: rows
        unit = self.spec.unit
        if dimensions not in range(1, dim):
            raise RequestError(f"dimensions must be 1 to {dim}, which vectors of this encoder have")

        def cut(rows: Rows) -> Rows:
            kept = rows[:, :dimensions]
            lengths = np.linalg.norm(kept, axis=1, keepdims=True)
            return kept / np.maximum(lengths, 1e-12) if unit else kept

        return cut

    def choose_prompt(self, name: str | None, prompt: str | None) -> str:
        """Return what goes before texts; RequestError where no prompt has that name."""
        chosen = name or self.spec.default_prompt
        if prompt is not None or chosen is None:
            return prompt or ""
        if chosen not in self.spec.prompts:
            known = ", ".join(self.spec.prompts) or "none"
            raise RequestError(f"there is no prompt {chosen!r}; this encoder has: {known}")
        return self.spec.prompts[chosen]

    def _cut(self, text: object, number: int, before: str = "") -> str:
        if not isinstance(text, str):
            raise RequestError(f"text {number} must be a text")
        check_unicode(text, f"text {number}")
        return beginning(before + text, self.spec.max_tokens * BYTES_PER_TOKEN)

    def _encode(self, texts: Sequence[str]) -> Sequence[tokenizers.Encoding]:
        """Encode texts: few on this thread, for waiting until others run may take far longer."""
        if len(texts) <= FEW and max(map(len, texts)) <= SHORT:
            return [self._tokenizer.encode(text) for text in texts]
        return self._tokenizer.encode_batch_fast(texts)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The encoders of the artifact at `path`, by name: those that embed, those that score pairs."""

    path: Path
    encoders: Mapping[str, TextEncoder]

    def embed(
        self, texts: TextOrIds | Sequence[TextOrIds], **options: Unpack[EmbedOptions]
    ) -> Rows:
        """See `App.embed`."""
        job, cut = self._start(texts, options)
        return cut(job.result())

    async def aembed(
        self, texts: TextOrIds | Sequence[TextOrIds], **options: Unpack[EmbedOptions]
    ) -> Rows:
        """See `App.aembed`: texts are read on another thread, and vectors hold none."""
        job, cut = await start_aside(partial(self._start, texts, options))
        return cut(await asyncio.wrap_future(job.future))

    def _start(self, texts: TextOrIds | Sequence[TextOrIds], options: EmbedOptions) -> Started:
        """Read texts and queue them; return the job, and what is done to its rows."""
        _check("embed", options, EMBED_TYPES)
        chosen = self.choose(options.get("model"), labels=False)
        cut = chosen.cutter(options.get("dimensions"))
        ids = chosen.read(texts, options.get("prompt_name"), options.get("prompt"))
        wait = options.get("wait", False)
        return chosen.service.submit(ids, model=chosen.name, wait=wait), cut

    def rerank(
        self, query: str, documents: Sequence[str], **options: Unpack[RerankOptions]
    ) -> list[Ranked]:
        """See `App.rerank`."""
        job, rank = self.start_rerank(query, documents, **options)
        return rank(job.result())

    def start_rerank(
        self, query: str, documents: Sequence[str], **options: Unpack[RerankOptions]
    ) -> StartedRerank:
        """Read and queue what `rerank` asks; return the job, and what makes its result of rows."""
        _check("rerank", options, RERANK_TYPES)
        top_n, wait = options.get("top_n"), options.get("wait", False)
        chosen = self.choose(options.get("model"), labels=True)
        if chosen.spec.dim != 1:
            raise RequestError(
                f"this classifier has {chosen.spec.dim} labels; one that ranks has one"
            )
        if isinstance(documents, str) or (top_n is not None and top_n < 1):
            raise RequestError("documents must be a list of texts, and top_n at least 1")
        listed = _as_texts(documents)
        pairs = list(chosen.read_pairs(query, listed, options.get("instruction")))
        ids, kinds = [ids for ids, _ in pairs], [kinds for _, kinds in pairs]

        def rank(rows: Rows) -> list[Ranked]:
            scores = rows[:, 0].astype(np.float64)
            if chosen.spec.sigmoid:
                scores = 1 / (1 + np.exp(-scores))
            order = np.argsort(-scores, kind="stable")[:top_n]
            return [Ranked(int(i), float(scores[i]), str(listed[i])) for i in order]

        return chosen.service.submit(ids, kinds, model=chosen.name, wait=wait), rank

    def choose(self, model: str | None = None, *, labels: bool) -> TextEncoder:
        """Return the encoder of that name, default the first, with or without a head that scores.

        Raises RequestError where there is none.
        """
        able = {n: e for n, e in self.encoders.items() if bool(e.spec.labels) == labels}
        kind = "cross-encoder" if labels else "encoder"
        if not able:
            raise RequestError(
                f"{self.path} has no {kind}; compile one with `dovetail compile MODEL`"
            )
        # the first that ranks, not one that puts texts into several classes
        name = min(able, key=lambda n: able[n].spec.labels) if model is None else model
        if name not in able:
            raise RequestError(f"{self.path} has no {kind} {name!r}; it has {', '.join(able)}")
        return able[name]

    @property
    def embeds(self) -> bool:
        """Whether one of the encoders turns texts into vectors."""
        return any(not encoder.spec.labels for encoder in self.encoders.values())

    def divide(self, text: str, before: str) -> list[str]:
        """Return the parts of a text that the first encoder takes whole behind another text."""
        return self.choose(labels=False).divide(text, before)

    @property
    def ready(self) -> bool:
        """Whether all encoders have what runs them."""
        return all(found.service.ready for found in self.encoders.values())

    @property
    def failure(self) -> str:
        """Why one has not, in words; "" where all have, or the reason is unknown."""
        return next(filter(None, (e.service.failure for e in self.encoders.values())), "")

    def close(self) -> None:
        """End the threads and processes of all encoders."""
        for service in {found.service for found in self.encoders.values()}:
            service.close()


async def start_aside(start: Callable[[], T]) -> T:
    """Return the job, and more, that `start` makes on another thread.

    The job leaves the queues where the caller goes meanwhile.
    """
    starting = asyncio.get_running_loop().run_in_executor(None, start)
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(cancel_started)
        raise


def cancel_started(starting: asyncio.Future[Any] | Future[Any]) -> None:
    """Take a job out of the queues whose caller went while it was read."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result()[0].future.cancel()


def _check(what: str, options: Mapping[str, object], hints: Mapping[str, object]) -> None:
    """Raise RequestError for an option that there is not, or whose value is of a wrong type."""
    if options:
        check_names(what, options, hints)
        check_types(options, hints)


def _as_texts(texts: TextOrIds | Sequence[TextOrIds]) -> list[TextOrIds]:
    """Return what was given as a list: of one text, of one list of ids, or as it is."""
    if isinstance(texts, str):
        return [texts]
    if not hasattr(texts, "__iter__") or isinstance(texts, bytes | Mapping):
        raise RequestError("give texts, or lists of token ids")
    listed = list(texts)
    if listed and all(isinstance(item, int | np.integer) for item in listed):
        return [np.asarray(listed)]
    return listed
