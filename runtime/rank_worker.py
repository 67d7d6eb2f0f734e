"""A rank of a tensor-parallel group, as a process: `python -P -m dovetail.runtime.rank_worker FDS`.

In: three inherited descriptors (a socket to the parent, the memory of the sums, that of the step
arrays), then a `RankSetup` and a message per step. It ends when the parent hangs up.
"""

from __future__ import annotations

import socket
import sys

from dovetail.ir.errors import ArtifactError, DovetailError, RankError
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.collective import Communicator, SharedMemory
from dovetail.runtime.forward import ForwardModel
from dovetail.runtime.framing import receive, receive_value, send_value
from dovetail.runtime.leash import begin_child
from dovetail.runtime.ranks import STEP, STEP_ARGS, RankReply, RankSetup, fingerprint
from dovetail.runtime.step import StepBuffers
from dovetail.topology.hardware import read_hardware


class RankWorker:
    """One rank, ready to run steps."""

    def __init__(self, setup: RankSetup, link: socket.socket, comm_fd: int, step_fd: int) -> None:
        """Open the artifact and join the group; raises as a load does."""
        artifact = open_artifact(setup.artifact, read_hardware())
        if setup.fingerprint != fingerprint(artifact.manifest):
            raise ArtifactError(f"{setup.artifact} has changed since it was loaded; load it again")
        part = artifact.models[setup.model]
        library = artifact.open_kernels()
        self.model = ForwardModel(artifact, part, library, setup.plan)
        shared = SharedMemory(comm_fd, setup.comm_bytes)
        self.comm = Communicator(
            library.c,
            shared.bytes,
            rank=setup.plan.rank,
            ranks=setup.plan.ranks,
            lanes=setup.lanes,
            spin=setup.plan.spin,
            peers=[link.fileno()],
        )
        self.model.join(self.comm)
        steps = SharedMemory(step_fd, setup.step_bytes)
        spec = part.file.spec
        self.buffers = StepBuffers(steps.take, spec, setup.max_tokens, setup.max_sequences)
        self.fixed_args = self.buffers.forward_addresses()

    def run(self, message: bytes) -> None:
        """Run the step of a message; RankError when the group failed."""
        *values, prefill = STEP.unpack(message)
        args = dict(zip(STEP_ARGS, values, strict=True))
        self.model.run({**self.fixed_args, **args}, prefill=bool(prefill))


def serve(link: socket.socket, comm_fd: int, step_fd: int) -> None:
    """Set up, answer, and run steps until the parent hangs up or the group fails."""
    setup = receive_value(link, RankSetup)
    if setup is None:
        return
    try:
        worker = RankWorker(setup, link, comm_fd, step_fd)
    except DovetailError as error:
        send_value(link, RankReply(error=type(error).__name__, message=str(error)))
        return
    send_value(link, RankReply())
    try:
        while message := receive(link, STEP.size):
            worker.run(message)
    except RankError:
        return  # the parent knows, or is gone
    except DovetailError as error:
        send_value(link, RankReply(error=type(error).__name__, message=str(error)))
        sys.exit(f"dovetail: rank {setup.plan.rank} ended: {error}")


if __name__ == "__main__":
    begin_child()
    control, sums, arrays = map(int, sys.argv[1:])
    serve(socket.socket(fileno=control), sums, arrays)
