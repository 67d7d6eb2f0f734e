"""Trials as Ray tasks, on nodes of the machine that is tuned for.

In: the address of a Ray cluster, a tuning library and a hardware key. Out: measurers for a tuning
job. A node says what it is by a resource named as `HardwareKey.label`, one unit for each trial it
may run at once; Ray repeats trials of nodes that die. Records are kept where the job runs.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO

import msgspec
import ray
import ray.exceptions

from dovetail.codegen.library import ABI, BuiltLibrary
from dovetail.compiler.measure.jobs import core_sets
from dovetail.compiler.measure.meter import (
    Candidate,
    Case,
    Measurement,
    Meter,
    StoppedError,
    pool_bytes,
)
from dovetail.compiler.measure.recorder import Identity, hardware_key
from dovetail.ir.artifact import KernelIndex
from dovetail.ir.cache import cache_directory
from dovetail.ir.errors import SpecError
from dovetail.ir.files import write_whole
from dovetail.ir.tuning import LABEL_PREFIX, HardwareKey
from dovetail.runtime.group import ray_ranks
from dovetail.topology.hardware import read_hardware
from dovetail.topology.values import HardwareSpec

POLL_SECONDS = 0.5
LOCK_SECONDS = 0.05
PATIENCE_SECONDS = 30.0
"""How long to wait for a node of the right kind, when the last one is gone."""


class Trials(msgspec.Struct, frozen=True, kw_only=True):
    """What a task is asked to measure, and on which machine."""

    machine: HardwareKey
    index: KernelIndex
    case: Case
    candidates: tuple[Candidate, ...]
    rounds: int
    seconds: float


@contextmanager
def connect(address: str) -> Iterator[None]:
    """Join the cluster at `address` as a driver; SpecError where there is none."""
    joined = ray_ranks.connect(address)
    try:
        yield
    finally:
        if joined:
            ray.shutdown()


def count_slots(machine: HardwareKey) -> int:
    """Return how many trials of this machine's kind the cluster can run at once.

    Raises SpecError, with the command that starts such a node, where there is none.
    """
    fits = [node["Resources"] for node in _nodes() if _fits(node, machine)]
    if not fits:
        raise SpecError(
            f"no node of the Ray cluster offers {machine.label} and {machine.cores} CPUs; on each "
            f"machine of that kind run: ray start --address=HEAD "
            f"--resources='{{\"{machine.label}\": 1}}'"
        )
    return sum(int(min(have[machine.label], have["CPU"] // machine.cores)) for have in fits)


def find_kinds() -> dict[str, HardwareSpec]:
    """Return a machine of each kind that nodes of the cluster offer, by label.

    Raises SpecError where no node offers any, or one is another machine than it says.
    """
    offered = (name for node in _nodes() if node["Alive"] for name in node["Resources"])
    labels = sorted({name for name in offered if name.startswith(LABEL_PREFIX)})
    if not labels:
        raise SpecError(
            "no node of the Ray cluster offers a kind of machine; on each node run: ray start "
            "--address=HEAD --resources='{\"CLASS\": 1}', where `dovetail db show` tells the CLASS"
        )
    asked = [_describe_node.options(num_cpus=0, resources={name: 1}).remote() for name in labels]
    found: dict[str, HardwareSpec] = {}
    for label, told in zip(labels, ray.get(asked), strict=True):
        found[label] = msgspec.json.decode(told, type=HardwareSpec)
        own = hardware_key(found[label], 1, ABI).label
        if own != label:
            raise SpecError(f"a node offers {label} but is {own}; start it with that resource")
    return found


def _nodes() -> list[dict[str, Any]]:
    return list(ray.nodes())  # type: ignore[no-untyped-call]


def _fits(node: dict[str, Any], machine: HardwareKey) -> bool:
    have = node["Resources"]
    return bool(
        node["Alive"] and have.get(machine.label, 0) >= 1 and have.get("CPU", 0) >= machine.cores
    )


class RayMeasurer:
    """A measurer whose trials run on whichever node of the right kind is free."""

    def __init__(self, library: Any, identity: Identity) -> None:
        """`library`: a Ray object with the bytes of the tuning library."""
        self._library, self._identity = library, identity
        self._stopped = False

    def now(self) -> float:
        """Return seconds of the clock here."""
        return time.monotonic()

    def stop(self) -> None:
        """Have `measure` end with StoppedError, in whichever thread it runs."""
        self._stopped = True

    def measure(
        self, case: Case, candidates: Sequence[Candidate], *, rounds: int, seconds: float
    ) -> tuple[Measurement, ...]:
        """Return one measurement per candidate, all from one node."""
        machine = self._identity.machine(case.threads)
        trials = Trials(
            machine=machine,
            index=self._identity.index,
            case=case,
            candidates=tuple(candidates),
            rounds=rounds,
            seconds=seconds,
        )
        placed = _run_trials.options(
            num_cpus=case.threads, resources={machine.label: 1}, max_retries=-1
        )
        return self._wait(placed.remote(self._library, msgspec.json.encode(trials)), machine)

    def _wait(self, task: Any, machine: HardwareKey) -> tuple[Measurement, ...]:
        try:
            return self._poll(task, machine)
        except ray.exceptions.RayTaskError as error:
            raise SpecError(f"a node could not measure: {error.cause}") from None
        except ray.exceptions.RayError as error:
            raise SpecError(
                f"the Ray cluster failed ({str(error).splitlines()[0]}); the measurements are "
                "kept: start the cluster again and run the same command"
            ) from None

    def _poll(self, task: Any, machine: HardwareKey) -> tuple[Measurement, ...]:
        lonely_since = None
        while not ray.wait([task], timeout=POLL_SECONDS)[0]:
            if self._stopped:
                ray.cancel(task, force=True)
                raise StoppedError
            if any(_fits(node, machine) for node in _nodes()):
                lonely_since = None
            elif lonely_since is None:
                lonely_since = time.monotonic()
            elif time.monotonic() - lonely_since > PATIENCE_SECONDS:
                count_slots(machine)
        return msgspec.json.decode(ray.get(task), type=tuple[Measurement, ...])


def open_measurers(
    library: BuiltLibrary, identity: Identity, count: int
) -> tuple[RayMeasurer, ...]:
    """Return `count` measurers that share one copy of the library in the cluster."""
    stored = ray.put(library.path.read_bytes())
    return tuple(RayMeasurer(stored, identity) for _ in range(count))


# ---- on the nodes ----


@ray.remote
def _describe_node() -> bytes:
    return msgspec.json.encode(read_hardware())


@ray.remote
def _run_trials(library: bytes, request: bytes) -> bytes:
    """Measure on this node, in the child process that earlier tasks of this worker left."""
    trials = msgspec.json.decode(request, type=Trials)
    threads = trials.case.threads
    here = read_hardware()
    if hardware_key(here, threads, trials.index.abi) != trials.machine:
        raise SpecError(
            f"node {os.uname().nodename} offers {trials.machine.label} but is another machine"
        )
    meter = _meter(library, msgspec.json.encode(trials.index))
    with claim_pus(here, threads) as pus:
        case = msgspec.structs.replace(trials.case, cpus=pus)
        found = meter.measure(case, trials.candidates, rounds=trials.rounds, seconds=trials.seconds)
    return msgspec.json.encode(found)


@contextmanager
def claim_pus(here: HardwareSpec, threads: int) -> Iterator[tuple[int, ...]]:
    """Hold PUs that no other trial on this node is pinned to; wait for some where all are held.

    The kernel drops the claim of a process that dies.
    """
    sets, _ = core_sets(here, threads, len(here.allowed_pus) // threads)
    folder = cache_directory() / "tuning"
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        locks = [
            (pus, held.enter_context((folder / f"pus-{pus[0]}-{threads}.lock").open("w")))
            for pus in sets
        ]
        yield next(pus for pus, lock in itertools.cycle(locks) if _try_lock(lock))


def _try_lock(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(LOCK_SECONDS)
        return False
    return True


@functools.lru_cache(maxsize=1)
def _meter(library: bytes, index: bytes) -> Meter:
    path = cache_directory() / "tuning" / f"{hashlib.sha256(library).hexdigest()}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, library)
    decoded = msgspec.json.decode(index, type=KernelIndex)
    return Meter(path, decoded, pool_bytes=pool_bytes(read_hardware()))
