"""Texts to vectors and scores: tokenising, prompts and the encoders of an artifact.

In: texts or token ids. Out: float32 rows in order (`embed`), or documents by score (`rerank`). All
work goes through the queues of `runtime/embedding/`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypedDict, Unpack

import numpy as np

from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.encoder import EncoderSpec
from dovetail.ir.errors import ArtifactError, RequestError
from dovetail.runtime.artifact import Artifact
from dovetail.runtime.bounded import BYTES_PER_TOKEN, SHORT, beginning, check_unicode
from dovetail.runtime.devices import AUTO
from dovetail.runtime.embedding.job import EmbedJob
from dovetail.runtime.embedding.open import (
    open_service,
    serve_accelerators,
    serve_apart,
    serve_here,
)
from dovetail.runtime.embedding.service import EmbeddingService
from dovetail.runtime.embedding.settings import EmbeddingSettings
from dovetail.runtime.encoder import Encoder, Ids, Rows, check_ids
from dovetail.runtime.library import fit_plans
from dovetail.topology.hardware import HardwareSpec

if TYPE_CHECKING:
    import tokenizers

TextOrIds: TypeAlias = str | Sequence[int] | Ids
SLICE = 1024
"""Texts that are tokenised at once: what a call holds beside token ids."""
FEW = 4
"""Texts that one thread tokenises, in about 0.15 ms each."""


class EmbedOptions(TypedDict, total=False):
    """Options of `App.embed`, which says what they mean."""

    model: str | None
    prompt_name: str | None
    prompt: str | None
    wait: bool


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document of a `rerank`: its place in what was given, its score, its text."""

    index: int
    score: float
    document: str


class TextReader:
    """Texts to token ids by an encoder's tokenizer.json, cut to the tokens that it takes.

    They are cut to `letters` before they are tokenised, and then to tokens.
    """

    def __init__(self, path: Path | None, spec: EncoderSpec) -> None:
        """The file is read when a text first needs it; None: only token ids can be embedded."""
        self._path, self.spec = path, spec

    @property
    def letters(self) -> int:
        """Letters of a text that are read at most."""
        return self.spec.max_tokens * BYTES_PER_TOKEN

    @cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        if self._path is None:
            raise RequestError("this encoder has no tokenizer, so texts must be lists of token ids")
        import tokenizers  # noqa: PLC0415 - callers that give token ids never need it

        try:
            found = tokenizers.Tokenizer.from_file(str(self._path))
        except Exception as error:  # the library raises bare Exception
            raise ArtifactError(
                f"{self._path}: is not a tokenizer ({error}); put a valid tokenizer.json into the "
                "model directory and run `dovetail compile MODEL` again"
            ) from None
        found.no_padding()
        found.enable_truncation(self.spec.max_tokens)
        return found

    def choose_prompt(self, name: str | None, prompt: str | None) -> str:
        """Return the text that goes before each other; RequestError for an unknown name."""
        if prompt is not None:
            return prompt
        chosen = name or self.spec.default_prompt
        if chosen is None:
            return ""
        if chosen not in self.spec.prompts:
            known = ", ".join(self.spec.prompts) or "none"
            raise RequestError(f"there is no prompt {chosen!r}; this encoder has: {known}")
        return self.spec.prompts[chosen]

    def read(self, texts: Sequence[TextOrIds], prompt: str = "") -> list[Sequence[int] | Ids]:
        """Return the token ids of each text, special tokens included; ids stay as they are."""
        places = [i for i, text in enumerate(texts) if isinstance(text, str)]
        found: list[Sequence[int] | Ids] = [() if isinstance(t, str) else t for t in texts]
        for first in range(0, len(places), SLICE):
            part = places[first : first + SLICE]
            checked = [self._cut(prompt + _checked(texts[i], i)) for i in part]
            for place, encoding in zip(part, self._encode(checked), strict=True):
                found[place] = np.array(encoding.ids, np.int32)
        return found

    def _cut(self, text: str) -> str:
        return beginning(text, self.letters)

    def _encode(self, texts: Sequence[str]) -> Sequence[tokenizers.Encoding]:
        """Encode texts: few on this thread, for waiting until others run may take far longer."""
        if len(texts) <= FEW and max(map(len, texts)) <= SHORT:
            return [self._tokenizer.encode(text) for text in texts]
        return self._tokenizer.encode_batch_fast(texts)

    def read_pairs(self, query: str, documents: Sequence[str]) -> Iterator[tuple[Ids, Ids]]:
        """Yield (token ids, segments) of the query beside each document; the longer one is cut."""
        asked = self._cut(_checked(query, 0))
        pairs = [(asked, self._cut(_checked(text, i))) for i, text in enumerate(documents)]
        segments = self.spec.token_types > 1  # a tokenizer may tell them to a model without
        for first in range(0, len(pairs), SLICE):
            for encoding in self._tokenizer.encode_batch(pairs[first : first + SLICE]):
                kinds = np.array(encoding.type_ids, np.int32)
                yield np.array(encoding.ids, np.int32), kinds if segments else np.zeros_like(kinds)


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """An encoder behind the queues that all encoders share, and the reader of its texts."""

    name: str
    spec: EncoderSpec
    service: EmbeddingService
    reader: TextReader

    def read(
        self, texts: TextOrIds | Sequence[TextOrIds], prompt_name: str | None, prompt: str | None
    ) -> list[Ids]:
        """Return checked token ids of each text, a prompt before those that are no ids."""
        before = self.reader.choose_prompt(prompt_name, prompt)
        return check_ids(self.spec, self.reader.read(as_texts(texts), before))

    def start(
        self, ids: Sequence[Ids], kinds: Sequence[Ids] | None = None, *, wait: bool = False
    ) -> EmbedJob:
        """Queue a call; see `EmbeddingService.start`."""
        return self.service.start(ids, kinds, model=self.name, wait=wait)

    def start_texts(
        self, texts: TextOrIds | Sequence[TextOrIds], options: EmbedOptions
    ) -> EmbedJob:
        """Read texts and queue them."""
        ids = self.read(texts, options.get("prompt_name"), options.get("prompt"))
        return self.start(ids, wait=options.get("wait", False))


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The encoders of the artifact at `path`, by name: those that embed, those that score pairs."""

    path: Path
    encoders: Mapping[str, TextEncoder]

    def embed(
        self, texts: TextOrIds | Sequence[TextOrIds], **options: Unpack[EmbedOptions]
    ) -> Rows:
        """See `App.embed`."""
        chosen = self.choose(options.get("model"), labels=False)
        return chosen.start_texts(texts, options).result()

    async def aembed(
        self, texts: TextOrIds | Sequence[TextOrIds], **options: Unpack[EmbedOptions]
    ) -> Rows:
        """See `App.aembed`: texts are read on another thread, and vectors hold none."""
        chosen = self.choose(options.get("model"), labels=False)
        start = partial(chosen.start_texts, texts, options)
        starting = asyncio.get_running_loop().run_in_executor(None, start)
        try:
            job = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(partial(_cancel, chosen.service))
            raise
        return await asyncio.wrap_future(job.future)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        model: str | None = None,
        top_n: int | None = None,
        wait: bool = False,
    ) -> list[Ranked]:
        """See `App.rerank`."""
        chosen = self.choose(model, labels=True)
        if chosen.spec.dim != 1:
            raise RequestError(
                f"this classifier has {chosen.spec.dim} labels; one that ranks has one"
            )
        if isinstance(documents, str) or (top_n is not None and top_n < 1):
            raise RequestError("documents must be a list of texts, and top_n at least 1")
        pairs = list(chosen.reader.read_pairs(query, documents))
        ids, kinds = [ids for ids, _ in pairs], [kinds for _, kinds in pairs]
        rows = chosen.start(ids, kinds, wait=wait).result()
        scores = rows[:, 0].astype(np.float64)
        if chosen.spec.sigmoid:
            scores = 1 / (1 + np.exp(-scores))
        order = np.argsort(-scores, kind="stable")[:top_n]
        return [Ranked(int(i), float(scores[i]), documents[i]) for i in order]

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
        name = next(iter(able)) if model is None else model
        if name not in able:
            raise RequestError(f"{self.path} has no {kind} {name!r}; it has {', '.join(able)}")
        return able[name]

    @property
    def ready(self) -> bool:
        """Whether all encoders have what runs them."""
        return all(found.service.ready for found in self.encoders.values())

    def close(self) -> None:
        """End the threads and processes of all encoders."""
        for service in {found.service for found in self.encoders.values()}:
            service.close()


def _cancel(service: EmbeddingService, starting: asyncio.Future[EmbedJob]) -> None:
    """Take a job out of the queues whose caller went while it was read."""
    if not starting.cancelled() and starting.exception() is None:
        service.cancel(starting.result())


def open_encoders(
    artifact: Artifact,
    hardware: HardwareSpec,
    *,
    plan: ServicePlan | None = None,
    threads: int | None = None,
    settings: EmbeddingSettings | None = None,
    apart: bool = False,
    device: str = AUTO,
) -> Embeddings:
    """Serve every encoder of an artifact, each on all threads of the plan for prompts, in turns.

    settings: an SLO for all devices together; without, calls wait for the accelerators that embed,
    or else for encoders in this process or `apart`. device: which accelerators, by torch's name,
    `auto` for all that are here, `cpu` for none.

    Raises ArtifactError or CapacityError as `Encoder` does, SpecError and DeviceError as
    `open_service`.
    """
    service = plan or artifact.service
    whole = service.prefill.threads * service.processes
    phase = PhasePlan(threads=whole, cpus=service.prefill.cpus)
    (fitted,) = fit_plans(phase, 1, threads, hardware.allowed_pus)
    if not artifact.encoders:
        return Embeddings(artifact.path, {})
    if settings is not None:
        queues = open_service(artifact, hardware, settings, threads=threads, device=device)
    elif beside := serve_accelerators(artifact, hardware, device, threads):
        queues = beside
    elif apart:
        queues = serve_apart(artifact, fitted)
    else:
        queues = serve_here(_open_here(artifact, fitted, service.spin_iterations))
    found = {
        name: TextEncoder(name, spec, queues, TextReader(part.tokenizer, spec))
        for name, part in artifact.encoders.items()
        for spec in (part.file.spec,)
    }
    return Embeddings(artifact.path, found)


def _open_here(artifact: Artifact, plan: PhasePlan, spin: int) -> dict[str, Encoder]:
    found: dict[str, Encoder] = {}
    with ExitStack() as opened:
        for name, part in artifact.encoders.items():
            found[name] = Encoder(artifact, part, plan, spin=spin)
            opened.callback(found[name].close)
        opened.pop_all()  # all are there: the service closes them
    return found


def as_texts(texts: TextOrIds | Sequence[TextOrIds]) -> list[TextOrIds]:
    """Return what was given as a list: of one text, of one list of ids, or as it is."""
    if isinstance(texts, str):
        return [texts]
    if not hasattr(texts, "__iter__") or isinstance(texts, bytes | Mapping):
        raise RequestError("give texts, or lists of token ids")
    listed = list(texts)
    if listed and all(isinstance(item, int | np.integer) for item in listed):
        return [np.asarray(listed)]
    return listed


def _checked(text: object, number: int) -> str:
    if not isinstance(text, str):
        raise RequestError(f"text {number} must be a text")
    check_unicode(text, f"text {number}")
    return text
