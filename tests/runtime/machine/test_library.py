"""Plans cut to the machine, and the ctypes mirror of abi.h."""

from __future__ import annotations

import ctypes
import math
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from dovetail.ir.artifact import PhasePlan
from dovetail.ir.schedule import SCHEDULE_VALUES, Row, ScheduleTable
from dovetail.runtime.machine import abi
from dovetail.runtime.native.adapt import fit_plans
from dovetail.runtime.native.tape import nearest_table, pick_tables

TEMPLATES = Path(__file__).parents[3] / "codegen/templates"


def test_structs_have_the_sizes_and_offsets_of_the_header(tmp_path: Path) -> None:
    structs = {
        "dt_slot": abi.Slot,
        "dt_row": abi.Row,
        "dt_entry": abi.Entry,
        "dt_patch": abi.Patch,
        "dt_tape": abi.Tape,
    }
    fields = [(c, f[0]) for c, s in structs.items() for f in s._fields_]
    lines = [f'printf("%zu ", sizeof({c}));' for c in structs]
    lines += [f'printf("%zu ", offsetof({c}, {f}));' for c, f in fields]
    lines.append('printf("%d %d", DT_ABI, DT_SCHEDULE_VALUES);')
    source = tmp_path / "sizes.c"
    head = '#include "abi.h"\n#include <stddef.h>\n#include <stdio.h>\n'
    source.write_text(head + "int main(void) {" + "\n".join(lines) + "}")
    command = ["gcc", f"-I{TEMPLATES}", str(source), "-o", str(tmp_path / "sizes")]
    subprocess.run(command, check=True)
    printed = subprocess.run([tmp_path / "sizes"], capture_output=True, text=True, check=True)
    expected = [ctypes.sizeof(s) for s in structs.values()]
    expected += [getattr(structs[c], f).offset for c, f in fields]
    expected += [abi.ABI, abi.SCHEDULE_LENGTH]
    assert [int(v) for v in printed.stdout.split()] == expected
    assert len(SCHEDULE_VALUES) == abi.SCHEDULE_LENGTH


def test_plans_are_cut_to_threads_and_allowed_cpus() -> None:
    plan = PhasePlan(threads=4, cpus=(0, 2, 4, 6))
    cases = [
        (None, (0, 1, 2, 3, 4, 5, 6, 7), (4, (0, 2, 4, 6))),
        (2, (0, 1, 2, 3), (2, (0, 2))),
        (None, (4, 5), (2, (4, 5))),
        (None, (5,), (1, (5,))),
        (6, (0, 1, 2, 3, 4, 5, 6, 7), (6, (0, 2, 4, 6, 1, 3))),
    ]
    for threads, allowed, (count, cpus) in cases:
        assert fit_plans(plan, 1, threads, allowed) == (PhasePlan(threads=count, cpus=cpus),)
    free = PhasePlan(threads=4, cpus=())
    assert fit_plans(free, 1, 3, (0, 1, 2, 3)) == (PhasePlan(threads=3, cpus=()),)


def test_plans_of_several_processes_keep_to_their_own_cpus() -> None:
    plan = PhasePlan(threads=2, cpus=(0, 2, 4, 6))
    cases: list[tuple[int, int | None, tuple[int, ...], list[tuple[int, ...]]]] = [
        (2, None, tuple(range(8)), [(0, 2), (4, 6)]),
        (2, 1, tuple(range(8)), [(0,), (4,)]),
        (2, 3, tuple(range(8)), [(0, 2, 1), (4, 6, 3)]),
        (2, None, (0, 4, 5, 7), [(0, 5), (4, 7)]),
        (2, None, (0, 2, 6), [(0,), (6,)]),
        (2, None, (4, 6), [(6,), (4,)]),
        (2, None, (3,), [(), ()]),
    ]
    for processes, threads, allowed, cpus in cases:
        plans = fit_plans(plan, processes, threads, allowed)
        assert [p.cpus for p in plans] == cpus
        assert {p.threads for p in plans} == {max(1, len(cpus[0]))}


def make_table(phase: str, threads: int, target: str = "generic") -> ScheduleTable:
    row = Row(m_lo=1, kernel="k", schedule=(0,) * 9)
    return ScheduleTable(
        target=target, op="o", n=1, k=1, dtype="f32", phase=phase, threads=threads, rows=(row,)
    )


def test_the_nearest_table_of_a_phase_is_picked() -> None:
    tables = [make_table(p, t) for p in ("any", "decode") for t in (1, 2, 8)]
    tables.append(make_table("decode", 4, "x86-64-avx2"))

    def picked(phase: str, threads: int) -> tuple[str, int]:
        (table,) = pick_tables(tables, "generic", phase, threads)["o"]
        return table.phase, table.threads

    assert picked("decode", 2) == ("decode", 2)
    assert picked("prefill", 2) == ("any", 2)
    assert picked("decode", 4) == ("decode", 2)
    assert picked("decode", 64) == ("decode", 8)
    assert pick_tables(tables[2:3], "generic", "decode", 2)["o"][0].threads == 8
    assert pick_tables(tables, "aarch64-neon", "decode", 2) == {}


@pytest.mark.parametrize("cells", [(1, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2), (0, 0, 0)])
@pytest.mark.parametrize("threads", [1, 2, 3, 5, 8])
def test_more_threads_than_a_table_was_made_for_have_all_a_share(
    cells: tuple[int, int, int], threads: int
) -> None:
    """Threads take turns at the cells of a product's grid: without one they would idle."""
    made_for = math.prod(max(side, 1) for side in cells)
    schedule = (0, 0, 0, *cells, 0, 0, 0)
    row = Row(m_lo=1, kernel="k", schedule=schedule)
    table = replace(make_table("decode", made_for), rows=(row,))
    (picked,) = pick_tables([table], "generic", "decode", threads)["o"]
    values = dict(zip(SCHEDULE_VALUES, picked.rows[0].schedule, strict=True))
    assert math.prod(max(values[f"grid_{side}"], 1) for side in "mnk") >= threads
    assert values["grid_k"] == cells[2]  # what bits depend on
    if threads <= made_for:
        assert picked == table
    other = replace(table, n=0)  # attention has no grid
    assert pick_tables([other], "generic", "decode", threads)["o"] == (other,)


def test_every_shape_has_its_table_and_others_take_the_nearest() -> None:
    shapes = [(768, 768), (384, 768), (768, 384)]
    tables = [
        replace(make_table("any", threads), n=n, k=k) for n, k in shapes for threads in (1, 2)
    ]
    picked = pick_tables(tables, "generic", "decode", 1)["o"]
    assert [(t.n, t.k, t.threads) for t in picked] == [(n, k, 1) for n, k in shapes]
    for wanted, found in (((384, 768), 1), ((768, 380), 2), ((192, 768), 1), ((3000, 3000), 0)):
        assert (nearest_table(picked, *wanted).n, nearest_table(picked, *wanted).k) == shapes[found]
