"""Times what policies found in turns, a product of several regions as one tape of calls.

In: a product's operands, regions with their programs. Out: seconds of each set of regions, round by
round. Before it is timed, a result is compared with float64 on the first and last row of regions.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import numpy as np

from common import Patience
from dovetail.compiler.measure.child import SPIN, GemmRun, WeightPool, count_calls
from dovetail.compiler.measure.expected import ExpectedProduct, agrees
from dovetail.compiler.measure.meter import Candidate
from dovetail.compiler.rules.schedules import dot_rows, reduce_kernel
from dovetail.compiler.search.policy import SearchTask
from dovetail.ir.formats import FORMATS
from dovetail.ir.model import PANEL
from dovetail.runtime.machine import abi
from dovetail.runtime.machine.library import KernelLibrary
from dovetail.runtime.native.tape import Team
from rivals.result import Region, Regions

M_TILE = 0
"""Place of the tile's height among the schedule values."""


def region_candidate(task: SearchTask, m: int, region: Region) -> Candidate:
    """Return the kernel and schedule of a region.

    Where the whole product rounds its rows, a region of few rows has to do so as well: a height
    below 0 says that.
    """
    candidate = task.problem(m).candidate(region.program)
    least = dot_rows(task.op.dtype, task.target)
    if not region.rows < least <= m:
        return candidate
    schedule = list(candidate.schedule)
    schedule[M_TILE] = -schedule[M_TILE]
    return Candidate(candidate.kernel, tuple(schedule))


class Product:
    """One product at one M, with copies of its weight that outgrow the caches."""

    def __init__(
        self, library: KernelLibrary, team: Team, task: SearchTask, m: int, pool: WeightPool
    ) -> None:
        self.task, self.m, self.team = task, m, team
        self.run = GemmRun(library, team, task.problem(m).case, pool, {})
        self._library = library

    def values(self, region: Region, turn: int) -> list[int]:
        """Return the operands of a region, those of the whole product moved to where it begins."""
        run, op = self.run, self.task.op
        whole = run.operands(turn)
        row_bytes = run.c.strides[0]
        panel_bytes = FORMATS[op.dtype].panel_bytes(op.k)
        names = self._library.slots(self.task.problem(self.m).candidate(region.program).kernel)
        at = {name: i for i, name in enumerate(names)}
        whole[at["M"]], whole[at["N"]] = region.rows, region.columns
        whole[at["A"]] += region.row * run.a.strides[0]
        whole[at["B"]] += region.column // PANEL * panel_bytes
        whole[at["C"]] += region.row * row_bytes + region.column * run.c.itemsize
        return whole

    def seconds(self, regions: Regions, calls: int) -> float:
        """Return the seconds of one product, over `calls` on the next copies of the weight."""
        first = self.run.turn
        self.run.turn += calls + 1
        tape, args, _keep = self._tape(regions, range(first, first + calls + 1))
        self.team.run(tape, args, range(len(regions)))  # wakes the team
        start = time.perf_counter()
        self.team.run(tape, args, range(len(regions), (calls + 1) * len(regions)))
        return (time.perf_counter() - start) / calls

    def right(self, regions: Regions) -> bool:
        """Tell whether the regions compute the product; what lies beside it stays as it is."""
        run, m, op = self.run, self.m, self.task.op
        run.c[:] = np.nan
        tape, args, _keep = self._tape(regions, range(1))
        self.team.run(tape, args, range(len(regions)))
        c = run.c[:, : op.n]
        if not np.isfinite(c).all() or not np.isnan(run.c[:, op.n :]).all():
            return False
        expected = ExpectedProduct(
            op.kind, op.n, lambda panel: run.pool.columns(run.weights[0], op.k, panel)
        )
        rows = sorted({row for r in regions for row in (r.row, r.row + r.rows - 1)})
        whole = self.task.problem(m).candidate(regions[0].program)
        return agrees(c[rows], expected.rows(run.activations(whole), rows))

    def _tape(
        self, regions: Regions, turns: Sequence[int]
    ) -> tuple[abi.Tape, ctypes.Array[abi.Slot], object]:
        """Return a tape that calls all regions for each turn, its arguments, and what it uses."""
        rows = [self._row(region) for region in regions]
        values = [self.values(region, turn) for turn in turns for region in regions]
        slots = (abi.Slot * sum(map(len, values)))(
            *(abi.Slot(i=value) for each in values for value in each)
        )
        entries = (abi.Entry * len(values))(
            *(
                abi.Entry(rows[i % len(rows)], 1, i * len(values[0]), 0, -1, 1)
                for i in range(len(values))
            )
        )
        args = (abi.Slot * 1)(abi.Slot(i=self.m))
        return abi.Tape(entries, len(entries), slots, None, 0), args, (rows, slots, entries)

    def _row(self, region: Region) -> ctypes.Array[abi.Row]:
        candidate = region_candidate(self.task, self.m, region)
        op = self.task.op
        names = (candidate.kernel, reduce_kernel(op.kind, op.dtype, candidate.schedule))
        addresses = [self._library.entry(name) if name else None for name in names]
        schedule = (ctypes.c_int64 * abi.SCHEDULE_LENGTH)(*candidate.schedule)
        return (abi.Row * 1)(abi.Row(1, *addresses, schedule))


def time_in_turns(
    product: Product, asked: Sequence[Regions], rounds: int, seconds: float, patience: Patience
) -> list[list[float]]:
    """Return each one's seconds per product, round by round, in another order in each.

    Raises SystemExit where one computes something else.
    """
    for regions in asked:
        if not product.right(regions):
            raise SystemExit(f"a chosen program is wrong at M={product.m}: {regions}")
    calls = count_calls(product.seconds(asked[0], 1))
    times: list[list[float]] = [[] for _ in asked]
    random, end = np.random.default_rng(4), time.monotonic() + seconds
    for turn in range(rounds):
        if turn >= 7 and time.monotonic() > end:  # fewer give no bound
            break
        patience.wait()
        for i in random.permutation(len(asked)).tolist():
            times[i].append(product.seconds(asked[i], calls))
    return times


def make_team(library: KernelLibrary, task: SearchTask) -> Team:
    """Return the threads of a task, on its CPUs."""
    team = Team(library, task.phase.threads, SPIN)
    team.set_active(task.phase)
    return team
