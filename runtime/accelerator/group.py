"""Ranks 1 and up of an accelerated group: started, met, told each step, watched and ended.

In: a `PairSetup` for each and `RankOptions`. Out: a `PairGroup` with the first rank's `Collective`.
Control goes over TCP, here and between machines: a rank calls back with the token that its launcher
gave it, and each end notices when the other hangs up.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
import weakref
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from dovetail.ir.errors import RankError
from dovetail.runtime.accelerator.collective import TorchCollective
from dovetail.runtime.accelerator.meeting import Meeting
from dovetail.runtime.accelerator.orders import Hello, PairSetup, StepOrder
from dovetail.runtime.framing import pack_value, receive_value, send_value
from dovetail.runtime.launch import (
    Launcher,
    LocalLauncher,
    Member,
    end_members,
    find_loss,
    hung_up,
)
from dovetail.runtime.rank_options import RankOptions
from dovetail.runtime.ranks import START_SECONDS, await_ready, read_last_words

WORKER = "dovetail.runtime.accelerator.rank"
PARENT, TOKEN, RANK = (f"DOVETAIL_RANK_{name}" for name in ("PARENT", "TOKEN", "NUMBER"))
"""What a new rank finds in its environment."""
KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""After so many seconds, seconds and probes a machine that went silent counts as gone."""
LOOK_SECONDS = 0.2
HELLO_SECONDS = 5.0


class PairLink:
    """A rank's control connection and its process."""

    def __init__(self, rank: int, link: socket.socket, member: Member, hello: Hello) -> None:
        self.rank, self.socket, self.member, self.hello = rank, link, member, hello

    @property
    def where(self) -> str:
        """See launch.Link."""
        return f"process {self.hello.process} on {self.hello.machine}"

    def last_words(self) -> str:
        """See launch.Link."""
        return read_last_words(self.socket)


class PairGroup:
    """Ranks 1.. of an accelerated group. Not thread-safe: one caller at a time."""

    def __init__(self, setups: Sequence[PairSetup], options: RankOptions, backend: str) -> None:
        """Start a rank per setup, to sum by `backend`; raises what a rank raised on its start."""
        self._options, self._backend = options, backend
        self._setups = setups if options.ray is None else [_unpin(setup) for setup in setups]
        self._ranks = len(setups) + 1
        self._launcher = _make_launcher(options, gpu=backend == "nccl")
        self._close = weakref.finalize(self, self._launcher.close)
        self.start()

    def start(self) -> None:
        """See ranks.Group."""
        self._members: list[Member] = []
        self._links: list[PairLink] = []
        self._end = weakref.finalize(self, _end_ranks, self._links, self._members)
        try:
            plan, host = self._setups[0].plan, self._launcher.host
            meeting = Meeting(self._options, self._backend, plan, host)
            self.collective = self._meet(meeting)
        except BaseException:
            for member in self._members:
                member.kill()
            self._end()
            raise

    def _meet(self, meeting: Meeting) -> TorchCollective:
        host, token = self._launcher.host, secrets.token_hex(16)
        deadline = time.monotonic() + START_SECONDS
        with socket.create_server((host, 0)) as listener:
            told = {PARENT: f"{host}:{listener.getsockname()[1]}", TOKEN: token}
            for setup in self._setups:
                words = told | {RANK: str(setup.plan.rank)}
                self._members.append(self._launcher.launch(setup, WORKER, words))
            self._links += self._accept(listener, token, deadline)
        for link, setup in zip(self._links, self._setups, strict=True):
            send_value(link.socket, setup)
        self._await_all(deadline)
        for link in self._links:
            send_value(link.socket, meeting.told)
        collective = meeting.join([link.socket for link in self._links])
        self._await_all(deadline)
        return collective

    def _await_all(self, deadline: float) -> None:
        for link in self._links:
            await_ready(link, deadline)

    def _accept(self, listener: socket.socket, token: str, deadline: float) -> list[PairLink]:
        """Return the links of all ranks, in order, once each has called."""
        found: dict[int, PairLink] = {}
        listener.settimeout(LOOK_SECONDS)
        while len(found) < len(self._members):
            try:
                link = listener.accept()[0]
            except TimeoutError:
                self._check_start(found, deadline)
                continue
            link.settimeout(HELLO_SECONDS)
            hello = _read_hello(link, token)
            if hello is None or not 1 <= hello.rank < self._ranks or hello.rank in found:
                link.close()
                continue
            keep_alive(link)
            link.settimeout(None)
            member = self._members[hello.rank - 1]
            found[hello.rank] = PairLink(hello.rank, link, member, hello)
        return [found[rank] for rank in sorted(found)]

    def _check_start(self, found: Mapping[int, PairLink], deadline: float) -> None:
        for rank, member in enumerate(self._members, 1):
            name = f"rank {rank} of {self._ranks} ({member.where})"
            if rank not in found and (fate := member.fate(0)) is not None:
                raise RankError(f"{name} {fate or 'ended'} on its start")
            if rank not in found and time.monotonic() > deadline:
                raise RankError(f"{name} was not ready in {START_SECONDS:.0f} s")

    @property
    def pids(self) -> tuple[int, ...]:
        """See ranks.Group."""
        return tuple(link.hello.process for link in self._links)

    @property
    def running(self) -> bool:
        """See ranks.Group."""
        return bool(self._end.alive)

    @property
    def alive(self) -> bool:
        """See ranks.Group."""
        if not self.running or self.collective.failed:
            return False
        return not hung_up([link.socket for link in self._links])

    def tell(self, order: StepOrder) -> None:
        """Have the other ranks run a step; RankError when one has died."""
        message = pack_value(order)
        for link in self._links:
            try:
                link.socket.sendall(message)
            except OSError:
                raise RankError(f"rank {link.rank} of {self._ranks} has died") from None

    def loss(self) -> str:
        """See ranks.Group."""
        return find_loss(self._links, self._ranks)

    def fail(self) -> None:
        """See ranks.Group."""
        self.collective.fail()
        for member in self._members:
            member.kill()
        self._end()

    def close(self) -> None:
        """See ranks.Group."""
        self._end()
        self.collective.close()
        self._close()


def keep_alive(link: socket.socket) -> None:
    """Have a connection hang up when the machine at its other end is gone; send at once."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in KEEPALIVE.items():
        link.setsockopt(socket.IPPROTO_TCP, option, value)


def _unpin(setup: PairSetup) -> PairSetup:
    """Return a set-up for a machine whose CPUs are not those of this one."""
    plan = setup.plan
    prefill, decode = (replace(phase, cpus=()) for phase in (plan.prefill, plan.decode))
    return replace(setup, plan=replace(plan, prefill=prefill, decode=decode, nodes=()))


def _read_hello(link: socket.socket, token: str) -> Hello | None:
    """Return a rank's first words, or None where a stranger calls."""
    try:
        hello = receive_value(link, Hello)
    except (OSError, ValueError):
        return None
    return hello if hello and hmac.compare_digest(hello.token, token) else None


def _make_launcher(options: RankOptions, *, gpu: bool) -> Launcher:
    if options.ray is None:
        return LocalLauncher()
    try:
        from dovetail.runtime import ray_ranks  # noqa: PLC0415 - an extra, and slow to load
    except ImportError as error:
        raise RankError(f"Ray is not installed ({error}); pip install 'dovetail[ray]'") from None
    return ray_ranks.RayLauncher(options.ray, options.resources, gpu=gpu)


def _end_ranks(links: list[PairLink], members: list[Member]) -> None:
    """Hang up, and wait for the processes: an idle one goes by itself."""
    for link in links:
        link.socket.close()
    end_members(members)
    links.clear()
    members.clear()
