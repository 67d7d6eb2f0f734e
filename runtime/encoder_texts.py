"""Texts to vectors and scores: tokenising, prompts and the encoders of an artifact.

In: texts or token ids. Out: float32 rows in order (`embed`), or documents by score (`rerank`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.encoder import EncoderSpec
from dovetail.ir.errors import ArtifactError, RequestError
from dovetail.runtime.artifact import Artifact
from dovetail.runtime.encoder import Encoder, Ids, Rows
from dovetail.runtime.library import fit_plans
from dovetail.topology.hardware import HardwareSpec

if TYPE_CHECKING:
    import tokenizers

TextOrIds: TypeAlias = str | Sequence[int] | Ids
SLICE = 1024
"""Texts that are tokenised at once: what a call holds beside token ids."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document of a `rerank`: its place in what was given, its score, its text."""

    index: int
    score: float
    document: str


class TextReader:
    """Texts to token ids by an encoder's tokenizer.json, cut to the tokens that it takes."""

    def __init__(self, path: Path | None, spec: EncoderSpec) -> None:
        """The file is read when a text first needs it; None: only token ids can be embedded."""
        self._path, self.spec = path, spec

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
            checked = [prompt + _checked(texts[i], i) for i in part]
            for place, encoding in zip(part, self._tokenizer.encode_batch(checked), strict=True):
                found[place] = np.array(encoding.ids, np.int32)
        return found

    def read_pairs(self, query: str, documents: Sequence[str]) -> Iterator[tuple[Ids, Ids]]:
        """Yield (token ids, segments) of the query beside each document; the longer one is cut."""
        pairs = [(_checked(query, 0), _checked(text, i)) for i, text in enumerate(documents)]
        for first in range(0, len(pairs), SLICE):
            for encoding in self._tokenizer.encode_batch(pairs[first : first + SLICE]):
                yield np.array(encoding.ids, np.int32), np.array(encoding.type_ids, np.int32)


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """An encoder and the reader of its texts."""

    encoder: Encoder
    reader: TextReader


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The encoders of the artifact at `path`, by name: those that embed, those that score pairs."""

    path: Path
    encoders: Mapping[str, TextEncoder]

    def embed(
        self,
        texts: TextOrIds | Sequence[TextOrIds],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> Rows:
        """See `App.embed`."""
        chosen = self.choose(labels=False)
        before = chosen.reader.choose_prompt(prompt_name, prompt)
        return chosen.encoder.embed_tokens(chosen.reader.read(as_texts(texts), before))

    def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None
    ) -> list[Ranked]:
        """See `App.rerank`."""
        chosen = self.choose(labels=True)
        if chosen.encoder.dim != 1:
            raise RequestError(
                f"this classifier has {chosen.encoder.dim} labels; one that ranks has one"
            )
        if isinstance(documents, str) or (top_n is not None and top_n < 1):
            raise RequestError("documents must be a list of texts, and top_n at least 1")
        pairs = list(chosen.reader.read_pairs(query, documents))
        ids, kinds = [ids for ids, _ in pairs], [kinds for _, kinds in pairs]
        scores = chosen.encoder.embed_tokens(ids, kinds)[:, 0].astype(np.float64)
        if chosen.encoder.spec.sigmoid:
            scores = 1 / (1 + np.exp(-scores))
        order = np.argsort(-scores, kind="stable")[:top_n]
        return [Ranked(int(i), float(scores[i]), documents[i]) for i in order]

    def choose(self, *, labels: bool) -> TextEncoder:
        """Return the first encoder with, or without, a classification head."""
        for found in self.encoders.values():
            if bool(found.encoder.spec.labels) == labels:
                return found
        kind = "cross-encoder" if labels else "encoder"
        raise RequestError(f"{self.path} has no {kind}; compile one with `dovetail compile MODEL`")

    def close(self) -> None:
        """End the threads of all encoders."""
        for found in self.encoders.values():
            found.encoder.close()


def open_encoders(
    artifact: Artifact,
    hardware: HardwareSpec,
    *,
    plan: ServicePlan | None = None,
    threads: int | None = None,
) -> Embeddings:
    """Load every encoder of an artifact, each on all threads of the plan for prompts.

    Raises ArtifactError or CapacityError as `Encoder` does.
    """
    service = plan or artifact.service
    whole = service.prefill.threads * service.processes
    phase = PhasePlan(threads=whole, cpus=service.prefill.cpus)
    (fitted,) = fit_plans(phase, 1, threads, hardware.allowed_pus)
    return Embeddings(
        artifact.path,
        {
            name: TextEncoder(
                Encoder(artifact, part, fitted, spin=service.spin_iterations),
                TextReader(part.tokenizer, part.file.spec),
            )
            for name, part in artifact.encoders.items()
        },
    )


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
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"text {number} is not valid Unicode: half a surrogate pair at {error.start}"
        ) from None
    return text
