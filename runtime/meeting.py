"""How the ranks of an accelerated group come to one `Collective`, by shared memory or torch.

In: `RankOptions`. Out: the first rank's `Meeting`, whose `told` the others join by.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from dovetail.ir.errors import RankError, SpecError
from dovetail.runtime.collective import Collective, Communicator, SharedMemory, comm_bytes
from dovetail.runtime.forward import RankPlan
from dovetail.runtime.launch import hung_up
from dovetail.runtime.library import KernelLibrary


@dataclass(frozen=True, slots=True)
class RankOptions:
    """How ranks beyond the first one are started, and how they sum.

    backend: `shared` memory on this machine, or torch.distributed's `gloo` or `nccl`.
    ray: address of a Ray cluster (extra `ray`) that places the ranks on its machines, each of
    which has the artifact under the same path; None: all run on this machine. The first rank is
    the process that loads.
    resources: what a rank asks of the machine Ray puts it on, beside its threads as CPUs.
    seconds: after which a rank that does not answer in a sum is given up.
    """

    backend: Literal["shared", "gloo", "nccl"] = "shared"
    ray: str | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.backend not in ("shared", "gloo", "nccl"):
            raise SpecError(f"the backend must be shared, gloo or nccl, not {self.backend!r}")
        if self.ray is not None and self.backend == "shared":
            raise SpecError("ranks on other machines share no memory; use the backend gloo or nccl")


class Meet(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is told to join: where the store is, or how much memory it has inherited."""

    backend: str
    host: str = ""
    port: int = 0
    nbytes: int = 0
    lanes: int = 1
    seconds: float = 0.0


class Meeting(Protocol):
    """The first rank's side: open while the group starts."""

    fds: tuple[int, ...]
    """Descriptors that the others inherit."""
    told: Meet

    def join(self, peers: Sequence[socket.socket]) -> Collective:
        """Return the first rank's collective; `peers` are its connections to the others."""

    def close(self) -> None:
        """Let nobody else join."""


def open_meeting(
    options: RankOptions, library: KernelLibrary, plan: RankPlan, lanes: int, host: str
) -> Meeting:
    """Return a meeting for the ranks of `plan`, any of them; `host` is this machine's address."""
    if options.backend == "shared":
        return _SharedMeeting(library, plan, lanes)
    return _TorchMeeting(options, plan, host)


class _SharedMeeting:
    def __init__(self, library: KernelLibrary, plan: RankPlan, lanes: int) -> None:
        nbytes = comm_bytes(library.c, plan.ranks, lanes)
        self._library, self._plan, self._memory = library, plan, SharedMemory.create(nbytes)
        self.fds: tuple[int, ...] = (self._memory.fd,)
        self.told = Meet(backend="shared", nbytes=nbytes, lanes=lanes)

    def join(self, peers: Sequence[socket.socket]) -> Collective:
        return _share(self._library, self._memory, self.told, 0, self._plan, peers)

    def close(self) -> None:
        self._memory.close()


class _TorchMeeting:
    def __init__(self, options: RankOptions, plan: RankPlan, host: str) -> None:
        torch = _load_torch()
        self._plan, self._host = plan, host
        self._store = torch.Store(host, 0, server=True, seconds=options.seconds)
        self.fds: tuple[int, ...] = ()
        self.told = Meet(
            backend=options.backend, host=host, port=self._store.port, seconds=options.seconds
        )

    def join(self, peers: Sequence[socket.socket]) -> Collective:
        return _distribute(self._store, self.told, 0, self._plan, self._host, peers)

    def close(self) -> None:
        """The store ends with the collective."""


def prepare_backend(backend: str) -> None:
    """Load what `join_meeting` will need; RankError where it is not installed."""
    if backend != "shared":
        _load_torch()


def join_meeting(
    told: Meet, library: KernelLibrary, plan: RankPlan, parent: socket.socket, fd: int
) -> Collective:
    """Join as the rank of `plan`; RankError when the others do not come.

    `fd`: the inherited shared memory, where that is how ranks meet.
    """
    if told.backend == "shared":
        memory = SharedMemory(fd, told.nbytes)
        return _share(library, memory, told, plan.rank, plan, [parent])
    store = _load_torch().Store(told.host, told.port, server=False, seconds=told.seconds)
    host = parent.getsockname()[0]
    return _distribute(store, told, plan.rank, plan, host, [parent])


def _share(
    library: KernelLibrary,
    memory: SharedMemory,
    told: Meet,
    rank: int,
    plan: RankPlan,
    peers: Sequence[socket.socket],
) -> Collective:
    fds = [peer.fileno() for peer in peers]
    return Communicator(
        library.c,
        memory.bytes,
        rank=rank,
        ranks=plan.ranks,
        lanes=told.lanes,
        spin=plan.spin,
        peers=fds,
    )


def _distribute(
    store: Any, told: Meet, rank: int, plan: RankPlan, host: str, peers: Sequence[socket.socket]
) -> Collective:
    found: Collective = _load_torch().TorchCollective(
        told.backend,
        store,
        rank=rank,
        ranks=plan.ranks,
        host=host,
        seconds=told.seconds,
        lost=lambda: bool(hung_up(peers)),
    )
    return found


def _load_torch() -> Any:
    try:
        from dovetail.runtime import torch_collective  # noqa: PLC0415 - an extra, and slow to load
    except ImportError as error:
        raise RankError(
            f"torch is not installed ({error}); pip install 'dovetail[gpu]', or use the backend "
            "shared on one machine"
        ) from None
    return torch_collective
