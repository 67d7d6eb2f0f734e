"""Tunes a kernel of a user's own for given shapes, without a model.

In: `OP=FILE`, shapes, a database. Out: a KernelReport: for each shape the fastest variant beside
ours. Records are in the database as soon as they are made; the same call again measures what lacks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

import msgspec

from dovetail.codegen.library import build_library
from dovetail.codegen.user_file import read_around
from dovetail.compiler.measure.database import TuningDatabase, default_path
from dovetail.compiler.measure.meter import CallCase, Meter, RowsCase
from dovetail.compiler.measure.recorder import Identity, Recorder, describe_disturbed
from dovetail.compiler.measure.row_ops import row_bytes
from dovetail.compiler.request import choose_targets
from dovetail.compiler.search.instances import ROUNDS, find_best, refuse_wrong
from dovetail.compiler.search.user_kernels import (
    UserKernel,
    our_request,
    read_user_kernel,
    user_library,
    user_tasks,
)
from dovetail.ir.artifact import KernelEntry
from dovetail.ir.cache import use_cache
from dovetail.ir.errors import SpecError
from dovetail.ir.tuning import OK
from dovetail.topology.binding import choose_pus
from dovetail.topology.hardware import read_hardware

Sizes = tuple[tuple[str, int], ...]
SECONDS = 2.0
"""For a shape, by default."""


class KernelOptions(TypedDict, total=False):
    """Options of `tune_kernel`. budget: seconds in all. eps: of the operators that have one.

    prelude, include: as of `compile`.
    """

    database: str | Path | None
    budget: float | None
    threads: int | None
    target: str | None
    eps: float
    cache: Path | None
    prelude: Sequence[str | Path]
    include: Sequence[str | Path]
    say: Callable[[str], None]


class KernelRow(msgspec.Struct, frozen=True, kw_only=True):
    """The times of one shape, in seconds.

    ours: None where there is none; plain: the user's kernel as it stands; best: of its fastest
    variant; gbytes: 10^9 bytes of rows that it reads and writes per second, of an operator;
    serves: which one a search takes.
    """

    shape: dict[str, int]
    ours: float | None
    plain: float
    best: float
    gbytes: float | None
    variant: str
    serves: str


class KernelReport(msgspec.Struct, frozen=True, kw_only=True):
    """What tuning a kernel found."""

    file: str
    op: str
    database: str
    target: str
    machine: str
    measured: int
    rows: tuple[KernelRow, ...]
    notes: tuple[str, ...]


def tune_kernel(
    kernel: str, shapes: Iterable[str], **options: Unpack[KernelOptions]
) -> KernelReport:
    """Tune the kernel `OP=FILE` (or FILE, with a function called as the operator) for shapes.

    shapes: `rows=R,width=W` each; of a FILE whose kernel is no operator the numbers it takes, by
    their names. Raises SpecError for bad input and for a kernel that is wrong.
    """
    cases = [_read_shape(shape) for shape in shapes]
    if not cases:
        raise SpecError("give the shapes to tune for: --shape rows=16,width=2048")
    with use_cache(options.get("cache")):
        return _tune(kernel, cases, options)


def _read_shape(shape: str) -> Sizes:
    found = re.findall(r"(\w+)=(\d{1,9})", shape)
    if ",".join(map("=".join, found)) != shape or len(dict(found)) < len(found):
        raise SpecError(
            f"--shape {shape}: write rows=R,width=W, as in rows=16,width=2048, each name once"
        )
    return tuple((name, int(size)) for name, size in found)


def _make_case(
    user: UserKernel, kernel: KernelEntry, sizes: Sizes, cpus: tuple[int, ...], eps: float
) -> RowsCase | CallCase:
    """Return a case of an operator's rows, or of the numbers that the user's kernel takes."""
    own = [p.name for p in kernel.params if p.kind == "slot" and not p.type.startswith("ptr")]
    wanted, most = ["rows", "width"] if user.op else own, 10**6
    if sorted(dict(sizes)) != sorted(wanted):
        shown = ",".join(f"{name}=N" for name in wanted)
        raise SpecError(f"--shape of {user.file} needs {shown}, each a whole number")
    if not user.op:
        return CallCase(kind=kernel.name, sizes=sizes, threads=len(cpus), cpus=cpus)
    rows, width = (size for _, size in sorted(sizes))
    if not 0 < rows < most or not 0 < width < most:
        raise SpecError(f"rows and width are from 1 to {most - 1}, not {rows} and {width}")
    return RowsCase(kind=user.op, rows=rows, width=width, eps=eps, threads=len(cpus), cpus=cpus)


def _tune(kernel: str, shapes: Sequence[Sizes], options: KernelOptions) -> KernelReport:
    say = options.get("say") or (lambda _: None)
    around = read_around(options.get("prelude"), options.get("include"))
    user, hardware = read_user_kernel(kernel, around, guess=True), read_hardware()
    wanted = options.get("target")
    (target,) = choose_targets((wanted,) if wanted else (), hardware)
    path = Path(options.get("database") or default_path(options.get("cache")))
    database = TuningDatabase(path)
    say("building kernels")
    library = build_library(user_library((user,), target))
    budget = options.get("budget")
    seconds = SECONDS if budget is None else budget / len(shapes)
    eps = options.get("eps", 1e-5)
    (plain,) = (k for k in library.index.kernels if k.name == user.requests[0].name)
    asked = options.get("threads")
    most = hardware.usable_threads if asked is None else asked
    threads = most if any(p.kind == "thread" for p in plain.params) else 1
    cpus = choose_pus(hardware, most)[:threads]
    cases = [_make_case(user, plain, sizes, cpus, eps) for sizes in shapes]
    ours, found = our_request(user.op, target), []
    identity = Identity.of(hardware, library.index)
    with Meter(library.path, library.index, pool_bytes=1 << 20) as meter:
        recorder = Recorder(meter, identity, database)
        for number, task in enumerate(user_tasks(user, target, cases)):
            say(f"{number} of {len(cases)} shapes; next {task.case.shape}")
            times = recorder.measure(task.case, task.candidates, rounds=ROUNDS, seconds=seconds)
            refuse_wrong((task,), (times,))
            chosen = find_best([(each,) for each in times])
            own = [m for m in times[ours is not None :] if m.status == OK]
            best = min(own, key=lambda m: m.low)
            found.append(
                KernelRow(
                    shape=task.case.shape,
                    ours=times[0].seconds if ours else None,
                    plain=own[0].seconds,
                    best=best.seconds,
                    gbytes=row_bytes(user.op, task.case.shape) / best.seconds / 1e9 or None,
                    variant=best.candidate.kernel,
                    serves=times[chosen or 0].candidate.kernel,
                )
            )
    alone = f"{plain.name} takes no tid and nth of type thread, so it was timed on one thread"
    notes = (database.warning, alone if threads < most else None, describe_disturbed((recorder,)))
    return KernelReport(
        file=user.file,
        op=user.op or cases[0].kind,
        database=str(path),
        target=target.name,
        machine=identity.machine(1).label,
        measured=recorder.measured,
        rows=tuple(found),
        notes=tuple(note for note in notes if note),
    )
