"""A rank of a tensor-parallel group, as a process.

In: a `RankSetup` and a message per step; the memory of the sums, and that of the step arrays, are
inherited. It ends when the parent hangs up.
"""

from __future__ import annotations

from contextlib import suppress

from dovetail.ir.errors import RankError
from dovetail.runtime.child.framing import Channel
from dovetail.runtime.group.ranks import RankReady, RankSetup, RankStep, join_sums, sum_bytes
from dovetail.runtime.machine.shared_memory import SharedMemory
from dovetail.runtime.native.forward import ForwardModel, shared_kv_bytes
from dovetail.runtime.native.step import StepBuffers, step_bytes


def serve(channel: Channel, comm_fd: int, step_fd: int) -> None:
    """Open the artifact, join the group, and run steps until the parent hangs up or it fails."""
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
