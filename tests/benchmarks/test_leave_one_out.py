"""What one machine's records choose on another is read from reports, and what they lack is told."""

from __future__ import annotations

import json
import sys

import pytest

from dovetail.compiler.rules.schedules import MicroKernel
from dovetail.compiler.search.space import WHOLE, Scheme
from tests.compiler.search.landscape import TARGET
from tests.extras import need
from tests.repository import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import leave_one_out
from leave_one_out import Machine, Shape, read_reports, transfers

need("sklearn")  # which learns the prior
CACHES = [32 << 10, 1 << 20, 32 << 20]
TILES = {"default": MicroKernel(6, 4), "sandwich": MicroKernel(14, 2), "roller": MicroKernel(9, 3)}


def write_report(
    file, name, speed, commit="abc", policies=TILES, weights=((512, 512), (1024, 512))
):
    """A report of 24 M for each weight; `speed` gives the GFLOPS of (n, tile)."""
    machine = Machine(name, commit, TARGET.name, "f32", 1)
    rows = []
    for n, k in weights:
        for m in range(40, 64):
            one = leave_one_out.make_task(machine, Shape(n, k, m), CACHES)
            for policy, tile in policies.items():
                program = one.program(m, tile, WHOLE, Scheme())
                candidate = one.problem(m).candidate(program)
                rows.append(
                    {
                        "part": "policies", "policy": policy, "n": n, "k": k, "m": m, "threads": 1,
                        "gflops": speed(n, tile), "kernel": candidate.kernel, "commit": commit,
                        "schedule": candidate.schedule, "dtype": "f32", "target": TARGET.name,
                        "machine": name, "caches": CACHES,
                    }
                )  # fmt: skip
    report = {"machine": {"cpu": name, "caches": {}}, "config": {}, "rows": rows}
    file.write_text(json.dumps(report))
    return file


def wide(n, tile):
    return 10.0 * tile.panels


def tall(n, tile):
    return 10.0 * tile.rows


def test_a_prior_carries_over_between_like_machines_and_misleads_unlike_ones(tmp_path):
    files = [
        write_report(tmp_path / "a.json", "A", wide),
        write_report(tmp_path / "b.json", "B", wide),
        write_report(tmp_path / "c.json", "C", tall),
    ]
    table = {(row["learnt_on"], row["applied_on"]): row for row in transfers(read_reports(files))}
    assert len(table) == 9 and {row["cells"] for row in table.values()} == {48}
    assert table["A", "B"]["prior"] == pytest.approx(1.0)  # the widest tile is the rules' own
    assert table["A", "C"]["prior"] == pytest.approx(1.0)  # 6 x 4 again, where 14 x 2 is best
    assert table["C", "C"]["prior"] == table["C", "C"]["best"] == pytest.approx(14 / 6)
    assert table["C", "A"]["prior"] == pytest.approx(0.5)
    assert table["A", "C"]["search"] == table["A", "C"]["winner"] == pytest.approx(14 / 6)


def test_what_was_not_timed_is_counted_and_left_out(tmp_path):
    known = {name: TILES[name] for name in ("default", "sandwich")}
    files = [
        write_report(
            tmp_path / "a.json", "A", wide, policies=TILES | {"sandwich": MicroKernel(9, 3)}
        ),
        write_report(tmp_path / "b.json", "B", wide, policies=known, weights=((512, 512),)),
    ]
    row = next(r for r in transfers(read_reports(files)) if r["applied_on"] == "B")
    assert row["learnt_on"] == "A" and row["cells"] == 24
    assert (row["winner"], row["winner_of"]) == (None, 0)  # B never timed 9 x 3
    alone = list(transfers(read_reports(files[1:])))
    assert [row["prior"] for row in alone] == [None]  # no other weight to learn from


def test_regions_and_absent_cells_are_no_programs_of_a_whole_product(tmp_path):
    file = write_report(tmp_path / "a.json", "A", wide, weights=((512, 512),))
    report = json.loads(file.read_text())
    for row in report["rows"]:
        if row["policy"] == "roller":
            row["absent" if row["m"] % 2 else "regions"] = True
    file.write_text(json.dumps(report))
    ((_, cells),) = read_reports([file]).items()
    assert all(len(cell.speeds) == 2 for cell in cells.values())


def test_the_recorded_reports_have_both_kinds_of_machines():
    found = read_reports([leave_one_out.RESULTS / name for name in leave_one_out.REPORTS[:2]])
    assert {machine.name.split()[0] for machine in found} == {"AMD", "Intel(R)"}
    for machine, cells in found.items():
        assert machine.commit and all(len(cell.speeds) >= 1 for cell in cells.values())
