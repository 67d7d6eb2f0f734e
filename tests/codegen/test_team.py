"""The thread team: barriers, skipped entries, reduce phases, rows by M, patches, active sets."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from dovetail.runtime.machine import abi

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "codegen/templates"
SOURCES = (
    TEMPLATES / "team.c",
    TEMPLATES / "collective.c",
    Path(__file__).parent / "team_kernels.c",
)
COMPILERS = {
    "gcc": ["gcc"],
    "clang": ["clang"],
    "zig": [sys.executable, "-m", "ziglang", "cc"],
}


def build(compiler: str, out: Path, *flags: str) -> Path:
    command = COMPILERS[compiler]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{compiler} is not installed")
    flags = ("-std=c11", "-O2", "-fPIC", "-pthread", f"-I{TEMPLATES}", *flags)
    subprocess.run(
        [*command, *flags, "-Wall", "-Wextra", "-Werror", "-o", str(out), *map(str, SOURCES)],
        check=True,
    )
    return out


@pytest.fixture(scope="module", params=["gcc", "zig"])
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ctypes.CDLL:
    out = tmp_path_factory.mktemp("team") / f"{request.param}.so"
    return abi.declare(ctypes.CDLL(str(build(request.param, out, "-shared"))))


@dataclass
class Step:
    """One entry: rows of (m_lo, kernel, reduce, schedule[0]); a str operand names an arg."""

    operands: Sequence[object]
    rows: Sequence[tuple[int, str, str | None, int]]
    barrier: bool = True
    skip: str | None = None


class HandTape:
    """A tape built by hand; args are the integers and addresses of `names`."""

    def __init__(self, library: ctypes.CDLL, names: Sequence[str], steps: Sequence[Step]) -> None:
        self.library, self.names = library, list(names)
        slots: list[object] = [operand for step in steps for operand in step.operands]
        self.slots = (abi.Slot * max(1, len(slots)))()
        patches = []
        for i, value in enumerate(slots):
            if isinstance(value, str):
                patches.append(abi.Patch(i, self.names.index(value), 0))
            elif isinstance(value, tuple):
                patches.append(abi.Patch(i, self.names.index(value[0]), value[1]))
            elif isinstance(value, float):
                self.slots[i].f = value
            else:
                self.slots[i].i = int(value)
        self.rows = [(abi.Row * len(s.rows))(*map(self._row, s.rows)) for s in steps]
        first = np.cumsum([0, *(len(s.operands) for s in steps)])
        self.entries = (abi.Entry * max(1, len(steps)))(
            *(
                abi.Entry(
                    rows,
                    len(rows),
                    int(first[i]),
                    self.names.index("m"),
                    -1 if s.skip is None else self.names.index(s.skip),
                    s.barrier,
                )
                for i, (s, rows) in enumerate(zip(steps, self.rows, strict=True))
            )
        )
        self.patches = (abi.Patch * max(1, len(patches)))(*patches)
        self.tape = abi.Tape(self.entries, len(steps), self.slots, self.patches, len(patches))

    def _row(self, row: tuple[int, str, str | None, int]) -> abi.Row:
        m_lo, kernel, reduce, value = row
        schedule = (ctypes.c_int64 * abi.SCHEDULE_LENGTH)(value)
        return abi.Row(m_lo, self._address(kernel), self._address(reduce), schedule)

    def _address(self, name: str | None) -> int | None:
        return ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value if name else None

    def run(
        self,
        team: int,
        first: int = 0,
        last: int | None = None,
        most: int = 64,
        times: npt.NDArray[np.int64] | None = None,
        **args: int,
    ) -> int:
        values = (abi.Slot * len(self.names))()
        for i, name in enumerate(self.names):
            values[i].i = args.get(name, 1)
        end = self.tape.n_entries if last is None else last
        given = (team, ctypes.byref(self.tape), values, first, end)
        noted = None if times is None else address(times)
        return int(self.library.dt_run(*given, most, noted))


@pytest.fixture
def make_team(library: ctypes.CDLL) -> Iterator[Callable[..., int]]:
    teams: list[int] = []

    def make(threads: int, cpus: tuple[int, ...] = (), spin: int = 500) -> int:
        team = library.dt_team_create(threads, abi.int32_array(cpus), spin)
        assert team
        teams.append(team)
        return int(team)

    yield make
    for team in teams:
        library.dt_team_destroy(team)


def address(array: npt.NDArray[np.generic]) -> int:
    return int(array.ctypes.data)


def stress_tape(
    library: ctypes.CDLL, rounds: int
) -> tuple[HandTape, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    cells, faults = np.zeros(8 * 64, np.int64), np.zeros(1, np.int64)
    steps = []
    for step in range(rounds):
        steps += [
            Step((address(cells), step), [(1, "write_cell", None, 0)]),
            Step((address(cells), step, address(faults)), [(1, "check_cells", None, 0)]),
        ]
    return HandTape(library, ["m"], steps), cells, faults


@pytest.mark.parametrize("threads", range(1, 9))
@pytest.mark.parametrize("spin", [0, 200])
def test_no_thread_passes_a_barrier_early(
    library: ctypes.CDLL, make_team: Callable[..., int], threads: int, spin: int
) -> None:
    tape, cells, faults = stress_tape(library, 50)
    team = make_team(threads, spin=spin)
    for _ in range(10):
        assert tape.run(team) == 0
    assert faults[0] == 0
    assert list(cells[: 8 * threads : 8]) == [49] * threads


def test_active_set_changes_between_runs(
    library: ctypes.CDLL, make_team: Callable[..., int]
) -> None:
    tape, _, faults = stress_tape(library, 20)
    seen = np.zeros(1, np.int64)
    count = HandTape(library, ["m"], [Step((address(seen),), [(1, "count_threads", None, 0)])])
    team = make_team(4)
    for active in [4, 1, 3, 2, 4, 2, 1, 4] * 5:
        assert library.dt_team_set_active(team, active, None) == 0
        assert tape.run(team) == 0 and count.run(team) == 0
        assert seen[0] == active
        assert count.run(team, most=2) == 0
        assert seen[0] == min(active, 2)
    assert tape.run(team, most=0) == -1
    assert faults[0] == 0
    assert library.dt_team_size(team) == 4


@pytest.mark.parametrize("active", [0, 5, -1])
def test_active_set_outside_the_team_is_refused(
    library: ctypes.CDLL, make_team: Callable[..., int], active: int
) -> None:
    assert library.dt_team_set_active(make_team(4), active, None) == -1


def test_two_teams_alternate(library: ctypes.CDLL, make_team: Callable[..., int]) -> None:
    one, two = stress_tape(library, 10), stress_tape(library, 10)
    teams = make_team(3), make_team(2)
    for _ in range(30):
        assert one[0].run(teams[0]) == 0 and two[0].run(teams[1]) == 0
    assert one[2][0] == 0 and two[2][0] == 0


def log_step(
    log: npt.NDArray[np.int64], code: int, kernel: str = "append_last", **more: object
) -> Step:
    return Step((address(log), code), [(1, kernel, None, 0)], **more)  # type: ignore[arg-type]


def taken(log: npt.NDArray[np.int64]) -> list[int]:
    return [int(v) for v in log[1 : 1 + log[0]]]


def test_a_timed_run_notes_when_each_thread_came_began_and_ended(
    library: ctypes.CDLL, make_team: Callable[..., int]
) -> None:
    cells, faults, log = np.zeros(8 * 64, np.int64), np.zeros(1, np.int64), np.zeros(64, np.int64)
    tape = HandTape(
        library,
        ["m", "absent"],
        [
            Step((address(cells), 0), [(1, "write_cell", None, 0)]),
            log_step(log, 7, skip="absent"),
            Step((address(cells), 0, address(faults)), [(1, "check_cells", "write_cell", 0)]),
        ],
    )
    times = np.zeros((2, 3, abi.TIMES), np.int64)
    before = time.perf_counter_ns()
    assert tape.run(make_team(3), 1, times=times, absent=0) == 0  # from the skipped one on
    assert not times[0].any()
    assert (np.diff(times[1], axis=1) >= 0).all()
    assert before <= times.max(where=times > 0, initial=0) <= time.perf_counter_ns()
    assert times[1, :, 2].max() <= times[1, :, 3].min()  # a barrier lies before a reduction
    times = np.zeros((3, 3, abi.TIMES), np.int64)
    assert tape.run(make_team(3), times=times, absent=0) == 0
    assert times[0, :, 2].max() <= times[2, :, 1].min()
    assert not times[0, :, 3:].any()  # it has no reduction
    assert faults[0] == 0


def test_skipped_entry_leaves_its_barrier_to_the_next(
    library: ctypes.CDLL, make_team: Callable[..., int]
) -> None:
    cells, faults = np.zeros(8 * 8, np.int64), np.zeros(1, np.int64)
    steps = []
    for step in range(1, 40):
        steps += [
            Step((address(cells), step), [(1, "write_cell", None, 0)]),
            Step((address(cells), 0), [(1, "write_cell", None, 0)], skip="none"),
            Step(
                (address(cells), step, address(faults)),
                [(1, "check_cells", None, 0)],
                barrier=False,
            ),
        ]
    tape = HandTape(library, ["m", "none"], steps)
    team = make_team(4)
    for _ in range(10):
        assert tape.run(team, none=0) == 0
    assert faults[0] == 0


def test_skip_and_empty_m(library: ctypes.CDLL, make_team: Callable[..., int]) -> None:
    log = np.zeros(32, np.int64)
    tape = HandTape(
        library, ["m", "a"], [log_step(log, 1), log_step(log, 2, skip="a"), log_step(log, 3)]
    )
    team = make_team(2)
    tape.run(team, a=0)
    tape.run(team, a=5)
    tape.run(team, m=0)
    assert taken(log) == [100, 300, 100, 200, 300]


def test_reduce_runs_after_all_threads(library: ctypes.CDLL, make_team: Callable[..., int]) -> None:
    cells, faults = np.zeros(8 * 8, np.int64), np.zeros(1, np.int64)
    steps = [
        Step((address(cells), step, address(faults)), [(1, "write_cell", "check_cells", 0)])
        for step in range(50)
    ]
    tape = HandTape(library, ["m"], steps)
    team = make_team(4)
    for _ in range(5):
        tape.run(team)
    assert faults[0] == 0


def test_rows_change_exactly_at_their_breakpoints(
    library: ctypes.CDLL, make_team: Callable[..., int]
) -> None:
    breakpoints = [1, 2, 5, 6, 32, 100]
    log = np.zeros(300, np.int64)
    rows = [(lo, "append", None, i) for i, lo in enumerate(breakpoints)]
    tape = HandTape(library, ["m"], [Step((address(log), 0), rows)])
    team = make_team(2)
    for m in range(1, 131):
        tape.run(team, m=m)
    expected = [max(i for i, lo in enumerate(breakpoints) if lo <= m) for m in range(1, 131)]
    assert taken(log) == expected


def test_patches_set_addresses_integers_and_doubles(
    library: ctypes.CDLL, make_team: Callable[..., int]
) -> None:
    out = np.zeros(3, np.int64)
    tape = HandTape(
        library, ["m", "p"], [Step([("p", 24), "m", 1.5, address(out)], [(1, "keep", None, 0)])]
    )
    team = make_team(2)
    for m, p in ((3, 4096), (7, 1 << 40)):
        assert tape.run(team, m=m, p=p) == 0
        assert (out[0], out[1], out.view(np.float64)[2]) == (p + 24, m, 1.5)


def test_segments_and_malformed_calls(library: ctypes.CDLL, make_team: Callable[..., int]) -> None:
    log = np.zeros(32, np.int64)
    tape = HandTape(library, ["m"], [log_step(log, code) for code in range(1, 5)])
    team = make_team(2)
    assert tape.run(team, 1, 3) == 0 and tape.run(team, 2, 2) == 0
    assert taken(log) == [200, 300]
    for first, last in ((-1, 2), (3, 2), (0, 5)):
        assert tape.run(team, first, last) == -1
    assert library.dt_run(team, None, None, 0, 0, 1, None) == -1
    assert library.dt_team_create(0, None, 0) is None


def test_caller_keeps_its_affinity(library: ctypes.CDLL, make_team: Callable[..., int]) -> None:
    before = os.sched_getaffinity(0)
    cpus = tuple(sorted(before))[:2]
    tape, _, faults = stress_tape(library, 10)
    assert tape.run(make_team(len(cpus), cpus)) == 0
    assert os.sched_getaffinity(0) == before and faults[0] == 0


def test_a_forked_child_runs_alone_and_destroys(
    library: ctypes.CDLL, make_team: Callable[..., int]
) -> None:
    seen = np.zeros(1, np.int64)
    count = HandTape(library, ["m"], [Step((address(seen),), [(1, "count_threads", None, 0)])])
    team = make_team(3)
    assert count.run(team) == 0 and seen[0] == 3
    child = os.fork()
    if child == 0:
        ok = count.run(team) == 0 and seen[0] == 1
        library.dt_team_destroy(team)
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert count.run(team) == 0 and seen[0] == 3


class Orders:
    """A runner on a team, and a log of what its orders ran; each appends its number."""

    def __init__(self, library: ctypes.CDLL, team: int, count: int) -> None:
        self.library, self.log = library, np.zeros(64, np.int64)
        steps = [Step((address(self.log), i), [(1, "append", None, 0)]) for i in range(count)]
        self.tape = HandTape(library, ["m"], steps)
        self.args = (abi.Slot * 1)()
        self.args[0].i = 1
        self.pools = np.ones((2, 4, 16), np.uint8)
        self.begun = np.array([2, 3, 1], np.int64)
        self.held = [self.make(i) for i in range(count)]
        self.runner = library.dt_runner_create(team, None, 0)
        assert self.runner

    def make(self, number: int) -> abi.Order:
        pools = (address(self.pools[0]), address(self.pools[1]))
        span, begun = (number, number + 1), address(self.begun)
        return abi.Order(ctypes.pointer(self.tape.tape), self.args, *span, pools, begun, 16)

    def give(self, number: int) -> int:
        return int(self.library.dt_runner_give(self.runner, ctypes.byref(self.held[number])))

    @property
    def ran(self) -> list[int]:
        return [int(code) // 100 for code in self.log[1 : self.log[0] + 1]]


def test_orders_run_in_turn_each_once_it_is_released(
    library: ctypes.CDLL, make_team: Callable[..., int]
) -> None:
    made = Orders(library, make_team(2), 5)
    for number in range(5):
        assert made.give(number) == number
    assert not made.ran
    for number in range(5):
        library.dt_runner_release(made.runner)
        library.dt_runner_wait(made.runner, number)
        assert made.ran == list(range(number + 1))
    assert [(order.status, *order.times) for order in made.held] == sorted(
        (0, *order.times) for order in made.held
    )
    assert not made.pools[:, (1, 3)].any() and made.pools[:, (0, 2)].all()
    library.dt_runner_destroy(made.runner)


def test_what_has_not_begun_is_dropped_and_later_orders_run(
    library: ctypes.CDLL, make_team: Callable[..., int]
) -> None:
    made = Orders(library, make_team(2), 6)
    for turn in range(40):  # more than there are places for orders
        made.log[:] = 0
        first = made.give(0)
        made.give(1)
        library.dt_runner_release(made.runner)
        library.dt_runner_wait(made.runner, first)
        if turn % 2:
            library.dt_runner_drop(made.runner)
            assert made.ran == [0] and made.held[1].status == -3
        else:
            library.dt_runner_release(made.runner)
            library.dt_runner_wait(made.runner, first + 1)
            assert made.ran == [0, 1]
    made.give(2)
    library.dt_runner_destroy(made.runner)  # does not wait for what nobody releases


def test_an_order_that_cannot_run_says_so(
    library: ctypes.CDLL, make_team: Callable[..., int]
) -> None:
    made = Orders(library, make_team(1), 1)
    made.held[0].last = 7
    number = made.give(0)
    library.dt_runner_release(made.runner)
    library.dt_runner_wait(made.runner, number)
    assert made.held[0].status == -1
    library.dt_runner_destroy(made.runner)


STRESS_MAIN = r"""
#include "abi.h"
#include <stdio.h>
void write_cell(const dt_slot *, const int64_t *, int64_t, int64_t);
void check_cells(const dt_slot *, const int64_t *, int64_t, int64_t);
int main(void) {
  static int64_t cells[512], faults;
  dt_slot args[1] = {{.i = 1}}, slots[5];
  dt_row rows[2] = {{1, write_cell, 0, {0}}, {1, check_cells, 0, {0}}};
  dt_entry entries[2] = {{rows, 1, 0, 0, -1, 1, 0}, {rows + 1, 1, 2, 0, -1, 1, 0}};
  dt_tape tape = {entries, 2, slots, 0, 0, 0};
  dt_team *team = dt_team_create(4, 0, 50);
  for (int64_t i = 1; i < 300; i++) {
    slots[0].p = slots[2].p = cells, slots[1].i = slots[3].i = i, slots[4].p = &faults;
    if (i % 50 == 0) dt_team_set_active(team, 1 + (i / 50) % 4, 0);
    dt_run(team, &tape, args, 0, 2, 1 + i % 4, 0);
  }
  static const int64_t none[1];
  dt_runner *runner = dt_runner_create(team, 0, 0);
  for (int64_t i = 0; i < 300; i++) {
    dt_order order = {&tape, args, 0, 2, {0, 0}, none, 0, 1, {0, 0}};
    slots[1].i = slots[3].i = i;
    uint32_t number = dt_runner_give(runner, &order);
    if (i % 7) dt_runner_release(runner), dt_runner_wait(runner, number);
    else dt_runner_drop(runner);
    faults += order.status != (i % 7 ? 0 : -3);
  }
  dt_runner_destroy(runner);
  dt_team_destroy(team);
  printf("%d", (int)faults);
}
"""


def test_thread_sanitizer_finds_no_race(tmp_path: Path) -> None:
    main = tmp_path / "main.c"
    main.write_text(STRESS_MAIN)
    probe = subprocess.run(
        ["gcc", "-fsanitize=thread", "-xc", "-", "-o", str(tmp_path / "probe")],
        input=b"int main(void){return 0;}",
        capture_output=True,
        check=False,
    )
    if probe.returncode:
        pytest.skip("gcc has no thread sanitizer here")
    program = build("gcc", tmp_path / "stress", "-fsanitize=thread", "-g", str(main))
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer cannot map its shadow memory on this kernel")
    assert (done.returncode, done.stdout, done.stderr) == (0, "0", "")


@pytest.mark.long  # emulated
def test_the_team_runs_on_aarch64(tmp_path: Path) -> None:
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None:
        pytest.skip("qemu-aarch64 is not installed")
    main = tmp_path / "main.c"
    main.write_text(STRESS_MAIN)
    program = build("zig", tmp_path / "stress", "-target", "aarch64-linux-musl", str(main))
    done = subprocess.run([emulator, program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0", "")
