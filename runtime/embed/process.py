"""An instance as a process of its own: pinned to its CPUs, watched, started anew when it dies.

In: where its encoder comes from, and its CPUs. Out: an `EmbeddingModel` that can be started
again; a batch is one message to the child, which runs `serve`, and one back.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from dovetail.ir.errors import DeviceError, DovetailError
from dovetail.runtime.child.child import Child, ChildLost
from dovetail.runtime.child.framing import Channel, ErrorText
from dovetail.runtime.embed.encoder import EmbeddingModel, EncoderSource, InstanceLost
from dovetail.runtime.machine.seat import Board, Seat
from dovetail.runtime.native.encoder import Encoder, Ids, Rows

START_SECONDS = 120.0


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
    """The vectors of a batch as float32, of `dim` values each."""

    dim: int
    rows: bytes


class ProcessInstance:
    """An encoder in a child process; one caller at a time."""

    def __init__(
        self, source: EncoderSource, pus: Sequence[int] = (), board: Board | None = None
    ) -> None:
        """Start the process; raises what opening the encoder raised there.

        board: of the workers that share the CPUs.
        """
        self._board, slot = board, next(board.slots) if board else 0
        self._setup = WorkerSetup(source, tuple(pus), slot)
        self._died: Callable[[], object] | None = None
        self._left = False
        self._start()

    def _start(self) -> None:
        if self._board is not None:
            self._board.clear(self._setup.slot)
        fds = [self._board.memory.fd] if self._board else []
        self._child = Child.start(__name__, "the embedding process {}", fds=fds)
        self._end = weakref.finalize(self, self._child.end)
        if self._left:
            self._child.channel.hang_up()
        self.dim = self._child.set_up(self._setup, EncoderReady, START_SECONDS).dim

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.pid

    @property
    def dead(self) -> bool:
        """Whether it has died, also with nothing to do; what was closed is not dead."""
        return self._end.alive and self._child.member.wait(0) is not None

    def watch(self, died: Callable[[], object]) -> None:
        """Have `died` called, on a thread, whenever it dies."""
        self._died = died
        threading.Thread(target=_wait, args=(self._child, died), daemon=True).start()

    def embed_tokens(
        self, ids: Sequence[Ids], types: Sequence[Ids] | None = None, limit: float = math.inf
    ) -> Rows:
        """Run a batch in the child.

        Raises:
            InstanceLost: it died, or is not done in `limit` seconds.
            DovetailError: what the encoder raised; the child is well.
        """
        batch = PackedBatch(_pack(ids), None if types is None else _pack(types))
        try:
            found = self._child.ask(batch, PackedVectors, limit if limit < math.inf else None)
        except ChildLost:
            raise InstanceLost from None
        return np.frombuffer(found.rows, np.float32).reshape(-1, found.dim)

    def restart(self) -> None:
        """End the child at once, for it may hang, and start another one."""
        self._child.member.kill()
        self.close()
        self._start()
        if self._died is not None:
            self.watch(self._died)

    def leave(self) -> None:
        """Have nobody wait for a batch or a start any more. For any thread."""
        self._left = True
        self._child.channel.hang_up()

    def close(self) -> None:
        """End the child; safe to call twice."""
        self._end()


def _wait(child: Child, died: Callable[[], object]) -> None:
    child.member.wait(math.inf)
    died()


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
    except InstanceLost as lost:  # the parent sees the end, and starts another process
        sys.exit(str(lost))


def _run(encoder: EmbeddingModel, batch: PackedBatch) -> PackedVectors | ErrorText:
    types = None if batch.types is None else _unpack(batch.types)
    try:
        rows = np.ascontiguousarray(encoder.embed_tokens(_unpack(batch.ids), types), np.float32)
    except DovetailError as error:
        return ErrorText.of(error)
    except MemoryError:
        return ErrorText.of(DeviceError("out of memory"))
    return PackedVectors(rows.shape[1], rows.tobytes())
