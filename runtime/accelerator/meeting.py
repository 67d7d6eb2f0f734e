"""How the ranks of a group with devices come to one collective: by a store of the first rank.

In: `RankOptions`. Out: the first rank's `Meeting`, whose `told` the others join by.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import msgspec

from dovetail.runtime.accelerator.collective import Store, TorchCollective
from dovetail.runtime.forward import RankPlan
from dovetail.runtime.launch import hung_up
from dovetail.runtime.rank_options import RankOptions


class Meet(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is told to join: where the store is, and what sums."""

    backend: str
    host: str
    port: int
    seconds: float


class Meeting:
    """The first rank's side; the store ends with the collective."""

    def __init__(self, options: RankOptions, backend: str, plan: RankPlan, host: str) -> None:
        """Serve at `host`, this machine's address."""
        self._plan, self._host = plan, host
        self._store = Store(host, 0, server=True, seconds=options.seconds)
        self.told = Meet(backend=backend, host=host, port=self._store.port, seconds=options.seconds)

    def join(self, peers: Sequence[socket.socket]) -> TorchCollective:
        """Return the first rank's collective; `peers` are its connections to the others."""
        return _distribute(self._store, self.told, 0, self._plan, self._host, peers)


def join_meeting(told: Meet, plan: RankPlan, parent: socket.socket) -> TorchCollective:
    """Join as the rank of `plan`; RankError when the others do not come."""
    store = Store(told.host, told.port, server=False, seconds=told.seconds)
    return _distribute(store, told, plan.rank, plan, parent.getsockname()[0], [parent])


def _distribute(
    store: Store,
    told: Meet,
    rank: int,
    plan: RankPlan,
    host: str,
    peers: Sequence[socket.socket],
) -> TorchCollective:
    return TorchCollective(
        told.backend,
        store,
        rank=rank,
        ranks=plan.ranks,
        host=host,
        seconds=told.seconds,
        lost=lambda: bool(hung_up(peers)),
    )
