"""Ranks 1 and up of an accelerated group: started, met, told each step, watched and ended.

In: a `PairSetup` for each and `RankOptions`. Out: a `PairGroup` with a `TorchCollective`.
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

from dovetail.ir.errors import DovetailError, RankError, install
from dovetail.runtime.accel.collective import TorchCollective, open_store
from dovetail.runtime.accel.orders import Hello, JoinGroup, PairSetup
from dovetail.runtime.child.child import Child, hung_up
from dovetail.runtime.child.framing import Channel
from dovetail.runtime.child.launch import LocalProcess, Member, end_members
from dovetail.runtime.engine.options import RankOptions
from dovetail.runtime.group.ranks import START_SECONDS, Group, await_all, tell_all

MODULE = "dovetail.runtime.accel.rank"
PARENT, TOKEN, RANK = (f"DOVETAIL_RANK_{name}" for name in ("PARENT", "TOKEN", "NUMBER"))
"""What a new rank finds in its environment."""
HERE = "127.0.0.1"
KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""After so many seconds, seconds and probes a machine that went silent counts as gone."""
LOOK_SECONDS = 0.2
HELLO_SECONDS = 5.0
MAX_SAID = 1 << 16
"""Bytes of what a rank says at once; a stranger may call, too."""


class PairGroup(Group):
    """Ranks 1.. of an accelerated group."""

    def __init__(self, setups: Sequence[PairSetup], options: RankOptions, backend: str) -> None:
        """Start a rank per setup, to sum by `backend`; raises what a rank raised on its start."""
        self._options, self._backend = options, backend
        self._setups, self._ray, self._host = setups, None, HERE
        if options.ray is not None:
            try:
                from dovetail.runtime.group import ray_ranks  # noqa: PLC0415 - an extra, and slow
            except ImportError as error:
                raise RankError(f"Ray is not installed ({error}): {install('ray')}") from None
            self._setups = [_unpin(setup) for setup in setups]
            gpu = backend == "nccl"
            self._ray = ray_ranks.RayLauncher(options.ray, options.resources, gpu=gpu)
            self._leave = weakref.finalize(self, self._ray.close)
            self._host = self._ray.host
        super().__init__(len(setups) + 1)

    def _start(self) -> TorchCollective:
        seconds, deadline = self._options.seconds, time.monotonic() + START_SECONDS
        store = open_store(self._host, 0, server=True, seconds=seconds)
        self._children += self._launch(deadline)
        tell_all(self._children, self._setups)
        await_all(self._children, deadline)
        join = JoinGroup(backend=self._backend, host=self._host, port=store.port, seconds=seconds)
        tell_all(self._children, [join] * len(self._children))
        peers = [child.channel.socket for child in self._children]
        collective = TorchCollective(
            self._backend,
            store,
            rank=0,
            ranks=self._ranks,
            host=self._host,
            seconds=seconds,
            lost=lambda: bool(hung_up(peers)),
        )
        await_all(self._children, deadline)
        return collective

    def _launch(self, deadline: float) -> list[Child]:
        """Return all ranks, in order, once each has called."""
        token, members = secrets.token_hex(16), list[Member]()
        try:
            with socket.create_server((self._host, 0)) as listener:
                environment = {PARENT: f"{self._host}:{listener.getsockname()[1]}", TOKEN: token}
                for plan in (setup.part.plan for setup in self._setups):
                    words = environment | {RANK: str(plan.rank)}
                    if self._ray is None:
                        members.append(LocalProcess(MODULE, words=words))
                    else:
                        members.append(self._ray.launch(plan.threads, MODULE, words))
                return self._accept(listener, token, members, deadline)
        except BaseException as error:
            for member in members:
                member.kill()
            end_members(members)
            if isinstance(error, OSError):
                raise RankError(f"cannot start a process of the group ({error})") from error
            raise

    def _accept(
        self, listener: socket.socket, token: str, members: Sequence[Member], deadline: float
    ) -> list[Child]:
        found: dict[int, Child] = {}
        listener.settimeout(LOOK_SECONDS)
        while len(found) < len(members):
            try:
                link = listener.accept()[0]
            except TimeoutError:
                self._check_start(members, found, deadline)
                continue
            link.settimeout(HELLO_SECONDS)
            channel = Channel(link, MAX_SAID)
            hello = _read_hello(channel, token)
            if hello is None or not 1 <= hello.rank < self._ranks or hello.rank in found:
                link.close()
                continue
            keep_alive(link)
            link.settimeout(None)
            where = f"process {hello.process} on {hello.machine}"
            name, member = f"rank {hello.rank} of {self._ranks} ({where})", members[hello.rank - 1]
            found[hello.rank] = Child(name, hello.process, member, channel)
        return [found[rank] for rank in sorted(found)]

    def _check_start(
        self, members: Sequence[Member], found: Mapping[int, Child], deadline: float
    ) -> None:
        for rank, member in enumerate(members, 1):
            name = f"rank {rank} of {self._ranks} ({member.where})"
            if rank not in found and (end := member.wait(0)) is not None:
                raise RankError(f"{name} {end or 'ended'} on its start")
            if rank not in found and time.monotonic() > deadline:
                raise RankError(f"{name} was not ready in {START_SECONDS:.0f} s")

    def close(self) -> None:
        """See Group."""
        super().close()
        self.collective.fail()
        if self._ray is not None:
            self._leave()


def keep_alive(link: socket.socket) -> None:
    """Have a connection hang up when the machine at its other end is gone; send at once."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in KEEPALIVE.items():
        link.setsockopt(socket.IPPROTO_TCP, option, value)


def _unpin(setup: PairSetup) -> PairSetup:
    """Return a set-up for a machine whose CPUs are not those of this one."""
    plan = setup.part.plan
    prefill, decode = (replace(phase, cpus=()) for phase in (plan.prefill, plan.decode))
    plan = replace(plan, prefill=prefill, decode=decode, nodes=())
    return replace(setup, part=replace(setup.part, plan=plan))


def _read_hello(channel: Channel, token: str) -> Hello | None:
    """Return a rank's first words, or None where a stranger calls."""
    try:
        hello = channel.receive(Hello)
    except (OSError, ValueError, DovetailError):
        return None
    return hello if hello and hmac.compare_digest(hello.token, token) else None
