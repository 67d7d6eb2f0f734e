"""A rank of an accelerated group, as a process: `python -P -m dovetail.runtime.accel.rank`.

In: where its parent listens, in the environment; then a `PairSetup`, a `JoinGroup` and a
`StepOrder` per step. It ends when the parent hangs up.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress

from dovetail.ir.errors import DovetailError, RankError
from dovetail.runtime.accel.attention_choice import choose_attention
from dovetail.runtime.accel.collective import TorchCollective, open_store
from dovetail.runtime.accel.device import TYPES, TorchDevice
from dovetail.runtime.accel.group import PARENT, RANK, TOKEN, keep_alive
from dovetail.runtime.accel.orders import Hello, JoinGroup, PairSetup, StepOrder
from dovetail.runtime.accel.pair import DevicePair
from dovetail.runtime.child.child import hung_up
from dovetail.runtime.child.framing import Channel, ErrorText
from dovetail.runtime.child.worker import begin_child
from dovetail.runtime.group.ranks import RankReady
from dovetail.runtime.native.forward import ForwardModel


def call_parent(words: Mapping[str, str]) -> None:
    """Call the parent that `words` name, and serve it until it hangs up or the group fails."""
    host, _, port = words[PARENT].rpartition(":")
    with suppress(ConnectionError), socket.create_connection((host, int(port))) as link:
        keep_alive(link)
        channel, machine = Channel(link), os.uname().nodename
        rank, token = int(words[RANK]), words[TOKEN]
        channel.send(Hello(rank=rank, token=token, process=os.getpid(), machine=machine))
        try:
            serve(channel)
        except DovetailError as error:
            channel.send(ErrorText.of(error))
        except Exception as error:  # its last words; a fault of ours goes on
            channel.send(ErrorText.of(RankError(repr(error))))
            raise


def serve(channel: Channel) -> None:
    """Set up, join the group and run steps, each as the parent says; raises as a load does."""
    setup = channel.receive(PairSetup)
    if setup is None:
        return
    artifact, part = setup.part.open()
    model = ForwardModel(artifact, part, artifact.open_kernels(), setup.part.plan)
    device = TorchDevice(setup.device, setup.threads)
    kind = TYPES[setup.activations]
    attention = choose_attention(device, model.spec, kind)
    pair = DevicePair(model, device, kind, setup.limits, attention)
    channel.send(RankReady())
    join = channel.receive(JoinGroup)
    if join is None:
        return
    link = channel.socket
    collective = TorchCollective(
        join.backend,
        open_store(join.host, join.port, server=False, seconds=join.seconds),
        rank=setup.part.plan.rank,
        ranks=setup.part.plan.ranks,
        host=link.getsockname()[0],
        seconds=join.seconds,
        lost=lambda: bool(hung_up([link])),
    )
    pair.join(collective)
    channel.send(RankReady())
    with suppress(RankError):  # the parent knows, or is gone
        for order in channel.messages(StepOrder):
            pair.obey(order)


if __name__ == "__main__":
    begin_child()
    call_parent(os.environ)
