"""The processes of a tensor-parallel group: started, told each step, watched and ended.

In: the plan of each rank. Out: a `RankGroup` whose first rank is this process. Step arrays and
sums lie in shared memory; a step itself is one small message per rank. Descriptors are inherited,
and sockets hang up with their process: whatever ends a rank or the parent, the others notice.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import struct
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from dovetail.ir import errors
from dovetail.ir.artifact import Manifest, PhasePlan, ServicePlan
from dovetail.ir.errors import RankError
from dovetail.runtime.artifact import Artifact, ModelPart
from dovetail.runtime.collective import Communicator, SharedMemory, comm_bytes
from dovetail.runtime.forward import RankPlan
from dovetail.runtime.framing import receive_value, send_value
from dovetail.runtime.launch import END_SECONDS, Link, LocalProcess, end_members, find_loss
from dovetail.runtime.library import KernelLibrary, fit_plans
from dovetail.runtime.placement import choose_nodes
from dovetail.runtime.step import step_bytes
from dovetail.topology.hardware import HardwareSpec

STEP_ARGS = ("n_tokens", "n_prefill", "n_decode", "n_out", "kv_splits")
"""The arguments of a forward step that change, in the order of a message; then the phase."""
STEP = struct.Struct(f"<{len(STEP_ARGS) + 1}q")
START_SECONDS = 240.0

log = logging.getLogger("dovetail")


class RankSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a new rank is told: where the model is, its plan, and what the descriptors hold."""

    artifact: str
    model: str
    fingerprint: str
    plan: RankPlan
    lanes: int
    comm_bytes: int = 0  # known when the group starts
    step_bytes: int
    max_tokens: int
    max_sequences: int


class RankReply(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's answer to its set-up; an empty `error` is success."""

    error: str = ""
    message: str = ""


def plan_ranks(
    service: ServicePlan,
    hardware: HardwareSpec,
    threads: int | None,
    kv_blocks: int,
    *,
    deterministic: bool = False,
    own_logits: bool = False,
    floats: bool = False,
) -> tuple[RankPlan, ...]:
    """Return the plan of each rank as this machine can run it; says so where that is less.

    Args:
        service: what was planned, perhaps on a larger machine.
        hardware: CPUs and quota of this process.
        threads: of each process, instead of the plan's; then the quota is not looked at.
        kv_blocks: size of the KV pool.
        deterministic: whether the bits may not depend on this plan.
        own_logits: whether each rank has memory of its own for the logits of a step.
        floats: whether activations stay float32 where weights are quantised.
    """
    allowed, ranks = hardware.allowed_pus, service.processes
    prefill, decode = (
        fit_plans(plan, ranks, _within_quota(plan, ranks, threads, hardware), allowed)
        for plan in (service.prefill, service.decode)
    )
    for name, plan, fitted in (
        ("prefill", service.prefill, prefill[0]),
        ("decode", service.decode, decode[0]),
    ):
        wanted = (threads or plan.threads) * ranks
        if fitted.threads * ranks < wanted:
            log.warning(
                "%s: %d threads wanted, this process gets %g CPUs: %d run",
                name, wanted, min(len(allowed), hardware.cpu_quota or len(allowed)),
                fitted.threads * ranks,
            )  # fmt: skip
    most = max(prefill[0].threads, decode[0].threads) * ranks
    spin = service.spin_iterations if most <= len(allowed) else 0  # who spins delays who works
    return tuple(
        RankPlan(
            rank=i,
            ranks=ranks,
            prefill=p,
            decode=d,
            spin=spin,
            kv_blocks=kv_blocks,
            deterministic=deterministic,
            own_logits=own_logits,
            floats=floats,
            nodes=choose_nodes(d, hardware, service.nodes[i] if service.nodes else None),
        )
        for i, (p, d) in enumerate(zip(prefill, decode, strict=True))
    )


def _within_quota(plan: PhasePlan, ranks: int, threads: int | None, hardware: HardwareSpec) -> int:
    """Return the threads wanted of each process, cut to the CPU quota unless asked for."""
    if threads is not None or hardware.cpu_quota is None:
        return threads or plan.threads
    return min(plan.threads, max(1, int(hardware.cpu_quota) // ranks))


def make_setups(
    artifact: Artifact, part: ModelPart, plans: Sequence[RankPlan], tokens: int, sequences: int
) -> tuple[RankSetup, ...]:
    """Return what ranks 1 and up are told, for steps of at most so many tokens and sequences."""
    return tuple(
        RankSetup(
            artifact=str(artifact.path.resolve()),
            model=part.name,
            fingerprint=fingerprint(artifact.manifest),
            plan=plan,
            lanes=plan.threads,
            step_bytes=step_bytes(part.file.spec, tokens, sequences),
            max_tokens=tokens,
            max_sequences=sequences,
        )
        for plan in plans[1:]
    )


class Group(Protocol):
    """Ranks 1 and up, as an engine sees them."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1 and up, each on its machine."""

    @property
    def running(self) -> bool:
        """Whether the group has been started and not ended."""

    @property
    def alive(self) -> bool:
        """Whether the group runs, and no rank has died."""

    def start(self) -> None:
        """Start the processes, anew after their end; raises what a rank raised on its start."""

    def loss(self) -> str:
        """Return which rank has died and how, in words."""

    def fail(self) -> None:
        """End the group at once, whatever it does."""

    def close(self) -> None:
        """End the processes; safe to call twice."""


class RankGroup:
    """Ranks 1.. as child processes. Not thread-safe: one caller at a time."""

    def __init__(
        self, library: KernelLibrary, steps: SharedMemory, setups: Sequence[RankSetup]
    ) -> None:
        """Start a process per setup (ranks 1..); raises what a rank raised on its start."""
        self._library, self._steps, self._setups = library, steps, setups
        self.start()

    def start(self) -> None:
        """Start the processes, anew after `end`, and wait until all are ready."""
        first = self._setups[0]
        ranks, lanes = first.plan.ranks, first.lanes
        nbytes = comm_bytes(self._library.c, ranks, lanes)
        shared = SharedMemory.create(nbytes)
        self._links: list[_Link] = []
        self._end = weakref.finalize(self, _end_links, self._links)
        try:
            for setup in self._setups:
                self._links.append(_Link(setup.plan.rank, shared.fd, self._steps.fd))
            self.comm = Communicator(
                self._library.c,
                shared.bytes,
                rank=0,
                ranks=ranks,
                lanes=lanes,
                spin=first.plan.spin,
                peers=[link.socket.fileno() for link in self._links],
            )
            for link, setup in zip(self._links, self._setups, strict=True):
                send_value(link.socket, replace(setup, comm_bytes=nbytes))
            deadline = time.monotonic() + START_SECONDS
            for link in self._links:
                await_ready(link, deadline)
        except BaseException:
            self._end()
            raise
        finally:
            shared.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1 and up."""
        return tuple(link.member.process.pid for link in self._links)

    def step(self, args: Mapping[str, int], *, prefill: bool) -> None:
        """Have the other ranks run a step; RankError when one has died."""
        message = STEP.pack(*(args[name] for name in STEP_ARGS), prefill)
        try:
            for link in self._links:
                link.socket.sendall(message)
        except OSError:
            raise RankError("a process of the group has died") from None

    @property
    def running(self) -> bool:
        """See Group."""
        return bool(self._end.alive)

    @property
    def alive(self) -> bool:
        """See Group."""
        running = self.running and not self.comm.failed
        return running and all(link.member.fate(0) is None for link in self._links)

    def loss(self) -> str:
        """See Group."""
        return find_loss(self._links, self._setups[0].plan.ranks)

    def fail(self) -> None:
        """End the group at once: a rank may be in the middle of a step that others do not share."""
        self.comm.fail()
        for link in self._links:
            link.member.kill()
        self._end()

    def close(self) -> None:
        """End the processes; safe to call twice."""
        self._end()


class _Link:
    """A child process and our end of its socket."""

    def __init__(self, rank: int, comm_fd: int, step_fd: int) -> None:
        self.rank = rank
        self.socket, theirs = socket.socketpair()
        fds = (theirs.fileno(), comm_fd, step_fd)
        try:
            self.member = LocalProcess("dovetail.runtime.rank_worker", fds, fds=fds)
        except RankError:
            self.socket.close()
            raise
        finally:
            theirs.close()

    @property
    def where(self) -> str:
        return self.member.where

    def last_words(self) -> str:
        return read_last_words(self.socket)


def _end_links(links: list[_Link]) -> None:
    """Hang up, and wait for the processes: an idle one goes by itself."""
    for link in links:
        link.socket.close()
    end_members([link.member for link in links])
    links.clear()


def await_ready(link: Link, deadline: float) -> None:
    """Return when a rank has answered its set-up; raises what it raised."""
    link.socket.settimeout(max(0.1, deadline - time.monotonic()))
    try:
        reply = receive_value(link.socket, RankReply)
    except TimeoutError:
        raise RankError(
            f"rank {link.rank} ({link.where}) was not ready in {START_SECONDS:.0f} s"
        ) from None
    if reply is None:
        fate = link.member.fate(END_SECONDS) or "hung up"
        raise RankError(f"rank {link.rank} ({link.where}) {fate} on its start")
    if reply.error:
        raise getattr(errors, reply.error, RankError)(reply.message)
    link.socket.settimeout(None)


def read_last_words(link: socket.socket) -> str:
    """Return what a rank that has hung up said of its end, "" where nothing."""
    try:
        link.setblocking(False)
        reply = receive_value(link, RankReply)
    except OSError:
        return ""
    return f"has failed: {reply.message}" if reply else ""


def fingerprint(manifest: Manifest) -> str:
    """Return what tells one artifact from another."""
    return hashlib.sha256(msgspec.json.encode(manifest)).hexdigest()
