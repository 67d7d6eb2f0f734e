"""Loads a kernel library and gives out the addresses of its kernels, and thread teams.

In: a .so file and its KernelIndex. Out: `KernelLibrary` and `Team`.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.ir.artifact import KernelIndex, PhasePlan
from dovetail.ir.errors import ArtifactError, CapacityError, DeviceError, RankError
from dovetail.runtime.machine import abi


class KernelLibrary:
    """Loaded libraries: tape entries by kernel name, thread teams of the first library."""

    def __init__(
        self, path: Path, index: KernelIndex, shared: Mapping[str, Path] | None = None
    ) -> None:
        """Load `path`, and the library of each kernel that `shared` names.

        ArtifactError where one is no library, of another ABI, or lacks a kernel.
        """
        self.path, self.index = path, index
        if index.abi != abi.ABI:
            raise self._error(f"was built for kernel ABI {index.abi}, this version has {abi.ABI}")
        self._homes = shared or {}
        self._loaded: dict[Path, Any] = {
            p: self._load(p) for p in dict.fromkeys((path, *self._homes.values()))
        }
        self.c: Any = self._loaded[path]
        self.kernels = {kernel.name: kernel for kernel in index.kernels}
        self._addresses = {name: self._address(name) for name in self.kernels}

    def entry(self, kernel: str) -> int:
        """Return the address of `dt_entry_<kernel>`; ArtifactError where there is none."""
        if kernel in abi.COLLECTIVES:
            return self._address(kernel)
        try:
            return self._addresses[kernel]
        except KeyError:
            raise self._error(f"has no kernel {kernel!r}") from None

    def slots(self, kernel: str) -> tuple[str, ...]:
        """Return the names of the operands `kernel` takes from a tape, in order."""
        if kernel in abi.COLLECTIVES:
            return abi.COLLECTIVES[kernel]
        return tuple(p.name for p in self.kernels[kernel].params if p.kind == "slot")

    def run(
        self,
        team: Team,
        tape: abi.Tape,
        args: ctypes.Array[abi.Slot],
        span: range,
        most: int | None = None,
        times: int | None = None,
    ) -> None:
        """Run the entries `span` of a bound tape on `team`, on at most so many of its threads.

        times: address of where to note when they ran, see dt_run.

        Raises RankError when it was stopped, DeviceError when the team could not run it.
        """
        given = (team.handle, ctypes.byref(tape), args, span.start, max(span.start, span.stop))
        status = self.c.dt_run(*given, team.threads if most is None else most, times)
        check_status(status, span)

    def make_team(self, threads: int, spin: int) -> Team:
        """Return a new team of `threads` threads, the caller included."""
        handle = self.c.dt_team_create(threads, None, spin)
        if not handle:
            raise CapacityError(f"cannot start {threads} threads; give a smaller number of threads")
        return Team(self.c, handle, threads)

    def _load(self, path: Path) -> Any:
        try:
            library = abi.declare(ctypes.CDLL(str(path.resolve())))
        except (OSError, AttributeError) as error:
            raise self._error(f"cannot be loaded ({error})", path) from None
        found = library.dt_abi()
        if found != abi.ABI:
            raise self._error(f"has kernel ABI {found}, this version has {abi.ABI}", path)
        return library

    def _address(self, kernel: str) -> int:
        try:
            home = self._loaded[self._homes.get(kernel, self.path)]
            function = getattr(home, f"dt_entry_{kernel}")
        except AttributeError:
            raise self._error(f"lacks the kernel {kernel!r}") from None
        return int(ctypes.cast(function, ctypes.c_void_p).value or 0)

    def _error(self, problem: str, path: Path | None = None) -> ArtifactError:
        return ArtifactError(
            f"{path or self.path}: {problem}; run `dovetail compile MODEL` again for this machine"
        )


def check_status(status: int, span: range) -> None:
    """Raise RankError when a run of entries was stopped, DeviceError when it failed."""
    if status == abi.STOPPED:
        raise RankError("a process of the group ended while it was computing")
    if status:
        raise DeviceError(
            f"the CPU could not run entries {span.start} to {span.stop} of a step: status "
            f"{status}; send the request again"
        )


class Team:
    """Fixed threads that run tapes; the caller of a run is one of them. Ends with `close`."""

    def __init__(self, library: ctypes.CDLL, handle: int, threads: int) -> None:
        self.library, self.handle, self.threads = library, handle, threads
        self._active: tuple[int, tuple[int, ...]] = (threads, ())
        self._end = weakref.finalize(self, library.dt_team_destroy, handle)
        self._end.atexit = False  # another thread may be in a run while the process ends

    def set_active(self, plan: PhasePlan) -> None:
        """Use the first `plan.threads` threads from now on, pinned to `plan.cpus`.

        Raises CapacityError when one of these CPUs is not there any more.
        """
        wanted = (plan.threads, plan.cpus)
        if wanted == self._active:
            return
        if self.library.dt_team_set_active(self.handle, plan.threads, abi.int32_array(plan.cpus)):
            self._active = (0, ())
            raise CapacityError(
                f"threads cannot be bound to CPUs {', '.join(map(str, plan.cpus))}: one is offline "
                "or no longer allowed to this process; load the artifact again to plan again"
            )
        self._active = wanted

    def close(self) -> None:
        """End the threads; safe to call twice."""
        self._end()


def fit_plans(
    plan: PhasePlan, processes: int, threads: int | None, allowed: Sequence[int]
) -> tuple[PhasePlan, ...]:
    """Return the plan of each process: `plan` cut to `threads` and to the CPUs we may use.

    Threads count for each process; CPUs of the plan that are not allowed are replaced by others.
    Unpinned are plans without CPUs, and processes for which there are too few.
    """
    count = max(1, min(threads or plan.threads, len(allowed) // processes))
    if not plan.cpus or len(allowed) < processes:
        return (PhasePlan(threads=count, cpus=()),) * processes
    spare = [c for c in allowed if c not in plan.cpus]
    own = [
        [c for c in plan.cpus[i * plan.threads : (i + 1) * plan.threads] if c in allowed]
        for i in range(processes)
    ]
    spare = [c for cpus in own for c in cpus[count:]] + spare
    filled = []
    for cpus in own:
        missing = max(0, count - len(cpus))
        filled.append(tuple(cpus[:count] + spare[:missing]))
        del spare[:missing]
    return tuple(PhasePlan(threads=count, cpus=cpus) for cpus in filled)
