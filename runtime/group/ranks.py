"""The processes of a tensor-parallel group: planned, started, told each step, watched and ended.

In: the plan of each rank. Out: a `RankGroup` whose first rank is this process; the others run
`serve`. Step arrays and sums lie in shared memory; a step itself is one small message per rank.
Descriptors are inherited, and sockets hang up with their process: whatever ends a rank or the
parent, the others notice.
"""

from __future__ import annotations

import hashlib
import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from mmap import PAGESIZE

import msgspec
from msgspec.structs import replace

from dovetail.ir.artifact import PHASES, Manifest, PhasePlan, ServicePlan
from dovetail.ir.errors import ArtifactError, DovetailError, RankError
from dovetail.runtime.artifact import Artifact, ModelPart, open_artifact
from dovetail.runtime.child.child import Child, StartError, hung_up
from dovetail.runtime.child.framing import Channel, pack_value
from dovetail.runtime.child.launch import END_SECONDS, end_members
from dovetail.runtime.machine.library import KernelLibrary
from dovetail.runtime.machine.memory import SharedMemory
from dovetail.runtime.machine.placement import choose_nodes
from dovetail.runtime.native.adapt import fit_plans
from dovetail.runtime.native.collective import Collective, Communicator, comm_bytes
from dovetail.runtime.native.forward import ForwardModel, RankPlan, shared_kv_bytes
from dovetail.runtime.native.step import StepBuffers, step_bytes
from dovetail.topology.hardware import HardwareSpec, read_hardware

START_SECONDS = 240.0
STEP_ARGS = ("n_tokens", "n_prefill", "n_decode", "n_out", "kv_splits")
"""The arguments of a forward step that change."""

log = logging.getLogger("dovetail")


class RankPart(msgspec.Struct, frozen=True, kw_only=True):
    """What any new rank is told: where the model is, what tells it from others, and its plan."""

    artifact: str
    model: str
    fingerprint: str
    plan: RankPlan

    def open(self) -> tuple[Artifact, ModelPart]:
        """Return the artifact and the model; raises as a load does."""
        artifact = open_artifact(self.artifact, read_hardware())
        if self.fingerprint != fingerprint(artifact.manifest):
            raise ArtifactError(f"{self.artifact} has changed since it was loaded; load it again")
        return artifact, artifact.models[self.model]


class RankSetup(RankPart, frozen=True, kw_only=True):
    """What a new rank on CPUs is told, also how large its steps are -> RankReady."""

    max_tokens: int
    max_sequences: int


class RankReady(msgspec.Struct, frozen=True):
    """A rank has done what it was told."""


class RankStep(msgspec.Struct, frozen=True, array_like=True):
    """A forward step: arguments STEP_ARGS by name, its phase, PUs of each rank, None = all."""

    args: dict[str, int]
    phase: str
    usable: tuple[tuple[int, ...], ...] | None = None


def plan_ranks(
    service: ServicePlan,
    hardware: HardwareSpec,
    threads: int | None,
    kv_blocks: int,
    *,
    state_slots: int = 0,
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
        state_slots: states of recurrent layers that there is memory for.
        deterministic: whether the bits may not depend on this plan.
        own_logits: whether each rank has memory of its own for the logits of a step.
        floats: whether activations stay float32 where weights are quantised.
    """
    allowed, most = hardware.allowed_pus, 0
    fitted: dict[str, tuple[PhasePlan, ...]] = {}
    for name, plan in (("prefill", service.prefill), ("decode", service.decode)):
        ranks = service.processes_of(name)
        count = threads or plan.threads
        if threads is None and hardware.cpu_quota is not None:
            count = min(count, max(1, int(hardware.cpu_quota) // ranks))
        fitted[name] = fit_plans(plan, ranks, count, allowed)
        wanted, run = (threads or plan.threads) * ranks, fitted[name][0].threads * ranks
        if run < wanted:
            log.warning(
                "%s: %d threads were planned, but this process may use %g CPUs: running %d",
                name, wanted, min(len(allowed), hardware.cpu_quota or len(allowed)), run,
            )  # fmt: skip
        most = max(most, run)
    spin = service.spin_iterations if most <= len(allowed) else 0  # who spins delays who works
    return tuple(
        RankPlan(
            rank=i,
            ranks=service.processes,
            prefill_ranks=service.prefill_processes,
            prefill=p,
            decode=d,
            spin=spin,
            kv_blocks=kv_blocks,
            state_slots=state_slots,
            deterministic=deterministic,
            own_logits=own_logits,
            floats=floats,
            nodes=choose_nodes(d, hardware, service.nodes[i] if i < len(service.nodes) else None),
        )
        for i in range(service.most_processes)
        for p, d in [[_plan_of(plans, i) for plans in fitted.values()]]
    )


def _plan_of(plans: Sequence[PhasePlan], rank: int) -> PhasePlan:
    """Return a rank's plan of a phase; of one that it has no part in, the threads of the others."""
    return plans[rank] if rank < len(plans) else PhasePlan(threads=plans[0].threads, cpus=())


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
            max_tokens=tokens,
            max_sequences=sequences,
        )
        for plan in plans[1:]
    )


class Group(ABC):
    """Ranks 1 and up as processes. Not thread-safe: one caller at a time."""

    def __init__(self, ranks: int) -> None:
        """Start `ranks` processes but the first one; raises what a rank raised on its start."""
        self._ranks = ranks
        self.start()

    def start(self) -> None:
        """Start the processes, anew after their end, and wait until all are ready."""
        self._children: list[Child] = []
        self._end = weakref.finalize(self, end_children, self._children)
        try:
            self.collective = self._start()
        except BaseException as error:
            for child in self._children:
                child.member.kill()
            self._end()
            if isinstance(error, StartError):
                raise RankError(str(error)) from None
            raise

    @abstractmethod
    def _start(self) -> Collective:
        """Fill `_children` and return the first rank's collective, once all are ready."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1 and up, each on its machine."""
        return tuple(child.pid for child in self._children)

    @property
    def running(self) -> bool:
        """Whether the group has been started and not ended."""
        return bool(self._end.alive)

    @property
    def alive(self) -> bool:
        """Whether the group runs, and no rank has died."""
        if not self.running or self.collective.failed:
            return False
        return not hung_up([child.channel.socket for child in self._children])

    def tell(self, order: msgspec.Struct, count: int | None = None) -> None:
        """Have the next `count` ranks, by default all, run a step; RankError when one has died."""
        message = pack_value(order)
        for child in self._children[:count]:
            try:
                child.channel.socket.sendall(message)
            except OSError:
                raise RankError(f"{child.name} has died") from None

    def loss(self) -> str:
        """Return which rank has died and how, in words; wait a little for the system to say so.

        Ranks that end because another one did are not to blame.
        """
        deadline, left, first = time.monotonic() + END_SECONDS, list(self._children), ""
        while left and (seconds := deadline - time.monotonic()) > 0:
            places = hung_up([child.channel.socket for child in left], seconds)
            for child in [left[place] for place in places]:
                if said := _last_words(child) or child.member.wait(END_SECONDS):
                    return f"{child.name} {said}"
                first = first or f"{child.name} has ended"
                left.remove(child)
        return first or "a process of the group does not answer"

    def fail(self) -> None:
        """End the group at once: a rank may be in the middle of a step that others do not share."""
        self.collective.fail()
        for child in self._children:
            child.member.kill()
        self._end()

    def close(self) -> None:
        """End the processes; safe to call twice."""
        self._end()


class RankGroup(Group):
    """Ranks on this machine's CPUs, which sum in shared memory."""

    def __init__(
        self, library: KernelLibrary, steps: SharedMemory, setups: Sequence[RankSetup]
    ) -> None:
        """Start a process per setup (ranks 1..); raises what a rank raised on its start."""
        self._library, self._steps, self._setups = library, steps, setups
        super().__init__(len(setups) + 1)

    def _start(self) -> PhaseSums:
        first = replace(self._setups[0].plan, rank=0)
        shared = SharedMemory.create(sum_bytes(self._library, first))
        try:
            for setup in self._setups:
                name = f"rank {setup.plan.rank} of {self._ranks} (process {{}})"
                self._children.append(Child.start(__name__, name, fds=(shared.fd, self._steps.fd)))
            peers = [child.channel for child in self._children]
            self.sums = PhaseSums(join_sums(self._library, first, shared, peers))
        finally:
            shared.close()
        tell_all(self._children, self._setups)
        await_all(self._children, time.monotonic() + START_SECONDS)
        return self.sums

    def step(
        self, args: Mapping[str, int], phase: str, usable: tuple[tuple[int, ...], ...] | None
    ) -> None:
        """Have the other ranks of a phase run a step; RankError when one has died.

        usable: PUs of each rank, None = those of its plan.
        """
        step = RankStep({name: args[name] for name in STEP_ARGS}, phase, usable)
        self.tell(step, self._setups[0].plan.ranks_of(phase) - 1)


class PhaseSums(dict[str, Communicator]):
    """The first rank's part in the sums of each phase that has several ranks: a Collective."""

    @property
    def failed(self) -> bool:
        """See Collective."""
        return any(comm.failed for comm in self.values())

    def fail(self) -> None:
        """See Collective."""
        for comm in self.values():
            comm.fail()


def sum_bytes(library: KernelLibrary, plan: RankPlan) -> int:
    """Return the bytes of shared memory that the sums of all phases need."""
    return sum(_phase_bytes(library, plan, phase) for phase in PHASES)


def join_sums(
    library: KernelLibrary, plan: RankPlan, shared: SharedMemory, peers: Sequence[Channel]
) -> dict[str, Communicator]:
    """Return a rank's part in the sums of each phase in which it is one of several.

    `peers` lead to the ranks whose end it has to notice.
    """
    found = {}
    for phase in PHASES:
        memory = shared.take(_phase_bytes(library, plan, phase))
        if phase in plan.phases and plan.ranks_of(phase) > 1:
            found[phase] = Communicator(
                library.c,
                memory,
                rank=plan.rank,
                ranks=plan.ranks_of(phase),
                threads=plan.threads,
                spin=plan.spin,
                peers=[peer.socket.fileno() for peer in peers],
            )
    return found


def _phase_bytes(library: KernelLibrary, plan: RankPlan, phase: str) -> int:
    size = comm_bytes(library.c, plan.ranks_of(phase), plan.threads)
    return -(-size // PAGESIZE) * PAGESIZE


def tell_all(children: Sequence[Child], values: Iterable[msgspec.Struct]) -> None:
    """Tell each rank something."""
    for child, value in zip(children, values, strict=True):
        child.tell(value)


def await_all(children: Sequence[Child], deadline: float) -> None:
    """Return when all ranks have done what they were told; raises what they raise."""
    for child in children:
        child.set_up(None, RankReady, max(0.1, deadline - time.monotonic()))


def end_children(children: list[Child]) -> None:
    """Hang up, and wait for the processes: an idle one goes by itself."""
    for child in children:
        child.channel.socket.close()
    end_members([child.member for child in children])
    children.clear()


def _last_words(child: Child) -> str:
    """Return what a rank that has hung up said of its end, "" where nothing."""
    try:
        child.channel.socket.setblocking(False)
        child.channel.receive(RankReady)
    except DovetailError as error:
        return f"has failed: {error}"
    except OSError:
        pass
    return ""


def fingerprint(manifest: Manifest) -> str:
    """Return what tells one artifact from another."""
    return hashlib.sha256(msgspec.json.encode(manifest)).hexdigest()


def serve(channel: Channel, comm_fd: int, step_fd: int) -> None:
    """Be a rank: join the group, and run steps until the parent hangs up or the group fails.

    The memory of the sums and that of the step arrays are inherited.
    """
    setup = channel.receive(RankSetup)
    if setup is None:
        return
    artifact, part = setup.open()
    library, plan = artifact.open_kernels(), setup.plan
    sizes = part.file.spec, setup.max_tokens, setup.max_sequences
    steps = SharedMemory(step_fd, step_bytes(*sizes) + shared_kv_bytes(part.file.spec, plan))
    model = ForwardModel(artifact, part, library, plan, steps)
    shared = SharedMemory(comm_fd, sum_bytes(library, plan))
    sums = join_sums(library, plan, shared, [channel])  # kept: the model has its address
    model.join(sums)
    buffers = StepBuffers(steps.take, *sizes)
    channel.send(RankReady())
    with suppress(RankError):  # the parent knows, or is gone
        for step in channel.messages(RankStep):
            usable = step.usable[plan.rank] if step.usable else None
            model.run({**buffers.addresses, **step.args}, step.phase, usable)
