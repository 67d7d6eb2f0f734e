"""Groups of forked processes that run one function together, each as a rank."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from dovetail.runtime.machine import abi
from dovetail.runtime.machine.memory import SharedMemory
from dovetail.runtime.native.collective import Communicator, comm_bytes

Work = Callable[[Communicator], object]
PATIENCE = 120  # seconds after which a hung group is killed


class Group:
    """Ranks 0..n-1 as children; rank 0 holds a socket to each of the others, as a master does."""

    def __init__(
        self, library: Path, ranks: int, work: Work, *, threads: int = 1, spin: int = 200
    ) -> None:
        c = abi.declare(ctypes.CDLL(str(library)))
        self.shared = SharedMemory.create(comm_bytes(c, ranks, threads))
        pairs = [socket.socketpair() for _ in range(ranks - 1)]
        self.children: list[int] = []
        for rank in range(ranks):
            child = os.fork()
            if child:
                self.children.append(child)
                continue
            try:
                mine = [a for a, _ in pairs] if rank == 0 else [pairs[rank - 1][1]]
                for end in (end for pair in pairs for end in pair if end not in mine):
                    end.close()
                comm = Communicator(
                    c, self.shared.bytes, rank=rank, ranks=ranks, threads=threads, spin=spin,
                    peers=[end.fileno() for end in mine],
                )  # fmt: skip
                work(comm)
            except BaseException:  # a child must never go on as the test runner
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        for end in (end for pair in pairs for end in pair):
            end.close()

    def kill(self, rank: int) -> None:
        os.kill(self.children[rank], signal.SIGKILL)

    def wait(self) -> list[int]:
        """Return the exit statuses: 0, 1 for an exception, -9 for a killed rank."""
        fds = [os.pidfd_open(child) for child in self.children]
        for fd in fds:
            if not select.select([fd], [], [], PATIENCE)[0]:
                for child in self.children:
                    with suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
            os.close(fd)
        found = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in self.children]
        self.shared.close()
        return found


def named_memory(pids: Sequence[int]) -> set[str]:
    """Return the named shared memory that processes have mapped or opened."""
    maps = [Path(f"/proc/{pid}/maps").read_text().split() for pid in pids]
    opened = []
    for file in (file for pid in pids for file in Path(f"/proc/{pid}/fd").iterdir()):
        with suppress(FileNotFoundError):  # a thread has closed it meanwhile
            opened.append(str(file.readlink()))
    return {word for word in (*chain(*maps), *opened) if word.startswith("/dev/shm/")}
