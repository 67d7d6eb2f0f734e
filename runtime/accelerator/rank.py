"""A rank of an accelerated group, as a process: `python -P -m dovetail.runtime.accelerator.rank`.

In: where its parent listens, in the environment; then a `PairSetup`, a `Meet` and a `StepOrder` per
step. It ends when the parent hangs up.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress

from dovetail.ir.errors import ArtifactError, DovetailError, RankError
from dovetail.runtime.accelerator.device import TorchDevice
from dovetail.runtime.accelerator.group import PARENT, RANK, TOKEN, keep_alive
from dovetail.runtime.accelerator.meeting import Meet, join_meeting
from dovetail.runtime.accelerator.orders import Hello, PairSetup, StepOrder
from dovetail.runtime.accelerator.pair import DevicePair
from dovetail.runtime.accelerator.weights import TYPES
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.device_limits import DeviceLimits
from dovetail.runtime.forward import ForwardModel
from dovetail.runtime.framing import receive_value, send_value
from dovetail.runtime.leash import begin_child
from dovetail.runtime.ranks import RankReply, fingerprint
from dovetail.topology.hardware import read_hardware


class PairWorker:
    """One rank, ready to run steps once it has met the others."""

    def __init__(self, setup: PairSetup) -> None:
        """Open the artifact; raises as a load does."""
        artifact = open_artifact(setup.artifact, read_hardware())
        if setup.fingerprint != fingerprint(artifact.manifest):
            raise ArtifactError(f"{setup.artifact} has changed since it was loaded; load it again")
        part = artifact.models[setup.model]
        self._plan = setup.plan
        model = ForwardModel(artifact, part, artifact.open_kernels(), setup.plan)
        limits = DeviceLimits(
            step_tokens=setup.tokens,
            sequences=setup.sequences,
            context=part.file.spec.max_context,
            blocks=setup.blocks,
            landing=setup.landing,
        )
        device = TorchDevice(setup.device, setup.threads)
        self._pair = DevicePair(model, device, TYPES[setup.activations], limits)

    def join(self, told: Meet, parent: socket.socket) -> None:
        """Meet the other ranks."""
        self._pair.join(join_meeting(told, self._plan, parent))

    def run(self, order: StepOrder) -> None:
        """Run a step; RankError when the group failed."""
        self._pair.obey(order)


def call_parent(words: Mapping[str, str]) -> None:
    """Call the parent that `words` name, and serve it until it hangs up or the group fails."""
    host, _, port = words[PARENT].rpartition(":")
    with socket.create_connection((host, int(port))) as parent:
        keep_alive(parent)
        rank, machine = int(words[RANK]), os.uname().nodename
        hello = Hello(rank=rank, token=words[TOKEN], process=os.getpid(), machine=machine)
        send_value(parent, hello)
        try:
            serve(parent)
        except Exception as error:  # its last words; a fault of ours goes on
            said = error if isinstance(error, DovetailError) else RankError(repr(error))
            send_value(parent, RankReply(error=type(said).__name__, message=str(said)))
            raise


def serve(parent: socket.socket) -> None:
    """Set up, meet the others and run steps, each as the parent says."""
    setup = receive_value(parent, PairSetup)
    if setup is None:
        return
    worker = PairWorker(setup)
    send_value(parent, RankReply())
    told = receive_value(parent, Meet)
    if told is None:
        return
    worker.join(told, parent)
    send_value(parent, RankReply())
    with suppress(RankError):  # the parent knows, or is gone
        while order := receive_value(parent, StepOrder):
            worker.run(order)


if __name__ == "__main__":
    begin_child()
    with suppress(DovetailError):  # the parent has been told
        call_parent(os.environ)
