"""What runs batches: an encoder with a model of its own, and an accelerator that is not there.

In: token ids of each query. Out: one vector each, or an error that only this batch has.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from dovetail.ir.errors import DeviceError, SpecError
from dovetail.runtime.embedding.line import Line

Ids = npt.NDArray[np.int32]
Vectors = npt.NDArray[np.float32]


class Encoder(Protocol):
    """An embedding model, ready to run; one caller at a time."""

    @property
    def dim(self) -> int:
        """Values of a vector."""

    def embed_tokens(self, ids: Sequence[Ids], types: Sequence[Ids] | None = None) -> Vectors:
        """Return the vectors (n, dim) of `n` queries; DeviceError where they cannot be run.

        types: the segment of each token, by default 0.
        """

    def close(self) -> None:
        """Free what it holds."""


class Instance(Encoder, Protocol):
    """An encoder that may die or hang, and be started anew."""

    def embed_tokens(
        self, ids: Sequence[Ids], types: Sequence[Ids] | None = None, limit: float = math.inf
    ) -> Vectors:
        """As an encoder's; InstanceLost where it died, or is not done in `limit` seconds."""

    def restart(self) -> None:
        """Start it again after `InstanceLost`; DeviceError where that fails."""


@runtime_checkable
class Mortal(Protocol):
    """An instance whose death is told of, also while it has nothing to do."""

    @property
    def dead(self) -> bool:
        """Whether it has died and has not been started again."""

    def watch(self, died: Callable[[], object]) -> None:
        """Have `died` called, on a thread, whenever it dies."""


class InstanceLost(Exception):
    """The process of an instance has died or hangs; what it ran is lost."""


class EncoderSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where an encoder comes from, told to another process: a function of a module, its options."""

    module: str
    function: str
    options: dict[str, Any] = {}

    def open(self) -> Encoder:
        """Return the encoder; SpecError where there is no such function."""
        try:
            make: Callable[..., Encoder] = getattr(
                importlib.import_module(self.module), self.function
            )
        except (ImportError, AttributeError) as error:
            raise SpecError(f"no encoder {self.module}.{self.function} ({error})") from None
        return make(**self.options)


class LocalInstance:
    """An encoder in this process, on the thread that calls it; it neither dies nor hangs alone."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.dim = encoder.dim

    def embed_tokens(
        self, ids: Sequence[Ids], types: Sequence[Ids] | None = None, limit: float = math.inf
    ) -> Vectors:
        """See Instance."""
        return self._encoder.embed_tokens(ids, types)

    def restart(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Close the encoder."""
        self._encoder.close()


class EmulatedAccelerator:
    """An accelerator that takes alpha * C + beta on the wall clock, C in queries of `length`.

    Its vectors are the encoder's, computed on the CPU where they are not known from before
    (`learn`); `late` counts batches that were not ready by their time for it. Without an encoder
    vectors are zero: for timing alone. All that is measured on it is *emulated*.
    """

    def __init__(
        self,
        line: Line,
        length: int,
        encoder: Encoder | None = None,
        *,
        dim: int = 1,
        most_tokens: int | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Take the modelled times, and the memory in tokens of a batch (None: no end)."""
        self._line, self._length, self._encoder = line, length, encoder
        self.dim = encoder.dim if encoder else dim
        self._most, self._now, self._sleep = most_tokens, now, sleep
        self._known: dict[bytes, Vectors] = {}
        self._ends = 0.0
        self.late = 0

    def learn(self, ids: Sequence[Ids]) -> None:
        """Compute vectors ahead of time, of queries with one segment."""
        if self._encoder and ids:
            rows = self._encoder.embed_tokens(ids)
            self._known |= {each.tobytes(): row for each, row in zip(ids, rows, strict=True)}

    def embed_tokens(
        self, ids: Sequence[Ids], types: Sequence[Ids] | None = None, limit: float = math.inf
    ) -> Vectors:
        """Return the vectors at the time at which they would be ready.

        Raises DeviceError when the batch has more tokens than the device has memory for.
        """
        tokens = sum(map(len, ids))
        if self._most is not None and tokens > self._most:
            raise DeviceError(f"out of memory: {tokens} tokens, {self._most} fit")
        # A batch that follows another starts at its modelled end: a late wake-up does not add up
        start = self._ends if 0 <= self._now() - self._ends < 0.002 else self._now()
        self._ends = start + self._line.seconds(tokens / self._length)
        rows = self._compute(ids, types)
        if self._now() > self._ends:
            self.late += 1
        while (left := self._ends - self._now()) > 0:
            self._sleep(left)
        return rows

    def _compute(self, ids: Sequence[Ids], types: Sequence[Ids] | None) -> Vectors:
        if self._encoder is None:
            return np.zeros((len(ids), self.dim), np.float32)
        if types is not None:
            return self._encoder.embed_tokens(ids, types)
        rows = np.empty((len(ids), self.dim), np.float32)
        missing = []
        for place, each in enumerate(ids):
            known = self._known.get(each.tobytes())
            if known is None:
                missing.append(place)
            else:
                rows[place] = known
        if missing:
            rows[missing] = self._encoder.embed_tokens([ids[place] for place in missing])
        return rows

    def restart(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Forget what is known; the encoder is its owner's."""
        self._known.clear()
