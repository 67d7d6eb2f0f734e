"""Ranks that Ray places on the machines of a cluster (extra `ray`).

In: the address of a cluster. Out: a `RayLauncher`: each rank is a task in a worker process of its
own, spread over the machines that have what it asks for. It runs until this process hangs up.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import ray
import ray.exceptions
import ray.util

from dovetail.ir.errors import SpecError
from dovetail.runtime.child.launch import Member

KNOCK_SECONDS = 5.0
"""For a machine to take a connection; Ray itself asks for more than a minute."""


def connect(address: str) -> bool:
    """Join the cluster at `address` as a driver; SpecError where there is none.

    Returns whether this call did: a process is a driver of one cluster.
    """
    if ray.is_initialized():
        return False
    handler = signal.getsignal(signal.SIGTERM)
    try:
        _knock(address)
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise SpecError(
            f"no Ray cluster answers at {address} ({str(error).splitlines()[0]}); "
            "start one with `ray start --head`"
        ) from None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray puts its own there
    return True


def _knock(address: str) -> None:
    """Raise OSError where nobody listens at `address`, if it has a host and a port."""
    place = urlsplit(address if "//" in address else f"//{address}")
    if place.hostname and place.port:
        socket.create_connection((place.hostname, place.port), KNOCK_SECONDS).close()


class RayLauncher:
    """Ranks as Ray tasks. Leaves the cluster in the end where it has joined it."""

    def __init__(self, address: str, resources: Mapping[str, float], *, gpu: bool) -> None:
        """`resources`: what a rank asks for beside CPUs and, with `gpu`, one GPU."""
        self._joined = connect(address)
        self._resources, self._gpu = dict(resources), gpu
        self.host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    def launch(self, threads: int, module: str, words: Mapping[str, str]) -> Member:
        """Start `module` as a task with environment `words`, on so many CPUs."""
        placed = _run_rank.options(
            num_cpus=threads,
            num_gpus=int(self._gpu),
            resources=self._resources,
            scheduling_strategy="SPREAD",
            max_retries=0,
        )
        return RayMember(placed.remote(module, dict(words)))

    def close(self) -> None:
        """Leave the cluster."""
        if self._joined:
            ray.shutdown()
            self._joined = False


class RayMember:
    """A rank that Ray runs."""

    def __init__(self, task: Any) -> None:
        self._task = task

    @property
    def where(self) -> str:
        """See Member; Ray knows the task, the rank itself says its machine."""
        return f"process of Ray task {self._task.task_id().hex()[:12]}"

    def wait(self, seconds: float) -> str | None:
        """See Member."""
        if not ray.wait([self._task], timeout=seconds)[0]:
            return None
        try:
            ray.get(self._task)
        except ray.exceptions.RayTaskError as error:
            return f"has failed: {error.cause}"
        except ray.exceptions.RayError as error:
            return f"has died with its worker or machine ({type(error).__name__})"
        return ""

    def kill(self) -> None:
        """See Member."""
        ray.cancel(self._task, force=True)


@ray.remote(max_calls=1)
def _run_rank(module: str, words: dict[str, str]) -> None:
    """Be a rank, in a process that ends with it."""
    with suppress(PermissionError):  # Ray makes its workers nice, but all ranks wait for the last
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    os.environ.update(words)
    runpy.run_module(module, run_name="__main__")
