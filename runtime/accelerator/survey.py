"""Asks what a device has for a model: `python -P -m dovetail.runtime.accelerator.survey FD`.

In: an inherited socket, and on it an artifact and the options it is to be loaded with. Out: a
`Survey`: bytes that KV may take beside weights and workspace, and cost tables, which are measured
here where none are kept. The device is this process's alone, and given back with it.
"""

from __future__ import annotations

import socket
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dovetail.ir.errors import DovetailError, SpecError
from dovetail.runtime.accelerator.engine import DeviceEngine
from dovetail.runtime.accelerator.profile import describe_device
from dovetail.runtime.apart.wire import Setup
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.framing import receive_value, send_value
from dovetail.runtime.gpu_memory import Survey
from dovetail.runtime.leash import begin_child
from dovetail.runtime.open_engine import open_engine
from dovetail.topology.hardware import read_hardware


def survey(setup: Setup) -> Survey:
    """Open the engine, measure it or read what was measured before, and close it."""
    hardware = read_hardware()
    options = replace(setup.options, offload="auto", gpu_blocks=None)  # with tables, all the memory
    engine = open_engine(open_artifact(Path(setup.path), hardware), hardware, options)
    assert isinstance(engine, DeviceEngine)
    try:
        if engine.profile is None:
            raise SpecError(
                "the memory of devices that share a model is not divided by itself; give "
                "cluster_bytes and gpu_blocks instead of a share"
            )
        return Survey(device=describe_device(engine), room=engine.room, profile=engine.profile)
    finally:
        engine.close()


def serve(link: socket.socket) -> None:
    """Answer one question."""
    setup = receive_value(link, Setup)
    if setup is None:
        return
    try:
        found = survey(setup)
    except DovetailError as error:
        found = Survey(error=type(error).__name__, message=str(error))
    send_value(link, found)


if __name__ == "__main__":
    begin_child()
    with suppress(ConnectionError):  # who asked is gone
        serve(socket.socket(fileno=int(sys.argv[1])))
