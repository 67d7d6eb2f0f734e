"""An instance as a process of its own: pinned to its CPUs, watched, started anew when it dies.

In: where its encoder comes from, and its CPUs. Out: an `EmbeddingModel` that comes back; a batch is
one message to the child, which runs `serve`, and one back.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from concurrent.futures import Future

import msgspec
import numpy as np

from dovetail.ir.errors import DeviceError, DovetailError
from dovetail.runtime.child.child import Child, ChildLost
from dovetail.runtime.child.framing import Channel, ErrorText, pack_value
from dovetail.runtime.child.supervisor import CLOSED, Supervisor
from dovetail.runtime.child.watch import Reading
from dovetail.runtime.embed.encoder import EmbeddingModel, EncoderSource
from dovetail.runtime.machine.seat import Board, Seat
from dovetail.runtime.native.encoder import Encoder, Ids, Rows

START_SECONDS = 120.0
SEND_SECONDS = 30


class WorkerSetup(msgspec.Struct, frozen=True):
    """What a new process is told -> EncoderReady."""

    source: EncoderSource
    pus: tuple[int, ...]
    slot: int = 0  # of the board


class EncoderReady(msgspec.Struct, frozen=True):
    """A process serves; its vectors have `dim` values."""

    dim: int


class PackedBatch(msgspec.Struct, frozen=True, array_like=True):
    """Queries as int32 -> PackedVectors: the ids of each, and segments where there are any."""

    ids: list[bytes]
    types: list[bytes] | None


class PackedVectors(msgspec.Struct, frozen=True, array_like=True):
    """The vectors of a batch as float32, of `dim` values each; or why there are none."""

    dim: int = 0
    rows: bytes = b""
    error: ErrorText | None = None


class ProcessInstance(Supervisor[PackedVectors]):
    """An encoder in a child process; one caller at a time."""

    def __init__(
        self, source: EncoderSource, pus: Sequence[int] = (), board: Board | None = None
    ) -> None:
        """Start the process; raises what opening the encoder raised there.

        board: of the workers that share the CPUs.
        """
        super().__init__(PackedVectors, closed=CLOSED, send_seconds=SEND_SECONDS)
        self._board, slot = board, next(board.slots) if board else 0
        self._setup = WorkerSetup(source, tuple(pus), slot)
        self._answer = Future[PackedVectors]()
        self._answer.cancel()  # nobody waits for it
        self._batches, self._predicted = 0, math.inf
        with self._lock:
            self._ensure()
        self.wait()

    def embed_tokens(
        self, ids: Sequence[Ids], types: Sequence[Ids] | None = None, predicted: float = math.inf
    ) -> Rows:
        """Run a batch in the child, which should take so many seconds.

        Raises:
            ChildLost: it died, or hung.
            DovetailError: what the encoder raised; the child is well.
        """
        batch = PackedBatch(_pack(ids), None if types is None else _pack(types))
        message, answer = pack_value(batch), Future[PackedVectors]()
        with self._lock:
            if self._outbox is None:
                raise ChildLost("the embedding process is gone")
            self._answer, self._predicted = answer, predicted
            self._outbox.post(message)
        found = answer.result()
        if found.error is not None:
            raise found.error.make()
        return np.frombuffer(found.rows, np.float32).reshape(-1, found.dim)

    # ---- a Supervisor: see there ----

    def _launch(self) -> Child:
        if self._board is not None:
            self._board.clear(self._setup.slot)
        fds = [self._board.memory.fd] if self._board else []
        return Child.start(__name__, "the embedding process {}", fds=fds)

    def _set_up(self, child: Child) -> None:
        self.dim = child.set_up(self._setup, EncoderReady, START_SECONDS).dim

    def _send_waiting(self) -> None:
        """Nothing waits here, but in queues."""

    def _hear(self, found: PackedVectors) -> None:
        self._batches += 1
        self._answer.set_result(found)

    def _look(self) -> Reading:
        return Reading(not self._answer.done(), self._batches, self._predicted)

    def _lose(self, why: str) -> None:
        if not self._answer.done():
            self._answer.set_exception(ChildLost(why))

    def _fail_all(self, error: DovetailError) -> None:
        """Nothing is left: what it had was lost with its process."""


def _pack(rows: Sequence[Ids]) -> list[bytes]:
    return [np.asarray(row, np.int32).tobytes() for row in rows]


def _unpack(rows: Sequence[bytes]) -> list[Ids]:
    return [np.frombuffer(row, np.int32) for row in rows]


# ---- the child ----


def serve(channel: Channel, board: int = -1) -> None:
    """Set up, answer, and run batches until the parent hangs up."""
    setup = channel.receive(WorkerSetup)
    if setup is None:
        return
    if allowed := set(setup.pus) & os.sched_getaffinity(0):  # before the model is there, so that
        os.sched_setaffinity(0, allowed)  # its memory lies near
    encoder = setup.source.open()
    if (shared := Board.join(board)) and isinstance(encoder, Encoder):
        encoder.seat = Seat(shared, setup.slot)
    channel.send(EncoderReady(encoder.dim))
    try:
        for batch in channel.messages(PackedBatch):
            channel.send(_run(encoder, batch))
    except ChildLost as lost:  # the parent sees the end, and starts another process
        sys.exit(str(lost))


def _run(encoder: EmbeddingModel, batch: PackedBatch) -> PackedVectors:
    types = None if batch.types is None else _unpack(batch.types)
    try:
        rows = np.ascontiguousarray(encoder.embed_tokens(_unpack(batch.ids), types), np.float32)
    except DovetailError as error:
        return PackedVectors(error=ErrorText.of(error))
    except MemoryError:
        return PackedVectors(error=ErrorText.of(DeviceError("out of memory")))
    return PackedVectors(rows.shape[1], rows.tobytes())
