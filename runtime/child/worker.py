"""A child's side: `python -P -m dovetail.runtime.child.worker MODULE FD...`.

In: a module with `serve(channel, ...)`, the inherited socket of its channel, and numbers of its own
(other inherited descriptors). Out: what it answers, and the error that ends it, by name.

Ctrl-C is for the parent, which this process does not outlive: the system kills it when the parent
ends, also where it is stopped, or holds the interpreter in native code and never sees that a socket
hung up.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from dovetail.ir.errors import DovetailError
from dovetail.runtime.child.framing import Channel, ErrorText
from dovetail.runtime.child.launch import CPUS, PARENT

PR_SET_PDEATHSIG = 1
"""Of prctl(2). The signal comes when the *thread* that started this process ends."""

T = TypeVar("T")


def begin_child() -> None:
    """Go to the CPUs that are meant, and have the system kill this process with its parent.

    Call it first of all: threads that begin later stay on these CPUs, and memory lies near them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if cpus := os.environ.pop(CPUS, ""):
        os.sched_setaffinity(0, map(int, cpus.split(",")))
    parent = os.environ.pop(PARENT, None)
    if parent is None:  # somebody else started it
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(parent):  # it ended before
        os._exit(0)


def run(channel: Channel, serve: Callable[..., object], *numbers: int) -> None:
    """Call `serve`; tell the parent the error that ends it, but a fault of ours."""
    with suppress(ConnectionError):  # the parent is gone
        try:
            serve(channel, *numbers)
        except ConnectionError:
            raise
        except (DovetailError, MemoryError, OSError) as error:
            channel.send(ErrorText.of(error))


def read_beside(channel: Channel, kind: type[T], take: Callable[[T], object]) -> threading.Thread:
    """Return a thread that calls `take` with each message.

    It ends this process once the parent hangs up: whatever is computed, nobody waits for it.
    """

    def read() -> None:
        for message in channel.messages(kind):
            take(message)
        os._exit(0)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def main() -> None:
    """Be the child that the arguments name."""
    begin_child()
    module, link, *numbers = sys.argv[1:]
    channel = Channel(socket.socket(fileno=int(link)))  # open until the last words are out
    run(channel, importlib.import_module(module).serve, *map(int, numbers))


if __name__ == "__main__":
    main()
