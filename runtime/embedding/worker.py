"""An instance's process: `python -P -m dovetail.runtime.embedding.worker FD`.

In: an inherited socket; a `WorkerSetup`, then batches. Out: vectors. It ends when the parent hangs
up.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress

import msgspec
import numpy as np

from dovetail.ir.errors import DovetailError
from dovetail.runtime.embedding.instance import Encoder, Ids, InstanceLost
from dovetail.runtime.embedding.process import REPLY, REQUEST, WorkerReply, WorkerSetup
from dovetail.runtime.framing import receive, receive_value, send_value
from dovetail.runtime.leash import begin_child


def serve(link: socket.socket) -> None:
    """Set up, answer, and run batches until the parent hangs up."""
    setup = receive_value(link, WorkerSetup)
    if setup is None:
        return
    allowed = set(setup.pus) & os.sched_getaffinity(0)
    if allowed:  # before the model is there, so that its memory lies near
        os.sched_setaffinity(0, allowed)
    try:
        encoder = setup.source.open()
    except DovetailError as error:
        send_value(link, _failure(error))
        return
    send_value(link, WorkerReply(dim=encoder.dim))
    while head := receive(link, REQUEST.size):
        queries, tokens, rows = REQUEST.unpack(head)
        body = receive(link, 4 * (queries + rows * tokens))
        if not body:
            return
        link.sendall(_run(encoder, *_read(np.frombuffer(body, np.int32), queries, rows)))


def _read(body: Ids, queries: int, rows: int) -> tuple[list[Ids], list[Ids] | None]:
    """Return the ids of each query, and the segments where they were sent."""
    ends = np.cumsum(body[:queries])[:-1]
    ids, *types = (np.split(row, ends) for row in body[queries:].reshape(rows, -1))
    return ids, types[0] if types else None


def _run(encoder: Encoder, ids: list[Ids], types: list[Ids] | None) -> bytes:
    try:
        rows = np.ascontiguousarray(encoder.embed_tokens(ids, types), np.float32)
    except (DovetailError, MemoryError) as error:
        data = msgspec.json.encode(_failure(error))
        return REPLY.pack(-1, len(data)) + data
    return REPLY.pack(*rows.shape) + rows.tobytes()


def _failure(error: BaseException) -> WorkerReply:
    if isinstance(error, DovetailError):
        return WorkerReply(error=type(error).__name__, message=str(error))
    return WorkerReply(error="DeviceError", message="out of memory")


if __name__ == "__main__":
    begin_child()
    parent = socket.socket(fileno=int(sys.argv[1]))  # open until the last words are out
    with suppress(ConnectionError):  # the parent is gone
        try:
            serve(parent)
        except InstanceLost as lost:  # the parent sees the end, and starts another process
            sys.exit(str(lost))
