"""The process that asks what a device has for a model.

In: an artifact and the options it is to be loaded with. Out: a `Survey`: bytes that KV may take
beside weights and workspace, and cost tables, which are measured here where none are kept. The
device is this process's alone, and given back with it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dovetail.ir.errors import SpecError
from dovetail.runtime.accel.executor import DeviceExecutor
from dovetail.runtime.accel.profile import describe_device
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.child.framing import Channel
from dovetail.runtime.flows.gpu_memory import Survey
from dovetail.runtime.hosting.open_engine import open_engine
from dovetail.runtime.hosting.wire import Setup
from dovetail.topology.hardware import read_hardware


def survey(setup: Setup) -> Survey:
    """Open the engine, measure it or read what was measured before, and close it."""
    hardware = read_hardware()
    options = replace(setup.options, offload="auto", gpu_blocks=None)  # with tables, all the memory
    engine = open_engine(open_artifact(Path(setup.path), hardware), hardware, options)
    executor = engine.executor
    assert isinstance(executor, DeviceExecutor)
    try:
        if executor.profile is None:
            raise SpecError(
                "the memory of devices that share a model is not divided by itself; give "
                "cluster_bytes and gpu_blocks instead of a share"
            )
        device = describe_device(executor.accelerator)
        return Survey(device=device, room=executor.sizes.room, profile=executor.profile)
    finally:
        engine.close()


def serve(channel: Channel) -> None:
    """Answer one question."""
    setup = channel.receive(Setup)
    if setup is not None:
        channel.send(survey(setup))
