"""One instance of a text encoder: its weights, threads and tape.

In: texts as token ids. Out: one float32 row each. Texts are packed one after another into passes
without padding; a pass is one native call. `PackedEncoder` is what all devices share.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from dovetail.ir.artifact import PhasePlan
from dovetail.ir.encoder import EncoderFile, EncoderSpec
from dovetail.ir.errors import ArtifactError, RequestError
from dovetail.ir.tape import ENCODE_ARGS, Tape
from dovetail.runtime.artifact import Artifact, EncoderPart
from dovetail.runtime.device import CpuDevice, Segment
from dovetail.runtime.forward import find_tape
from dovetail.runtime.tape import BoundTape, Operands, pick_tables
from dovetail.runtime.weights import Weights

Ids = npt.NDArray[np.int32]
Rows = npt.NDArray[np.float32]
PASS_TOKENS = 1024
"""Rows of a pass: enough to read weights seldom, few enough for activations to stay in caches. A
longer text has a pass of its own."""
WIDE_TOKENS = 8192
"""Rows of a pass on an accelerator, which wants many: each costs the host the same launches."""
SCRATCH = "split_k"
"""The buffer that only the CPU's kernels use."""


class PackedEncoder(ABC):
    """A loaded encoder, whatever runs its passes. Calls from several threads take turns.

    most_tokens: rows of a pass; a longer text has a pass of its own.
    """

    most_tokens = PASS_TOKENS

    def __init__(self, part: EncoderPart) -> None:
        """Take spec and tape; ArtifactError where they do not fit each other."""
        self.spec: EncoderSpec = part.file.spec
        self.tape, self._lock = find_tape(part, "encode"), threading.Lock()
        longest = self.spec.max_tokens
        rows = self.spec.n_positions if self.spec.positions == "learned" else longest
        if longest > self.tape.max_tokens or self.spec.first_position + longest > rows:
            raise ArtifactError(
                f"{part.folder / 'encoder.json'}: texts of {longest} tokens do not fit "
                "the tape or the table of positions; run `dovetail compile MODEL` again"
            )

    @property
    def pass_tokens(self) -> int:
        """Most tokens of one pass."""
        return self.tape.max_tokens

    @property
    def dim(self) -> int:
        """Values of each row that comes out."""
        return self.spec.dim

    def embed_tokens(
        self, ids: Sequence[Sequence[int] | Ids], types: Sequence[Ids] | None = None
    ) -> Rows:
        """Return float32 [len(ids)][dim]: vectors, or logits of a classifier.

        ids: token ids of each text, special tokens included. types: the segment of each
        token, by default 0.

        Raises RequestError for a text that is empty or too long, or an id out of the vocabulary;
        nothing has been computed then.
        """
        texts = check_ids(self.spec, ids)
        kinds = [np.zeros_like(t) for t in texts] if types is None else self._kinds(texts, types)
        out = np.empty((len(texts), self.dim), np.float32)
        most = (min(self.most_tokens, self.tape.max_tokens), self.tape.max_sequences)
        with self._lock:
            for span in pack_texts([len(text) for text in texts], *most):
                taken = slice(span.start, span.stop)
                step = Pass.of(self.spec, texts[taken], kinds[taken])
                self._run(step, out[taken])
        return out

    @abstractmethod
    def close(self) -> None:
        """Give back what is held; safe to call twice."""

    @abstractmethod
    def _run(self, step: Pass, out: Rows) -> None:
        """Run a pass; one at a time."""

    def _kinds(self, ids: Sequence[Ids], types: Sequence[Ids]) -> list[Ids]:
        kinds = [np.asarray(kind, np.int32) for kind in types]
        most = max(1, self.spec.token_types)
        if [kind.shape for kind in kinds] != [text.shape for text in ids] or any(
            kind.min() < 0 or kind.max() >= most for kind in kinds
        ):
            raise RequestError(f"types must be numbers below {most}, one for each token")
        return kinds


class Encoder(PackedEncoder):
    """An encoder on CPU threads of its own, as are its activations; weights are mapped."""

    def __init__(
        self, artifact: Artifact, part: EncoderPart, plan: PhasePlan, *, spin: int = 2000
    ) -> None:
        """Map weights, start the threads of `plan` and bind the tape.

        Raises:
            ArtifactError: the artifact's parts do not fit each other.
            CapacityError: memory or threads cannot be had.
        """
        super().__init__(part)
        self._plan = plan
        library = artifact.open_kernels()
        self.device = CpuDevice(library, plan.threads, spin)
        self._weights = Weights(part)
        self._weights.read_ahead()
        tables = pick_tables(part.schedules.tables, artifact.target, "prefill", plan.threads)
        operands = Operands(self._weights, self.device.alloc(self.tape.arena_bytes))
        self._bound = BoundTape(library, self.tape, tables, operands)

    def close(self) -> None:
        """End the threads; safe to call twice."""
        with self._lock:
            self.device.close()

    def _run(self, step: Pass, out: Rows) -> None:
        arrays = {name: int(array.ctypes.data) for name, array in step.arrays().items()}
        args = {**step.counts(), **arrays, "out": int(out.ctypes.data)}
        assert args.keys() == set(ENCODE_ARGS)
        self.device.run(Segment(self._bound, self._plan, args))


def check_ids(spec: EncoderSpec, ids: Sequence[Sequence[int] | Ids]) -> list[Ids]:
    """Return the token ids of each text as int32; RequestError for what `spec` does not take."""
    return [_check_text(spec, number, text) for number, text in enumerate(ids)]


def _check_text(spec: EncoderSpec, number: int, text: Sequence[int] | Ids) -> Ids:
    try:
        found = np.asarray(text)
    except ValueError:  # lists of different lengths
        found = np.empty(0)
    if found.ndim != 1 or not found.size or not np.issubdtype(found.dtype, np.integer):
        raise RequestError(f"text {number} must be a list of at least one token id")
    if len(found) > spec.max_tokens:
        raise RequestError(
            f"text {number} has {len(found)} tokens; this encoder takes {spec.max_tokens}"
        )
    if found.min() < 0 or found.max() >= spec.vocab_size:
        raise RequestError(
            f"text {number} has a token id out of the vocabulary of {spec.vocab_size}"
        )
    return found.astype(np.int32, copy=False)


def pack_texts(lengths: Sequence[int], tokens: int, texts: int) -> Iterator[range]:
    """Yield runs of texts, in order, of at most so many tokens and texts; one text always fits."""
    first = total = 0
    for number, length in enumerate(lengths):
        if number > first and (total + length > tokens or number - first == texts):
            yield range(first, number)
            first, total = number, 0
        total += length
    if first < len(lengths):
        yield range(first, len(lengths))


def widen_tape(tape: Tape, tokens: int) -> Tape:
    """Return the tape for passes of so many rows or its own, whatever is more, and as many texts.

    Its arena stays as it is: for devices whose buffers lie elsewhere.
    """
    times = max(1, tokens // tape.max_tokens)
    return msgspec.structs.replace(
        tape, max_tokens=tape.max_tokens * times, max_sequences=tape.max_sequences * times
    )


def device_bytes(file: EncoderFile, tape: Tape, value_bytes: int = 2) -> tuple[int, int]:
    """Return the bytes that an encoder takes on an accelerator: weights; activations of a pass.

    value_bytes: of a weight of a matrix and of an activation; other weights are float32. Libraries
    and the driver take their own beside it.
    """
    weights = sum(e.n * e.k * (value_bytes if e.k > 1 else 4) for e in file.weights)
    wide, spec = widen_tape(tape, WIDE_TOKENS), file.spec
    columns = [buffer.columns for buffer in tape.buffers if buffer.name != SCRATCH]
    widest = max(*columns, 2 * spec.intermediate_size if spec.gated else 0)
    rows = value_bytes * (sum(columns) + 2 * widest)  # what makes a row of it lies beside it
    return weights, wide.max_tokens * rows + 4 * wide.max_sequences * spec.dim


@dataclass(frozen=True, slots=True)
class Pass:
    """The arrays that a tape's arguments point to, by their names."""

    token_ids: Ids
    positions: Ids
    type_ids: Ids
    seq_starts: Ids
    picked_rows: Ids

    @classmethod
    def of(cls, spec: EncoderSpec, ids: Sequence[Ids], kinds: Sequence[Ids]) -> Pass:
        """Return the pass over these texts."""
        lengths = np.fromiter(map(len, ids), np.int32, len(ids))
        starts = np.zeros(len(ids) + 1, np.int32)
        np.cumsum(lengths, out=starts[1:])
        places = np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1], lengths)
        return cls(
            token_ids=np.concatenate(ids),
            positions=places + np.int32(spec.first_position),
            type_ids=np.concatenate(kinds),
            seq_starts=starts,
            picked_rows=starts[1:] - np.int32(1) if spec.pooling == "last" else starts[:-1].copy(),
        )

    def counts(self) -> Mapping[str, int]:
        """Return the rows and texts by name."""
        return {"n_tokens": len(self.token_ids), "n_sequences": len(self.picked_rows)}

    def arrays(self) -> Mapping[str, Ids]:
        """Return the arrays by name."""
        names = ("token_ids", "positions", "type_ids", "seq_starts", "picked_rows")
        return {name: getattr(self, name) for name in names}
