"""One instance of a text encoder: its weights, threads and tape.

In: texts as token ids. Out: one float32 row each. Texts are packed one after another into passes
without padding; a pass is one native call. `PackedEncoder` is what all devices share.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from dovetail.ir.artifact import PhasePlan
from dovetail.ir.encoder import EncoderFile, EncoderSpec
from dovetail.ir.errors import ArtifactError, RequestError
from dovetail.ir.tape import ENCODE_ARGS, Tape
from dovetail.runtime.artifact import Artifact, EncoderPart
from dovetail.runtime.machine.memory import allocate
from dovetail.runtime.machine.seat import Seat, take_seat
from dovetail.runtime.native.forward import find_tape
from dovetail.runtime.native.tape import BoundTape, Operands, Team, pick_tables
from dovetail.runtime.native.weights import Weights, row_bytes, weight_bytes
from dovetail.runtime.schedule.device_limits import MemoryNeed
from dovetail.topology.division import ENCODERS

Ids = npt.NDArray[np.int32]
Rows = npt.NDArray[np.float32]
PASS_TOKENS = 1024
"""Rows of a pass: enough to read weights seldom, few enough for activations to stay in caches. A
longer text has a pass of its own."""
WIDE_TOKENS = 8192
"""Rows of a pass on an accelerator, which wants many: each costs the host the same launches."""


class PackedEncoder(ABC):
    """A loaded encoder, whatever runs its passes. Calls from several threads take turns.

    dim: values of each row that comes out. most_tokens: rows of a pass; a longer text has a pass
    of its own.
    """

    most_tokens = PASS_TOKENS

    def __init__(self, part: EncoderPart) -> None:
        """Take spec and tape; ArtifactError where they do not fit each other."""
        self.spec: EncoderSpec = part.file.spec
        self.dim = self.spec.dim
        self.tape, self._lock = find_tape(part, "encode"), threading.Lock()
        longest = self.spec.max_tokens
        rows = self.spec.n_positions if self.spec.positions == "learned" else longest
        if longest > self.tape.max_tokens or self.spec.first_position + longest > rows:
            raise ArtifactError(
                f"{part.folder / 'encoder.json'}: texts of {longest} tokens do not fit "
                "the tape or the table of positions; run `dovetail compile MODEL` again"
            )

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
                self._run(pass_arrays(self.spec, texts[taken], kinds[taken]), out[taken])
        return out

    @abstractmethod
    def close(self) -> None:
        """Give back what is held; safe to call twice."""

    @abstractmethod
    def _run(self, arrays: Mapping[str, Ids], out: Rows) -> None:
        """Run a pass over `pass_arrays`; one at a time."""

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
        library = artifact.open_kernels()
        self._team = Team(library, plan.threads, spin)
        self._weights = Weights(part)
        self._weights.read_ahead()
        tables = pick_tables(part.schedules.tables, artifact.target, "prefill", plan.threads)
        operands = Operands(self._weights, allocate(self.tape.arena_bytes))
        self._bound = BoundTape(library, self.tape, tables, operands, plan)
        self.seat: Seat | None = None
        """Tells which CPUs it has in a pass; None: those of its plan."""

    def close(self) -> None:
        """End the threads; safe to call twice."""
        with self._lock:
            self._team.close()

    def _run(self, arrays: Mapping[str, Ids], out: Rows) -> None:
        given = {**arrays, "out": out}
        args = {name: int(array.ctypes.data) for name, array in given.items()}
        args |= {"n_tokens": len(arrays["token_ids"]), "n_sequences": len(out)}
        assert args.keys() == set(ENCODE_ARGS)
        with take_seat(self.seat, ENCODERS) as usable:
            self._bound.run(self._team, args, usable=usable)


def check_ids(spec: EncoderSpec, ids: Sequence[Sequence[int] | Ids]) -> list[Ids]:
    """Return the token ids of each text as int32; RequestError for what `spec` does not take."""
    checked = []
    for number, text in enumerate(ids):
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
        checked.append(found.astype(np.int32, copy=False))
    return checked


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


def encoder_need(part: EncoderPart, instances: int) -> MemoryNeed:
    """Return what so many instances of an encoder need on the CPU: they share its weights."""
    return MemoryNeed(
        weights=part.chunks.total_bytes,
        block=0,
        activations=find_tape(part, "encode").arena_bytes * instances,
        context=part.file.spec.max_tokens,
    )


def widen_tape(tape: Tape, tokens: int) -> Tape:
    """Return the tape for passes of so many rows or its own, whatever is more, and as many texts.

    Its arena stays as it is: for devices whose buffers lie elsewhere.
    """
    times = max(1, tokens // tape.max_tokens)
    return msgspec.structs.replace(
        tape, max_tokens=tape.max_tokens * times, max_sequences=tape.max_sequences * times
    )


def device_bytes(
    file: EncoderFile, tape: Tape, value_bytes: int = 2, tokens: int = WIDE_TOKENS
) -> tuple[int, int]:
    """Return the bytes that an encoder takes on an accelerator: weights; activations of a pass.

    value_bytes: of a weight of a matrix and of an activation; other weights are float32. tokens:
    rows of a pass. Libraries and the driver take their own beside it.
    """
    wide, spec = widen_tape(tape, tokens), file.spec
    row = row_bytes(tape, value_bytes, 2 * spec.intermediate_size if spec.gated else 0)
    activations = wide.max_tokens * row + 4 * wide.max_sequences * spec.dim
    return weight_bytes(file.weights, value_bytes), activations


def pass_arrays(spec: EncoderSpec, ids: Sequence[Ids], kinds: Sequence[Ids]) -> dict[str, Ids]:
    """Return the arrays of the pass over these texts that a tape's arguments point to, by name."""
    lengths = np.fromiter(map(len, ids), np.int32, len(ids))
    starts = np.zeros(len(ids) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    places = np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1], lengths)
    return {
        "token_ids": np.concatenate(ids),
        "positions": places + np.int32(spec.first_position),
        "type_ids": np.concatenate(kinds),
        "seq_starts": starts,
        "picked_rows": starts[1:] - np.int32(1) if spec.pooling == "last" else starts[:-1].copy(),
    }
