"""The measured search: choosing is pure and covers every M; one run on a tiny model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.codegen.targets import TARGETS, host_target
from dovetail.compiler.measure import Candidate, Measurement, Meter
from dovetail.compiler.schedules import (
    LINEAR,
    GemmOp,
    default_gemm_rows,
    gemm_ops,
)
from dovetail.compiler.search.tables import (
    CANDIDATE_GAIN,
    POINTS,
    candidates_at,
    phase_points,
    ranking,
    reused,
    rows_from,
    search_tables,
    tuning_library,
)
from dovetail.ir.errors import SpecError
from dovetail.topology.hardware import read_hardware
from tests.compiler.test_schedules import SPEC, plan

OP = GemmOp("qkv", LINEAR, 320, 192, "f32")
TARGET = TARGETS["x86-64-avx512"]
DEFAULTS = default_gemm_rows(OP, TARGET, 2, 1 << 25)


def measured(name: str, seconds: float, status: str = "ok") -> Measurement:
    return Measurement(
        candidate=Candidate(name, (0,) * 8), status=status, seconds=seconds, low=seconds
    )


def test_the_default_keeps_its_place_unless_clearly_beaten():
    close = [measured("default", 1.0), measured("other", 1.0 - CANDIDATE_GAIN / 2)]
    assert ranking(close)[0].candidate.kernel == "default"
    clear = [measured("default", 1.0), measured("other", 1.0 - 2 * CANDIDATE_GAIN)]
    assert ranking(clear)[0].candidate.kernel == "other"


def test_failed_candidates_are_never_chosen():
    found = [measured("default", 0.0, "crash"), measured("b", 0.0, "wrong"), measured("c", 2.0)]
    assert [m.candidate.kernel for m in ranking(found)] == ["c"]
    assert ranking([measured("default", 0.0, "timeout")]) == ()


@given(points=st.sets(st.sampled_from(POINTS)), data=st.data())
def test_rows_cover_every_m_whatever_was_measured(points, data):
    names = st.sampled_from(["a", "b", "c"])
    winners = {m: measured(data.draw(names), 1.0) for m in points}
    rows = rows_from(OP, winners, DEFAULTS)
    bounds = [row.m_lo for row in rows]
    assert bounds[0] == 1 and bounds == sorted(set(bounds))
    for m in points:
        serving = [row for row in rows if row.m_lo <= m][-1]
        assert serving.kernel == winners[m].candidate.kernel and serving.source == "measured"
    if points and max(points) < POINTS[-1]:
        assert rows[-1].source == "default"


@pytest.mark.parametrize("m", POINTS)
def test_candidates_start_with_the_default(m):
    found = candidates_at(OP, TARGET, m, threads=2, l3_bytes=1 << 25)
    serving = [row for row in DEFAULTS if row.m_lo <= m][-1]
    assert (found[0].kernel, found[0].schedule) == (serving.kernel, serving.schedule)
    assert len(set(found)) == len(found)
    assert reused(found, found[3:]) == (found[0], *found[3:5])


def test_decode_and_head_see_one_row_per_sequence():
    ops = {op.op: op for op in gemm_ops(SPEC)}
    assert max(phase_points(ops["qkv"], "prefill", 512, 8)) == 512
    assert max(phase_points(ops["qkv"], "decode", 512, 8)) == 8
    assert max(phase_points(ops["head"], "any", 512, 8)) == 8


def test_search_on_a_tiny_model():
    target, hardware, steps = host_target(), read_hardware(), []
    library = tuning_library(SPEC, target)
    with Meter(library.path, library.index, pool_bytes=1 << 24) as meter:
        tables = search_tables(
            SPEC,
            plan(2, 1),
            hardware,
            meter,
            target=target,
            budget_seconds=2.0,
            max_tokens=32,
            max_sequences=2,
            progress=lambda done, total, name: steps.append((done, total)),
        )
    gemm = [t for t in tables.tables if t.n]
    assert {(t.op, t.phase) for t in gemm} == {
        (op.op, phase) for op in gemm_ops(SPEC) for phase in ("prefill", "decode")
    }
    assert all(t.rows[0].m_lo == 1 for t in tables.tables)
    assert any(row.source == "measured" for t in gemm for row in t.rows)
    assert steps == [(i, 10) for i in range(10)]


def test_unknown_effort_is_refused():
    with pytest.raises(SpecError, match="effort"):
        search_tables(
            SPEC, plan(1, 1), read_hardware(), None, target=host_target(), effort="heroic"
        )
