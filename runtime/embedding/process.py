"""An instance as a process of its own: pinned to its CPUs, watched, started anew when it dies.

In: where its encoder comes from, and its CPUs. Out: an `Instance`; a batch is one message to the
child (`worker.py`) and one back.
"""

from __future__ import annotations

import math
import struct
import threading
import weakref
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from dovetail.ir import errors
from dovetail.ir.errors import DeviceError, DovetailError
from dovetail.runtime.embedding.instance import EncoderSource, Ids, InstanceLost, Vectors
from dovetail.runtime.framing import receive, receive_value, send_value
from dovetail.runtime.launch import Child, Popen

REQUEST = struct.Struct("<qqq")
"""Queries of a batch, their tokens, and 1 or 2 rows: ids, and segments where there are any.

Lengths and the rows follow as int32.
"""
REPLY = struct.Struct("<qq")
"""Vectors and values of each, which follow as float32; or -1 and the bytes of a `WorkerReply`."""
START_SECONDS = 120.0
MODULE = "dovetail.runtime.embedding.worker"


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a new process is told."""

    source: EncoderSource
    pus: tuple[int, ...] = ()


class WorkerReply(msgspec.Struct, frozen=True, kw_only=True):
    """That a process is ready, or an error: its class in `ir.errors` and its text."""

    dim: int = 0
    error: str = ""
    message: str = ""

    def raise_error(self) -> None:
        """Raise the error, if there is one."""
        if self.error:
            raise _error_class(self.error)(self.message)


def _error_class(name: str) -> type[DovetailError]:
    found = getattr(errors, name, DeviceError)
    return found if isinstance(found, type) and issubclass(found, DovetailError) else DeviceError


class ProcessInstance:
    """An encoder in a child process; one caller at a time."""

    def __init__(self, source: EncoderSource, pus: Sequence[int] = ()) -> None:
        """Start the process; raises what opening the encoder raised there."""
        self._setup = WorkerSetup(source=source, pus=tuple(pus))
        self.dim = 0
        self._died: Callable[[], object] | None = None
        self._start()

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.pid

    @property
    def dead(self) -> bool:
        """See Mortal."""
        return self._child.member.process.poll() is not None

    def watch(self, died: Callable[[], object]) -> None:
        """See Mortal."""
        self._died = died
        threading.Thread(
            target=_mourn, args=(self._child.member.process, died), daemon=True
        ).start()

    def embed_tokens(
        self, ids: Sequence[Ids], types: Sequence[Ids] | None = None, limit: float = math.inf
    ) -> Vectors:
        """Run a batch in the child.

        Raises:
            InstanceLost: it died, or is not done in `limit` seconds.
            DovetailError: what the encoder raised; the child is well.
        """
        lengths = np.array([len(each) for each in ids], np.int32)
        body = np.concatenate([lengths, *ids, *(types or ())]).astype(np.int32, copy=False)
        head = REQUEST.pack(len(ids), int(lengths.sum()), 2 if types else 1)
        self._socket.settimeout(limit if limit < math.inf else None)
        try:
            self._socket.sendall(head + body.tobytes())
            rows, size, data = self._receive()
        except OSError:  # a timeout is one as well
            raise InstanceLost from None
        if rows < 0:
            msgspec.json.decode(data, type=WorkerReply).raise_error()
        return np.frombuffer(data, np.float32).reshape(rows, size)

    def _receive(self) -> tuple[int, int, bytes]:
        """Return the two numbers of a reply and what follows; OSError where none comes."""
        head = receive(self._socket, REPLY.size)
        if not head:
            raise ConnectionError
        rows, size = REPLY.unpack(head)
        data = receive(self._socket, size if rows < 0 else rows * size * 4)
        if not data:
            raise ConnectionError
        return rows, size, data

    def restart(self) -> None:
        """End the child at once, for it may hang, and start another one."""
        self._child.member.kill()
        self.close()
        self._start()
        if self._died is not None:
            self.watch(self._died)

    def close(self) -> None:
        """End the child; safe to call twice."""
        self._end()

    def _start(self) -> None:
        self._child = Child(MODULE, "an embedding process")
        self._socket = self._child.link
        self._end = weakref.finalize(self, self._child.bury)
        send_value(self._socket, self._setup)
        self._socket.settimeout(START_SECONDS)
        try:
            reply = receive_value(self._socket, WorkerReply)
        except TimeoutError:
            self._end()
            raise DeviceError(
                f"an embedding process was not ready in {START_SECONDS:.0f} s"
            ) from None
        if reply is None or reply.error:
            self._end()
            if reply is not None:
                reply.raise_error()
            raise DeviceError("an embedding process died on its start")
        self._socket.settimeout(None)
        self.dim = reply.dim


def _mourn(process: Popen, died: Callable[[], object]) -> None:
    process.wait()
    died()
